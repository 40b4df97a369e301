from __future__ import annotations

import socket
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from requirements import require

from edgefl.coordinator.api.server import WebServer
from edgefl.coordinator.directory import CoordinatorDirectory, StartOptions, init_directory
from edgefl.coordinator.service import LOG_INTERVAL_S, Coordinator, StoreOutageGuard
from edgefl.core.errors import EdgeflError, PortInUseError, StoreBusyError, StoreError, StoreFullError
from edgefl.engine.assembly.build import build_run
from edgefl.simulation.local_fleet import find_free_port
from edgefl.storage.repositories.records import RunStatus
from edgefl.storage.store import Store


@pytest.fixture
def directory(tmp_path: Path) -> CoordinatorDirectory:
    return init_directory(tmp_path / "c", hosts=["127.0.0.1"], fleet="lab", port=find_free_port())


def _options(directory: CoordinatorDirectory, **options: object) -> StartOptions:
    usual = {"host": "127.0.0.1", "port": directory.port, "broker_port": find_free_port(), "broker": "embedded"}
    return StartOptions(**{**usual, **options})


@pytest.mark.parametrize("broker", ["mosquitto", "embedded"])
def test_closing_leaves_no_thread_and_no_open_database(directory: CoordinatorDirectory, broker: str) -> None:
    if broker == "mosquitto":
        require("mosquitto")
    before = set(threading.enumerate())
    with Coordinator(directory, _options(directory, broker=broker), build_run) as coordinator:
        coordinator.stop()
        coordinator.wait()
    # The web server's worker threads notice a moment later that it is over.
    until_s = time.monotonic() + 60
    while set(threading.enumerate()) - before and time.monotonic() < until_s:
        time.sleep(0.02)
    assert set(threading.enumerate()) - before == set()
    assert not list(directory.root.glob("edgefl.db-*"))


def test_a_failed_start_closes_what_was_opened(directory: CoordinatorDirectory) -> None:
    before = set(threading.enumerate())
    taken = find_free_port()
    with (
        socket.create_server(("127.0.0.1", taken)),
        pytest.raises(PortInUseError),
        Coordinator(directory, _options(directory, broker_port=taken), build_run),
    ):
        pass
    assert set(threading.enumerate()) - before == set()
    with Coordinator(directory, _options(directory), build_run):
        pass


def test_a_second_coordinator_on_the_same_directory_is_refused_and_changes_nothing(
    directory: CoordinatorDirectory,
) -> None:
    settled: list[CoordinatorDirectory] = []

    def settle(held: CoordinatorDirectory) -> CoordinatorDirectory:
        settled.append(held)
        return held

    with Coordinator(directory, _options(directory), build_run):
        second = Coordinator(directory, _options(directory, port=find_free_port()), build_run, settle)
        with pytest.raises(StoreError, match="another coordinator runs on") as refused, second:
            pass
    assert (refused.value.exit_code, settled) == (14, [])
    with Coordinator(directory, _options(directory), build_run, settle):
        pass
    assert settled == [directory]


def test_a_run_that_an_earlier_coordinator_left_is_interrupted_before_anybody_can_ask(
    directory: CoordinatorDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, seen = WebServer.start, []

    def start(server: WebServer) -> None:
        with Store.open(directory.database, read_only=True) as store:
            seen.append(store.get_run("r1").status)
        opened(server)

    monkeypatch.setattr(WebServer, "start", start)
    with Store.open(directory.database) as store:
        store.add_run(
            run_id="r1", name="n", task="digits", strategy="fedavg", config={"run": {"task": "digits"}}, seed=7,
            submitted_at=1.0,
        )  # fmt: skip
        store.set_run_status("r1", RunStatus.RUNNING, at=2.0)
    (directory.runs / "r1" / "journal").mkdir(parents=True)  # it began; without one it would begin again
    with Coordinator(directory, _options(directory), build_run):
        pass
    assert seen == [RunStatus.INTERRUPTED]
    connection = sqlite3.connect(directory.database)
    assert connection.execute("SELECT status FROM runs").fetchall() == [("interrupted",)]
    assert connection.execute("SELECT kind FROM events").fetchall() == [("run-interrupted",)]
    connection.close()


def test_a_run_whose_first_model_is_gone_fails_and_the_coordinator_goes_on(
    directory: CoordinatorDirectory, tmp_path: Path
) -> None:
    with Store.open(directory.database) as store:
        for run_id, init in (("gone", "none.safetensors"), ("damaged", "damaged.safetensors")):
            run = {"task": "digits", "init": str(tmp_path / init)}
            store.add_run(
                run_id=run_id, name="n", task="digits", strategy="fedavg", config={"run": run}, seed=7,
                submitted_at=1.0,
            )  # fmt: skip
        (tmp_path / "damaged.safetensors").write_bytes(b"no model")
        with Coordinator(directory, _options(directory), build_run):
            until_s = time.monotonic() + 60
            while any(record.status is not RunStatus.FAILED for record in store.list_runs()):
                assert time.monotonic() < until_s
                time.sleep(0.02)
        assert all("safetensors" in (record.reason or "") for record in store.list_runs())


def test_a_join_that_was_cut_off_is_finished_at_the_next_start_and_told_once(directory: CoordinatorDirectory) -> None:
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    with Store.open(directory.database) as store:
        store.add_token(
            token_id="t", secret_sha256="0" * 64, expires_at=9e9, uses=1, groups=(), role=None, created_at=1.0
        )
        store.enroll_device(
            token_id="t", secret_sha256="0" * 64, now=2.0, device_id="pi", public_key=pem, role="trainer",
            issue_certificate=lambda: "1", version="0.1.0",
        )  # fmt: skip
        for _ in range(2):
            with Coordinator(directory, _options(directory), build_run):
                pass
        assert store.get_device("pi").node_id is not None
    connection = sqlite3.connect(directory.database)
    assert connection.execute("SELECT kind FROM events").fetchall() == [("device-joined",)]
    connection.close()


def test_the_coordinator_s_own_broker_refuses_removed_devices_from_the_start_and_from_their_removal_on(
    directory: CoordinatorDirectory,
) -> None:
    with Store.open(directory.database) as store:
        store.add_token(
            token_id="t", secret_sha256="0" * 64, expires_at=9e9, uses=2, groups=(), role=None, created_at=1.0
        )
        for name in ("pi-1", "pi-2"):
            key = ec.generate_private_key(ec.SECP384R1()).public_key()
            pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
            store.enroll_device(
                token_id="t", secret_sha256="0" * 64, now=2.0, device_id=name, public_key=pem, role="trainer"
            )
        store.remove_device("pi-1", at=3.0)
        with Coordinator(directory, _options(directory), build_run) as coordinator:
            assert coordinator._mqtt.broker._revoked[0] == {"pi-1"}
            waiting = threading.Thread(target=coordinator.wait)
            waiting.start()
            store.remove_device("pi-2", at=4.0)
            until_s = time.monotonic() + 60
            while coordinator._mqtt.broker._revoked[0] != {"pi-1", "pi-2"}:
                assert time.monotonic() < until_s
                time.sleep(0.02)
            coordinator.stop()
            waiting.join()


class Disk:
    """Raises what it is told to, and notes what was written."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.told: list[tuple[str, str, float]] = []
        self.error: EdgeflError | None = None
        self.hindrance = StoreOutageGuard(
            record=self._record, clock=lambda: 1000 + self.now_s, monotonic=lambda: self.now_s
        )

    def write(self) -> None:
        if self.error is not None:
            raise self.error

    def _record(self, kind: str, message: str, at: float) -> None:
        self.write()
        self.told.append((kind, message, at))


@pytest.mark.parametrize("error", [StoreFullError("no room"), StoreBusyError("in use")])
def test_what_passes_is_said_once_a_minute_and_told_to_the_store_when_it_has_passed(
    error: EdgeflError, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk()
    disk.error = error
    for disk.now_s in range(10, 10 + int(LOG_INTERVAL_S) + 1):
        disk.hindrance.run(disk.write)
    assert caplog.text.count(str(error)) == 2
    assert disk.told == []
    disk.error = None
    disk.hindrance.run(disk.write)
    disk.hindrance.run(disk.write)
    assert disk.told == [("store-unavailable", f"{error}; for 60 s", 1010.0)]


def test_it_is_told_later_when_even_that_cannot_be_written() -> None:
    disk = Disk()
    disk.error = StoreFullError("no room")
    disk.hindrance.run(disk.write)
    disk.hindrance.run(lambda: None)
    assert disk.told == []
    disk.error = None
    disk.hindrance.run(disk.write)
    assert [kind for kind, _, _ in disk.told] == ["store-unavailable"]


def test_a_store_that_is_damaged_does_not_pass() -> None:
    disk = Disk()
    disk.error = StoreError("damaged")
    with pytest.raises(StoreError, match="damaged"):
        disk.hindrance.run(disk.write)
