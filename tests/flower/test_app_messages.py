"""Flower's records keep all they hold on their way, and a message that makes no sense is refused."""

import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from edgefl.core.errors import DataError
from edgefl.flower.app_messages import decode_message, encode_envelope, encode_message, read_metrics, split_envelope

ARRAYS = ArrayRecord({
    "w": Array(np.arange(6, dtype=np.float16).reshape(2, 3)),
    "empty": Array(np.zeros((0, 4))), "n": Array(np.array(3)),
    "tree": Array("uint8", (5,), "a format of its own", b"\0tree"),
})  # fmt: skip
VALUES = {
    "flag": True,
    "n": -3,
    "x": 1.0,
    "text": "ä\n",
    "raw": b"\0\xff",
    "many": [1, 2],
    "raws": [b"a", b""],
    "no": [],
}
METRICS = {"nan": math.nan, "large": 1e300, "count": 2**62, "list": [0.5, 1.0]}


def test_every_kind_of_record_and_value_comes_back_as_it_was():
    content = RecordDict({"a": ARRAYS, "c": ConfigRecord(VALUES), "m": MetricRecord(METRICS), "e": ArrayRecord()})
    header, back = decode_message(encode_message({"type": "train"}, content))
    assert header == {"type": "train"}
    assert list(back) == ["a", "c", "m", "e"]
    for name, array in ARRAYS.items():
        found = back["a"][name]
        assert (found.dtype, found.shape, found.stype, found.data) == (
            array.dtype,
            array.shape,
            array.stype,
            array.data,
        )
    assert dict(back["c"]) == VALUES
    assert {name: type(value) for name, value in back["c"].items()} == {
        name: type(one) for name, one in VALUES.items()
    }
    assert math.isnan(back["m"]["nan"])
    assert {name: value for name, value in back["m"].items() if name != "nan"} == {
        name: value for name, value in METRICS.items() if name != "nan"
    }
    assert decode_message(encode_message({"error": 2})) == ({"error": 2}, None)


def test_an_envelope_leaves_the_message_as_it_is():
    message = encode_message({}, RecordDict({"a": ARRAYS}))
    assert split_envelope(encode_envelope({"node": 3}) + message) == ({"node": 3}, message)


def test_a_message_that_is_cut_longer_or_another_thing_is_refused():
    message = encode_message({}, RecordDict({"a": ARRAYS}))
    for damaged in (
        b"",
        message[:3],
        message[:-1],
        message + b"x",
        b"\xff" * 40,
        message.replace(b"arrays", b"arrayz"),
    ):
        with pytest.raises(DataError, match="makes no sense"):
            decode_message(damaged)
    for damaged in (b"", b"\x02\0\0\0[]"):
        with pytest.raises(DataError, match="envelope"):
            split_envelope(damaged)


def test_the_metrics_of_a_reply_are_read_of_both_interfaces_and_are_bounded():
    metrics = MetricRecord({"num-examples": 7, "eval_loss": 0.5, "accuracy": 0.75, "list": [0.5], "nan": math.nan,
                            "large": 1e300, "\x1b[2J": 1.0, "n" * 65: 1.0})  # fmt: skip
    reply = encode_message({}, RecordDict({"arrays": ARRAYS, "metrics": metrics, "c": ConfigRecord({"n": 1})}))
    found = read_metrics(reply, kind="evaluate")
    assert (found.num_examples, found.loss, found.accuracy) == (7, 0.5, 0.75)
    assert found.values == {"eval_loss": 0.5, "accuracy": 0.75}
    assert read_metrics(reply, kind="train").loss is None
    older = RecordDict({
        "fitres.num_examples": MetricRecord({"num_examples": 10**12}),
        "fitres.metrics": ConfigRecord({"train_loss": 0.25, "name": "a", "flag": True}),
    })  # fmt: skip
    found = read_metrics(encode_message({}, older), kind="train")
    assert (found.num_examples, found.loss, found.values) == (10**9, 0.25, {"train_loss": 0.25})
    many = RecordDict({"metrics": MetricRecord({f"m{number}": 1.0 for number in range(100)})})
    assert len(read_metrics(encode_message({}, many), kind="evaluate").values) == 32
    many["metrics"]["train_loss"] = 3.0
    assert read_metrics(encode_message({}, many), kind="train").loss == 3.0
    for accuracy in (1e12, 1.01, -0.01):
        wrong = encode_message({}, RecordDict({"metrics": MetricRecord({"accuracy": accuracy})}))
        found = read_metrics(wrong, kind="evaluate")
        assert (found.accuracy, found.values) == (None, {"accuracy": accuracy})
    answer = read_metrics(encode_message({}, older), kind="query")
    assert (answer.loss, answer.accuracy, answer.is_evaluation, answer.values) == (
        None,
        None,
        False,
        {"train_loss": 0.25},
    )
    for body in (b"", reply[:60], encode_message({"error": 2, "reason": "no"}), encode_envelope({"records": [3]})):
        assert read_metrics(body, kind="evaluate").values == {}
