"""Renewing a certificate, against a real coordinator's routes and with the cards that power cuts leave behind."""

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from edgefl.coordinator import pki
from edgefl.core.errors import NetworkError, NotAllowedError
from edgefl.device import state_dir
from edgefl.device.enrolment import certificates
from edgefl.device.enrolment.certificates import (
    OFFLINE_POLL_INTERVAL_S,
    POLL_INTERVAL_S,
    REENROLL_ROUTE,
    RETRY_INTERVAL_S,
    CertificateRenewal,
    create_key,
    export_public_key,
)
from edgefl.device.enrolment.enroll import EnrolmentOptions, enroll
from edgefl.device.state_dir import DeviceStateDir
from edgefl.system.https_client import CoordinatorInfo, create_pinned_context

DAY_S = 86_400.0


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def state(front_door, tmp_path):
    return enroll(
        front_door.token(), EnrolmentOptions(name="pi-1"), root=tmp_path / "device", addresses=[front_door.address]
    )


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def renewal(state, clock):
    return CertificateRenewal(
        state, create_pinned_context(state.ca.read_bytes()), make_signer=lambda _key: lambda *_: {}, monotonic=clock
    )


def hello(earliest, latest):
    return CoordinatorInfo(
        version="1", fleet="lab", addresses=(), broker_port=1, broker_host=None, skew_s=0.0,
        renewal_window=(earliest, latest),
    )  # fmt: skip


def end_of(state):
    return pki.get_expiry(state.cert.read_bytes())


def test_it_is_time_when_the_end_lies_outside_of_what_the_coordinator_wants_or_somebody_asks(state, renewal, clock):
    end = end_of(state)
    assert not renewal.is_due(), "nothing was heard yet"
    for earliest_s, latest_s, is_due in ((-1, 1, False), (1, 2, True), (-2, -1, True), (-100, DAY_S, False)):
        renewal.on_coordinator_info(hello(end + earliest_s, end + latest_s))
        assert renewal.is_due() is is_due
    clock.now_s += 101
    assert renewal.is_due(), "it becomes time while the device stays connected"
    # One that is older says nothing of certificates.
    renewal.on_coordinator_info(
        CoordinatorInfo(version="1", fleet="lab", addresses=(), broker_port=1, broker_host=None, skew_s=0.0)
    )
    assert not renewal.is_due()
    renewal.request()
    assert renewal.is_due()


@pytest.mark.parametrize(("is_link_up", "after_s"), [(True, POLL_INTERVAL_S), (False, OFFLINE_POLL_INTERVAL_S)])
def test_the_coordinator_is_asked_again_and_sooner_while_the_broker_refuses(
    state, renewal, clock, front_door, is_link_up, after_s
):
    renewal.on_coordinator_info(hello(0.0, 1.0))
    clock.now_s += after_s - 1
    renewal.poll(front_door.address, is_connected=is_link_up)
    assert renewal.is_due()
    clock.now_s += 1
    renewal.poll(front_door.address, is_connected=is_link_up)
    assert not renewal.is_due(), "the answer of this coordinator is that 90 days are right"


def test_another_server_at_the_coordinator_s_address_is_one_that_does_not_answer(renewal, clock, make_front_door):
    renewal.on_coordinator_info(hello(0.0, 1.0))
    clock.now_s += POLL_INTERVAL_S
    with pytest.raises(NetworkError, match="CA"):
        renewal.poll(make_front_door().address, is_connected=True)


class Coordinator:
    """Signs as the route does, and can lose its answer."""

    def __init__(self, door):
        self.door, self.asked = door, []
        self.loses_answers = False

    def post(self, _address, _trust, path, value, **_):
        if path == REENROLL_ROUTE:
            raise NotAllowedError("this certificate counts no more, or its key is known")
        csr = str(value["csr"]).encode()
        self.asked.append(csr)
        if self.loses_answers:
            raise TimeoutError("no answer in time")
        return {"certificate": pki.sign_request(self.door.directory.load_authority(), csr, "pi-1").decode()}


@pytest.fixture
def coordinator(front_door, monkeypatch):
    made = Coordinator(front_door)
    monkeypatch.setattr("edgefl.device.enrolment.certificates.post_json", made.post)
    return made


def test_key_and_certificate_are_new_fit_each_other_and_lie_in_one_file(state, renewal, coordinator):
    old = state.key.read_bytes()
    renewal.request()
    assert renewal.renew("here:1")
    assert state.cert == state.key
    assert pki.is_key_pair(state.cert.read_bytes(), state.key.read_bytes())
    assert export_public_key(state.key.read_bytes()) != export_public_key(old)
    assert load_pem_private_key(state.key.read_bytes(), password=None)
    assert not state.pending_key.exists()
    assert state.key.stat().st_mode & 0o777 == 0o600
    assert not renewal.is_due()
    # What was left over at the very end is not taken for a new one.
    state.pending_key.write_bytes(state.key.read_bytes())
    former = export_public_key(state.key.read_bytes())
    assert renewal.renew("here:1")
    assert export_public_key(state.key.read_bytes()) != former


def test_after_a_lost_answer_the_same_key_is_asked_for_again(state, renewal, coordinator, clock):
    coordinator.loses_answers = True
    renewal.request()
    old = state.key.read_bytes()
    assert not renewal.renew("here:1")
    assert state.key.read_bytes() == old
    assert not renewal.is_due(), "not at once"
    clock.now_s += RETRY_INTERVAL_S
    assert renewal.is_due()
    coordinator.loses_answers = False
    kept = state.pending_key.read_bytes()
    assert renewal.renew("here:1")
    assert export_public_key(state.key.read_bytes()) == export_public_key(kept)


@pytest.mark.parametrize("writes", [1, 2])
def test_a_power_cut_at_any_write_leaves_a_pair_that_fits(state, renewal, coordinator, monkeypatch, writes):
    left = [writes]

    def cut(real):
        def write(*arguments):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            real(*arguments)

        return write

    monkeypatch.setattr(certificates, "write_atomic", cut(certificates.write_atomic))
    monkeypatch.setattr(state_dir, "write_atomic", cut(state_dir.write_atomic))
    monkeypatch.setattr(Path, "unlink", lambda *_args, **_options: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        renewal.renew("here:1")
    again = DeviceStateDir.load(state.root)
    assert pki.is_key_pair(again.cert.read_bytes(), again.key.read_bytes())


def test_a_damaged_key_of_a_renewal_is_given_up(state, renewal, coordinator):
    state.pending_key.write_bytes(b"damaged")
    assert not renewal.recover("here:1")
    assert not state.pending_key.exists()
    assert not renewal.recover("here:1")


def test_the_key_that_the_coordinator_knows_already_brings_the_device_back(state, renewal, coordinator):
    kept = create_key()
    state.pending_key.write_bytes(kept)
    assert renewal.recover("here:1")
    assert export_public_key(state.key.read_bytes()) == export_public_key(kept)
    assert abs(end_of(state) - time.time() - 90 * DAY_S) < DAY_S


@pytest.mark.parametrize("is_renewed", [False, True], ids=["as it joined", "key and certificate in one file"])
def test_a_device_shows_its_certificate_and_never_its_key_to_be_re_enrolled(
    state, renewal, front_door, monkeypatch, is_renewed
):
    if is_renewed:
        state.save_certificate(key_pem=state.key.read_bytes(), cert_pem=state.cert.read_bytes())
    shown = []

    def post(_address, _trust, path, value, **_):
        shown.append({"path": path, **value})
        return {"v": 1}

    monkeypatch.setattr("edgefl.device.enrolment.certificates.post_json", post)
    assert renewal.recover("here:1")
    assert [one["path"] for one in shown] == [REENROLL_ROUTE]
    assert "PRIVATE" not in str(shown)
    assert pki.get_serial(shown[0]["certificate"].encode()) == pki.get_serial(state.cert.read_bytes())
    assert pki.verify_request(shown[0]["csr"].encode())
