import contextlib
import os
import socket
import ssl
import threading
import time
from dataclasses import replace

import pytest
from cryptography import x509

from edgefl.coordinator import pki
from edgefl.core.errors import (
    NameTakenError,
    NetworkError,
    NotJoinedError,
    StoreError,
    TokenExpiredError,
    TokenInvalidError,
    TokenUsedError,
    UsageError,
    VersionError,
    WrongCaError,
)
from edgefl.device.enrolment.certificates import create_key, export_public_key
from edgefl.device.enrolment.enroll import (
    DiscoveredCoordinator,
    EnrolmentOptions,
    enroll,
    find_coordinator,
    get_host_slug,
)
from edgefl.device.state_dir import DeviceStateDir
from edgefl.simulation.local_fleet import find_free_port
from edgefl.system.https_client import CoordinatorInfo

PI = EnrolmentOptions(
    name="pi-1", shards={"digits": "/data/a.npz"}, examples={"digits": 300}, facts={"model": "Pi 5"}
)
YEAR_S = 365 * 86400.0


def test_a_join_leaves_all_that_the_agent_needs_to_its_owner_alone_and_the_coordinator_books_it(front_door, tmp_path):
    old, dead = os.umask(0), f"127.0.0.1:{find_free_port()}"
    try:
        token = front_door.token(groups=("lab", "roof"), role="evaluator")
        state = enroll(token, PI, root=tmp_path / "d", addresses=[dead])
    finally:
        os.umask(old)
    again = DeviceStateDir.load(tmp_path / "d")
    assert again.settings == state.settings
    assert (state.device_id, state.settings.fleet, state.settings.role) == ("pi-1", "lab", "evaluator")
    assert state.settings.addresses == (front_door.address,)
    assert (state.settings.broker_host, state.settings.broker_port) == (None, 18883)
    assert state.settings.shards == {"digits": "/data/a.npz"}
    assert state.ca.read_bytes() == front_door.directory.ca_cert.read_bytes()
    assert pki.compute_fingerprint(state.ca.read_bytes()) == state.settings.ca_fingerprint
    assert x509.load_pem_x509_certificate(state.cert.read_bytes()).subject.rfc4514_string() == "CN=pi-1"
    assert {path.name for path in state.root.iterdir()} == {"device.json", "key.pem", "cert.pem", "ca.pem"}
    assert state.root.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in state.root.iterdir())
    record, capabilities = front_door.store.get_device("pi-1"), front_door.store.get_all_capabilities()["pi-1"]
    assert record.groups == ("lab", "roof")
    assert record.certificate_serial == pki.get_serial(state.cert.read_bytes())
    assert (capabilities.facts, capabilities.shards) == ({"model": "Pi 5"}, {"digits": 300})
    assert front_door.enrolled == [("pi-1", record.public_key)]
    assert record.public_key.startswith(b"-----BEGIN PUBLIC KEY-----\n")


@pytest.mark.parametrize("role", ["trainer", "evaluator"])
def test_a_32_bit_board_gets_its_tokens_role_and_the_coordinator_is_told_why_it_trains_nothing(
    front_door, tmp_path, role
):
    wishes = replace(PI, facts={"userland_bits": 32, "architecture": "armv7l"})
    state = enroll(front_door.token(role=role), wishes, root=tmp_path / "d")
    assert state.settings.role == role
    facts = front_door.store.get_all_capabilities()["pi-1"].facts
    assert (facts["trains"], facts["backends"]) == (False, [])
    assert "there are no wheels of numpy" in facts["backend_reasons"]["numpy"]
    assert facts["trains_reason"] == facts["backend_reasons"]["numpy"]
    again = enroll(front_door.token(), wishes, root=tmp_path / "d")
    assert again.settings == state.settings, "the same again is no quarrel"


@pytest.mark.parametrize(
    ("case", "kind", "told"),
    [
        ("secret", TokenInvalidError, "token"),
        ("expired", TokenExpiredError, "expired"),
        ("used", TokenUsedError, "no uses left"),
        ("reserved", NameTakenError, "reserved"),
        ("no slug", UsageError, "device name"),
        ("version", VersionError, "update the coordinator"),
    ],
)
def test_who_is_refused_is_told_why_and_has_left_nothing(front_door, tmp_path, monkeypatch, case, kind, told):
    token = front_door.token(ttl_s=-1.0 if case == "expired" else 60.0)
    if case == "secret":
        token = replace(token, secret="guess")
    if case == "used":
        enroll(token, replace(PI, name="pi-2"), root=tmp_path / "other")
    if case == "version":
        monkeypatch.setattr("edgefl.device.enrolment.enroll.__version__", "9.7.0")
    name = {"reserved": "coordinator", "no slug": "My Pi"}.get(case, "pi-1")
    with pytest.raises(kind, match=told):
        enroll(token, replace(PI, name=name), root=tmp_path / "a" / "d")
    assert not (tmp_path / "a").exists()
    assert len(front_door.enrolled) == (case == "used")
    assert front_door.requests or case == "no slug", "nothing is sent for what cannot be"


def test_a_taken_name_is_refused_and_leaves_nothing_but_the_use(front_door, tmp_path):
    token = front_door.token(uses=2)
    enroll(token, PI, root=tmp_path / "d")
    with pytest.raises(NameTakenError, match="pi-1"):
        enroll(token, PI, root=tmp_path / "e")
    assert not (tmp_path / "e").exists()
    assert enroll(token, replace(PI, name="pi-2"), root=tmp_path / "e").device_id == "pi-2"


def test_another_ca_or_who_shows_the_right_one_without_its_key_is_told_nothing(make_front_door, tmp_path):
    ours, other = make_front_door(), make_front_door()
    impostor = make_front_door(shown_ca=ours.directory.ca_cert.read_bytes())
    for stranger in (other, impostor):
        with pytest.raises(WrongCaError, match="nothing was sent"):
            enroll(ours.token(), PI, root=tmp_path / "d", addresses=[stranger.address])
        assert stranger.requests == ["GET /edgefl/v1/ca"]
        assert not (tmp_path / "d").exists()
    # It was asked at the same time, what everybody may ask.
    assert set(ours.requests) <= {"GET /edgefl/v1/ca", "GET /edgefl/v1/hello"}


def test_addresses_that_take_a_connection_and_say_nothing_hold_no_join_up(front_door, tmp_path):
    with contextlib.ExitStack() as mutes:
        silent = [mutes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        addresses = [f"127.0.0.1:{mute.getsockname()[1]}" for mute in silent]
        since = time.monotonic()
        state = enroll(front_door.token(), PI, root=tmp_path / "d", addresses=addresses)
        assert time.monotonic() - since < 9.0, "one of them alone is waited for ten seconds"
    assert state.settings.addresses[0] == front_door.address


def test_a_mistyped_token_after_a_lost_answer_does_not_lose_the_key(front_door, tmp_path):
    token = front_door.token(uses=1)
    front_door.lose_answers = 1
    with pytest.raises(NetworkError):
        enroll(token, PI, root=tmp_path / "d")
    with pytest.raises(NotJoinedError):
        DeviceStateDir.load(tmp_path / "d")
    with pytest.raises(TokenInvalidError):
        enroll(replace(token, secret="guess"), PI, root=tmp_path / "d")
    assert enroll(token, PI, root=tmp_path / "d").device_id == "pi-1"
    assert len({key for _, key in front_door.enrolled}) == 1
    assert not (tmp_path / "d" / ".pending").exists()


def test_joining_again_changes_shards_and_uses_no_token(front_door, tmp_path):
    token = front_door.token()
    key = enroll(token, PI, root=tmp_path / "d").key.read_bytes()
    again = enroll(token, replace(PI, shards={"mnist": "/m"}, threads=2), root=tmp_path / "d")
    assert again.settings.shards == {"digits": "/data/a.npz", "mnist": "/m"}
    assert DeviceStateDir.load(tmp_path / "d").settings.threads == 2
    assert again.key.read_bytes() == key
    assert sum("/enroll" in asked for asked in front_door.requests) == 1


def test_a_removed_board_that_joins_again_is_let_in_with_a_new_key_and_its_shards(front_door, tmp_path):
    first = enroll(front_door.token(), PI, root=tmp_path / "d")
    first.update(max_temperature_c=70.0)
    former = first.key.read_bytes()
    front_door.store.remove_device("pi-1", at=time.time())
    again = enroll(front_door.token(), replace(PI, shards={"mnist": "/m"}), root=tmp_path / "d")
    assert export_public_key(again.key.read_bytes()) != export_public_key(former)
    assert [each.public_key for each in front_door.store.list_devices()] == [
        export_public_key(again.key.read_bytes())
    ]
    assert pki.is_key_pair(again.cert.read_bytes(), again.key.read_bytes())
    loaded = DeviceStateDir.load(tmp_path / "d").settings
    assert loaded == again.settings
    assert loaded.shards == {"digits": "/data/a.npz", "mnist": "/m"}
    assert loaded.max_temperature_c == 70.0


def test_a_board_whose_renewal_lost_its_answer_is_still_in_the_fleet(front_door, tmp_path):
    state = enroll(front_door.token(), PI, root=tmp_path / "d")
    state.pending_key.write_bytes(state.key.read_bytes())
    state.key.write_bytes(create_key())
    before = state.key.read_bytes()
    assert enroll(front_door.token(), PI, root=tmp_path / "d").key.read_bytes() == before
    assert sum("/enroll" in asked for asked in front_door.requests) == 1


def test_a_removed_board_with_a_wrong_token_or_that_reaches_nobody_keeps_what_it_has(make_front_door, tmp_path):
    door = make_front_door()
    token = door.token(uses=2)
    state = enroll(token, PI, root=tmp_path / "d")
    before = {path.name: path.read_bytes() for path in state.root.iterdir()}
    door.store.remove_device("pi-1", at=time.time())
    with pytest.raises(TokenInvalidError):
        enroll(replace(token, secret="guess"), PI, root=tmp_path / "d")
    assert {path.name: path.read_bytes() for path in state.root.iterdir()} == before
    door.stop()
    assert enroll(token, PI, root=tmp_path / "d").key.read_bytes() == before["key.pem"]


def test_a_stranger_who_refuses_the_key_puts_no_board_out(make_front_door, tmp_path):
    own = make_front_door()
    stranger = make_front_door(shown_ca=own.directory.ca_cert.read_bytes())
    state = enroll(own.token(), PI, root=tmp_path / "d")
    before = state.key.read_bytes()
    token = own.token()
    own.stop()
    asked = replace(token, addresses=(stranger.address,))
    assert enroll(asked, PI, root=tmp_path / "d", addresses=[stranger.address]).key.read_bytes() == before
    assert not any("/renew" in each for each in stranger.requests)


def test_nobody_or_a_service_that_speaks_no_tls_is_a_network_error_that_names_the_address(front_door, tmp_path):
    token, dead = replace(front_door.token(), addresses=()), f"127.0.0.1:{find_free_port()}"
    with pytest.raises(NetworkError, match=dead):
        enroll(token, PI, root=tmp_path / "d", addresses=[dead])
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def answer():
            peer, _ = plain.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(NetworkError, match="cannot be reached"):
            enroll(token, PI, root=tmp_path / "d", addresses=[f"127.0.0.1:{plain.getsockname()[1]}"])
        thread.join(60)
    assert not (tmp_path / "d").exists()


def test_a_host_that_the_certificate_does_not_name_says_readdress(front_door, make_front_door, tmp_path):
    pair = pki.issue_server_certificate(front_door.directory.load_authority(), ["elsewhere.lan"])
    for name, content in (("cert", pair.cert_pem), ("key", pair.key_pem)):
        (tmp_path / name).write_bytes(content)
    ca_pem = front_door.directory.ca_cert.read_bytes()
    door = make_front_door(shown_ca=ca_pem, server=(tmp_path / "cert", tmp_path / "key"))
    token = replace(front_door.token(), addresses=())
    with pytest.raises(NetworkError, match=r"readdress 127\.0\.0\.1"):
        enroll(token, PI, root=tmp_path / "d", addresses=[door.address])


def test_a_clock_that_is_years_off_does_not_stop_a_join(make_front_door, tmp_path):
    door = make_front_door(clock=lambda: time.time() + 56 * YEAR_S)
    assert enroll(door.token(), PI, root=tmp_path / "d").device_id == "pi-1"


def test_a_file_in_the_way_of_the_state_directory_uses_no_token_up(front_door, tmp_path):
    (tmp_path / "file").touch()
    token = front_door.token(uses=1)
    with pytest.raises(StoreError, match="cannot be made"):
        enroll(token, PI, root=tmp_path / "file")
    assert enroll(token, PI, root=tmp_path / "d")


def test_the_host_s_name_makes_a_device_name():
    assert get_host_slug()
    assert set(get_host_slug()) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


HELLO = CoordinatorInfo(version="1", fleet="lab", addresses=(), broker_port=1, broker_host=None, skew_s=0.0)
NEVER_S = 60.0


def _site(address):
    return DiscoveredCoordinator(
        address=address, ca_pem=b"", tls_context=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), info=HELLO
    )


class Net:
    """Addresses of which each answers at once, later, with an error, or not before the test ends."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []

    def ask(self, address, _fingerprint):
        self.asked.append(address)
        answer = self.answers[address]
        if isinstance(answer, threading.Event):
            answer.wait(NEVER_S)
        if isinstance(answer, Exception):
            raise answer
        return _site(address)

    def reach(self, **options):
        return find_coordinator(list(self.answers), "f" * 64, probe=self.ask, **options).address


def test_silent_addresses_before_the_right_one_cost_no_time_of_their_own():
    silent = threading.Event()
    net = Net(a=silent, b=silent, c=silent, d=None)
    try:
        assert net.reach(grace_s=0.1) == "d"
    finally:
        silent.set()


def test_a_better_address_that_is_a_little_slower_is_taken():
    late, last = threading.Event(), threading.Event()
    net = Net(a=late, b=None)

    def ask(address, fingerprint):
        if address == "b":
            threading.Timer(0.1, late.set).start()  # b has answered when a begins to
            last.set()
        return net.ask(address, fingerprint)

    assert find_coordinator(["a", "b"], "f" * 64, probe=ask, grace_s=NEVER_S).address == "a"
    assert last.is_set()


def test_the_order_counts_and_not_who_is_first_and_nobody_worse_is_waited_for():
    assert Net(a=None, b=None, c=None).reach() == "a"
    silent = threading.Event()
    try:
        assert Net(a=NetworkError("no"), b=None, c=silent).reach(grace_s=NEVER_S) == "b"
    finally:
        silent.set()
    net = Net(a=None)
    assert find_coordinator(["a"] * 3, "f" * 64, probe=net.ask).address == "a"
    assert net.asked == ["a"], "each address is asked once"


def test_another_ca_at_the_first_address_ends_the_search_though_a_later_one_is_right():
    with pytest.raises(WrongCaError, match="somebody"):
        Net(a=WrongCaError("somebody"), b=None).reach(grace_s=NEVER_S)
    assert Net(a=NetworkError("no"), b=WrongCaError("somebody"), c=None).reach() == "c"


@pytest.mark.parametrize(
    ("answers", "kind", "told"),
    [
        ({"a": NetworkError("a is away"), "b": NetworkError("b is away")}, NetworkError, "a is away .nor 1 other"),
        ({"a": NetworkError("a is away"), "b": WrongCaError("b is odd")}, WrongCaError, "b is odd .nor 1 other"),
        ({"a": NetworkError("a is away"), "b": ZeroDivisionError("ours")}, ZeroDivisionError, "ours"),
        ({}, NetworkError, "no address of the coordinator is known"),
    ],
)
def test_what_is_worst_is_said_when_none_is_right(answers, kind, told):
    with pytest.raises(kind, match=told):
        Net(**answers).reach()
