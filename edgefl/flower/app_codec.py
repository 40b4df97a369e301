"""Codecs of the arrays in a Flower app's messages: those sent to boards, and what a ClientApp changed in them.

Both ends have the message, so that of a reply the change alone travels. A record counts where its message has one of
the same name; of its arrays those of floats whose shape and type are the same, and all others travel as they are.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from edgefl.compression.codec import Codec, decode_body, make_codec
from edgefl.compression.error_feedback import ErrorFeedback, has_error_feedback
from edgefl.compression.stages import to_dense
from edgefl.core.errors import CodecError, ConfigError, DataError
from edgefl.core.types import ModelSpec, TensorSpec, derive_rng

log = logging.getLogger(__name__)

_FLOATS = frozenset({"float16", "float32", "float64"})
_NUMPY = "numpy.ndarray"
_OLDER_NAMES = {"fitres.parameters": "fitins.parameters"}
"""Records of replies of Flower's older interface, and of their messages."""
CHANGES, MODEL = "changes", "model"
"""Kinds of records in a codec: of a reply, and of a message."""
_MAX_EXPANSION = 128
"""How many times larger than its body the arrays of a message may be: more is not believed, and not sent."""
_MAX_MODEL_BYTES = 512 * 1024**2
"""Of the arrays of a message: twice what a part of a job may have."""
_MAX_NAMES = 4
"""Of records in messages to boards, whose models are kept."""
_UPDATE = "update"
"""What the residual calls an update, of which none is under way after its reply was made."""
_Values = dict[str, np.ndarray[Any, Any]]


class ChangeCodec:
    """Codec of the reply to one message.

    Args:
        content: of the message, whose arrays are kept as they are now.
        line: of the codec; empty where replies are only decoded.
        seed: of what the codec draws: the same message has the same reply.
        residuals: by records of replies, what the codec left out of earlier ones (`ef`); `encode` changes it.
    """

    kind: ClassVar[str] = CHANGES

    def __init__(
        self,
        content: RecordDict,
        line: str = "",
        *seed: int | str,
        residuals: dict[str, ArrayRecord] | None = None,
    ) -> None:
        self._sent = {name: dict(record) for name, record in content.array_records.items()}
        self._line, self._seed = line, seed
        self._residuals = {} if residuals is None else residuals

    def encode(self, name: str, record: Mapping[str, Array]) -> tuple[frozenset[str], bytes] | None:
        """Returns which arrays of a record are in the body, and that; None where the record travels as it is."""
        sent = self._sent.get(_OLDER_NAMES.get(name, name), {})
        if list(sent) != list(record):
            return None
        try:
            before, after = (_read_floats({key: arrays[key] for key in sent}) for arrays in (sent, record))
            shared = [key for key in before if key in after and _is_alike(before[key], after[key])]
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found below
                changes = {key: (after[key] - before[key]).astype(np.float32) for key in shared}
            if not all(np.isfinite(change).all() for change in changes.values()):
                return None
            codec = make_codec(self._line, _make_shapes(changes))
            rng = derive_rng(*self._seed, name)
            feedback = self._restore_feedback(name, codec) if has_error_feedback(self._line) else None
            body = codec.encode(changes, rng) if feedback is None else feedback.encode(_UPDATE, changes, rng)
        except (CodecError, ValueError):  # beyond the codec's range, or no array after all
            return None
        coded = frozenset(shared)
        if len(body) >= sum(len(record[key].data) for key in coded):
            return None
        if feedback is not None:
            feedback.record_used((_UPDATE,))
            self._residuals[name] = ArrayRecord({key: Array(array) for key, array in feedback.state().items()})
        return coded, body

    def _restore_feedback(self, name: str, codec: Codec) -> ErrorFeedback:
        """Returns the residual of a record; none where the app's arrays have other names or shapes than before."""
        feedback, kept = ErrorFeedback(codec), dict(self._residuals.get(name, {}))
        try:
            feedback.restore({key: array.numpy() for key, array in kept.items()})
        except (CodecError, ValueError) as error:
            log.warning("what was left out of the record %.60r is lost: its arrays are others now (%s)", name, error)
        return feedback

    def decode(self, name: str, exact: Mapping[str, Array], body: bytes) -> ArrayRecord:
        """Returns a record of a reply; each once.

        Args:
            name: of the record.
            exact: its arrays that travelled as they are.
            body: the changes of all others of the message's record.

        Raises:
            DataError: the message has no such record, or no such arrays, or the body is not of them.
        """
        sent = self._sent.pop(_OLDER_NAMES.get(name, name), None)
        if sent is None or not exact.keys() <= sent.keys():
            raise DataError(f"changes of {name!r:.60}, which is not of the message, or came twice")
        coded = {key: array for key, array in sent.items() if key not in exact}
        before = _read_floats(coded)
        if before.keys() != coded.keys():
            raise DataError(f"changes of {name!r:.60}, whose arrays are not all of floats")
        try:
            changes = decode_body(body, _make_shapes(before))
        except CodecError as error:
            raise DataError(f"changes of {name!r:.60}: {error}") from None
        with np.errstate(over="ignore", invalid="ignore"):
            after = {key: Array((old + to_dense(changes[key])).astype(old.dtype)) for key, old in before.items()}
        return ArrayRecord({key: exact[key] if key in exact else after[key] for key in sent})


class ModelCodec:
    """Codec of messages to boards: their arrays of floats, rounded; of the last few names the last record is kept.

    Args:
        line: of the codec, which rounds each number by itself.
    """

    kind: ClassVar[str] = MODEL

    def __init__(self, line: str) -> None:
        self._line = line
        self._last: dict[str, tuple[Sequence[bytes], ArrayRecord, tuple[frozenset[str], bytes] | None]] = {}

    def encode(self, name: str, record: Mapping[str, Array]) -> tuple[frozenset[str], bytes] | None:
        """Returns which arrays of a record are in the body, and that; None where the record travels as it is."""
        return self._encode(name, record)[1]

    def round(self, content: RecordDict) -> RecordDict:
        """Returns a message's content as its board reads it."""
        made = {name: self._encode(name, record)[0] for name, record in content.array_records.items()}
        return RecordDict({**content, **made})

    def _encode(
        self, name: str, record: Mapping[str, Array]
    ) -> tuple[ArrayRecord, tuple[frozenset[str], bytes] | None]:
        data = [array.data for array in record.values()]
        if name in self._last:
            before, rounded, encoded = self._last[name] = self._last.pop(name)  # the newest name is the last
            is_same = len(data) == len(before) and all(map(operator.is_, data, before))
            if is_same and list(rounded) == list(record):  # a strategy sends the same arrays to every board
                return rounded, encoded
        encoded = self._encode_floats(record)
        rounded = ArrayRecord(dict(record))
        if encoded is not None:
            exact = {key: array for key, array in record.items() if key not in encoded[0]}
            rounded = decode_model([[key, a.dtype, a.shape] for key, a in record.items()], exact, encoded[1])
        self._last.pop(name, None)
        self._last[name] = data, rounded, encoded
        if len(self._last) > _MAX_NAMES:
            del self._last[next(iter(self._last))]
        return rounded, encoded

    def _encode_floats(self, record: Mapping[str, Array]) -> tuple[frozenset[str], bytes] | None:
        try:
            with np.errstate(over="ignore"):  # what is not finite is found below
                values = {key: array.astype(np.float32) for key, array in _read_floats(record).items()}
            if not values or not all(np.isfinite(array).all() for array in values.values()):
                return None
            body = make_codec(self._line, _make_shapes(values)).encode(values, derive_rng("app", "downlink"))
        except (CodecError, ValueError):  # beyond the codec's range, or no array after all
            return None
        size = sum(len(record[key].data) for key in values)
        return (frozenset(values), body) if len(body) < size <= _MAX_EXPANSION * len(body) else None


def decode_model(arrays: Sequence[Sequence[Any]], exact: Mapping[str, Array], body: bytes) -> ArrayRecord:
    """Returns a record of a message.

    Args:
        arrays: name, type and shape of each array, in order.
        exact: those that travelled as they are.
        body: all others.

    Raises:
        DataError: the body is not of them, or they are larger than such a body makes.
    """
    coded = {key: (np.dtype(kind), tuple(shape)) for key, kind, shape in arrays if key not in exact}
    for key, (kind, shape) in coded.items():
        if kind.name not in _FLOATS or not all(type(size) is int and size >= 0 for size in shape):
            raise DataError(f"a model's array {key!r:.60} of {kind.name:.20} and shape {shape!r:.60}")
    num_bytes = sum(math.prod(shape) * kind.itemsize for kind, shape in coded.values())
    if num_bytes > min(_MAX_EXPANSION * len(body), _MAX_MODEL_BYTES):
        raise DataError(f"a model of {num_bytes} bytes in a body of {len(body)}")
    try:
        values = decode_body(body, tuple(TensorSpec(name=key, shape=shape) for key, (_, shape) in coded.items()))
    except CodecError as error:
        raise DataError(f"a model: {error}") from None
    with np.errstate(over="ignore"):  # float16
        made = {key: Array(to_dense(values[key]).astype(kind)) for key, (kind, _) in coded.items()}
    return ArrayRecord({key: exact[key] if key in exact else made[key] for key, *_ in arrays})


def check_codec(line: str, content: RecordDict) -> bool:
    """Returns whether a message has arrays of floats, of which a codec takes the changes.

    Raises:
        ConfigError: a pattern of the codec matches none of them, so that no board would use it.
    """
    found: _Values = {}
    for record in content.array_records.values():
        with contextlib.suppress(ValueError):  # no array after all, which travels as it is
            found |= _read_floats(record)
    try:
        make_codec(line, _make_shapes(found))
    except CodecError as error:
        raise ConfigError(f"compression.layers: {error}") from None
    return bool(found)


def _read_floats(arrays: Mapping[str, Array]) -> _Values:
    """Returns those that a codec can take.

    Raises:
        ValueError: the data of one is no array.
    """
    return {key: array.numpy() for key, array in arrays.items() if array.stype == _NUMPY and array.dtype in _FLOATS}


def _is_alike(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _make_shapes(values: _Values) -> ModelSpec:
    return tuple(TensorSpec(name=key, shape=array.shape) for key, array in values.items())
