"""Whoever connects under a client's name takes its place: over real TLS, with a listener of a few lines."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from small_fleet import enroll

from edgefl.coordinator import pki
from edgefl.coordinator.brokers.broker import RENEWED_INTERVAL_S, RevocationSync, _encode_connect, disconnect_client
from edgefl.core.errors import StoreFullError
from edgefl.storage.repositories.certificates import record_issued_certificate, renew_certificate
from edgefl.storage.store import Store


class FakeBroker:
    """Keeps whom it was told to refuse."""

    def __init__(self) -> None:
        self.told: list[set[str]] = []
        self.revoked: set[str] = set()
        self.is_full = False

    def revoke(self, names: Collection[str], serials: Collection[str]) -> None:
        if self.is_full:
            raise StoreFullError("no room for the rules")
        self.told.append(set(names))
        self.revoked = set(serials)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(tmp_path / "edgefl.db") as store:
        enroll(store, "pi-1", "pi-2", "pi-3")
        yield store


def test_a_broker_is_told_of_changes_until_it_took_them_and_only_of_them(store: Store) -> None:
    broker: Any = FakeBroker()
    refusals = RevocationSync(broker, store)
    refusals.update()
    assert broker.told == []
    store.remove_device("pi-1", at=3.0)
    store.remove_device("pi-2", at=3.0)
    broker.is_full = True
    with pytest.raises(StoreFullError):
        refusals.update()
    broker.is_full = False
    refusals.update()
    refusals.update()
    assert broker.told == [{"pi-1", "pi-2"}]
    enroll(store, "pi-1")
    refusals.update()
    assert broker.told[1:] == [{"pi-2"}]


def issue(store: Store, name: str, serial: str, *, ends_at: float = 9e9) -> None:
    renew_certificate(store, name, public_key=f"{name} {serial}".encode(), serial=serial, expires_at=ends_at, at=3.0)


def test_a_certificate_is_refused_when_there_is_a_newer_one_until_it_has_ended(store: Store) -> None:
    broker: Any = FakeBroker()
    now = [100.0]
    refusals = RevocationSync(broker, store, clock=lambda: now[0])
    issue(store, "pi-1", "a1", ends_at=5000.0)
    issue(store, "pi-1", "a2")
    issue(store, "pi-2", "b1")
    refusals.update()
    assert (broker.told, broker.revoked) == ([set()], {"a1"})
    issue(store, "pi-2", "b2")
    refusals.update()
    assert broker.revoked == {"a1"}, "renewals are told together"
    now[0] += RENEWED_INTERVAL_S
    refusals.update()
    assert broker.revoked == {"a1", "b1"}
    now[0] = 6000.0
    refusals.update()
    assert broker.revoked == {"b1"}, "what has ended by itself need not be told"


def test_every_certificate_of_a_removed_device_is_refused_at_once_also_when_its_name_is_taken_again(
    store: Store,
) -> None:
    broker: Any = FakeBroker()
    refusals = RevocationSync(broker, store, clock=lambda: 100.0)
    issue(store, "pi-1", "a1")
    refusals.update()
    store.remove_device("pi-1", at=4.0)
    refusals.update()
    assert (broker.told[-1], broker.revoked) == ({"pi-1"}, {"a1"})
    enroll(store, "pi-1")
    issue(store, "pi-1", "c1")
    refusals.update()
    assert (broker.told[-1], broker.revoked) == (set(), {"a1"})


def test_the_coordinator_s_own_certificate_is_never_refused(store: Store) -> None:
    broker: Any = FakeBroker()
    record_issued_certificate(store, serial="e1", expires_at=9e9, at=1.0)
    record_issued_certificate(store, serial="e2", expires_at=9e9, at=2.0, previous_serial="e0")
    RevocationSync(broker, store, get_own_serial=lambda: "e2", clock=lambda: 100.0).update()
    assert broker.revoked == {"e0", "e1"}


CONNACK = b"\x20\x02\x00\x00"


@dataclass
class Listener:
    """Answers one connection with `answer`; what came, and who came, is kept."""

    port: int
    answer: bytes
    heard: bytes = b""
    name: str = ""
    is_over: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def authority(tmp_path: Path) -> pki.KeyPair:
    pair = pki.create_authority("lab")
    (tmp_path / "ca.pem").write_bytes(pair.cert_pem)
    return pair


@contextlib.contextmanager
def listening(
    folder: Path, authority: pki.KeyPair, *, answer: bytes = CONNACK, of: pki.KeyPair | None = None
) -> Iterator[Listener]:
    server = pki.issue_server_certificate(of or authority, ["elsewhere"])
    (folder / "s.pem").write_bytes(server.cert_pem)
    (folder / "s.key").write_bytes(server.key_pem)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.pem"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder / "s.pem", folder / "s.key")
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(20)
        listener = Listener(door.getsockname()[1], answer)

        def serve() -> None:
            with (
                contextlib.suppress(OSError),
                contextlib.closing(door.accept()[0]) as plain,
                context.wrap_socket(plain, server_side=True) as secured,
            ):
                listener.name = _common_name(secured)
                listener.heard = secured.recv(1024)
                if listener.answer:
                    secured.sendall(listener.answer)
                    listener.heard += secured.recv(1024)
            listener.is_over.set()

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener
        thread.join(30)


def _common_name(secured: ssl.SSLSocket) -> str:
    shown = secured.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).subject.rfc4514_string()


def test_it_connects_as_the_client_and_leaves_at_once(tmp_path: Path, authority: pki.KeyPair) -> None:
    with listening(tmp_path, authority) as listener:
        assert disconnect_client("127.0.0.1", listener.port, "pi-1", authority=authority, ca=tmp_path / "ca.pem")
        assert listener.is_over.wait(20)
    assert listener.name == "CN=pi-1"
    # CONNECT of MQTT 3.1.1 with a clean session, no will, a keep-alive of 10 s and the client's id; then DISCONNECT.
    connect = b"\x10\x10\x00\x04MQTT\x04\x02\x00\x0a\x00\x04pi-1"
    assert listener.heard == connect + b"\xe0\x00"


def test_the_longest_name_still_fits_one_length_byte() -> None:
    packet = _encode_connect("x" * 63)
    assert (packet[0], packet[1], len(packet)) == (0x10, len(packet) - 2, 77)


@pytest.mark.parametrize("who", ["one that hangs up", "a stranger", "nobody"])
def test_where_no_broker_of_the_fleet_answers_nobody_is_dropped_and_it_is_said(
    who: str, tmp_path: Path, authority: pki.KeyPair, free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    def drop(port: int) -> bool:
        return disconnect_client("127.0.0.1", port, "pi-1", authority=authority, ca=tmp_path / "ca.pem")

    if who == "nobody":
        assert not drop(free_port)
    else:
        other = pki.create_authority("lab") if who == "a stranger" else authority
        with listening(tmp_path, authority, answer=b"", of=other) as listener:
            assert not drop(listener.port)
        assert bool(listener.heard) is (who != "a stranger")
    assert "pi-1 may still be connected" in caplog.text


@pytest.fixture(autouse=True)
def _no_key_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    yield
    assert list(scratch.iterdir()) == []
