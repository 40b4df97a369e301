"""What somebody may try who should not get in, or who is in and wants more: each is refused, and kept as an event."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paho.mqtt.client as mqtt
import pytest
import zstandard
from paho.mqtt.enums import CallbackAPIVersion
from requirements import needs

from edgefl import __version__
from edgefl.compression.wire import write_frame
from edgefl.coordinator import pki
from edgefl.coordinator.auth import MAX_FAILURES
from edgefl.coordinator.brokers.broker import make_client_context
from edgefl.coordinator.directory import init_directory, load_directory
from edgefl.coordinator.enrolment.tokens import make_token
from edgefl.core.config import parse_run
from edgefl.core.errors import (
    ConfigError,
    EdgeflError,
    NameTakenError,
    TokenExpiredError,
    TokenInvalidError,
    TokenUsedError,
    TooManyTriesError,
    UsageError,
    WrongCaError,
)
from edgefl.core.protocol import MAX_REQUEST_BYTES, JoinToken, error_from_code
from edgefl.device.enrolment.certificates import create_key, create_signing_request, export_public_key
from edgefl.device.enrolment.enroll import EnrolmentOptions, enroll
from edgefl.device.flower.supernode import ReplyRejectedError, RequestSigner, SuperNode, UnauthorisedError
from edgefl.device.state_dir import DeviceStateDir
from edgefl.simulation.local_fleet import LocalFleet
from edgefl.storage.store import Store
from edgefl.system.atomic_files import TlsFiles
from edgefl.system.https_client import create_pinned_context, request

pytestmark = pytest.mark.timeout(120)
INJECTION = "pi-1'); DROP TABLE devices; --"
GB = 1024**3


@dataclass
class Scene:
    """A fleet of real processes, and somebody who tries things."""

    fleet: LocalFleet
    tools: Any

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.fleet.port}"

    @property
    def trust(self) -> ssl.SSLContext:
        return create_pinned_context((self.fleet.directory / "ca.pem").read_bytes())

    def token(self, **terms: Any) -> JoinToken:
        with Store.open(self.fleet.database) as store:
            now = terms.pop("now", time.time())
            return make_token(store, load_directory(self.fleet.directory), now=now, **terms)

    def ask_to_join(
        self, token: JoinToken, *, host: str = "127.0.0.1", key: bytes | None = None, **changes: Any
    ) -> Any:
        """Asks as a board does, from this address of this machine: events tell addresses apart."""
        key = key or create_key()
        body = {
            "v": 1, "token_id": token.token_id, "secret": token.secret, "name": "intruder", "role": "trainer",
            "csr": create_signing_request(key, "intruder").decode(), "public_key": export_public_key(key).decode(),
            "capabilities": {}, "version": __version__, **changes,
        }  # fmt: skip
        status, answer = self.call("POST", "/edgefl/v1/enroll", json.dumps(body).encode(), host=host)
        if status != 200:
            raise error_from_code(answer["error"], answer["message"])
        return answer

    def let_in(self, name: str) -> tuple[Path, Path]:
        """Lets a stranger's device join, and returns the files of its certificate and key."""
        key, folder = create_key(), self.fleet.root / name
        folder.mkdir()
        (folder / "key.pem").write_bytes(key)
        (folder / "cert.pem").write_text(self.ask_to_join(self.token(), name=name, key=key)["certificate"])
        return folder / "cert.pem", folder / "key.pem"

    def call(
        self, method: str, path: str, body: bytes = b"", *, host: str, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Asks from this address of this machine; returns status and answer."""
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.fleet.port, context=self.trust, timeout=10, source_address=(host, 0)
        )
        with closing(connection):
            connection.request(method, path, body=body, headers=dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def state(self, name: str) -> DeviceStateDir:
        return DeviceStateDir.load(self.fleet.root / name)

    def node(self, name: str) -> SuperNode:
        """Speaks to Flower as this device, with its own key."""
        node = SuperNode(private_key_pem=self.state(name).key.read_bytes(), tls_context=self.trust, clock=time.time)
        node.connect(self.address)
        return node

    def refused(self) -> list[Any]:
        return [row for row in self.fleet.list_history("events") if row["kind"] == "request-rejected"]

    def is_recorded(self, *words: str, device: str | None = None) -> None:
        """Waits for an event that says all of these."""

        def found() -> bool:
            return any(
                all(word in row["message"] for word in words) and device in {None, row["device_id"]}
                for row in self.refused()
            )

        self.tools.eventually(
            found, 15, f"an event with {words} of {device}: {[r['message'] for r in self.refused()]}"
        )

    def rss_bytes(self) -> int:
        pid = self.fleet.processes["coordinator"].pid
        (pages,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(pages) * 1024


@pytest.fixture(
    scope="module", params=["auto", pytest.param("embedded", marks=[pytest.mark.slow, needs("mosquitto")])]
)
def scene(request: pytest.FixtureRequest, tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with tools.fleet(tmp_path_factory.mktemp("attacks"), tools.devices(2), broker=request.param) as fleet:
        yield Scene(fleet, tools)


@pytest.mark.parametrize(
    ("terms", "changes", "error", "words"),
    [
        pytest.param({}, {"secret": ""}, EdgeflError, "join (network)", id="without-a-token"),
        pytest.param({"uses": 0}, {}, TokenUsedError, "join (token-used)", id="with-a-used-token"),
        pytest.param({"now": -7200.0}, {}, TokenExpiredError, "join (token-expired)", id="with-an-expired-token"),
        pytest.param({}, {"name": "device-01"}, NameTakenError, "join (name-taken)", id="under-another-s-name"),
        pytest.param({}, {"name": INJECTION}, UsageError, "DROP TABLE devices", id="with-sql-in-the-name"),
    ],
)
def test_a_join_is_refused(
    scene: Scene, terms: dict[str, Any], changes: dict[str, Any], error: type[EdgeflError], words: str
) -> None:
    before = scene.fleet.get_presence()
    token = scene.token(**{**terms, "uses": 1, "now": time.time() + terms.get("now", 0.0)}, ttl_s=3600.0)
    if "uses" in terms:
        scene.ask_to_join(token, name="guest-1")
        before["guest-1"] = "offline"
    with pytest.raises(error):
        scene.ask_to_join(token, host="127.0.0.11", **changes)
    scene.is_recorded(words, "127.0.0.11")
    assert set(scene.fleet.get_presence()) == set(before)


def test_a_replayed_join_with_the_key_of_another_is_refused(scene: Scene) -> None:
    token, key = scene.token(uses=2), create_key()
    scene.ask_to_join(token, name="guest-3", key=key)
    with pytest.raises(NameTakenError, match="already joined as 'guest-3'"):
        scene.ask_to_join(token, name="guest-4", key=key, host="127.0.0.12")
    seen = {"csr": create_signing_request(key, "guest-3").decode()}
    with pytest.raises(EdgeflError, match="not the one of the certificate request"):
        scene.ask_to_join(token, name="guest-5", host="127.0.0.12", **seen)
    scene.is_recorded("join (name-taken)", "guest-3")
    scene.is_recorded("join (join)", "not the one of the certificate request")


def test_guessed_tokens_are_slowed_down_and_an_honest_board_gets_in_meanwhile(scene: Scene) -> None:
    token = scene.token()
    guess = JoinToken(
        ca_fingerprint=token.ca_fingerprint, token_id=token.token_id, secret="guessed", fleet=token.fleet
    )
    told = []
    for _ in range(3 * MAX_FAILURES):
        with pytest.raises((TokenInvalidError, TooManyTriesError)) as refused:
            scene.ask_to_join(guess, host="127.0.0.66")
        told.append(refused.type)
    assert told[: MAX_FAILURES - 1] == [TokenInvalidError] * (MAX_FAILURES - 1)
    assert told.count(TooManyTriesError) >= MAX_FAILURES
    # From where it was guessed not even the right one is looked at; from elsewhere it is.
    with pytest.raises(TooManyTriesError):
        scene.ask_to_join(token, host="127.0.0.66")
    assert scene.ask_to_join(token, host="127.0.0.67", name="guest-6")["device_id"] == "guest-6"
    scene.is_recorded("join (token-invalid)", "127.0.0.66")
    scene.is_recorded("join (too-many-tries)", "127.0.0.66")
    rows = [row for row in scene.refused() if "127.0.0.66" in row["message"]]
    assert len(rows) <= 4, "a row for every guess would fill the store"


def test_a_guessed_access_token_is_refused_and_the_right_one_still_works(scene: Scene) -> None:
    headers = {"Authorization": "Bearer guessed"}
    asked = [
        request(scene.address, scene.trust, "POST", "/edgefl/v1/tokens", body=b"{}", headers=headers)[0]
        for _ in range(2 * MAX_FAILURES)
    ]
    assert set(asked) == {401, 429}
    assert request(scene.address, scene.trust, "POST", "/edgefl/v1/runs/latest/stop", body=b"{}")[0] == 401
    assert scene.fleet.make_client().post("/edgefl/v1/tokens")["token"]
    scene.is_recorded("access token from 127.0.0.1", "/edgefl/v1/tokens")
    scene.is_recorded("action without access token", "/edgefl/v1/runs/latest/stop")


def test_a_board_with_a_token_of_another_ca_sends_nothing_and_says_so(scene: Scene, tmp_path: Path) -> None:
    other = init_directory(tmp_path / "other", hosts=["127.0.0.1"], fleet="fleet", port=scene.fleet.port)
    token = scene.token()
    forged = JoinToken(
        ca_fingerprint=other.compute_ca_fingerprint(), token_id=token.token_id, secret=token.secret,
        fleet=token.fleet, addresses=(scene.address,),
    )  # fmt: skip
    with pytest.raises(WrongCaError, match="nothing was sent"):
        enroll(forged, EnrolmentOptions(name="fooled"), root=tmp_path / "fooled")
    # The coordinator cannot know of it: what tells is the board's own line and exit code.
    words = ("device", "join", scene.address, "--token", forged.text(), "--name", "fooled", "--state")
    ended = scene.tools.typed(*words, tmp_path / "fooled")
    assert (ended.code, "nothing was sent" in ended.line) == (34, True)
    assert token.secret not in ended.err + ended.out


class Client:
    """An MQTT client with a device's own files, that does as it likes."""

    def __init__(self, scene: Scene, name: str, cert: Path | None = None, key: Path | None = None) -> None:
        state = scene.state(name)
        context = make_client_context(TlsFiles(ca=state.ca, cert=cert or state.cert, key=key or state.key))
        self.is_in, self.is_out = False, False
        self.paho = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=name, reconnect_on_failure=False)
        self.paho.tls_set_context(context)
        self.paho.on_connect = self._connected
        self.paho.on_disconnect = self._disconnected
        self.heard: list[str] = []
        self.paho.on_message = lambda _c, _d, message: self.heard.append(message.topic)
        try:
            self.paho.connect("127.0.0.1", scene.fleet.broker_port)
        except OSError:
            self.is_out = True
            return
        self.paho.loop_start()
        scene.tools.eventually(lambda: self.is_in or self.is_out)

    def _connected(self, _c: Any, _d: Any, _f: Any, reason: Any, _p: Any) -> None:
        self.is_in = not reason.is_failure

    def _disconnected(self, *_: Any) -> None:
        self.is_out = True

    def close(self) -> None:
        self.paho.disconnect()
        self.paho.loop_stop()


def is_let_in(scene: Scene, cert: Path, key: Path) -> bool:
    client = Client(scene, "device-01", cert, key)
    client.close()
    return client.is_in


def test_another_device_s_topics_are_refused(scene: Scene) -> None:
    spy = Client(scene, "device-01", *scene.let_in("spy"))
    try:
        assert spy.is_in
        status = '{"v":1,"state":"offline","boot_id":"x","session_no":99999}'
        spy.paho.publish("edgefl/v1/fleet/device-01/status", status, qos=1, retain=True).wait_for_publish(5)
        spy.paho.publish("edgefl/v1/fleet/device-02/command", b"{}", qos=1).wait_for_publish(5)
        spy.paho.subscribe([("edgefl/v1/fleet/#", 0), ("edgefl/v1/fleet/device-01/bell", 0)])
        scene.is_recorded("mqtt from spy", "PUBLISH", "device-01/status", device="spy")
        scene.tools.pause(1.0)
        assert spy.heard == []
        assert scene.fleet.get_presence()["device-01"] == "online"
    finally:
        spy.close()


def test_a_certificate_of_another_ca_is_refused_by_the_broker(scene: Scene, tmp_path: Path) -> None:
    stranger = pki.issue_client_certificate(pki.create_authority("fleet"), "device-01")
    (tmp_path / "c.pem").write_bytes(stranger.cert_pem)
    (tmp_path / "k.pem").write_bytes(stranger.key_pem)
    assert not is_let_in(scene, tmp_path / "c.pem", tmp_path / "k.pem")
    scene.is_recorded("mqtt from ?", "a certificate that does not count")


def test_an_unknown_key_and_another_device_s_node_are_refused_by_flower(scene: Scene) -> None:
    unknown = SuperNode(private_key_pem=create_key(), tls_context=scene.trust, clock=time.time)
    with pytest.raises(UnauthorisedError):
        unknown.connect(scene.address)
    scene.is_recorded("signature from 127.0.0.1", "activate-node")
    with closing(scene.node("device-01")) as node, closing(scene.node("device-02")) as other:
        node._node = other._node  # its own signature under the other's number
        with pytest.raises(UnauthorisedError):
            node.pull()
    scene.is_recorded("reply from device-01", "another device", device="device-01")


def test_a_request_that_was_overheard_counts_no_second_time_and_only_for_what_it_asked(scene: Scene) -> None:
    signer = RequestSigner(scene.state("device-02").key.read_bytes(), time.time)
    path, body = "/edgefl/v1/renew", json.dumps({"v": 1, "csr": "none \u00fc"}).encode()
    for other, content, host in ((path, b"{}", "127.0.0.16"), (f"{path}?x=1", body, "127.0.0.17")):
        headers = signer.sign("POST", path, body)
        assert scene.call("POST", other, content, headers=headers, host=host)[0] == 401
    scene.is_recorded("signature from 127.0.0.16", "not the one that was signed")
    scene.is_recorded("signature from 127.0.0.17", "does not count")
    headers = signer.sign("POST", path, body)
    assert scene.call("POST", path, body, headers=headers, host="127.0.0.18")[0] == 400, "signed, and no request"
    assert scene.call("POST", path, body, headers=headers, host="127.0.0.19")[0] == 401
    scene.is_recorded("signature from 127.0.0.19", "came before")


def test_a_removed_device_s_key_and_certificate_are_refused_everywhere(scene: Scene) -> None:
    own = scene.let_in("leaver")
    key = own[1].read_bytes()
    client = Client(scene, "device-01", *own)
    assert client.is_in
    scene.fleet.make_client().post("/edgefl/v1/devices/leaver/remove")
    since = time.monotonic()
    scene.tools.eventually(lambda: client.is_out, 5.0, "the connection to be cut")
    assert time.monotonic() - since < 5.0
    client.close()
    assert not is_let_in(scene, *own)
    signer = RequestSigner(key, time.time)
    body = json.dumps({"v": 1, "csr": create_signing_request(create_key(), "leaver").decode()}).encode()
    for path, content, host in (
        ("/edgefl/v1/renew", body, "127.0.0.13"),
        ("/v1/fleet/pull-messages", b"", "127.0.0.14"),
    ):
        assert scene.call("POST", path, content, headers=signer.sign("POST", path, content), host=host)[0] == 401
    scene.is_recorded("signature from 127.0.0.13", "/edgefl/v1/renew")
    scene.is_recorded("signature from 127.0.0.14", "pull-messages")
    shown = {"csr": create_signing_request(key, "leaver").decode(), "certificate": own[0].read_text()}
    reenrolment = json.dumps({"v": 1, **shown}).encode()
    assert scene.call("POST", "/edgefl/v1/re-enroll", reenrolment, host="127.0.0.15")[0] == 401
    # The name is free again, and its former holder stays out.
    scene.ask_to_join(scene.token(), name="leaver")
    assert scene.call("POST", "/edgefl/v1/re-enroll", reenrolment, host="127.0.0.15")[0] == 401
    scene.is_recorded("certificate (not-allowed) from 127.0.0.15", "counts no more")
    scene.tools.pause(1.5)
    assert not is_let_in(scene, *own)


@pytest.mark.parametrize("declared", [True, False])
def test_an_update_of_two_gigabytes_is_cut_off_in_little_memory(scene: Scene, declared: bool) -> None:
    # Of the two gigabytes a quarter is really sent: what comes after the answer is thrown away unread.
    before = scene.rss_bytes()
    signer = RequestSigner(scene.state("device-02").key.read_bytes(), time.time)
    headers = signer.sign("POST", "/v1/fleet/push-messages")
    connection = http.client.HTTPSConnection("127.0.0.1", scene.fleet.port, context=scene.trust, timeout=30)
    most, sent, piece = before, 0, bytes(1 << 20)
    with closing(connection):
        connection.putrequest("POST", "/v1/fleet/push-messages")
        for name, value in headers.items():
            connection.putheader(name, value)
        if declared:
            connection.putheader("Content-Length", str(2 * GB))
        else:
            connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        try:
            while sent < GB // 2:
                connection.send(piece if declared else b"100000\r\n" + piece + b"\r\n")
                sent += len(piece)
                most = max(most, scene.rss_bytes())
        except OSError:
            pass  # it has hung up
        with contextlib.suppress(OSError):
            assert connection.getresponse().status == 413
    assert most - before < 64 << 20, f"{(most - before) >> 20} MiB more"
    scene.is_recorded("size from device-02", f"over {MAX_REQUEST_BYTES} bytes", device="device-02")


class Rogue:
    """A device of the fleet whose agent is ours: it takes its work, and answers what it likes."""

    def __init__(self, scene: Scene, name: str) -> None:
        self.scene, self.name = scene, name
        self.runs: list[str] = []
        scene.fleet.terminate(name)
        self.link = Client(scene, name)
        root = f"edgefl/v1/fleet/{name}"
        session = scene.state(name).next_session_no()
        online = {"v": 1, "state": "online", "boot_id": os.urandom(4).hex(), "session_no": session}
        self.link.paho.publish(f"{root}/status", json.dumps(online), qos=1, retain=True).wait_for_publish(5)
        self.beat = {"v": 1, "seq": 1, "session_no": session, "uptime_s": 1.0}
        self.node = scene.node(name)

    def work(self, phase: str | None) -> Any:
        """Waits for an instruction of this phase; None for work itself."""

        def pulled() -> Any:
            self.link.paho.publish(f"edgefl/v1/fleet/{self.name}/heartbeat", json.dumps(self.beat))
            return self.node.pull()

        instruction = self.scene.tools.eventually(pulled, 30, f"work for {self.name}")
        assert instruction.header.get("phase") == phase, instruction.header
        return instruction

    def first_work(self) -> Any:
        for phase in ("can", "prepare"):
            asked = self.work(phase)
            ready = {"v": 2, "assignment": asked.header["assignment"], "ready": True}
            self.node.push(self.node.create_reply(asked, (ready, b"")))
        return self.work(None)

    def close(self) -> None:
        self.node.close()
        self.link.close()
        self.scene.fleet.start_device(self.name)
        self.scene.fleet.wait_for_devices(2)
        for run_id in self.runs:
            self.scene.fleet.make_client().post(f"/edgefl/v1/runs/{run_id}/stop")
            self.scene.fleet.wait_for_run(run_id)

    def run_of_two(self) -> str:
        devices = {"min": 2, "names": ["device-01", "device-02"]}
        config = parse_run({"run": {"task": "digits", "rounds": 1}, "devices": devices})
        self.runs.append(self.scene.fleet.submit(config))
        return self.runs[-1]


METRICS = {"iterations": 1, "num_examples": 8, "loss": 1.0, "compute_s": 0.1}


def store_of(work: Any) -> dict[str, Any]:
    """What every answer repeats of its instruction."""
    return {key: work.header[key] for key in ("lineage", "model_sha256", "newest_record") if key in work.header}


def bomb() -> bytes:
    frame = zstandard.ZstdCompressor().compress(bytes(400_000_000))
    return write_frame([1, 12], 4, [np.frombuffer(frame, dtype=np.uint8)])


@pytest.fixture
def rogue(scene: Scene) -> Iterator[Rogue]:
    rogue = Rogue(scene, "device-02")
    yield rogue
    rogue.close()


def test_a_zip_bomb_is_refused_in_little_memory(scene: Scene, rogue: Rogue) -> None:
    run_id = rogue.run_of_two()
    work = rogue.first_work()
    before = scene.rss_bytes()
    told = {**store_of(work), "v": 2, "assignment": work.header["assignment"], "metrics": METRICS}
    rogue.node.push(rogue.node.create_reply(work, (told, bomb())))
    scene.is_recorded("unusable reply", "unpacks to over", device="device-02")
    assert scene.rss_bytes() - before < 64 << 20
    rows = scene.fleet.list_history("updates", run=run_id, device="device-02")
    assert [row["outcome"] for row in rows] == ["rejected"]


def test_an_update_for_another_device_s_assignment_is_refused(scene: Scene, rogue: Rogue) -> None:
    run_id = rogue.run_of_two()
    work = rogue.first_work()
    rows = scene.tools.eventually(lambda: scene.fleet.list_history("updates", run=run_id, device="device-01"))
    name = rows[0]["assignment_id"]
    foreign = name if "/" in name else f"{run_id}/{name}"
    told = {**store_of(work), "v": 2, "assignment": foreign, "metrics": METRICS}
    # As a reply to its own instruction that names the other's work ...
    rogue.node.push(rogue.node.create_reply(work, (told, b"")))
    scene.is_recorded("unusable reply", "it names", device="device-02")
    # ... and as a reply that says it comes from the other device.
    with closing(scene.node("device-01")) as other:
        number = other._node.node_id
    forged = rogue.node.create_reply(work, (told, b""))
    forged.metadata.src_node_id = number
    with pytest.raises((UnauthorisedError, ReplyRejectedError)):
        rogue.node.push(forged)
    scene.is_recorded("reply from device-02", "another device", device="device-02")


def test_path_characters_in_a_run_s_name_are_refused(scene: Scene) -> None:
    before = {path.name for path in scene.fleet.directory.rglob("*")}
    config = parse_run({"run": {"task": "digits"}}).to_json()
    for name in ("../../etc/passwd", "a/b", "a\\b", "..", "x\n[run]", "\x00"):
        config["run"]["name"] = name
        with pytest.raises(ConfigError, match=r"run\.name"):
            scene.fleet.make_client().post("/edgefl/v1/runs", {"config": config})
    scene.is_recorded("run file from 127.0.0.1", "run.name")
    assert {path.name for path in scene.fleet.directory.rglob("*")} - before <= {"edgefl.db-wal", "edgefl.db-shm"}


def test_what_was_refused_is_in_the_history_that_operators_read(scene: Scene) -> None:
    told = scene.tools.as_operator(
        scene.fleet, "history", "events", "--format", "json", "--where", "kind=request-rejected"
    )
    assert len(told.rows) == len(scene.refused())
    assert scene.fleet.make_client().token not in told.out
