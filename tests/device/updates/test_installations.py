"""The agent's half of an update: what it fetches, verifies and asks for, and what it tells."""

import fcntl
import hashlib
import json
import time

import pytest
from model_source import ModelSource
from peer_boards import eventually
from wheel_files import Signer, link_slots, make_slots, stand_in

from edgefl.core.errors import NetworkError, StoreFullError
from edgefl.core.types import derive_rng
from edgefl.device.rollouts.client import RolloutClient
from edgefl.device.state_dir import DeviceSettings, DeviceStateDir
from edgefl.device.updates import installations as module
from edgefl.device.updates.installations import InstalledBundles
from edgefl.device.updates.protocol import (
    HealthWriter,
    InstallAttempt,
    InstallPhase,
    InstallRequest,
    InstallResult,
    UpdaterStatus,
    read_health,
    read_request,
    write_status,
)
from edgefl.device.updates.slots import (
    NO_SLOTS_REASON,
    InstalledPack,
    SlotRecord,
    Slots,
    SoftwareUpdateConfig,
    get_install_facts,
)

NO_ANSWER_S = 0.4


class Board:
    """A board in slots; the test is its updater and its coordinator."""

    def __init__(self, root, made):
        self.folder = root
        self.signer = Signer(root)
        self.slots = Slots(link_slots(made, root / "opt"))
        self.slots.work_dir.mkdir()
        self.coordinator = ModelSource(root / "coordinator", b"", "")
        self.root = root / "pi"
        self.root.mkdir()
        device = DeviceSettings(
            device_id="pi",
            fleet="lab",
            role="trainer",
            ca_fingerprint="00",
            addresses=("127.0.0.1:1",),
            broker_port=1,
        )
        self.state = DeviceStateDir(self.root, device)
        self.site = SoftwareUpdateConfig(slots=self.slots, signers=self.signer.trusted, updater_timeout_s=NO_ANSWER_S)
        self.is_away = False
        self.started = []
        self.told = []

    def offers(self, bundle):
        self.coordinator.body = bundle.read_bytes()
        sha256 = hashlib.sha256(self.coordinator.body).hexdigest()
        self.coordinator.offer |= {"sha256": sha256, "bytes": len(self.coordinator.body)}
        return InstallRequest(id="i1", sha256=sha256)

    def releases(self, version="1.1", signer=None):
        wheel = stand_in(self.folder, version)
        return self.offers((signer or self.signer).bundle(self.folder / "b", wheel, version=version))

    def start(self):
        made = RolloutClient(
            InstalledBundles(self.state, self.site),
            get_source=self._source,
            on_change=lambda: self.told.append(made.report),
            rng=derive_rng("t"),
        )
        self.started.append(made)
        made.start()
        return made

    def answer(self, state, reason=None, installation="i1"):
        write_status(self.slots, UpdaterStatus(outcome=InstallResult(id=installation, state=state, reason=reason)))

    def close(self):
        for one in self.started:
            one.stop()
        self.coordinator.close()

    def _source(self):
        if self.is_away:
            raise NetworkError("the coordinator is away")
        return self.coordinator.source()


@pytest.fixture(scope="module")
def made_slots(tmp_path_factory):
    """Version 1.0 in slot `a`, installed once for all boards."""
    folder = tmp_path_factory.mktemp("made")
    return make_slots(folder / "opt", stand_in(folder, "1.0"))


@pytest.fixture
def board(tmp_path, made_slots, monkeypatch):
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.02)
    made = Board(tmp_path, made_slots)
    yield made
    made.close()


def reports(installations, state):
    eventually(lambda: installations.report and installations.report["state"] == state, state)
    return installations.report


def test_a_verified_bundle_is_left_for_the_updater_and_its_answer_told_once_and_again(board):
    wanted = board.releases()
    installations = board.start()
    installations.apply("i1")
    reports(installations, "requested")
    eventually(lambda: read_request(board.root) == wanted)
    board.answer("rolled-back", "its agent did not come up")
    told = {"id": "i1", "state": "rolled-back", "reason": "its agent did not come up"}
    assert reports(installations, "rolled-back") == told
    eventually(lambda: [path.name for path in (board.root / "updates").iterdir()] == ["note.json"])
    num_told = len(board.told)
    # It is done, and not done again; an order that is still being ended counts as the same one.
    eventually(lambda: installations.apply("i1") or len(board.told) > num_told)
    assert (installations.report, len(board.coordinator.ranges)) == (told, 1)


def test_what_a_stranger_signed_is_too_old_or_no_bundle_is_never_left_for_the_updater(board, tmp_path):
    (board.folder / "x").write_bytes(bytes(5000))
    installations = board.start()
    for number, (offer, told) in enumerate((
        (lambda: board.releases(signer=Signer(tmp_path / "stranger")), "which this board does not trust"),
        (lambda: board.offers(board.folder / "x"), "this is no bundle"),
        (lambda: board.releases("0.9"), "is older than the 1.0"),
    )):  # fmt: skip
        offer()
        installations.apply(f"i{number}")
        eventually(lambda: (installations.report or {}).get("id") == f"i{number}")  # noqa: B023 called at once
        assert told in reports(installations, "rejected")["reason"]
        assert read_request(board.root) is None
        eventually(lambda: not list((board.root / "updates").glob("*.bundle")))


def test_an_updater_is_waited_for_while_it_works_and_no_longer(board):
    trial = InstallAttempt(id="i1", sha256="0" * 64, step=InstallPhase.BUILDING, old="a", new="b")
    write_status(board.slots, UpdaterStatus(trial=trial))
    board.releases()
    installations = board.start()
    with (board.slots.work_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        installations.apply("i1")
        reports(installations, "requested")
        time.sleep(2 * NO_ANSWER_S)  # it works; nothing may happen meanwhile
        assert installations.report == {"id": "i1", "state": "requested"}
    assert f"no updater has been at work for {NO_ANSWER_S} s" in reports(installations, "failed")["reason"]
    assert read_request(board.root) is None


def test_it_waits_for_a_coordinator_that_is_away_and_goes_on_with_a_broken_download(board):
    board.is_away = True
    board.releases()
    board.coordinator.cut_after, board.coordinator.cuts = 4096, 1
    installations = board.start()
    installations.apply("i1")
    reports(installations, "fetching")
    board.is_away = False
    reports(installations, "requested")
    assert len(board.coordinator.ranges) == 2
    assert board.coordinator.ranges[1] != "bytes=0-"


def test_another_installation_waits_until_the_one_on_its_way_has_come_and_ended(board):
    board.releases()
    board.coordinator.pause_s = 60.0
    installations = board.start()
    installations.apply("i1")
    eventually(lambda: board.coordinator.ranges)
    for again in ("i2", "i1", "i2"):
        installations.apply(again)
    board.coordinator.go_on.set()
    assert reports(installations, "requested")["id"] == "i1"
    assert all(told["id"] == "i1" for told in board.told)
    assert board.coordinator.ranges[0] == "bytes=0-"
    assert "bytes=0-" not in board.coordinator.ranges[1:]
    eventually(lambda: read_request(board.root))
    board.answer("running")
    eventually(lambda: installations.report == {"id": "i2", "state": "requested"})


def test_an_installation_that_a_newer_one_has_replaced_is_left_without_a_word(board):
    board.releases()
    board.coordinator.pause_s = 60.0
    installations = board.start()
    installations.apply("i1")
    eventually(lambda: board.coordinator.ranges)
    board.coordinator.gone.add("i1")
    installations.apply("i2")
    board.coordinator.go_on.set()
    assert reports(installations, "requested")["id"] == "i2"
    assert {(told["id"], told["state"]) for told in board.told} == {
        ("i1", "fetching"), ("i2", "fetching"), ("i2", "requested"),
    }  # fmt: skip


def test_health_is_told_at_the_start_and_again_when_coordinator_and_broker_answer(board):
    def told():
        health = read_health(board.root)
        assert health is not None
        return health.boot_id, health.slot, health.connected, health.linked

    health = HealthWriter(board.slots, board.root, "life 0")
    health.record()
    assert told() == ("life 0", "a", False, False)
    health.record(connected=True)
    assert told() == ("life 0", "a", True, False)
    health.record(linked=True)
    assert told() == ("life 0", "a", True, True)
    path = board.root / "health.json"
    path.write_text(
        json.dumps({name: one for name, one in json.loads(path.read_bytes()).items() if name != "linked"})
    )
    assert told() == ("life 0", "a", True, None), "a release that does not tell of the broker"


def test_capabilities_tell_the_slot_the_signers_and_packs_or_why_it_takes_none(board):
    (board.root / "updates").mkdir()
    (board.root / "updates" / "note.json").write_text(json.dumps([1]))
    installations = board.start()
    assert installations.report is None, "a note that is damaged is left aside"
    assert get_install_facts(board.site) == {
        "installs": {"able": True, "slot": "a", "signers": [board.signer.id], "packs": {}},
        "signed_models": True,
    }
    (board.signer.trusted / "operator.pem").unlink()
    told = get_install_facts(board.site)["installs"]
    assert (told["able"], "it trusts no signer" in told["reason"]) == (False, True)
    board.slots.write_record("a", SlotRecord(packs={"gulls": InstalledPack(version="1.0", projects=("gone-gulls",))}))
    told = get_install_facts(board.site)["installs"]
    assert (told["able"], "gone-gulls" in told["reason"]) == (False, True)
    board.site = SoftwareUpdateConfig(slots=None, signers=board.signer.trusted)
    assert get_install_facts(board.site)["installs"] == {"able": False, "reason": NO_SLOTS_REASON}
    HealthWriter(None, board.root, "life 0").record()
    by_hand = board.start()
    by_hand.apply("i1")
    assert reports(by_hand, "rejected")["reason"] == NO_SLOTS_REASON
    assert read_health(board.root) is None


def test_an_agent_that_is_restarted_by_the_updater_or_a_power_cut_goes_on_where_it_was(board):
    wanted = board.releases()
    first = board.start()
    first.apply("i1")
    reports(first, "requested")
    eventually(lambda: read_request(board.root))
    first.stop()
    (board.root / "updates" / "request.json").unlink()  # the power went between note and request
    again = board.start()
    eventually(lambda: read_request(board.root) == wanted)
    again.stop()
    board.answer("running")
    reports(board.start(), "running")
    assert len(board.coordinator.ranges) == 1


def test_a_note_that_finds_no_room_makes_no_failure_of_a_release_that_runs(board, monkeypatch):
    board.releases()
    installations = board.start()
    installations.apply("i1")
    reports(installations, "requested")
    eventually(lambda: read_request(board.root))

    def no_room(path, _content):
        raise StoreFullError(f"{path} cannot be written: No space left on device")

    monkeypatch.setattr(module, "write_atomic", no_room)
    board.answer("running")
    reports(installations, "running")
    eventually(lambda: not list((board.root / "updates").glob("*.bundle")))
    assert installations.report == {"id": "i1", "state": "running"}
