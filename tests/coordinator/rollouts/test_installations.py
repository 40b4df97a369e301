"""Releases and packs from the coordinator: who is told what and when; the store and the bundles are real."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from small_fleet import SmallFleet, eventually, settled
from wheel_files import Signer, make_wheel, stand_in

from edgefl import __version__
from edgefl.coordinator.rollouts import installations as bundle_store
from edgefl.coordinator.rollouts import service
from edgefl.coordinator.rollouts.installations import (
    OUTDATED_AGENT_REASON,
    BundleStore,
    InstallationRequest,
    Installations,
    InstallationService,
)
from edgefl.core.errors import (
    BundleError,
    ConfigError,
    EdgeflError,
    NotFoundError,
    StoreBusyError,
    UsageError,
    VersionError,
)
from edgefl.core.protocol import EVALUATOR_NAME, Capabilities, Command, Heartbeat, StatusMessage
from edgefl.storage.queries.dashboard import list_events_after
from edgefl.storage.store import Store

ABLE = {"installs": {"able": True, "slot": "a", "signers": [], "packs": {}}}
MAJOR, MINOR, PATCH = (int(part) for part in __version__.split("."))
NEXT = f"{MAJOR}.{MINOR}.{PATCH + 1}"


class Fleet:
    """A coordinator that has one release, and boards that say what a test makes them say."""

    def __init__(self, root: Path) -> None:
        self.root, self.signer = root, Signer(root)
        self.store = Store.open(root / "edgefl.db")
        self.registry = SmallFleet(clock=time.monotonic).registry
        self.files = BundleStore(root / "bundles")
        self.commands: list[tuple[str, str, str | None]] = []
        self.fatal: list[EdgeflError] = []
        self.running: list[InstallationService] = []
        self._seq, self.session_no = 0, 1
        self.release = self.bring(self.signer.bundle(root / "r", stand_in(root, NEXT), version=NEXT))

    def bring(self, path: Path) -> str:
        upload = self.files.start_upload()
        try:
            upload.write(path.read_bytes())
            return upload.complete().sha256
        finally:
            upload.close()

    def pack(self, name: str = "gulls") -> str:
        """Brings another bundle, that is no release; returns its hash."""
        wheel = make_wheel(self.root / "w", name, "1.0", {f"{name}.py": ""})
        return self.bring(self.signer.bundle(self.root / name, wheel, kind="pack", version="1.0"))

    def add(self, name: str, facts: Any = ABLE, *, is_online: bool = True) -> None:
        self.registry.add(name, node_id=hash(name), role="trainer", groups=(), examples={})
        if is_online:
            self.online(name, facts)

    def online(self, name: str, facts: Any = ABLE, *, session: int = 1) -> None:
        self.session_no = session
        self.registry.record_status(
            name, StatusMessage(state="online", boot_id=f"boot of {name}", session_no=session)
        )
        self.registry.record_capabilities(name, Capabilities(facts=facts))
        self.say(name)

    def start(self) -> InstallationService:
        made = InstallationService(
            Installations(store=self.store, registry=self.registry, bundle_store=self.files),
            store=self.store,
            registry=self.registry,
            send_command=self.send_command,
            on_fatal=self.fatal.append,
        )
        self.running.append(made)
        made.start()
        return made

    def send_command(self, device_id: str, command: Command) -> None:
        self.commands.append((device_id, command.kind, command.argument))

    def say(self, name: str, state: str | None = None, installation: str = "", reason: str | None = None) -> None:
        self._seq += 1
        told = {"id": installation, "state": state, "reason": reason} if state else None
        heartbeat = Heartbeat(seq=self._seq, session_no=self.session_no, uptime_s=1.0, installation=told)
        self.registry.record_heartbeat(name, heartbeat)
        for one in self.running:
            one.on_heartbeat(name, heartbeat)

    def stages(self, installation: str) -> dict[str, str]:
        return {row.device_id: str(row.state) for row in self.store.installations.list_devices(installation)}

    def status(self, installation: str) -> str:
        return str(self.store.installations.get(installation).status)

    def events(self) -> list[tuple[str, str | None]]:
        return [
            (row["kind"], row["device_id"])
            for row in list_events_after(self.store, 0, limit=100)
            if row["kind"].startswith("installation")
        ]

    def close(self) -> None:
        for one in self.running:
            one.stop()
        self.store.close()


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(service, "POLL_INTERVAL_S", 0.02)
    made = Fleet(tmp_path)
    yield made
    made.close()


def submit(fleet: Fleet, installations: InstallationService, **wish: Any) -> str:
    record, _ = installations.submit(InstallationRequest(**{"version": NEXT, **wish}))
    return record.installation_id


def test_every_board_that_can_be_updated_is_told_and_what_it_says_is_kept(fleet: Fleet) -> None:
    for name in ("pi-1", "pi-2"):
        fleet.add(name)
    installations = fleet.start()
    made = submit(fleet, installations)
    eventually(lambda: sorted(fleet.commands) == [("pi-1", "install", made), ("pi-2", "install", made)])
    fleet.say("pi-1", "fetching", made)
    fleet.say("pi-1", "running", made)
    fleet.say("pi-2", "rolled-back", made, "its agent did not come up")
    eventually(lambda: fleet.status(made) == "done")
    assert fleet.stages(made) == {"pi-1": "running", "pi-2": "rolled-back"}
    assert sorted(fleet.events()) == [
        ("installation-requested", "pi-1"),
        ("installation-requested", "pi-2"),
        ("installation-rolled-back", "pi-2"),
        ("installation-running", "pi-1"),
    ]
    row = fleet.store.installations.list_devices(made)[1]
    assert row.reason == "its agent did not come up"


def test_the_rest_follows_when_the_canaries_run_it_and_is_never_told_when_one_fails(fleet: Fleet) -> None:
    for name in ("pi-1", "pi-2", "pi-3"):
        fleet.add(name)
    installations = fleet.start()
    made = submit(fleet, installations, canary=1)
    (canary,) = eventually(lambda: [device for device, _, _ in fleet.commands])
    fleet.say(canary, "rejected", made, "not signed by anybody")
    eventually(lambda: fleet.status(made) == "failed")
    assert sorted(fleet.stages(made).values()) == ["rejected", "superseded", "superseded"]
    assert len(fleet.commands) == 1
    assert fleet.store.installations.get(made).reason == f"canary {canary}: not signed by anybody"
    again = submit(fleet, installations, canary=1)
    fleet.say(eventually(lambda: [device for device, _, _ in fleet.commands[1:]])[0], "running", again)
    eventually(lambda: {device for device, _, name in fleet.commands if name == again} == {"pi-1", "pi-2", "pi-3"})


def test_a_canary_that_keeps_what_it_runs_is_not_taken_back_when_another_is_silent(fleet: Fleet) -> None:
    for name in ("pi-1", "pi-2"):
        fleet.add(name)
    made = submit(fleet, fleet.start(), canary=2)
    fleet.say("pi-1", "running", made)
    eventually(lambda: fleet.stages(made)["pi-1"] == "running")
    fleet.store.installations.update(made, canary_until=0.0)
    eventually(lambda: fleet.status(made) == "failed")
    assert fleet.stages(made) == {"pi-1": "running", "pi-2": "superseded"}
    fleet.say("pi-2", "running", made)  # it was slow, and is believed
    eventually(lambda: fleet.stages(made)["pi-2"] == "running")


def test_boards_that_cannot_be_updated_are_left_out_with_their_reason(fleet: Fleet) -> None:
    fleet.add("pi-1")
    fleet.add("laptop", {"installs": {"able": False, "reason": "installed by hand"}})
    fleet.add("old", {})
    fleet.add(EVALUATOR_NAME)
    installations = fleet.start()
    record, left_out = installations.submit(InstallationRequest(version=NEXT))
    assert left_out == {"laptop": "installed by hand", "old": OUTDATED_AGENT_REASON}
    assert set(fleet.stages(record.installation_id)) == {"pi-1"}
    with pytest.raises(UsageError, match="laptop cannot be updated from here: installed by hand"):
        submit(fleet, installations, devices=("laptop", "pi-1"))
    with pytest.raises(NotFoundError, match="no device 'pi-9'"):
        submit(fleet, installations, devices=("pi-9",))


def test_a_board_that_is_away_is_told_when_it_comes(fleet: Fleet) -> None:
    fleet.add("pi-1")
    fleet.registry.record_status("pi-1", StatusMessage(state="offline", boot_id="boot of pi-1", session_no=1))
    made = submit(fleet, fleet.start())
    settled(fleet.running[-1])
    assert not fleet.commands
    fleet.online("pi-1", session=2)
    eventually(lambda: fleet.commands == [("pi-1", "install", made)])


def test_a_coordinator_that_was_killed_goes_on(fleet: Fleet) -> None:
    fleet.add("pi-1")
    first = fleet.start()
    made = submit(fleet, first)
    eventually(lambda: fleet.commands)
    first.stop()
    fleet.running.clear()
    fleet.start()
    eventually(lambda: len(fleet.commands) == 2)  # it may not have heard the first one
    fleet.say("pi-1", "running", made)
    eventually(lambda: fleet.status(made) == "done")


def test_a_newer_installation_of_the_same_name_takes_the_place_of_one_that_waits(fleet: Fleet) -> None:
    fleet.add("pi-1")
    installations = fleet.start()
    first, other = submit(fleet, installations), submit(fleet, installations, version=None, bundle=fleet.pack())
    second = submit(fleet, installations)
    eventually(lambda: fleet.stages(first) == {"pi-1": "superseded"})
    assert (fleet.stages(other), fleet.stages(second)) == ({"pi-1": "notified"}, {"pi-1": "notified"})


def test_a_board_is_told_of_its_oldest_installation_and_of_the_next_when_it_has_answered(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RESEND_AFTER_S", 0.05)
    fleet.add("pi-1")
    fleet.add("pi-2")
    installations = fleet.start()
    first = submit(fleet, installations, devices=("pi-1",))
    second = submit(fleet, installations, version=None, bundle=fleet.pack())
    eventually(lambda: fleet.commands.count(("pi-1", "install", first)) > 2)
    fleet.say("pi-1", "fetching", first)
    eventually(lambda: fleet.commands.count(("pi-2", "install", second)) > 2)
    assert ("pi-1", "install", second) not in fleet.commands
    fleet.say("pi-1", "running", first)
    eventually(lambda: ("pi-1", "install", second) in fleet.commands)


def test_a_canary_s_time_begins_when_the_board_is_done_with_an_older_installation_or_goes_away(fleet: Fleet) -> None:
    for name in ("pi-1", "pi-2"):
        fleet.add(name)
    installations = fleet.start()
    first, pack = submit(fleet, installations, devices=("pi-1",)), fleet.pack()
    fleet.say("pi-1", "fetching", first)
    second = submit(fleet, installations, version=None, bundle=pack, canary=1, canary_s=60.0)

    def until() -> float | None:
        return fleet.store.installations.get(second).canary_until

    eventually(lambda: until() is None)
    settled(installations)
    assert (until(), fleet.stages(second)["pi-1"]) == (None, "notified")
    fleet.registry.record_status("pi-1", StatusMessage(state="offline", boot_id="boot of pi-1", session_no=1))
    eventually(lambda: until() is not None)
    fleet.online("pi-1", session=2)
    eventually(lambda: until() is None)
    fleet.say("pi-1", "running", first)
    eventually(lambda: ("pi-1", "install", second) in fleet.commands)
    eventually(lambda: until() is not None)
    fleet.store.installations.update(second, canary_until=0.0)
    eventually(lambda: fleet.status(second) == "failed")
    assert fleet.store.installations.get(second).reason == "canary pi-1 did not report within 60 s"


def test_only_the_devices_of_an_installation_may_fetch_its_bundle(fleet: Fleet) -> None:
    fleet.add("pi-1")
    fleet.add("pi-2")
    installations = fleet.start()
    made = submit(fleet, installations, devices=("pi-1",))
    offer = installations.make_offer(made, "pi-1")
    assert (offer["sha256"], offer["version"]) == (fleet.release, NEXT)
    assert installations.get_file(made, "pi-1").stat().st_size == offer["bytes"]
    for name, installation in (("pi-2", made), ("pi-1", "other")):
        with pytest.raises(NotFoundError):
            installations.make_offer(installation, name)
    fleet.files.get_path(fleet.release).unlink()
    with pytest.raises(NotFoundError, match="has the bundle no more"):
        installations.get_file(made, "pi-1")


def test_a_release_that_was_never_brought_or_cannot_be_talked_to_is_refused(fleet: Fleet) -> None:
    fleet.add("pi-1")
    far, installations = f"{MAJOR}.{MINOR + 1}.0", fleet.start()
    fleet.bring(fleet.signer.bundle(fleet.root / "far", stand_in(fleet.root / "f", far), version=far))
    with pytest.raises(VersionError):
        submit(fleet, installations, version=far)
    with pytest.raises(NotFoundError, match=rf"has no release '9\.9' \(it has: .*{NEXT}"):
        submit(fleet, installations, version="9.9")


def test_an_upload_that_is_no_bundle_or_too_large_leaves_nothing(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(10_000))
    before = sorted(fleet.files.folder.iterdir())
    with pytest.raises(BundleError, match="this is no bundle"):
        fleet.bring(tmp_path / "x")
    fleet.files = BundleStore(fleet.files.folder, max_bytes=100)
    with pytest.raises(BundleError, match="the bundle has more than 100 bytes"):
        fleet.bring(tmp_path / "r")
    assert sorted(fleet.files.folder.iterdir()) == before


def test_old_bundles_go_unless_they_are_on_their_way(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.add("pi-1")
    monkeypatch.setattr(bundle_store, "MAX_BUNDLES", 1)
    installations = fleet.start()
    submit(fleet, installations)
    made = [fleet.pack(name) for name in ("gulls", "terns")]
    os.utime(fleet.files.get_path(made[0]), (1.0, 1.0))
    submit(fleet, installations, version=None, bundle=made[1])
    assert {one.sha256 for one in fleet.files.list_bundles()} == {fleet.release, made[1]}


@pytest.mark.parametrize(
    "wish", [{}, {"version": "1", "bundle": "ab"}, {"version": "1", "canary": -1}, {"version": "1", "canary_s": 0}]
)
def test_a_wish_that_makes_no_sense_is_refused(wish: Any) -> None:
    with pytest.raises(ConfigError):
        InstallationRequest(**wish)


def test_a_device_that_says_nonsense_changes_nothing(fleet: Fleet) -> None:
    fleet.add("pi-1")
    made = submit(fleet, fleet.start())
    for state, name in (("running", "other"), ("exploded", made), (7, made), (["x"], made)):
        fleet.say("pi-1", state, name)  # type: ignore[arg-type]
    settled(fleet.running[-1])
    assert fleet.stages(made) == {"pi-1": "notified"}
    assert not fleet.fatal


def test_what_one_board_says_wrong_does_not_hide_what_another_says(fleet: Fleet) -> None:
    fleet.add("pi-1")
    fleet.add("pi-2")
    first = fleet.start()
    made = submit(fleet, first)
    first.stop()
    fleet.running.clear()
    again = InstallationService(
        Installations(store=fleet.store, registry=fleet.registry, bundle_store=fleet.files),
        store=fleet.store,
        registry=fleet.registry,
        send_command=fleet.send_command,
        on_fatal=fleet.fatal.append,
    )
    fleet.running.append(again)
    fleet.say("pi-1", ["x"], made)  # type: ignore[arg-type]
    fleet.say("pi-2", "running", made)
    again.start()
    eventually(lambda: fleet.stages(made) == {"pi-1": "notified", "pi-2": "running"})


def test_nobody_waits_for_a_board_that_was_taken_out_of_the_fleet(fleet: Fleet) -> None:
    fleet.add("pi-1")
    fleet.add("pi-2", is_online=False)
    fleet.registry.record_capabilities("pi-2", Capabilities(facts=ABLE))
    made = submit(fleet, fleet.start())
    fleet.say("pi-1", "running", made)
    eventually(lambda: fleet.stages(made)["pi-1"] == "running")
    assert fleet.status(made) == "rolling"
    fleet.registry.remove("pi-2")
    eventually(lambda: fleet.status(made) == "done")
    assert fleet.stages(made)["pi-2"] == "failed"
    assert fleet.store.installations.list_devices(made)[1].reason == "it was taken out of the fleet"
    assert not fleet.store.installations.list_open()


def test_a_bundle_that_is_damaged_on_the_disk_does_not_hide_the_others(fleet: Fleet) -> None:
    (fleet.files.folder / f"{'0' * 64}.bundle").write_bytes(bytes(5000))
    assert [one.sha256 for one in fleet.files.list_bundles()] == [fleet.release]
    assert fleet.files.find_release(NEXT).sha256 == fleet.release


def test_a_report_outlasts_what_hinders_that_it_is_kept(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pi-1", "pi-2"):
        fleet.add(name)
    made = submit(fleet, fleet.start())
    eventually(lambda: len(fleet.commands) == 2)
    known, errors = fleet.store.installations.list_of_device, [StoreBusyError("in use"), ZeroDivisionError("odd")]
    monkeypatch.setattr(
        fleet.store.installations, "list_of_device", lambda name: _raise(errors.pop()) if errors else known(name)
    )
    fleet.say("pi-1", "running", made)
    fleet.say("pi-2", "running", made)
    eventually(lambda: fleet.stages(made) == {"pi-1": "running", "pi-2": "running"})
    assert errors == []


def _raise(error: Exception) -> NoReturn:
    raise error
