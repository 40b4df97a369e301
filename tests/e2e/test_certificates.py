"""Certificates of a real fleet: renewed in time, all at once, after a long absence; and taken away from a device."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any

import pytest
from requirements import needs

from edgefl.coordinator import pki
from edgefl.coordinator.brokers.broker import make_client_context
from edgefl.coordinator.directory import load_directory
from edgefl.core.config import parse_run
from edgefl.core.protocol import HEARTBEAT_S, POLL_S
from edgefl.device.enrolment.certificates import create_signing_request
from edgefl.device.state_dir import DeviceStateDir
from edgefl.simulation.local_fleet import LocalFleet
from edgefl.system.atomic_files import TlsFiles

pytestmark = pytest.mark.extended


@pytest.fixture(
    scope="module", params=["auto", pytest.param("embedded", marks=[pytest.mark.slow, needs("mosquitto")])]
)
def fleet(
    request: pytest.FixtureRequest, tools: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalFleet]:
    with tools.fleet(
        tmp_path_factory.mktemp("certificates"), tools.devices(3, "digits", tools.gated), broker=request.param
    ) as running:
        yield running


def state(fleet: LocalFleet, name: str) -> DeviceStateDir:
    return DeviceStateDir.load(fleet.root / name)


def serial(fleet: LocalFleet, name: str) -> str:
    return pki.get_serial(state(fleet, name).cert.read_bytes())


def is_whole(fleet: LocalFleet, name: str) -> bool:
    known = state(fleet, name)
    return pki.is_key_pair(known.cert.read_bytes(), known.key.read_bytes()) and not known.pending_key.exists()


def sessions(fleet: LocalFleet, name: str) -> int:
    return int((state(fleet, name).root / "session").read_text())


def give_certificate(fleet: LocalFleet, name: str, *, days: float) -> None:
    """Puts a certificate for the device's own key in the place of its own, which ends in so many days."""
    authority, known = load_directory(fleet.directory).load_authority(), state(fleet, name)
    pem = pki.sign_request(authority, create_signing_request(known.key.read_bytes(), name), name, days=days)
    known.save_certificate(key_pem=known.key.read_bytes().split(b"-----BEGIN CERT")[0], cert_pem=pem)


def shown_by_broker(fleet: LocalFleet) -> str:
    """The serial of the certificate that a client of the broker is shown now."""
    directory = load_directory(fleet.directory)
    context = make_client_context(
        TlsFiles(ca=directory.ca_cert, cert=directory.client_cert, key=directory.client_key)
    )
    with (
        socket.create_connection(("127.0.0.1", fleet.broker_port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        return f"{int(secured.getpeercert()['serialNumber'], 16):x}"  # type: ignore[index,arg-type] # it is verified


def run_on(fleet: LocalFleet, *names: str) -> None:
    """A run in which exactly these take part."""
    run_id = fleet.submit(parse_run({"run": {"task": "digits", "rounds": 2}, "devices": {"names": list(names)}}))
    assert fleet.wait_for_run(run_id)["status"] == "finished"
    assert {row["device_id"] for row in fleet.list_history("updates", run=run_id)} == set(names)


@pytest.mark.parametrize(("name", "days"), [("device-01", 29), ("device-02", -400)])
def test_a_certificate_in_its_last_third_or_long_ended_is_renewed_with_a_new_key_and_keeps_its_place(
    fleet: LocalFleet, tools: Any, name: str, days: float
) -> None:
    before = fleet.make_client().get(f"/edgefl/v1/devices/{name}")
    fleet.terminate(name)
    give_certificate(fleet, name, days=days)
    old_key, old_serial = state(fleet, name).key.read_bytes(), serial(fleet, name)
    fleet.start_device(name)
    tools.eventually(lambda: serial(fleet, name) != old_serial, 30, "the certificate to be renewed")
    tools.eventually(lambda: is_whole(fleet, name))
    assert state(fleet, name).key.read_bytes().split(b"-----BEGIN CERT")[0] not in old_key
    fleet.wait_for_devices(3)
    run_on(fleet, name)
    assert fleet.make_client().get(f"/edgefl/v1/devices/{name}")["joined_at"] == before["joined_at"]
    assert len(tools.events(fleet, "certificate-issued", device=name)) >= 2


def test_rotate_renews_every_certificate_while_the_fleet_works(fleet: LocalFleet, tools: Any) -> None:
    names = ["device-01", "device-02", "device-03"]
    tools.eventually(lambda: all(is_whole(fleet, name) for name in names))
    old = {name: serial(fleet, name) for name in names}
    directory = load_directory(fleet.directory)
    own = [path.read_bytes() for path in (directory.server_cert, directory.client_cert)]
    run_id = fleet.submit(parse_run({"run": {"task": "digits", "rounds": 60}, "devices": {"min": 3}}))
    assert "devices asked to renew theirs: 3" in tools.as_operator(fleet, "coordinator", "rotate").out
    tools.eventually(lambda: all(serial(fleet, name) != old[name] for name in names), 100, "all to be renewed")
    run = fleet.wait_for_run(run_id)
    assert (run["status"], run["rounds"]) == ("finished", 60)
    slowest_s = max(row["seconds"] for row in fleet.list_history("rounds", run=run_id))
    assert slowest_s < POLL_S / 2, "bells that rang while a device connected anew cost it nothing"
    assert [path.read_bytes() for path in (directory.server_cert, directory.client_cert)] != own
    shown = ssl.get_server_certificate(("127.0.0.1", fleet.port), timeout=10)
    assert pki.get_serial(shown.encode()) == pki.get_serial(directory.server_cert.read_bytes())
    assert shown_by_broker(fleet) == pki.get_serial(directory.server_cert.read_bytes())
    fleet.wait_for_devices(3)


def test_a_device_whose_answer_to_a_renewal_was_lost_is_known_by_its_new_key(fleet: LocalFleet, tools: Any) -> None:
    fleet.wait_for_devices(3)
    fleet.terminate("device-03")
    known = state(fleet, "device-03")
    saved = known.key.read_bytes()
    fleet.start_device("device-03")
    fleet.wait_for_devices(3)
    give = serial(fleet, "device-03")
    # The renewal itself goes well; then the board's card is as it was before the answer came.
    fleet.make_client().post("/edgefl/v1/certificates/rotate")
    tools.eventually(lambda: serial(fleet, "device-03") != give, 100, "the renewal")
    tools.eventually(lambda: is_whole(fleet, "device-03"))
    fleet.kill("device-03")
    known.pending_key.write_bytes(known.key.read_bytes().split(b"-----BEGIN CERT")[0])
    known.key.write_bytes(saved)
    fleet.start_device("device-03")
    tools.eventually(lambda: is_whole(fleet, "device-03") and known.key.read_bytes() != saved, 60, "the recovery")
    fleet.wait_for_devices(3)
    run_on(fleet, "device-03")


def test_a_device_that_is_removed_is_out_within_a_heartbeat_and_the_run_goes_on(
    fleet: LocalFleet, tools: Any, record_property: Any
) -> None:
    fleet.wait_for_devices(3)
    run_id = fleet.submit(tools.gated_run(rounds=400, seconds=12.0, pace_s=0.1, min=3))
    tools.eventually(lambda: fleet.make_client().get(f"/edgefl/v1/runs/{run_id}")["rounds"] or 0)
    counted = sessions(fleet, "device-03")
    log = fleet.root / "device-03.log"
    seen = len(log.read_text())
    assert "device-03 is out" in tools.as_operator(fleet, "devices", "remove", "device-03", "--yes").out
    asked = time.monotonic()
    tools.eventually(
        lambda: "lost the broker" in log.read_text()[seen:] or "401" in log.read_text()[seen:],
        HEARTBEAT_S,
        "the device to notice",
    )
    tools.eventually(lambda: sessions(fleet, "device-03") > counted, HEARTBEAT_S, "its connection to be cut")
    record_property("removal_s", round(time.monotonic() - asked, 2))
    assert "device-03" not in fleet.get_presence()
    beats = len(fleet.list_history("heartbeats", device="device-03"))
    run = fleet.wait_for_run(run_id)
    assert run["status"] == "finished"
    tools.eventually(lambda: "401" in log.read_text()[seen:], 40, "Flower to refuse it")
    assert "connected to the broker" not in log.read_text()[seen:], "the broker lets it in again"
    assert len(fleet.list_history("heartbeats", device="device-03")) == beats
    assert tools.events(fleet, "device-removed", device="device-03")
