"""What boards change in a message's arrays travels in a codec, all else as it is, and no body is believed."""

import io
import json
import struct

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from edgefl.core.errors import ConfigError, DataError
from edgefl.flower.app_codec import ChangeCodec, ModelCodec
from edgefl.flower.app_messages import decode_message, encode_message, read_metrics
from edgefl.flower.internals import ensure_identity
from edgefl.flower.server_process import ProcessGrid
from edgefl.system.process_messages import write_message

RNG = np.random.default_rng(3)
SENT = {
    "w": RNG.standard_normal((40, 25)).astype(np.float32),
    "n": np.array(7),
    "wide": RNG.standard_normal(300),
    "half": RNG.standard_normal(300).astype(np.float16),
    "tree": np.arange(5, dtype=np.uint8),
}


def make_record(arrays):
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def make_message(arrays=SENT, name="arrays"):
    return RecordDict({name: make_record(arrays)})


def train(arrays=SENT):
    """Returns what a ClientApp makes of the arrays."""
    return {
        name: array + (0.1 * RNG.standard_normal(array.shape)).astype(array.dtype) for name, array in arrays.items()
    }


def send(reply, line="int8", message=None):
    """Returns the reply as the ServerApp gets it, and its bytes."""
    message = make_message() if message is None else message
    body = encode_message({}, reply, ChangeCodec(message, line, 1))
    return decode_message(body, ChangeCodec(message))[1], body


@pytest.mark.parametrize("line", ["int8", "fp16", "qsgd:8", "int8|zstd", "topk:0.5|fp16"])
def test_floats_come_back_within_the_codecs_bound_and_all_else_as_it_was(line):
    after = train() | {"n": np.array(8)}
    reply = RecordDict(
        {"arrays": make_record(after), "metrics": MetricRecord({"num-examples": 3, "train_loss": 0.5})}
    )
    back, body = send(reply, line)
    assert list(back) == ["arrays", "metrics"]
    assert list(back["arrays"]) == list(SENT)
    for name, array in back["arrays"].items():
        found, change = array.numpy(), np.abs(after[name].astype(float) - SENT[name]).max()
        assert (array.dtype, array.shape) == (str(after[name].dtype), after[name].shape)
        bound = {"topk:0.5|fp16": change, "qsgd:8": change / 4}.get(line, change / 200) + (
            2e-3 if name == "half" else 0
        )
        np.testing.assert_allclose(found, after[name], rtol=0, atol=bound if name in ("w", "wide", "half") else 0)
    assert np.any(back["arrays"]["w"].numpy() != SENT["w"])
    assert len(body) < len(encode_message({}, reply)) * 0.55
    assert read_metrics(body, kind="train").values == {"train_loss": 0.5}
    assert encode_message({}, reply, ChangeCodec(make_message(), line, 1)) == body


def test_patterns_of_names_give_arrays_another_codec():
    after = train()
    back, _ = send(RecordDict({"arrays": make_record(after)}), "topk:0.01; w = dense")
    np.testing.assert_allclose(back["arrays"]["w"].numpy(), after["w"], atol=1e-6)
    assert np.count_nonzero(back["arrays"]["wide"].numpy() != SENT["wide"]) == 3


def test_what_is_no_change_of_the_message_or_beyond_the_codec_travels_as_it_is():
    inf, much = train() | {"w": np.full_like(SENT["w"], np.inf)}, train() | {"wide": np.full(300, 1e300)}
    replies = [
        ("arrays", inf, "int8"),
        ("arrays", much, "int8"),
        ("other", train(), "int8"),
        ("arrays", much, "int8; wide = dense"),
        ("arrays", train(), "new"),
    ]
    replies.append(("arrays", {"w": train()["w"]}, "int8"))
    replies.append(("arrays", dict(reversed(train().items())), "int8"))
    for name, after, line in replies:
        reply = RecordDict({name: make_record(after)})
        assert encode_message({}, reply, ChangeCodec(make_message(), line, 1)) == encode_message({}, reply)
    shaped = train() | {"w": np.zeros((3, 3), np.float32), "half": train()["half"].astype(np.float32)}
    back, _ = send(RecordDict({"arrays": make_record(shaped)}))
    for name in ("w", "half"):
        np.testing.assert_array_equal(back["arrays"][name].numpy(), shaped[name])
    assert np.any(back["arrays"]["wide"].numpy() != shaped["wide"])


@pytest.mark.parametrize("line", ["int8", "fp16", "bf16|zstd"])
def test_a_message_to_boards_is_rounded_and_both_ends_know_to_what(line):
    message, codec = make_message(), ModelCodec(line)
    message["config"] = ConfigRecord({"lr": 0.1})
    body = encode_message({"type": "train"}, message, codec)
    back, rounded = decode_message(body, is_from_server=True)[1], codec.round(message)
    assert len(body) < 0.55 * len(encode_message({}, message))
    assert list(back["arrays"]) == list(SENT)
    assert back["config"] == message["config"]
    for name, array in back["arrays"].items():
        found = array.numpy()
        assert (found.dtype, found.shape) == (SENT[name].dtype, SENT[name].shape)
        assert (array.dtype, array.data) == (rounded["arrays"][name].dtype, rounded["arrays"][name].data)
        atol = {"int8": 0.02, "fp16": 0.002, "bf16|zstd": 0.02}[line] if found.dtype.kind == "f" else 0
        np.testing.assert_allclose(found, SENT[name], rtol=0, atol=atol)
    assert np.any(back["arrays"]["w"].numpy() != SENT["w"])
    assert codec.round(message)["arrays"] is rounded["arrays"], "the same arrays go to every board"
    other = make_message(SENT | {"w": SENT["w"] + 1})
    np.testing.assert_allclose(codec.round(other)["arrays"]["w"].numpy(), SENT["w"] + 1, atol=0.03)


def test_models_of_the_last_few_names_of_records_alone_are_kept():
    codec, messages = ModelCodec("fp16"), [make_message(name=f"model-{number}") for number in range(5)]
    first, *others = [codec.round(message) for message in messages]
    assert codec.round(messages[1])["model-1"] is others[0]["model-1"]
    assert codec.round(messages[0])["model-0"] is not first["model-0"]
    assert codec.round(messages[1])["model-1"] is others[0]["model-1"], "it was used later than the others"
    assert codec.round(messages[2])["model-2"] is not others[1]["model-2"]


def test_a_message_that_is_not_finite_or_packs_too_well_travels_as_it_is():
    for arrays, line in (
        (SENT | {"w": np.full_like(SENT["w"], np.nan)}, "fp16"),
        ({"w": np.zeros((1000, 1000), np.float32)}, "fp16|zstd"),
        ({"n": np.arange(5)}, "fp16"),
    ):
        message = make_message(arrays)
        assert encode_message({}, message, ModelCodec(line)) == encode_message({}, message)


def set_array(index, value):
    return lambda records: records[0][2]["all"][0].__setitem__(index, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_array(2, [2**40]), "in a body of"),
        (set_array(2, [-40, -25]), "and shape"),
        (set_array(2, [40, 24]), "a model: "),
        (set_array(2, "ab"), "and shape"),
        (set_array(1, "int8"), "a model's array"),
        (set_array(1, "object"), "a model's array"),
        (set_array(1, "nothing"), "makes no sense"),
        (set_array(0, "n"), "a model"),
        (lambda records: records[0][2].pop("all"), "makes no sense"),
    ],
)
def test_a_body_of_another_model_than_it_says_is_refused(change, words):
    body = encode_message({}, make_message(), ModelCodec("int8"))
    with pytest.raises(DataError, match=words):
        decode_message(edit(body, change), is_from_server=True)
    with pytest.raises(DataError, match="of kind 'model'"):
        decode_message(body, ChangeCodec(make_message()))


def test_what_a_codec_with_ef_leaves_out_is_in_later_replies_and_stays_while_a_record_travels_as_it_is():
    residuals, total = {}, np.zeros((40, 25))
    change = (0.1 * RNG.standard_normal((40, 25))).astype(np.float32)
    for number in range(30):
        message = make_message()
        codec = ChangeCodec(message, "ef|topk:0.1", number, residuals=residuals)
        body = encode_message({}, RecordDict({"arrays": make_record(SENT | {"w": SENT["w"] + change})}), codec)
        assert b'"changes"' in body
        kept = {name: dict(record) for name, record in residuals.items()}
        broken = RecordDict({"arrays": make_record(SENT | {"w": np.full_like(SENT["w"], np.nan)})})
        encode_message({}, broken, ChangeCodec(message, "ef|topk:0.1", number, residuals=residuals))
        assert {name: dict(record) for name, record in residuals.items()} == kept
        total += decode_message(body, ChangeCodec(message))[1]["arrays"]["w"].numpy() - SENT["w"]
    half, none = {"half": SENT["half"]}, {}
    codec = ChangeCodec(make_message(half), "ef|topk:0.9", 1, residuals=none)
    assert (codec.encode("arrays", make_record(train(half))), none) == (None, {}), "no smaller, so it is not sent"
    left = residuals["arrays"]["residual/w"].numpy()
    np.testing.assert_allclose(total + left, 30 * change, atol=1e-4)
    assert np.count_nonzero(total) > 700, "entries that one reply never has room for get there"


def test_a_residual_of_other_arrays_is_not_added():
    residuals = {}
    ChangeCodec(make_message(), "ef|topk:0.1", 1, residuals=residuals).encode("arrays", make_record(train()))
    small = {"w": SENT["w"][:20]}
    message, after = make_message(small), small["w"] + 1
    body = encode_message(
        {},
        RecordDict({"arrays": make_record({"w": after})}),
        ChangeCodec(message, "ef|topk:1.0|fp16", 1, residuals=residuals),
    )
    np.testing.assert_allclose(decode_message(body, ChangeCodec(message))[1]["arrays"]["w"].numpy(), after, atol=0.01)


def test_a_message_of_the_older_interface_has_its_record_by_another_name():
    after = train()
    message = make_message(name="fitins.parameters")
    back, body = send(RecordDict({"fitres.parameters": make_record(after)}), message=message)
    assert b'"changes"' in body
    np.testing.assert_allclose(back["fitres.parameters"]["w"].numpy(), after["w"], atol=0.01)


def test_the_arrays_are_those_that_were_sent_whatever_an_app_makes_of_its_message():
    message, after = make_message(), train()
    ours, theirs = ChangeCodec(message, "int8", 1), ChangeCodec(message)
    message["arrays"]["w"] = Array(np.zeros((40, 25), np.float32))
    message["arrays"].pop("wide")
    body = encode_message({}, RecordDict({"arrays": make_record(after)}), ours)
    assert b'"changes"' in body
    back = decode_message(body, theirs)[1]
    np.testing.assert_allclose(back["arrays"]["w"].numpy(), after["w"], atol=0.01)


def edit(body, change, times=1):
    """Returns a reply whose list of records was changed, with the data of its arrays as often."""
    (length,) = struct.unpack_from("<I", body)
    header = json.loads(body[4 : 4 + length])
    change(header["records"])
    text = json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text + times * body[4 + length :]


def move_exact(records):
    records[0][2]["arrays"][0][0] = "w"


HOSTILE = {
    "which is not of the message": lambda good, _: edit(good, lambda records: records[0].__setitem__(0, "b")),
    "came twice": lambda good, _: edit(good, lambda records: records.append(records[0]), 2),
    "not all of floats": lambda good, _: edit(good, move_exact),
    "arrays'": lambda _, other: other,
    "are left": lambda good, _: good + b"x",
    "of which there are": lambda good, _: good[:-1],
    "body": lambda good, _: good[:-40] + bytes(40),
}


@pytest.mark.parametrize("words", HOSTILE)
def test_a_reply_with_other_changes_than_its_message_has_arrays_is_refused(words):
    small = {name: array for name, array in SENT.items() if name != "w"} | {"w": SENT["w"][:39]}
    small = {name: small[name] for name in SENT}
    _, good = send(RecordDict({"arrays": make_record(train())}))
    other = encode_message(
        {}, RecordDict({"arrays": make_record(train(small))}), ChangeCodec(make_message(small), "int8", 1)
    )
    with pytest.raises(DataError, match=words):
        decode_message(HOSTILE[words](good, other), ChangeCodec(make_message()))


@pytest.mark.parametrize(
    ("has_codec", "kind"), [(True, "train"), (True, "train.half"), (True, "query"), (False, "train")]
)
def test_changes_are_taken_of_replies_that_train_in_a_run_with_a_codec_alone(has_codec, kind):
    ensure_identity()
    _, body = send(RecordDict({"arrays": make_record(train())}))
    answers = io.BytesIO()
    for message in (({"message": "0"},), ({"count": 1},), ({"message": "0"}, body)):
        write_message(answers, *message)
    answers.seek(0)
    grid = ProcessGrid(answers, io.BytesIO(), 1, codec="int8" if has_codec else "")
    (reply,) = grid.send_and_receive([Message(make_message(), 2, kind)])
    if has_codec and kind != "query":
        assert reply.content["arrays"]["w"].shape == (40, 25)
    else:
        assert (reply.error.code, reply.error.reason[:27]) == (8, "the reply makes no sense: a")
    assert not grid._codecs


def test_a_change_is_that_of_the_rounded_arrays_which_its_board_was_sent():
    ensure_identity()
    seen = decode_message(encode_message({}, make_message(), ModelCodec("int8")), is_from_server=True)[1]
    after = {name: array.numpy() for name, array in seen["arrays"].items()}
    after |= {"w": after["w"] + 0.01 * RNG.standard_normal((40, 25)).astype(np.float32)}
    body = encode_message({}, RecordDict({"arrays": make_record(after)}), ChangeCodec(seen, "fp16", 1))
    assert b'"changes"' in body
    answers = io.BytesIO()
    for message in (({"message": "0"},), ({"count": 1},), ({"message": "0"}, body)):
        write_message(answers, *message)
    answers.seek(0)
    grid = ProcessGrid(answers, io.BytesIO(), 1, codec="fp16", down="int8")
    (reply,) = grid.send_and_receive([Message(make_message(), 2, "train")])
    np.testing.assert_allclose(reply.content["arrays"]["w"].numpy(), after["w"], atol=1e-4)
    assert np.abs(after["w"] - SENT["w"]).max() > 1e-3


def test_models_of_messages_whose_replies_never_come_are_not_kept():
    ensure_identity()
    answers = io.BytesIO()
    for message in ({"message": "0"}, {"message": "1"}, {"count": 0}, {"message": "2"}, {"message": "3"}):
        write_message(answers, message)
    answers.seek(0)
    grid = ProcessGrid(answers, io.BytesIO(), 1, codec="int8")
    assert not grid.send_and_receive([Message(make_message(), node, "train") for node in (2, 3)], timeout=1.0)
    assert (grid._codecs, grid._sent) == ({}, {})
    expired = Message(make_message(), 2, "train", ttl=60.0)
    expired.metadata.created_at = 1.0
    grid.push_messages([expired])
    grid.push_messages([Message(make_message(), 2, "train")])
    assert grid._codecs.keys() == {"3"}


def test_a_pattern_that_matches_no_array_of_the_first_message_with_any_ends_the_app_before_it_is_sent():
    ensure_identity()
    answers, sink = io.BytesIO(), io.BytesIO()
    write_message(answers, {"message": "0"})
    answers.seek(0)
    grid = ProcessGrid(answers, sink, 1, codec="dense; wid = int8")
    grid.push_messages([Message(RecordDict({"m": MetricRecord({"a": 1.0})}), 2, "train")])
    num_sent = len(sink.getvalue())
    line = r"compression.layers: .*no tensor of the task matches the pattern 'wid'; .*; nearest: 'wide', 'w'"
    with pytest.raises(ConfigError, match=line):
        grid.push_messages([Message(make_message(), 2, "train")])
    assert len(sink.getvalue()) == num_sent
    answers = io.BytesIO()
    for number in range(2):
        write_message(answers, {"message": str(number)})
    answers.seek(0)
    grid = ProcessGrid(answers, io.BytesIO(), 1, codec="dense; wid* = int8")
    grid.push_messages([Message(make_message(), node, "train") for node in (2, 3)])
