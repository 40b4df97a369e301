"""Updates on a board with real slots: taken, refused, rolled back; pip, environments and processes are real."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wheel_files import Signer, make_wheel, replace_signer, stand_in

from edgefl.core.errors import ConfigError, StoreError
from edgefl.device.rollouts import download
from edgefl.device.updates import protocol, updater
from edgefl.device.updates.protocol import read_status
from edgefl.device.updates.slots import SlotRecord, SoftwareUpdateConfig, get_install_facts
from edgefl.device.updates.updater import TrialTimeouts

TASKS = "from importlib.metadata import entry_points as e; print(sorted(p.name for p in e(group='edgefl.tasks')))"
NOTHING = ("running", "nothing was to be done")


def said(outcome: Any) -> tuple[str, str]:
    return outcome.state, outcome.reason


def test_releases_take_the_slots_in_turn_and_an_older_one_only_by_a_signature_that_counts_once(board: Any) -> None:
    before, bundle = board.tree("a"), board.release("1.1")
    outcome = board.install(bundle)
    assert (outcome.state, outcome.version) == ("running", "1.1")
    assert (board.runs(), board.slots.get_active_slot()) == (("b", "1.1"), "b")
    assert read_status(board.slots).outcome == outcome
    assert not list(board.slots.work_dir.glob("*.tar"))
    assert board.tree("a") == before, "the one before stays as it was"
    new = board.tree("b")
    pip = [path for path in before if "/pip/" in path]
    assert len(pip) > 200
    assert all(new[path][0] == before[path][0] for path in pip), "what stays the same is linked and not copied"
    code = next(path for path in before if path.endswith("edgefl/__init__.py"))
    assert new[code][0] != before[code][0]

    restarts = board.restarts
    assert board.updater().run() is None, "a request is done once"
    assert said(board.install(bundle)) == NOTHING
    assert "edgefl-fleet 0.9 is older than the 1.1 that this board has" in board.install(board.release("0.9")).reason
    assert (board.restarts, board.runs()) == (restarts, ("b", "1.1"))
    back = board.release("0.9", "works", allow_downgrade=True)
    assert board.install(back).state == "running"
    assert board.runs() == ("a", "0.9")
    assert board.install(board.release("1.2")).state == "running"
    assert board.runs() == ("b", "1.2")
    assert "edgefl-fleet 0.9 was signed before what this board has" in board.install(back).reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("crashes", "its agent did not come up within 4 s"),
        ("deaf", "its agent does not reach the coordinator within 4 s, and the version before does"),
        ("unlinked", "its agent does not reach the broker within 4 s, and the version before does"),
        ("dies", "its agent reached the coordinator and was gone again"),
    ],
)
def test_a_release_whose_agent_does_not_work_is_left_again(board: Any, mode: str, reason: str) -> None:
    outcome = board.install(board.release("1.1", mode))
    assert outcome.state == "rolled-back"
    assert reason in outcome.reason
    board.restart()
    assert board.slots.get_active_slot() == "a"
    assert board.python("import edgefl; print(edgefl.__version__)") == "1.0"


@pytest.mark.slow
def test_a_release_is_kept_on_a_board_whose_broker_is_away_for_the_version_before_as_well(board: Any) -> None:
    (board.state / "no-broker").touch()
    assert board.install(board.release("1.1", "unlinked")).state == "running"


@pytest.mark.slow
def test_a_network_that_is_away_for_all_is_nobodys_fault_until_it_lasts_too_long(board: Any) -> None:
    (board.state / "away").touch()
    outcome = board.install(board.release("1.1"))
    assert outcome.state == "rolled-back"
    assert outcome.reason == "no version reached the coordinator for 8 s; it is not proven"


@pytest.mark.slow
def test_a_network_that_comes_back_lets_the_new_version_prove_itself(board: Any, monkeypatch: Any) -> None:
    away = board.state / "away"
    away.touch()
    seen = []

    def on_step(step: str) -> None:
        seen.append(step)

    asked = updater.can_reach

    def asked_once(*arguments: Any) -> bool:
        reached = asked(*arguments)
        away.unlink(missing_ok=True)
        return reached

    monkeypatch.setattr(updater, "can_reach", asked_once)
    board.ask(board.release("1.1"))
    outcome = board.updater(on_step).run()
    assert outcome.state == "running"
    assert "leaving" not in seen


def refused(board: Any, bundle: Path) -> str:
    """The reason of a refusal, once it is sure that nothing of the bundle was run or kept."""
    outcome = board.install(bundle)
    assert outcome.state == "rejected", outcome
    is_untouched(board)
    return str(outcome.reason)


def is_untouched(board: Any) -> None:
    assert (board.slots.get_active_slot(), board.restarts) == ("a", 1)
    assert not board.slots.path("b").exists()
    assert sorted(path.name for path in board.slots.work_dir.iterdir()) == ["lock", "status.json"]


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory, made_slots: Path, board_kind: Any) -> Iterator[Any]:
    """A board for tests after which it is as it was before."""
    made = board_kind(tmp_path_factory.mktemp("idle"), made_slots)
    yield made
    made.stop()


def test_what_somebody_has_changed_or_signed_whom_the_board_does_not_trust_is_refused(
    idle: Any, tmp_path: Path
) -> None:
    stranger, release = Signer(tmp_path / "stranger"), idle.release("1.1")
    foreign = stranger.bundle(tmp_path / "x.bundle", kind="removal", version="0.1", name="gulls", serial=10**9)
    told = f"signed by key {stranger.id}, which this board does not trust; it trusts {idle.signer.id}"
    assert told in refused(idle, foreign)
    # An agent that was taken over may write what it likes into the inbox, the request as well.
    content, changed = release.read_bytes(), tmp_path / "changed.bundle"
    changed.write_bytes(content.replace(b"this version does not start", b"this version does NOT start"))
    assert "edgefl_fleet-1.1-py3-none-any.whl is not what was signed: it was changed" in refused(idle, changed)
    changed.write_bytes(content.replace(b'"allow_downgrade": false', b'"allow_downgrade": true '))
    assert "its signature by key" in refused(idle, changed)
    changed.write_bytes(content[:3000] + bytes([content[3000] ^ 1]) + content[3001:])
    idle.ask(release)
    (path,) = (idle.state / "updates").glob("*.bundle")
    path.write_bytes(changed.read_bytes())  # after the agent has checked it
    assert "it is damaged" in idle.updater().run().reason
    path.write_bytes(content)  # as it was signed, but behind a link
    path.symlink_to(path.rename(tmp_path / "elsewhere"))
    idle.ask_again()
    assert idle.updater().run().state == "rejected"
    path.unlink()
    os.mkfifo(path)
    idle.ask_again()
    assert "is no plain file" in idle.updater().run().reason
    path.unlink()
    is_untouched(idle)
    idle.signer.trusted.chmod(0o777)
    assert "could be changed by others" in refused(idle, release)
    idle.signer.trusted.chmod(0o755)
    trusted = (idle.signer.trusted / "operator.pem").rename(tmp_path / "operator.pem")
    assert "this board trusts no signer, so it takes no code" in refused(idle, release)
    trusted.rename(idle.signer.trusted / "operator.pem")


def test_a_bundle_for_another_board_is_refused_and_so_is_a_pack_signed_before_its_removal(idle: Any) -> None:
    wheel = stand_in(idle.wheels, "1.1", "works", tag="cp313-cp313-manylinux_2_17_riscv64")
    reason = refused(idle, idle.signer.bundle(idle.folder / "x.bundle", wheel, version="1.1"))
    assert "it is not for this board (Python 3." in reason
    assert "of edgefl-fleet it holds only edgefl_fleet-1.1-cp313-cp313-manylinux_2_17_riscv64.whl" in reason
    pack, removal = idle.pack("auks"), idle.removal("auks")
    assert said(idle.install(removal)) == NOTHING
    assert "was signed before what this board has" in refused(idle, pack)


def test_a_list_of_signers_is_followed_without_a_new_slot_and_old_signatures_expire(board: Any) -> None:
    second = Signer(board.folder / "second")
    lists = replace_signer(board.signer, second)
    early = board.signer.bundle(board.folder / "early", kind="removal", version="1", name="gulls")
    made = second.bundle(board.folder / "s", kind="signers", version="1", lists=lists)
    assert said(board.install(made)) == NOTHING
    assert (board.restarts, board.slots.path("b").exists()) == (1, False)
    told = board.install(early).reason
    assert f"signed by key {board.signer.id}, which this board does not trust; it trusts {second.id}" in told
    old = second.bundle(board.folder / "o", kind="removal", version="1", name="gulls", expires=1000)
    assert "could be installed until 1970-01-01" in board.install(old).reason
    # A signature of the year 5138 says that it is later than this board's clock believes.
    late = second.bundle(board.folder / "l", kind="removal", version="1", name="auks", serial=10**11)
    assert said(board.install(late)) == NOTHING
    withheld = second.bundle(board.folder / "w", kind="removal", version="1", name="gulls", expires=10**10)
    assert "could be installed until 2286-11-20, it is 5138-11-16" in board.install(withheld).reason
    (board.folder / "m.onnx").write_bytes(b"x")
    model = second.model_bundle(board.folder / "m", board.folder / "m.onnx", model="ab" * 32, expires=2**41)
    assert "which is deployed and not installed" in board.install(model).reason


def test_a_list_that_is_valid_counts_also_when_what_it_came_with_is_refused(board: Any) -> None:
    second = Signer(board.folder / "second")
    lists = replace_signer(board.signer, second, expires=1000)
    release = board.signer.bundle(board.folder / "r", kind="removal", version="1", name="gulls", lists=lists)
    assert "which this board does not trust" in board.install(release).reason
    renewed = second.bundle(board.folder / "s", kind="removal", version="1", name="gulls")
    assert "list 1 of signers expired on 1970-01-01" in board.install(renewed).reason
    config = SoftwareUpdateConfig(slots=board.slots, signers=board.signer.trusted)
    record = SlotRecord(expiries={"edgefl-fleet": 1000, "gone": 1000})
    board.slots.write_record("a", record)
    facts = get_install_facts(config)["installs"]
    assert (facts["able"], facts["signers"]) == (True, [second.id])
    assert facts["list"] == {"version": 1, "expires": 1000}
    assert facts["valid_until"] == {"edgefl-fleet": 1000}
    assert [text.partition(" on ")[0] for text in facts["expired"]] == ["edgefl-fleet", "list 1 of signers expired"]


def test_a_disk_without_room_fails_before_anything_is_built(idle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write = protocol.open_atomic

    def full(path: Path, **options: Any) -> Any:
        if path.suffix == ".tar":  # the copy of the bundle
            raise OSError(28, "No space left on device")
        return write(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(protocol, "open_atomic", full)
        outcome = idle.install(idle.release("1.1"))
        assert (outcome.state, "No space left on device; free some space" in outcome.reason) == ("failed", True)
    usage = updater.shutil.disk_usage(idle.folder)
    monkeypatch.setattr(updater.shutil, "disk_usage", lambda _: usage._replace(free=download.MIN_FREE_BYTES))
    outcome = idle.install(idle.release("1.1"))
    assert (outcome.state, "must stay free" in outcome.reason) == ("failed", True)
    is_untouched(idle)


def full_when(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Makes the disk too full to note that a trial is at this step."""
    write = updater.write_status

    def write_unless_full(slots: Any, status: Any) -> None:
        if status.trial is not None and status.trial.step == step:
            raise OSError(28, "No space left on device")
        write(slots, status)

    monkeypatch.setattr(updater, "write_status", write_unless_full)


@pytest.mark.extended
def test_a_release_that_cannot_be_noted_before_it_is_tried_or_says_another_version_is_never_used(
    idle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "says 'edgefl, version 9.9', expected version 1.1" in refused(idle, idle.release("1.1", "lies"))
    full_when(monkeypatch, "flipping")
    outcome = idle.install(idle.release("1.1"))
    assert (outcome.state, "No space left on device" in outcome.reason) == ("failed", True)
    assert read_status(idle.slots).outcome == outcome
    shutil.rmtree(idle.slots.path("b"))
    is_untouched(idle)


@pytest.mark.extended
def test_a_disk_that_is_full_does_not_keep_a_board_in_a_version_that_fails(
    board: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_when(monkeypatch, "leaving")
    board.ask(board.release("1.1", "crashes"))
    assert board.updater(pace=TrialTimeouts(health_s=1.5, settle_s=0.5, away_s=8.0)).run().state == "rolled-back"
    assert board.runs() == ("a", "1.0")


SPY = "import pathlib\npathlib.Path({path!r}).touch()\nclass Gulls:\n    pass\n"
COMMAND = "[console_scripts]\n{name} = gulls:Gulls\n"
POINT = "[edgefl.tasks]\ngulls = gulls:Gulls\n"


@pytest.mark.extended
def test_a_pack_that_does_not_work_here_or_would_replace_what_the_board_has_is_refused(
    idle: Any, tmp_path: Path
) -> None:
    numbers, trace, plain = itertools.count(), tmp_path / "trace", {"gulls/__init__.py": "class Gulls:\n    pass\n"}

    def pack(files: Any, points: str = POINT, signer: Any = idle.signer) -> Path:
        wheel = make_wheel(idle.wheels, "gulls", "0.1", files, points=points)
        return Path(signer.bundle(tmp_path / f"{next(numbers)}", wheel, kind="pack", version="0.1"))

    spying = {"gulls/__init__.py": SPY.format(path=str(trace)) + "import seagrass\n"}
    for bundle, told in (
        (pack(spying, signer=Signer(tmp_path / "stranger")), "which this board does not trust"),
        (idle.pack(requires=["seagrass>=2"]), "lacks what it needs: gulls 0.1 requires seagrass"),
        (idle.pack(name="pip", version="99"), "it brings pip, which this board has already"),
        (pack({**plain, "pip/__init__.py": ""}), "would replace pip/__init__.py, which belongs to something else"),
        (pack(plain, COMMAND.format(name="python")), "its command python would replace one that this board has"),
    ):
        assert told in refused(idle, bundle)
        assert not trace.exists(), "what nobody trusts was imported"
    # The same code is imported once somebody signs it whom the board trusts: a trace above would have been seen.
    assert "gulls:Gulls: ModuleNotFoundError: No module named 'seagrass'" in refused(idle, pack(spying))
    assert trace.exists()


@pytest.mark.extended
def test_a_pack_is_kept_by_the_next_release_and_its_newer_version_takes_its_place(board: Any) -> None:
    files = {"gulls/__init__.py": "class Gulls:\n    pass\n"}

    def install(version: str, points: str, *more: Path) -> str:
        wheel = make_wheel(board.wheels, "gulls", version, files, points=points)
        out = board.folder / f"gulls-{version}.bundle"
        bundle = board.signer.bundle(out, wheel, *more, kind="pack", version=version, name="gulls")
        return str(board.install(bundle).state)

    assert (
        install("0.1", POINT, make_wheel(board.wheels, "feathers", "0.1", {"feathers/__init__.py": ""})) == "running"
    )
    assert board.runs() == ("b", "1.0")
    assert json.loads((board.state / "health.json").read_bytes())["packs"] == {"gulls": "0.1"}
    assert board.python(TASKS) == "['gulls']"
    board.install(board.release("1.1"))
    assert (board.runs(), board.python(TASKS)) == (("a", "1.1"), "['gulls']")
    for version, slot in (("0.2", "b"), ("0.3", "a")):  # of its own command too
        assert install(version, POINT + COMMAND.format(name="edgefl-gulls")) == "running"
        assert board.slots.load_record(slot).packs["gulls"].version == version
        assert not list(board.slots.site_packages(slot).glob("feathers*")), (
            "a project that it does not bring any more"
        )


@pytest.mark.extended
def test_a_removal_takes_a_pack_off_that_nobody_needs_in_the_order_of_what_was_signed(board: Any) -> None:
    early, pack = board.removal(version="0.2"), board.pack(version="0.2")
    assert board.install(pack).state == "running"
    assert "gulls 0.2 was signed before what this board has" in board.install(early).reason
    assert "gulls 0.1 is older than the 0.2" in board.install(board.removal()).reason
    assert board.install(board.pack("terns", requires=["gulls"])).state == "running"
    needed = board.install(board.removal(version="0.2"))
    assert needed.reason == "this board lacks what it needs: terns 0.1 requires gulls, which is not installed."
    before = board.tree("a")
    assert board.install(board.removal("terns")).state == "running"
    assert (board.runs(), board.python(TASKS)) == (("b", "1.0"), "['gulls']")
    assert json.loads((board.state / "health.json").read_bytes())["packs"] == {"gulls": "0.2"}
    assert not list(board.slots.site_packages("b").glob("terns*"))
    assert board.tree("a") == before
    assert said(board.install(board.removal("terns"))) == NOTHING
    assert board.install(board.removal(version="0.2")).state == "running"
    assert board.python(TASKS) == "[]"
    assert "was signed before what this board has" in board.install(pack).reason
    assert board.install(board.pack(version="0.2")).state == "running"


def test_only_one_updater_works_at_a_time_and_none_on_a_board_without_slots(board: Any) -> None:
    board.slots.work_dir.mkdir()
    with board.slots.lock(), pytest.raises(StoreError, match="another updater is at work"):
        board.updater().run()
    (board.slots.root / "current").unlink()
    with pytest.raises(ConfigError, match="a board that was installed by hand is updated by hand"):
        board.updater().run()
