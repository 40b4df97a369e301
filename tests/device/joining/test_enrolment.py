from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from edgefl.coordinator import pki
from edgefl.device.joining.enrolment import JoinWishes, host_slug, join
from edgefl.device.joining.keys import new_key, public_pem
from edgefl.device.state import DeviceState
from edgefl.errors import (
    EdgeflError,
    JoinError,
    NameTakenError,
    NetworkError,
    StoreError,
    TokenExpiredError,
    TokenInvalidError,
    TokenUsedError,
    UsageError,
    VersionError,
    WrongCaError,
)
from edgefl.local_fleet import free_port

PI = JoinWishes(name="pi-1", shards={"digits": "/data/a.npz"}, examples={"digits": 300}, facts={"model": "Pi 5"})
YEAR_S = 365 * 86400.0


def _nothing_is_left(root: Path) -> bool:
    return not root.exists()


def test_a_join_leaves_all_that_the_agent_needs(front_door: Any, tmp_path: Path) -> None:
    state = join(front_door.token(), PI, root=tmp_path / "d")
    again = DeviceState.load(tmp_path / "d")
    assert again.device == state.device
    assert (state.device_id, state.device.fleet, state.device.role) == ("pi-1", "lab", "trainer")
    assert state.device.addresses == (front_door.address,)
    assert (state.device.broker_host, state.device.broker_port) == (None, 18883)
    assert state.device.shards == {"digits": "/data/a.npz"}
    assert state.ca.read_bytes() == front_door.directory.ca_cert.read_bytes()
    assert pki.fingerprint(state.ca.read_bytes()) == state.device.ca_fingerprint
    assert x509.load_pem_x509_certificate(state.cert.read_bytes()).subject.rfc4514_string() == "CN=pi-1"
    assert {path.name for path in state.root.iterdir()} == {"device.json", "key.pem", "cert.pem", "ca.pem"}


def test_a_32_bit_board_joins_as_evaluator_and_the_coordinator_is_told_why(
    front_door: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wishes = replace(PI, facts={"userland_bits": 32, "architecture": "armv7l"})
    state = join(front_door.token(), wishes, root=tmp_path / "d")
    assert state.device.role == "evaluator"
    assert "this board joins as evaluator: its userland has 32 bits (armv7l)" in caplog.text
    facts = front_door.store.capabilities()["pi-1"].facts
    assert (facts["trains"], facts["backends"]) == (False, [])
    assert "there are no wheels of numpy" in facts["backend_reasons"]["numpy"]
    assert join(front_door.token(), wishes, root=tmp_path / "d").device == state.device, (
        "the same again is no quarrel"
    )


def test_only_the_owner_can_read_the_state(front_door: Any, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        state = join(front_door.token(), PI, root=tmp_path / "d")
    finally:
        os.umask(old)
    assert state.root.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in state.root.iterdir())


def test_the_coordinator_books_the_device_and_what_it_can_do(front_door: Any, tmp_path: Path) -> None:
    state = join(front_door.token(groups=("lab", "roof")), PI, root=tmp_path / "d")
    record = front_door.store.device("pi-1")
    assert record.groups == ("lab", "roof")
    assert record.certificate_serial == pki.serial(state.cert.read_bytes())
    assert front_door.store.capabilities()["pi-1"].facts == {"model": "Pi 5"}
    assert front_door.store.capabilities()["pi-1"].shards == {"digits": 300}
    assert front_door.enrolled == [("pi-1", record.public_key)]
    assert record.public_key.startswith(b"-----BEGIN PUBLIC KEY-----\n")


def test_the_token_s_role_goes_before_the_wish(front_door: Any, tmp_path: Path) -> None:
    assert join(front_door.token(role="evaluator"), PI, root=tmp_path / "d").device.role == "evaluator"


def test_a_wrong_secret_is_refused_and_leaves_nothing(front_door: Any, tmp_path: Path) -> None:
    token = replace(front_door.token(), secret="guess")
    with pytest.raises(TokenInvalidError, match="token"):
        join(token, PI, root=tmp_path / "a" / "d")
    assert _nothing_is_left(tmp_path / "a")
    assert front_door.enrolled == []


def test_an_expired_token_is_refused_and_leaves_nothing(front_door: Any, tmp_path: Path) -> None:
    token = front_door.token(ttl_s=-1.0)
    with pytest.raises(TokenExpiredError, match="expired"):
        join(token, PI, root=tmp_path / "d")
    assert _nothing_is_left(tmp_path / "d")


def test_a_used_token_is_refused_and_leaves_nothing(front_door: Any, tmp_path: Path) -> None:
    token = front_door.token()
    join(token, PI, root=tmp_path / "d")
    with pytest.raises(TokenUsedError, match="no uses left"):
        join(token, replace(PI, name="pi-2"), root=tmp_path / "e")
    assert _nothing_is_left(tmp_path / "e")


def test_a_taken_name_is_refused_and_leaves_nothing_but_the_use(front_door: Any, tmp_path: Path) -> None:
    token = front_door.token(uses=2)
    join(token, PI, root=tmp_path / "d")
    with pytest.raises(NameTakenError, match="pi-1"):
        join(token, PI, root=tmp_path / "e")
    assert _nothing_is_left(tmp_path / "e")
    assert join(token, replace(PI, name="pi-2"), root=tmp_path / "e").device_id == "pi-2"


def test_the_coordinator_s_own_name_is_refused(front_door: Any, tmp_path: Path) -> None:
    with pytest.raises(NameTakenError, match="reserved"):
        join(front_door.token(), replace(PI, name="coordinator"), root=tmp_path / "d")


def test_a_name_that_is_no_slug_is_refused_before_anything_is_sent(front_door: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="device name"):
        join(front_door.token(), replace(PI, name="My Pi"), root=tmp_path / "d")
    assert front_door.requests == []


def test_another_ca_is_told_nothing(make_front_door: Any, tmp_path: Path) -> None:
    ours, other = make_front_door(), make_front_door()
    with pytest.raises(WrongCaError, match="nothing was sent"):
        join(ours.token(), PI, root=tmp_path / "d", addresses=[other.address])
    assert other.requests == ["GET /edgefl/v1/ca"]
    # It was asked at the same time, what everybody may ask.
    assert set(ours.requests) <= {"GET /edgefl/v1/ca", "GET /edgefl/v1/hello"}
    assert _nothing_is_left(tmp_path / "d")


def test_addresses_that_take_a_connection_and_say_nothing_hold_no_join_up(front_door: Any, tmp_path: Path) -> None:
    with contextlib.ExitStack() as mutes:
        silent = [mutes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        addresses = [f"127.0.0.1:{mute.getsockname()[1]}" for mute in silent]
        since = time.monotonic()
        state = join(front_door.token(), PI, root=tmp_path / "d", addresses=addresses)
        assert time.monotonic() - since < 9.0, "one of them alone is waited for ten seconds"
    assert state.device.addresses[0] == front_door.address


def test_somebody_in_between_who_shows_the_right_ca_but_has_not_its_key_learns_nothing(
    make_front_door: Any, tmp_path: Path
) -> None:
    ours = make_front_door()
    impostor = make_front_door(shown_ca=ours.directory.ca_cert.read_bytes())
    with pytest.raises(WrongCaError, match="nothing was sent"):
        join(ours.token(), PI, root=tmp_path / "d", addresses=[impostor.address])
    assert impostor.requests == ["GET /edgefl/v1/ca"]
    assert _nothing_is_left(tmp_path / "d")


def test_a_lost_answer_is_mended_by_the_same_command(front_door: Any, tmp_path: Path) -> None:
    token = front_door.token(uses=1)
    front_door.lose_answers = 1
    with pytest.raises(NetworkError):
        join(token, PI, root=tmp_path / "d")
    assert front_door.store.device("pi-1")
    with pytest.raises(EdgeflError, match="fleet yet"):
        DeviceState.load(tmp_path / "d")
    assert join(token, PI, root=tmp_path / "d").device_id == "pi-1"
    assert len({key for _, key in front_door.enrolled}) == 1
    assert not (tmp_path / "d" / ".pending").exists()


def test_a_mistyped_token_after_a_lost_answer_does_not_lose_the_key(front_door: Any, tmp_path: Path) -> None:
    token = front_door.token(uses=1)
    front_door.lose_answers = 1
    with pytest.raises(NetworkError):
        join(token, PI, root=tmp_path / "d")
    with pytest.raises(TokenInvalidError):
        join(replace(token, secret="guess"), PI, root=tmp_path / "d")
    assert join(token, PI, root=tmp_path / "d").device_id == "pi-1"


def test_joining_again_changes_shards_and_uses_no_token(front_door: Any, tmp_path: Path) -> None:
    token = front_door.token()
    key = join(token, PI, root=tmp_path / "d").key.read_bytes()
    again = join(token, replace(PI, shards={"mnist": "/m"}, threads=2), root=tmp_path / "d")
    assert again.device.shards == {"digits": "/data/a.npz", "mnist": "/m"}
    assert DeviceState.load(tmp_path / "d").device.threads == 2
    assert again.key.read_bytes() == key
    assert sum("/enroll" in asked for asked in front_door.requests) == 1


def test_a_removed_board_that_joins_again_is_let_in_with_a_new_key_and_its_shards(
    front_door: Any, tmp_path: Path
) -> None:
    first = join(front_door.token(), PI, root=tmp_path / "d")
    first.change(max_temperature_c=70.0)
    former = first.key.read_bytes()
    front_door.store.remove_device("pi-1", at=time.time())
    again = join(front_door.token(), replace(PI, shards={"mnist": "/m"}), root=tmp_path / "d")
    assert public_pem(again.key.read_bytes()) != public_pem(former)
    assert [each.public_key for each in front_door.store.devices()] == [public_pem(again.key.read_bytes())]
    assert pki.belong_together(again.cert.read_bytes(), again.key.read_bytes())
    loaded = DeviceState.load(tmp_path / "d").device
    assert loaded == again.device
    assert loaded.shards == {"digits": "/data/a.npz", "mnist": "/m"}
    assert loaded.max_temperature_c == 70.0


def test_a_board_whose_renewal_lost_its_answer_is_still_in_the_fleet(front_door: Any, tmp_path: Path) -> None:
    state = join(front_door.token(), PI, root=tmp_path / "d")
    state.pending_key.write_bytes(state.key.read_bytes())
    state.key.write_bytes(new_key())
    before = state.key.read_bytes()
    assert join(front_door.token(), PI, root=tmp_path / "d").key.read_bytes() == before
    assert sum("/enroll" in asked for asked in front_door.requests) == 1


def test_a_removed_board_with_a_wrong_token_keeps_what_it_has(front_door: Any, tmp_path: Path) -> None:
    token = front_door.token(uses=2)
    state = join(token, PI, root=tmp_path / "d")
    before = {path.name: path.read_bytes() for path in state.root.iterdir()}
    front_door.store.remove_device("pi-1", at=time.time())
    with pytest.raises(TokenInvalidError):
        join(replace(token, secret="guess"), PI, root=tmp_path / "d")
    assert {path.name: path.read_bytes() for path in state.root.iterdir()} == before


def test_a_board_that_reaches_nobody_stays_what_it_is(front_door: Any, tmp_path: Path) -> None:
    token = front_door.token(uses=2)
    state = join(token, PI, root=tmp_path / "d")
    front_door.store.remove_device("pi-1", at=time.time())
    front_door.stop()
    before = state.key.read_bytes()
    assert join(token, PI, root=tmp_path / "d").key.read_bytes() == before


def test_a_stranger_who_refuses_the_key_puts_no_board_out(make_front_door: Any, tmp_path: Path) -> None:
    own = make_front_door()
    stranger = make_front_door(shown_ca=own.directory.ca_cert.read_bytes())
    state = join(own.token(), PI, root=tmp_path / "d")
    before = state.key.read_bytes()
    token = own.token()
    own.stop()
    asked = replace(token, addresses=(stranger.address,))
    assert join(asked, PI, root=tmp_path / "d", addresses=[stranger.address]).key.read_bytes() == before
    assert not any("/renew" in each for each in stranger.requests)


def test_a_directory_of_another_device_is_not_overwritten(front_door: Any, tmp_path: Path) -> None:
    token = front_door.token(uses=2)
    key = join(token, PI, root=tmp_path / "d").key.read_bytes()
    with pytest.raises(JoinError, match="belongs to device 'pi-1'"):
        join(token, replace(PI, name="pi-2"), root=tmp_path / "d")
    assert DeviceState.load(tmp_path / "d").key.read_bytes() == key


def test_a_dead_address_is_passed_over_for_the_token_s_own(front_door: Any, tmp_path: Path) -> None:
    dead = f"127.0.0.1:{free_port()}"
    state = join(front_door.token(), PI, root=tmp_path / "d", addresses=[dead])
    assert state.device.addresses == (front_door.address,)


def test_no_coordinator_is_a_network_error_that_names_the_address(front_door: Any, tmp_path: Path) -> None:
    dead = f"127.0.0.1:{free_port()}"
    token = replace(front_door.token(), addresses=())
    with pytest.raises(NetworkError, match=dead):
        join(token, PI, root=tmp_path / "d", addresses=[dead])
    assert _nothing_is_left(tmp_path / "d")


def test_a_service_that_speaks_no_tls_is_a_network_error(front_door: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def answer() -> None:
            peer, _ = plain.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        token = replace(front_door.token(), addresses=())
        with pytest.raises(NetworkError, match="cannot be reached"):
            join(token, PI, root=tmp_path / "d", addresses=[f"127.0.0.1:{plain.getsockname()[1]}"])
        thread.join(60)


def test_a_host_that_the_certificate_does_not_name_says_readdress(front_door: Any, tmp_path: Path) -> None:
    token = replace(front_door.token(), addresses=())
    with pytest.raises(NetworkError, match=r"readdress 127\.0\.0\.2"):
        join(token, PI, root=tmp_path / "d", addresses=[f"127.0.0.2:{_forward(front_door.port)}"])


def test_a_clock_that_is_years_off_does_not_stop_a_join(make_front_door: Any, tmp_path: Path) -> None:
    door = make_front_door(clock=lambda: time.time() + 56 * YEAR_S)
    assert join(door.token(), PI, root=tmp_path / "d").device_id == "pi-1"


def test_another_version_is_told_to_update(front_door: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgefl.device.joining.enrolment.__version__", "9.7.0")
    with pytest.raises(VersionError, match="update the coordinator"):
        join(front_door.token(), PI, root=tmp_path / "d")
    assert _nothing_is_left(tmp_path / "d")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_state_directory_that_cannot_be_made_uses_no_token_up(front_door: Any, tmp_path: Path) -> None:
    (tmp_path / "ro").mkdir(mode=0o500)
    token = front_door.token(uses=1)
    with pytest.raises(StoreError, match="cannot be made"):
        join(token, PI, root=tmp_path / "ro" / "d")
    assert join(token, PI, root=tmp_path / "d")


def test_a_file_in_the_way_of_the_state_directory_uses_no_token_up(front_door: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    token = front_door.token(uses=1)
    with pytest.raises(StoreError, match="cannot be made"):
        join(token, PI, root=tmp_path / "file")
    assert join(token, PI, root=tmp_path / "d")


def test_the_host_s_name_makes_a_device_name() -> None:
    assert host_slug()
    assert set(host_slug()) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def _forward(port: int) -> int:
    """Listens on 127.0.0.2 and passes one connection after the other on to the coordinator."""
    listener = socket.create_server(("127.0.0.2", 0))

    def pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def serve() -> None:
        with listener:
            for _ in range(2):  # the question for the CA and the one after it
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", port))
                back = threading.Thread(target=pump, args=(far, near))
                back.start()
                pump(near, far)
                back.join()
                near.close()
                far.close()

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])
