"""Steps of secure aggregation on a board: around its trainer, with its certificate, and over damage on its card."""

from types import SimpleNamespace

import numpy as np
import pytest

from edgefl.coordinator.pki import create_authority, issue_client_certificate
from edgefl.core.errors import DataError
from edgefl.core.types import PeerMessage, SecureAggregationConfig, SecureStep, TrainConfig
from edgefl.device.secure_worker import CONSENTS_FILE, MAX_CONSENTS_BYTES, SecureWorker, load_consents
from edgefl.strategies.peer_algorithms.gossip_node import decode_messages, encode_messages

NAMES = ("a", "b", "c")
CONFIG = {"group": "g", "version": 4, "threshold": 0.6, "clip": 1.0, "max_examples": 10}


class Board:
    """A worker whose trainer returns a vector of ones, and counts its trainings."""

    def __init__(self, name, folder, authority):
        folder.mkdir(exist_ok=True)
        pair = issue_client_certificate(authority, name)
        files = {"key": pair.key_pem, "cert": pair.cert_pem, "ca": authority.cert_pem}
        for file, content in files.items():
            (folder / file).write_bytes(content)
        paths = {file: folder / file for file in files}
        self.name, self.headers, self.failure = name, [], None
        self.state = SimpleNamespace(device_id=name, root=folder, **paths)
        self.worker = SecureWorker(self.state, self.train)

    def train(self, header, body):
        self.headers.append((header, body))
        if self.failure:
            return {"error": self.failure}, b""
        return {"metrics": {"iterations": 1}}, np.ones(8, "<u4").tobytes()

    def ask(self, step, bodies=(), *, model=b"", **values):
        config = SecureAggregationConfig(step=step, **{**CONFIG, **values})
        messages = [PeerMessage(edge=(sender, self.name), step=0, body=body) for sender, body in dict(bodies).items()]
        index, body = encode_messages(messages, model)
        plan = TrainConfig(iterations=1, secure=config).to_json()
        header = {
            "v": 2,
            "run": "r",
            "version": config.version,
            "assignment": f"r/{step}",
            "plan": plan,
            "messages": index,
        }
        reply, content = self.worker.train(header, body)
        if "error" in reply:
            return reply
        return {message.edge[1]: message.body for message in decode_messages(reply["messages"], content)[0]}


@pytest.fixture
def boards(tmp_path):
    authority = create_authority("home")
    return {name: Board(name, tmp_path / name, authority) for name in NAMES}


def play(boards):
    """Plays until all have consented; returns what each was told of the others' consents."""
    adverts = {name: board.ask(SecureStep.KEYS)["coordinator"] for name, board in boards.items()}
    shares = {name: board.ask(SecureStep.SHARES, adverts) for name, board in boards.items()}
    masked = {
        name: board.ask(
            SecureStep.UPDATE, {sender: shares[sender][name] for sender in NAMES}, model=b"M", num_members=3
        )
        for name, board in boards.items()
    }
    values = {"num_members": 3, "survivors": NAMES}
    consents = {name: board.ask(SecureStep.CONSENT, **values)["coordinator"] for name, board in boards.items()}
    return masked, consents, values


def test_the_trainer_gets_the_model_alone_and_what_it_returns_leaves_the_board_masked(boards):
    masked, consents, values = play(boards)
    for name, board in boards.items():
        ((header, body),) = board.headers
        assert body == b"M"
        assert "messages" not in header
        words = np.frombuffer(masked[name]["coordinator"], "<u4")
        assert len(set(words.tolist())) == 8
    assert all("coordinator" in board.ask(SecureStep.UNMASK, consents, **values) for board in boards.values())
    assert load_consents(boards["a"].state.root / CONSENTS_FILE).is_spent("r", 4)


def test_other_work_goes_to_the_trainer_as_it_is(boards):
    for header in ({"plan": {}, "run": "r"}, {"phase": "can", "plan": {"secure": {}}}, {"plan": "?"}):
        assert boards["a"].worker.train(header, b"body")[0] == {"metrics": {"iterations": 1}}
        assert boards["a"].headers[-1] == (header, b"body")


def test_a_board_that_restarts_has_no_keys_and_takes_part_in_no_other_sum_of_the_version(boards):
    play(boards)
    board = boards["a"]
    board.worker = SecureWorker(board.state, board.train)
    assert "no keys of this attempt" in board.ask(SecureStep.CONSENT, num_members=3, survivors=NAMES)["error"]
    assert board.ask(SecureStep.KEYS, group="other")["coordinator"] == b""
    assert board.ask(SecureStep.KEYS, version=5)["coordinator"]


def test_a_consent_that_is_not_on_the_card_is_not_said_however_often_it_is_asked_for(boards):
    adverts = {name: board.ask(SecureStep.KEYS)["coordinator"] for name, board in boards.items()}
    shares = {name: board.ask(SecureStep.SHARES, adverts) for name, board in boards.items()}
    boards["a"].ask(SecureStep.UPDATE, {sender: shares[sender]["a"] for sender in NAMES}, num_members=3)
    (boards["a"].state.root / CONSENTS_FILE).mkdir()  # nothing can be written there
    for _ in range(2):
        assert "error" in boards["a"].ask(SecureStep.CONSENT, num_members=3, survivors=NAMES)


def test_training_that_fails_sends_no_vector(boards):
    boards["a"].failure = "no data"
    adverts = {name: board.ask(SecureStep.KEYS)["coordinator"] for name, board in boards.items()}
    shares = {name: board.ask(SecureStep.SHARES, adverts) for name, board in boards.items()}
    bodies = {sender: shares[sender]["a"] for sender in NAMES}
    assert boards["a"].ask(SecureStep.UPDATE, bodies, num_members=3) == {"error": "no data"}


@pytest.mark.parametrize(
    ("plan", "messages"),
    [
        ({"secure": 3}, []),
        ({"secure": {"step": "keys"}}, []),
        ({"secure": {"step": "keys", **CONFIG, "clip": "x"}}, []),
        ({"secure": {"step": "keys", **CONFIG}}, [["a", "b"]]),
        ({"secure": {"step": "keys", **CONFIG}}, [["b", "a", 0, 0, 99]]),
        ({"secure": {"step": "keys", **CONFIG, "clip": 10**400}}, []),
        ({"secure": {"step": "keys", **CONFIG, "clip": 2e6}}, []),
        ({"secure": {"step": "keys", **CONFIG, "group": 3}}, []),
        ({"secure": {"step": "keys", **CONFIG, "group": "g" * 401}}, []),
        ({"secure": {"step": "keys", **CONFIG, "max_examples": 10**5000}}, []),
        ({"secure": {"step": "keys", **CONFIG, "survivors": [*range(1001)]}}, []),
        ({"secure": {"step": "keys", **CONFIG, "version": 5}}, []),
    ],
)
def test_a_malformed_step_is_an_error_in_one_line_and_trains_nothing(boards, plan, messages):
    reply, body = boards["a"].worker.train({"run": "r", "version": 4, "plan": plan, "messages": messages}, b"")
    assert "\n" not in reply["error"]
    assert (body, boards["a"].headers) == (b"", [])


@pytest.mark.parametrize("run", ["r" * 201, 3])
def test_a_run_whose_id_cannot_be_kept_with_its_consent_is_refused(boards, run):
    plan = TrainConfig(iterations=1, secure=SecureAggregationConfig(step="keys", **CONFIG)).to_json()
    reply, _ = boards["a"].worker.train({"run": run, "version": 4, "plan": plan}, b"")
    assert "is a text of up to 200 characters" in reply["error"]


def test_an_answer_that_is_not_held_any_more_is_asked_for_anew(boards):
    plan = TrainConfig(iterations=1, secure=SecureAggregationConfig(step="keys", **CONFIG)).to_json()
    reply, _ = boards["a"].worker.train({"run": "r", "plan": plan, "has_stored_reply": True}, b"")
    assert reply["requires_full_model"] is True


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"{" + b" " * MAX_CONSENTS_BYTES + b"}",
        b'{"r": {}}',
        b'{"r": {"version": Infinity, "digest": ""}}',
        b'{"r": {"version": "x", "digest": ""}}',
    ],
)
def test_a_board_whose_consents_cannot_be_read_takes_no_part(boards, content):
    (boards["a"].state.root / CONSENTS_FILE).write_bytes(content)
    with pytest.raises(DataError, match="nobody knows what this board has consented to"):
        load_consents(boards["a"].state.root / CONSENTS_FILE)
    assert "cannot be read" in boards["a"].ask(SecureStep.KEYS)["error"]
