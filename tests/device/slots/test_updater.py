"""Updates on a board with real slots: taken, refused, rolled back; pip, environments and processes are real."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wheel_files import Signer, make_wheel

from edgefl.device.slots.status import read_status


def test_a_newer_release_runs_from_the_other_slot_and_the_one_before_stays_as_it_was(board: Any) -> None:
    before = board.tree("a")
    outcome = board.install(board.release("1.1"))
    assert (outcome.state, outcome.version) == ("running", "1.1")
    assert board.runs() == ("b", "1.1")
    assert board.slots.in_use() == "b"
    assert board.tree("a") == before
    assert read_status(board.slots).outcome == outcome
    assert not list((board.slots.work).glob("*.tar"))


def test_what_stays_the_same_is_linked_and_not_copied(board: Any) -> None:
    board.install(board.release("1.1"))
    old, new = board.tree("a"), board.tree("b")
    pip = [path for path in old if "/pip/" in path]
    assert len(pip) > 200
    assert all(new[path][0] == old[path][0] for path in pip)
    code = next(path for path in old if path.endswith("edgefl/__init__.py"))
    assert new[code][0] != old[code][0]


def test_updates_take_the_slots_in_turn(board: Any) -> None:
    for version, slot in (("1.1", "b"), ("1.2", "a"), ("1.3", "b")):
        assert board.install(board.release(version)).state == "running"
        assert board.runs() == (slot, version)


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
    assert board.slots.in_use() == "a"
    assert board.python("import edgefl; print(edgefl.__version__)") == "1.0"


@pytest.mark.slow
def test_a_release_is_kept_on_a_board_whose_broker_is_away_for_the_version_before_as_well(board: Any) -> None:
    (board.state / "no-broker").touch()
    assert board.install(board.release("1.1", "unlinked")).state == "running"


def test_a_release_that_says_another_version_than_was_signed_is_never_used(board: Any) -> None:
    outcome = board.install(board.release("1.1", "lies"))
    assert (outcome.state, board.restarts, board.slots.in_use()) == ("refused", 1, "a")
    assert "says 'edgefl, version 9.9', expected version 1.1" in outcome.reason
    assert not board.slots.path("b").exists()


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

    from edgefl.device.slots import proving  # noqa: PLC0415 only here

    asked = proving.reaches

    def asked_once(*arguments: Any) -> bool:
        reached = asked(*arguments)
        away.unlink(missing_ok=True)
        return reached

    monkeypatch.setattr(proving, "reaches", asked_once)
    board.ask(board.release("1.1"))
    outcome = board.updater(on_step).run()
    assert outcome.state == "running"
    assert "leaving" not in seen


def test_a_request_is_done_once(board: Any) -> None:
    assert board.install(board.release("1.1")).state == "running"
    assert board.updater().run() is None


def test_the_same_bundle_again_changes_nothing(board: Any) -> None:
    bundle = board.release("1.1")
    board.install(bundle)
    restarts = board.restarts
    outcome = board.install(bundle)
    assert (outcome.state, outcome.reason, board.restarts) == ("running", "nothing was to be done", restarts)


def refused(board: Any, bundle: Path) -> str:
    """The reason of a refusal, once it is sure that nothing of the bundle was run or kept."""
    outcome = board.install(bundle)
    assert outcome.state == "refused"
    assert (board.slots.in_use(), board.restarts) == ("a", 1)
    assert not board.slots.path("b").exists()
    assert sorted(path.name for path in board.slots.work.iterdir()) == ["lock", "status.json"]
    return str(outcome.reason)


SPY = "import pathlib\npathlib.Path({path!r}).touch()\nclass Gulls:\n    pass\n"


def test_what_an_unknown_key_signed_is_refused_and_never_imported(board: Any, tmp_path: Path) -> None:
    stranger = Signer(tmp_path / "stranger")
    trace = tmp_path / "trace"
    wheel = make_wheel(board.wheels, "gulls", "0.1", {"gulls/__init__.py": SPY.format(path=str(trace))},
                       points="[edgefl.tasks]\ngulls = gulls:Gulls\n")  # fmt: skip
    reason = refused(board, stranger.bundle(tmp_path / "x.bundle", wheel, kind="pack", version="0.1"))
    assert f"signed by key {stranger.id}, which this board does not trust; it trusts {board.signer.id}" in reason
    assert not trace.exists()
    # The same code runs once somebody signs it whom the board trusts: the trace above would have been seen.
    assert (
        board.install(board.signer.bundle(tmp_path / "y.bundle", wheel, kind="pack", version="0.1")).state
        == "running"
    )
    assert trace.exists()


def test_a_board_without_signers_takes_nothing_and_says_so(board: Any) -> None:
    (board.signer.trusted / "operator.pem").unlink()
    assert "this board trusts no signer, so it takes no code" in refused(board, board.release("1.1"))


def test_signers_that_others_could_change_are_worth_nothing(board: Any) -> None:
    board.signer.trusted.chmod(0o777)
    assert "could be changed by others" in refused(board, board.release("1.1"))


def test_an_older_version_is_refused_unless_its_signer_allows_it(board: Any) -> None:
    assert "edgefl-fleet 0.9 is older than the 1.0 that this board has" in refused(board, board.release("0.9"))
    allowed = board.release("0.9", "works", allow_downgrade=True)
    assert board.install(allowed).state == "running"
    assert board.runs() == ("b", "0.9")


def test_a_way_back_that_was_signed_once_cannot_be_replayed(board: Any) -> None:
    back = board.release("0.9", "works", allow_downgrade=True)
    board.install(back)
    board.install(board.release("1.1"))
    outcome = board.install(back)
    assert outcome.state == "refused"
    assert "edgefl-fleet 0.9 was signed before what this board has" in outcome.reason


def test_a_bundle_for_another_board_is_refused(board: Any) -> None:
    from wheel_files import stand_in  # noqa: PLC0415 only here

    wheel = stand_in(board.wheels, "1.1", "works", tag="cp313-cp313-manylinux_2_17_riscv64")
    bundle = board.signer.bundle(board.folder / "x.bundle", wheel, version="1.1")
    reason = refused(board, bundle)
    assert "it is not for this board (Python 3." in reason
    assert "of edgefl-fleet it holds only edgefl_fleet-1.1-cp313-cp313-manylinux_2_17_riscv64.whl" in reason


def test_a_bundle_that_is_changed_after_the_agent_has_checked_it_is_refused(board: Any) -> None:
    bundle = board.release("1.1")
    board.ask(bundle)
    (path,) = (board.state / "updates").glob("*.bundle")
    content = bytearray(path.read_bytes())
    content[3000] ^= 1
    path.write_bytes(content)
    outcome = board.updater().run()
    assert outcome.state == "refused"
    assert "it is damaged" in outcome.reason


def test_a_board_whose_agent_was_taken_over_still_runs_only_what_was_signed(board: Any) -> None:
    """The agent may write what it likes into the inbox, the request as well."""
    content = board.release("1.1").read_bytes()
    changed = board.folder / "changed.bundle"
    changed.write_bytes(content.replace(b"this version does not start", b"this version does NOT start"))
    assert "edgefl_fleet-1.1-py3-none-any.whl is not what was signed: it was changed" in refused(board, changed)
    changed.write_bytes(content.replace(b'"allow_downgrade": false', b'"allow_downgrade": true '))
    assert "its signature by key" in refused(board, changed)


def test_links_and_pipes_in_the_inbox_are_not_followed(board: Any) -> None:
    import os  # noqa: PLC0415 only here

    board.ask(board.release("1.1"))
    (path,) = (board.state / "updates").glob("*.bundle")
    secret = path.rename(board.folder / "elsewhere")
    path.symlink_to(secret)
    outcome = board.updater().run()
    assert (outcome.state, board.slots.in_use()) == ("refused", "a")
    board.ask(board.release("1.2"))
    for path in (board.state / "updates").glob("*.bundle"):
        path.unlink()
        os.mkfifo(path)
    assert "is no plain file" in board.updater().run().reason


def test_a_pack_is_installed_imported_and_kept_by_the_next_release(board: Any) -> None:
    assert board.install(board.pack()).state == "running"
    assert board.runs() == ("b", "1.0")
    assert json.loads((board.state / "health.json").read_bytes())["packs"] == {"gulls": "0.1"}
    points = "from importlib.metadata import entry_points as e; print([p.name for p in e(group='edgefl.tasks')])"
    assert board.python(points) == "['gulls']"
    board.install(board.release("1.1"))
    assert (board.runs(), board.python(points)) == (("a", "1.1"), "['gulls']")
    assert board.install(board.pack(version="0.2")).state == "running"
    assert board.slots.record("b").packs["gulls"].version == "0.2"


def test_a_pack_that_needs_what_the_board_lacks_is_refused_with_its_name(board: Any) -> None:
    reason = refused(board, board.pack(requires=["seagrass>=2"]))
    assert reason == "this board lacks what it needs: gulls 0.1 requires seagrass, which is not installed."


def test_a_pack_that_cannot_be_imported_is_refused_with_the_error(board: Any) -> None:
    reason = refused(board, board.pack(body="import seagrass\n"))
    assert "edgefl.tasks gulls = gulls:Gulls: ModuleNotFoundError: No module named 'seagrass'" in reason


def test_a_pack_must_not_replace_what_the_board_has(board: Any) -> None:
    assert "it brings pip, which this board has already" in refused(board, board.pack(name="pip", version="99"))
    files = {"gulls/__init__.py": "class Gulls:\n    pass\n", "pip/__init__.py": "evil = True\n"}
    wheel = make_wheel(board.wheels, "gulls", "0.3", files)
    bundle = board.signer.bundle(board.folder / "x.bundle", wheel, kind="pack", version="0.3")
    outcome = board.install(bundle)
    assert "would replace pip/__init__.py, which belongs to something else" in outcome.reason


def test_a_pack_must_not_take_the_name_of_a_command_that_the_board_has(board: Any) -> None:
    commands = "[console_scripts]\nedgefl-gulls = gulls:Gulls\n"
    files = {"gulls/__init__.py": "class Gulls:\n    pass\n"}
    for version, points, state in (
        ("0.1", commands.replace("edgefl-gulls", "python"), "refused"),
        ("0.2", commands, "running"),
        ("0.3", commands, "running"),
    ):
        wheel = make_wheel(board.wheels, "gulls", version, files, points=points)
        outcome = board.install(board.signer.bundle(board.folder / "c.bundle", wheel, kind="pack", version=version))
        assert outcome.state == state, outcome.reason
        assert state == "running" or outcome.reason == "its command python would replace one that this board has"


TASKS = "from importlib.metadata import entry_points as e; print([p.name for p in e(group='edgefl.tasks')])"


def test_a_removal_takes_a_pack_off_and_leaves_the_slot_before_as_it_was(board: Any) -> None:
    board.install(board.pack())
    board.install(board.pack("terns"))
    before = board.tree("a")
    assert board.install(board.removal()).state == "running"
    assert (board.runs(), board.python(TASKS)) == (("b", "1.0"), "['terns']")
    assert json.loads((board.state / "health.json").read_bytes())["packs"] == {"terns": "0.1"}
    assert not list(board.slots.packages("b").glob("gulls*"))
    assert board.tree("a") == before
    outcome = board.install(board.removal())
    assert (outcome.state, outcome.reason) == ("running", "nothing was to be done")


def test_a_removal_has_its_place_in_the_order_of_what_was_signed(board: Any) -> None:
    early, pack = board.removal(), board.pack()
    board.install(pack)
    assert "gulls 0.1 was signed before what this board has" in board.install(early).reason
    higher = board.pack(version="0.2")
    assert "gulls 0.1 is older than the 0.2" in (board.install(higher), board.install(board.removal()))[1].reason
    assert board.install(board.removal(version="0.2")).state == "running"
    assert "was signed before what this board has" in board.install(higher).reason
    assert board.install(board.pack(version="0.2")).state == "running"


def test_a_pack_that_was_signed_before_its_removal_is_refused_also_where_there_was_nothing_to_remove(
    board: Any,
) -> None:
    pack, removal = board.pack(), board.removal()
    outcome = board.install(removal)
    assert (outcome.state, outcome.reason) == ("running", "nothing was to be done")
    assert "was signed before what this board has" in refused(board, pack)
    assert board.install(board.pack(version="0.2")).state == "running"


def test_only_somebody_whom_the_board_trusts_can_take_a_pack_off(board: Any, tmp_path: Path) -> None:
    board.install(board.pack())
    stranger = Signer(tmp_path / "stranger")
    foreign = stranger.bundle(tmp_path / "x.bundle", kind="removal", version="0.1", name="gulls", serial=10**9)
    outcome = board.install(foreign)
    assert outcome.state == "refused"
    assert f"signed by key {stranger.id}, which this board does not trust" in outcome.reason
    assert board.python(TASKS) == "['gulls']"


def test_a_pack_that_another_one_needs_stays(board: Any) -> None:
    board.install(board.pack())
    assert board.install(board.pack("terns", requires=["gulls"])).state == "running"
    outcome = board.install(board.removal())
    assert outcome.reason == "this board lacks what it needs: terns 0.1 requires gulls, which is not installed."
    assert board.python(TASKS) == "['terns', 'gulls']" or board.python(TASKS) == "['gulls', 'terns']"


def test_a_project_that_a_newer_pack_does_not_bring_any_more_goes(board: Any) -> None:
    first, second = (
        make_wheel(board.wheels, name, "0.1", {f"{name}/__init__.py": ""}) for name in ("gulls", "feathers")
    )
    both = board.signer.bundle(board.folder / "2.bundle", first, second, kind="pack", version="0.1", name="gulls")
    assert board.install(both).state == "running"
    assert board.install(board.pack(version="0.2")).state == "running"
    assert not list(board.slots.packages("a").glob("feathers*"))
    assert board.install(board.pack("feathers")).state == "running"  # nobody else's any more


def test_a_disk_without_room_fails_before_anything_is_built(board: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgefl.device.slots import updater  # noqa: PLC0415 only here

    usage = updater.shutil.disk_usage(board.folder)
    monkeypatch.setattr(updater.shutil, "disk_usage", lambda _: usage._replace(free=updater.SPARE_BYTES))
    outcome = board.install(board.release("1.1"))
    assert outcome.state == "failed"
    assert "must stay free" in outcome.reason
    assert (board.slots.in_use(), board.restarts) == ("a", 1)
    assert not board.slots.path("b").exists()


def test_a_disk_that_is_full_while_the_bundle_is_copied_has_failed_and_nothing_was_refused(
    board: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgefl.device.slots import inbox  # noqa: PLC0415 only here

    @contextlib.contextmanager
    def full(*_: Any) -> Iterator[Any]:
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr(inbox, "open_whole", full)
    outcome = board.install(board.release("1.1"))
    assert outcome.state == "failed"
    assert "No space left on device; free some space" in outcome.reason


def test_a_disk_that_is_full_does_not_keep_a_board_in_a_version_that_fails(
    board: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgefl.device.slots import updater  # noqa: PLC0415 only here

    write = updater.write_status

    def full_when_leaving(slots: Any, status: Any) -> None:
        if status.trial is not None and status.trial.step == "leaving":
            raise OSError(28, "No space left on device")
        write(slots, status)

    monkeypatch.setattr(updater, "write_status", full_when_leaving)
    assert board.install(board.release("1.1", "crashes")).state == "rolled-back"
    assert board.runs() == ("a", "1.0")


def test_a_release_that_cannot_be_noted_before_it_is_tried_is_never_used(
    board: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgefl.device.slots import updater  # noqa: PLC0415 only here

    write = updater.write_status

    def full_when_flipping(slots: Any, status: Any) -> None:
        if status.trial is not None and status.trial.step == "flipping":
            raise OSError(28, "No space left on device")
        write(slots, status)

    monkeypatch.setattr(updater, "write_status", full_when_flipping)
    outcome = board.install(board.release("1.1"))
    assert outcome.state == "failed"
    assert "No space left on device" in outcome.reason
    assert (board.slots.in_use(), board.restarts) == ("a", 1)
    assert read_status(board.slots).outcome == outcome


def test_only_one_updater_works_at_a_time(board: Any) -> None:
    from edgefl.errors import StoreError  # noqa: PLC0415 only here

    board.ask(board.release("1.1"))
    board.slots.work.mkdir()
    with board.slots.locked(), pytest.raises(StoreError, match="another updater is at work"):
        board.updater().run()


def test_a_board_without_slots_is_left_alone(board: Any) -> None:
    from edgefl.errors import ConfigError  # noqa: PLC0415 only here

    (board.slots.root / "current").unlink()
    with pytest.raises(ConfigError, match="a board that was installed by hand is updated by hand"):
        board.updater().run()
