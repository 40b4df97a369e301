"""Codec of the arrays in replies: what a ClientApp changed in those that it was sent.

Both ends have the message, so that the change alone travels. A record counts where its message has one of the same
name; of its arrays those of floats whose shape and type are the same, and all others travel as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from edgefl.compression.codec import Codec, decode_body, make_codec
from edgefl.compression.error_feedback import ErrorFeedback, has_error_feedback
from edgefl.compression.stages import to_dense
from edgefl.core.errors import CodecError, ConfigError, DataError
from edgefl.core.types import ModelSpec, TensorSpec, derive_rng

_FLOATS = frozenset({"float16", "float32", "float64"})
_NUMPY = "numpy.ndarray"
_OLDER_NAMES = {"fitres.parameters": "fitins.parameters"}
"""Records of replies of Flower's older interface, and of their messages."""
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
        with contextlib.suppress(CodecError, ValueError):
            feedback.restore({key: array.numpy() for key, array in kept.items()})
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
