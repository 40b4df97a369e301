"""The agent's half of an update: what it fetches, verifies and asks for, and what it tells."""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from model_source import ModelSource
from wheel_files import Signer, link_slots, make_slots, stand_in

from edgefl.device import installations as module
from edgefl.device.file_fetch import Source
from edgefl.device.install_facts import BY_HAND, Site, install_facts
from edgefl.device.installations import Installations
from edgefl.device.slots.health import read_health
from edgefl.device.slots.inbox import InstallRequest, read_request
from edgefl.device.slots.layout import Pack, SlotRecord, Slots
from edgefl.device.slots.status import Outcome, Step, Trial, UpdaterStatus, write_status
from edgefl.device.state import DeviceState, JoinedDevice
from edgefl.errors import NetworkError, StoreFullError
from edgefl.types import derived_rng


class Board:
    """A board in slots; the test is its updater and its coordinator."""

    def __init__(self, root: Path, made: Path) -> None:
        self.folder = root
        self.signer = Signer(root)
        self.slots = Slots(link_slots(made, root / "opt"))
        self.slots.work.mkdir()
        self.coordinator = ModelSource(root / "coordinator", b"", "")
        self.root = root / "pi"
        self.root.mkdir()
        device = JoinedDevice(
            device_id="pi",
            fleet="lab",
            role="trainer",
            ca_fingerprint="00",
            addresses=("127.0.0.1:1",),
            broker_port=1,
        )
        self.state = DeviceState(self.root, device)
        self.site = Site(slots=self.slots, signers=self.signer.trusted, no_answer_s=1.0)
        self.is_away = False
        self.started: list[Installations] = []
        self.told: list[Any] = []

    def offers(self, bundle: Path) -> InstallRequest:
        self.coordinator.body = bundle.read_bytes()
        sha256 = hashlib.sha256(self.coordinator.body).hexdigest()
        self.coordinator.offer |= {"sha256": sha256, "bytes": len(self.coordinator.body)}
        return InstallRequest(id="i1", sha256=sha256)

    def start(self) -> Installations:
        made = Installations(
            self.state, site=self.site, boot_id=f"life {len(self.started)}", source=self._source,
            on_change=lambda: self.told.append(made.report), rng=derived_rng("t"),
        )  # fmt: skip
        self.started.append(made)
        made.start()
        return made

    def answer(self, state: str, reason: str | None = None, installation: str = "i1") -> None:
        write_status(self.slots, UpdaterStatus(outcome=Outcome(id=installation, state=state, reason=reason)))

    def close(self) -> None:
        for one in self.started:
            one.stop()
        self.coordinator.close()

    def _source(self) -> Source:
        if self.is_away:
            raise NetworkError("the coordinator is away")
        return self.coordinator.source()


@pytest.fixture(scope="module")
def made_slots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1.0 in slot `a`, installed once for all boards."""
    folder = tmp_path_factory.mktemp("made")
    return make_slots(folder / "opt", stand_in(folder, "1.0"))


@pytest.fixture
def board(tmp_path: Path, made_slots: Path) -> Iterator[Board]:
    made = Board(tmp_path, made_slots)
    yield made
    made.close()


def until(condition: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return value


def reports(installations: Installations, state: str) -> Any:
    return until(lambda: (told := installations.report) and told["state"] == state and told)


def release(board: Board, version: str = "1.1", signer: Signer | None = None) -> Path:
    return (signer or board.signer).bundle(board.folder / "b", stand_in(board.folder, version), version=version)


def test_a_verified_bundle_is_left_for_the_updater_and_its_answer_told(board: Board) -> None:
    wanted = board.offers(release(board))
    installations = board.start()
    installations.install("i1")
    reports(installations, "requested")
    assert until(lambda: read_request(board.root)) == wanted
    board.answer("rolled-back", "its agent did not come up")
    assert reports(installations, "rolled-back") == {
        "id": "i1", "state": "rolled-back", "reason": "its agent did not come up",
    }  # fmt: skip
    assert until(lambda: [path.name for path in (board.root / "updates").iterdir()] == ["note.json"])


def test_an_agent_that_is_restarted_by_the_updater_tells_what_became_of_it(board: Board) -> None:
    board.offers(release(board))
    first = board.start()
    first.install("i1")
    reports(first, "requested")
    until(lambda: read_request(board.root))
    first.stop()
    board.answer("running")
    reports(board.start(), "running")
    assert len(board.coordinator.ranges) == 1


def test_what_a_stranger_signed_is_never_left_for_the_updater(board: Board, tmp_path: Path) -> None:
    stranger = Signer(tmp_path / "stranger")
    board.offers(release(board, signer=stranger))
    installations = board.start()
    installations.install("i1")
    assert "which this board does not trust" in reports(installations, "refused")["reason"]
    assert read_request(board.root) is None
    assert until(lambda: not list((board.root / "updates").glob("*.bundle")))


def test_a_bundle_that_is_no_bundle_or_too_old_is_refused(board: Board) -> None:
    (board.folder / "x").write_bytes(bytes(5000))
    board.offers(board.folder / "x")
    installations = board.start()
    installations.install("i1")
    assert "this is no bundle" in reports(installations, "refused")["reason"]
    board.offers(release(board, "0.9"))
    installations.install("i2")
    assert "is older than the 1.0" in until(
        lambda: installations.report["id"] == "i2" and installations.report.get("reason")
    )  # type: ignore[index]


def test_an_updater_that_is_not_there_is_said_to_be_missing(board: Board) -> None:
    board.offers(release(board))
    installations = board.start()
    installations.install("i1")
    assert "no updater has been at work for 1 s" in reports(installations, "failed")["reason"]
    assert read_request(board.root) is None


def test_an_updater_that_was_cut_off_and_never_goes_on_is_not_waited_for(board: Board) -> None:
    trial = Trial(id="i1", sha256="0" * 64, step=Step.BUILDING, old="a", new="b")
    write_status(board.slots, UpdaterStatus(trial=trial))
    board.offers(release(board))
    installations = board.start()
    with (board.slots.work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        installations.install("i1")
        reports(installations, "requested")
        time.sleep(2.5)  # more than twice as long as an updater is waited for that does nothing
        assert installations.report == {"id": "i1", "state": "requested"}
    assert "no updater has been at work for 1 s" in reports(installations, "failed")["reason"]


def test_it_waits_for_a_coordinator_that_is_away_and_goes_on_with_a_broken_download(board: Board) -> None:
    board.is_away = True
    board.offers(release(board))
    board.coordinator.cut_after, board.coordinator.cuts = 4096, 1
    installations = board.start()
    installations.install("i1")
    reports(installations, "fetching")
    board.is_away = False
    reports(installations, "requested")
    assert len(board.coordinator.ranges) == 2
    assert board.coordinator.ranges[1] != "bytes=0-"


def test_another_installation_waits_until_the_one_on_its_way_has_come_and_ended(board: Board) -> None:
    board.offers(release(board))
    board.coordinator.pause_s = 60.0
    installations = board.start()
    installations.install("i1")
    until(lambda: board.coordinator.ranges)
    for again in ("i2", "i1", "i2"):
        installations.install(again)
    board.coordinator.go_on.set()
    assert reports(installations, "requested")["id"] == "i1"
    assert all(told["id"] == "i1" for told in board.told)
    assert board.coordinator.ranges[0] == "bytes=0-"
    assert "bytes=0-" not in board.coordinator.ranges[1:]
    until(lambda: read_request(board.root))
    board.answer("running")
    until(lambda: (told := installations.report) and (told["id"], told["state"]) == ("i2", "requested"))


def test_an_installation_that_a_newer_one_has_replaced_is_left_without_a_word(board: Board) -> None:
    board.offers(release(board))
    board.coordinator.pause_s = 60.0
    installations = board.start()
    installations.install("i1")
    until(lambda: board.coordinator.ranges)
    board.coordinator.gone.add("i1")
    installations.install("i2")
    board.coordinator.go_on.set()
    assert reports(installations, "requested")["id"] == "i2"
    assert {(told["id"], told["state"]) for told in board.told} == {
        ("i1", "fetching"), ("i2", "fetching"), ("i2", "requested"),
    }  # fmt: skip


def test_one_that_is_done_is_not_done_again(board: Board) -> None:
    board.offers(release(board))
    installations = board.start()
    installations.install("i1")
    reports(installations, "requested")
    until(lambda: read_request(board.root))
    board.answer("running")
    reports(installations, "running")
    installations.install("i1")
    time.sleep(0.3)
    assert installations.report == {"id": "i1", "state": "running"}
    assert len(board.coordinator.ranges) == 1


def test_a_board_that_was_installed_by_hand_refuses_with_the_reason(board: Board) -> None:
    board.site = Site(slots=None, signers=board.signer.trusted)
    installations = board.start()
    installations.install("i1")
    assert reports(installations, "refused")["reason"] == BY_HAND
    assert read_health(board.root) is None


def test_health_is_told_at_the_start_and_again_when_the_coordinator_answers(board: Board) -> None:
    installations = board.start()
    health = read_health(board.root)
    assert health is not None
    assert (health.boot_id, health.slot, health.connected) == ("life 0", "a", False)
    installations.connected()
    health = read_health(board.root)
    assert health is not None
    assert (health.connected, health.linked) == (True, False)
    installations.linked()
    health = read_health(board.root)
    assert health is not None
    assert (health.connected, health.linked) == (True, True)


def test_health_of_a_release_that_does_not_tell_of_the_broker_is_read(board: Board) -> None:
    board.start()
    path = board.root / "health.json"
    told = json.loads(path.read_bytes())
    del told["linked"]
    path.write_text(json.dumps(told))
    health = read_health(board.root)
    assert health is not None
    assert health.linked is None


def test_capabilities_tell_the_slot_the_signers_and_what_packs_offer(board: Board) -> None:
    assert board.start().facts() == {
        "installs": {"able": True, "slot": "a", "signers": [board.signer.id], "packs": {}}
    }
    assert install_facts(Site(slots=None))["installs"] == {"able": False, "reason": BY_HAND}
    (board.signer.trusted / "operator.pem").unlink()
    told = install_facts(board.site)["installs"]
    assert not told["able"]
    assert "it trusts no signer" in told["reason"]


def test_a_pack_whose_project_is_gone_is_told_and_kills_no_agent(board: Board) -> None:
    board.slots.write_record("a", SlotRecord(packs={"gulls": Pack(version="1.0", projects=("gone-gulls",))}))
    told = install_facts(board.site)["installs"]
    assert (told["able"], "gone-gulls" in told["reason"]) == (False, True)


def test_a_note_that_is_damaged_is_left_aside(board: Board) -> None:
    (board.root / "updates").mkdir()
    (board.root / "updates" / "note.json").write_text(json.dumps([1]))
    assert board.start().report is None


def test_a_power_cut_between_note_and_request_costs_nothing(board: Board) -> None:
    wanted = board.offers(release(board))
    first = board.start()
    first.install("i1")
    reports(first, "requested")
    until(lambda: read_request(board.root))
    first.stop()
    (board.root / "updates" / "request.json").unlink()
    again = board.start()
    assert until(lambda: read_request(board.root)) == wanted
    board.answer("running")
    reports(again, "running")
    assert len(board.coordinator.ranges) == 1


def test_a_note_that_finds_no_room_makes_no_failure_of_a_release_that_runs(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    board.offers(release(board))
    installations = board.start()
    installations.install("i1")
    reports(installations, "requested")
    until(lambda: read_request(board.root))

    def no_room(path: Path, _content: bytes) -> None:
        raise StoreFullError(f"{path} cannot be written: No space left on device")

    monkeypatch.setattr(module, "write_whole", no_room)
    board.answer("running")
    reports(installations, "running")
    until(lambda: not list((board.root / "updates").glob("*.bundle")))
    assert installations.report == {"id": "i1", "state": "running"}
