"""How the device sees a coordinator that is away, foreign or broken; the rest is tested with both ends together."""

import contextlib
import gc
import socket
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from edgefl.coordinator import pki
from edgefl.core.conditions import Blocker, ConditionsEndedError
from edgefl.core.errors import NetworkError
from edgefl.core.fleet_messages import MESSAGES, PULL_MESSAGES, Message, Metadata, ObjectTree, make_content
from edgefl.core.flower_objects import encode_chunk
from edgefl.core.protocol import CHUNK_BYTES, FIELD_JSON, RECORD_HEADER
from edgefl.device.flower.supernode import ReplyRejectedError, SuperNode, UnauthorisedError
from edgefl.system.https_client import create_pinned_context


@pytest.fixture(scope="module")
def authority():
    return pki.create_authority("lab")


@pytest.fixture(scope="module")
def key_pem():
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@pytest.fixture
def make_node(authority, key_pem):
    with contextlib.ExitStack() as closers:

        def make(ca=None):
            trust = create_pinned_context((ca or authority).cert_pem)
            node = SuperNode(private_key_pem=key_pem, tls_context=trust, clock=time.time)
            closers.callback(node.close)
            return node

        yield make


class BrokenCoordinator:
    """Answers every request with one status and body, over TLS."""

    def __init__(self, authority, folder):
        pair = pki.issue_server_certificate(authority, ["127.0.0.1"])
        for name, content in (("cert", pair.cert_pem), ("key", pair.key_pem)):
            (folder / name).write_bytes(content)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.status, self.content = 200, b""
        config = uvicorn.Config(
            self.answer,
            ssl_certfile=folder / "cert",
            ssl_keyfile=folder / "key",
            log_level="critical",
            interface="asgi3",
            lifespan="off",
            ws="none",
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})

    async def answer(self, _scope, _receive, send):
        head = {"type": "http.response.start", "status": self.status, "headers": [(b"connection", b"close")]}
        await send(head)
        await send({"type": "http.response.body", "body": self.content})

    def __enter__(self):
        self.thread.start()
        deadline = time.monotonic() + 60
        while not self.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(60)
        self.listener.close()


@pytest.fixture(scope="module")
def coordinator(authority, tmp_path_factory):
    with BrokenCoordinator(authority, tmp_path_factory.mktemp("server")) as running:
        yield running


def test_a_status_tells_the_agent_what_to_do(coordinator, make_node):
    kinds = {401: UnauthorisedError, 403: ReplyRejectedError, 413: ReplyRejectedError}
    for status in (401, 403, 413, 404, 412, 500, 503):
        coordinator.status, coordinator.content = status, b'{"detail": "so it is"}'
        with pytest.raises(NetworkError, match=f"coordinator answered {status}.*so it is") as caught:
            make_node().connect(coordinator.address)
        assert type(caught.value) is kinds.get(status, NetworkError)


def test_a_coordinator_that_is_away_foreign_or_of_another_ca_is_a_network_error(coordinator, make_node):
    coordinator.status, coordinator.content = 200, b"<html>log in to the hotel's network</html>"
    other, node = make_node(ca=pki.create_authority("other")), make_node()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        away = f"127.0.0.1:{unused.getsockname()[1]}"
        for one, address, told in (
            (node, coordinator.address, "makes no sense"),
            (node, away, "no answer from the coordinator"),
            (other, coordinator.address, "certificate"),
        ):
            with pytest.raises(NetworkError, match=told):
                one.connect(address)
    with pytest.raises(NetworkError, match="not connected"):
        make_node().pull()
    node.close()  # twice, with the one after the test


def test_an_answer_is_let_go_without_a_garbage_collection(coordinator, make_node):
    """Each holds a model, its request perhaps another one; collections of what is old come once in many rounds."""
    coordinator.status, coordinator.content = 200, MESSAGES["ActivateNodeResponse"](node_id=7).SerializeToString()
    gc.collect()
    gc.disable()
    try:
        of_others = _requests_and_responses()  # errors that earlier tests caught may hold some
        make_node().connect(coordinator.address)
        held = [made for made in _requests_and_responses() if not any(made is other for other in of_others)]
    finally:
        gc.enable()
    assert held == []


def _requests_and_responses():
    return [made for made in gc.get_objects() if isinstance(made, httpx.Request | httpx.Response)]


def test_a_model_is_charged_whole_before_its_first_chunk_and_what_was_not_begun_comes_back(make_node):
    node, charged, pulled = make_node(), [], []
    content = make_content((RECORD_HEADER, FIELD_JSON, "{}"))
    message = Message(metadata=Metadata(message_type="train", run_id=1), content=content)
    tree = ObjectTree(object_id="m", children=[ObjectTree(object_id=str(number)) for number in range(5)])

    def answer(method, _request):
        if method == PULL_MESSAGES:
            return SimpleNamespace(messages_list=[message], message_object_trees=[tree])
        pulled.append(1)
        return SimpleNamespace(object_available=len(pulled) < 3, object_content=encode_chunk(b"chunk"))

    node._client = SimpleNamespace(send=answer, stamp="", close=lambda: None)
    node._charge_traffic = charged.append
    with pytest.raises(NetworkError, match="taken the work back"):
        node.pull()
    assert charged == [5 * CHUNK_BYTES, -2 * CHUNK_BYTES]

    def become_metered():
        raise ConditionsEndedError("metered", Blocker(kind="download", reason="metered"))

    pulled.clear()
    charged.clear()
    node._check_link = become_metered
    assert node.pull().blocker.reason == "metered"
    assert (charged, pulled) == ([5 * CHUNK_BYTES, -4 * CHUNK_BYTES], [1])

    def refuse(_num_bytes):
        raise ConditionsEndedError("used up", Blocker(kind="budget", reason="used up"))

    node._charge_traffic = refuse
    assert node.pull().blocker.reason == "used up"
    assert len(pulled) == 1


def test_an_address_that_is_none_is_a_network_error(make_node):
    with pytest.raises(NetworkError, match=r"address .* makes no sense"):
        make_node().connect("127.0.0.1:port")
