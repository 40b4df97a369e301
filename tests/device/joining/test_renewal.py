"""Renewing a certificate, against a real coordinator's routes and with the cards that power cuts leave behind."""

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from edgefl.coordinator import pki
from edgefl.device.joining.enrolment import JoinWishes, join
from edgefl.device.joining.keys import new_key, public_pem
from edgefl.device.joining.renewal import LOOK_EVERY_S, LOOK_WHILE_OFF_S, READMIT, TRY_AGAIN_S, Renewal
from edgefl.device.state import DeviceState
from edgefl.device.trust import Hello, pinned_context
from edgefl.errors import NetworkError, NotAllowedError

DAY_S = 86_400.0


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def state(front_door, tmp_path):
    return join(front_door.token(), JoinWishes(name="pi-1"), root=tmp_path / "device", addresses=[front_door.address])


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def renewal(state, clock):
    return Renewal(state, pinned_context(state.ca.read_bytes()), sign=lambda _key: {}, monotonic=clock)


def hello(earliest, latest):
    return Hello(
        version="1", fleet="lab", addresses=(), broker_port=1, broker_host=None, skew_s=0.0,
        certificates=(earliest, latest),
    )  # fmt: skip


def end_of(state):
    return pki.expires_at(state.cert.read_bytes())


def test_it_is_time_when_the_end_lies_outside_of_what_the_coordinator_wants_or_somebody_asks(state, renewal, clock):
    end = end_of(state)
    assert not renewal.is_due(), "nothing was heard yet"
    for earliest_s, latest_s, is_due in ((-1, 1, False), (1, 2, True), (-2, -1, True), (-100, DAY_S, False)):
        renewal.heard(hello(end + earliest_s, end + latest_s))
        assert renewal.is_due() is is_due
    clock.now_s += 101
    assert renewal.is_due(), "it becomes time while the device stays connected"
    # One that is older says nothing of certificates.
    renewal.heard(Hello(version="1", fleet="lab", addresses=(), broker_port=1, broker_host=None, skew_s=0.0))
    assert not renewal.is_due()
    renewal.ask()
    assert renewal.is_due()


@pytest.mark.parametrize(("is_link_up", "after_s"), [(True, LOOK_EVERY_S), (False, LOOK_WHILE_OFF_S)])
def test_the_coordinator_is_asked_again_and_sooner_while_the_broker_refuses(
    state, renewal, clock, front_door, is_link_up, after_s
):
    renewal.heard(hello(0.0, 1.0))
    clock.now_s += after_s - 1
    renewal.look(front_door.address, is_link_up=is_link_up)
    assert renewal.is_due()
    clock.now_s += 1
    renewal.look(front_door.address, is_link_up=is_link_up)
    assert not renewal.is_due(), "the answer of this coordinator is that 90 days are right"


def test_another_server_at_the_coordinator_s_address_is_one_that_does_not_answer(renewal, clock, make_front_door):
    renewal.heard(hello(0.0, 1.0))
    clock.now_s += LOOK_EVERY_S
    with pytest.raises(NetworkError, match="CA"):
        renewal.look(make_front_door().address, is_link_up=True)


class Coordinator:
    """Signs as the route does, and can lose its answer."""

    def __init__(self, door):
        self.door, self.asked = door, []
        self.loses_answers = False

    def post(self, _address, _trust, path, value, **_):
        if path == READMIT:
            raise NotAllowedError("this certificate counts no more, or its key is known")
        csr = str(value["csr"]).encode()
        self.asked.append(csr)
        if self.loses_answers:
            raise TimeoutError("no answer in time")
        return {"certificate": pki.sign_request(self.door.directory.authority(), csr, "pi-1").decode()}


@pytest.fixture
def coordinator(front_door, monkeypatch):
    made = Coordinator(front_door)
    monkeypatch.setattr("edgefl.device.joining.renewal.post_json", made.post)
    return made


def test_key_and_certificate_are_new_fit_each_other_and_lie_in_one_file(state, renewal, coordinator):
    old = state.key.read_bytes()
    renewal.ask()
    assert renewal.renew("here:1")
    assert state.cert == state.key
    assert pki.belong_together(state.cert.read_bytes(), state.key.read_bytes())
    assert public_pem(state.key.read_bytes()) != public_pem(old)
    assert load_pem_private_key(state.key.read_bytes(), password=None)
    assert not state.pending_key.exists()
    assert state.key.stat().st_mode & 0o777 == 0o600
    assert not renewal.is_due()
    # What was left over at the very end is not taken for a new one.
    state.pending_key.write_bytes(state.key.read_bytes())
    former = public_pem(state.key.read_bytes())
    assert renewal.renew("here:1")
    assert public_pem(state.key.read_bytes()) != former


def test_after_a_lost_answer_the_same_key_is_asked_for_again(state, renewal, coordinator, clock):
    coordinator.loses_answers = True
    renewal.ask()
    old = state.key.read_bytes()
    assert not renewal.renew("here:1")
    assert state.key.read_bytes() == old
    assert not renewal.is_due(), "not at once"
    clock.now_s += TRY_AGAIN_S
    assert renewal.is_due()
    coordinator.loses_answers = False
    kept = state.pending_key.read_bytes()
    assert renewal.renew("here:1")
    assert public_pem(state.key.read_bytes()) == public_pem(kept)


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

    from edgefl.device import state as states  # noqa: PLC0415 likewise
    from edgefl.device.joining import renewal as module  # noqa: PLC0415 what is cut off

    monkeypatch.setattr(module, "write_whole", cut(module.write_whole))
    monkeypatch.setattr(states, "write_whole", cut(states.write_whole))
    monkeypatch.setattr(Path, "unlink", lambda *_args, **_options: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        renewal.renew("here:1")
    again = DeviceState.load(state.root)
    assert pki.belong_together(again.cert.read_bytes(), again.key.read_bytes())


def test_a_damaged_key_of_a_renewal_is_given_up(state, renewal, coordinator):
    state.pending_key.write_bytes(b"damaged")
    assert not renewal.recover("here:1")
    assert not state.pending_key.exists()
    assert not renewal.recover("here:1")


def test_the_key_that_the_coordinator_knows_already_brings_the_device_back(state, renewal, coordinator):
    kept = new_key()
    state.pending_key.write_bytes(kept)
    assert renewal.recover("here:1")
    assert public_pem(state.key.read_bytes()) == public_pem(kept)
    assert abs(end_of(state) - time.time() - 90 * DAY_S) < DAY_S


@pytest.mark.parametrize("is_renewed", [False, True], ids=["as it joined", "key and certificate in one file"])
def test_a_device_shows_its_certificate_and_never_its_key_to_be_readmitted(
    state, renewal, front_door, monkeypatch, is_renewed
):
    if is_renewed:
        state.take_certificate(key_pem=state.key.read_bytes(), cert_pem=state.cert.read_bytes())
    shown = []

    def post(_address, _trust, path, value, **_):
        shown.append({"path": path, **value})
        return {"v": 1}

    monkeypatch.setattr("edgefl.device.joining.renewal.post_json", post)
    assert renewal.recover("here:1")
    assert [one["path"] for one in shown] == [READMIT]
    assert "PRIVATE" not in str(shown)
    assert pki.serial(shown[0]["certificate"].encode()) == pki.serial(state.cert.read_bytes())
    assert pki.request_key(shown[0]["csr"].encode())
