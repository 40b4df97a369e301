"""Messages between the parts of a Flower app's run and stock SuperNodes, which know nothing of edgefl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from edgefl.core.errors import DataError
from edgefl.core.protocol import JOB_LIMITS, JOB_LOG, parse_job_log
from edgefl.core.types import Json
from edgefl.flower.app_job import MAX_REASON_CHARS, format_label, format_metrics
from edgefl.flower.app_messages import decode_message, encode_message, split_envelope

MAX_TREE_OBJECTS, MAX_TREE_DEPTH = 20_000, 5
"""Of a reply: message, content, record, array, chunk."""
OVERHEAD_BYTES = 1024 * 1024
"""What the objects of a reply may have beside `job.max_part_bytes`: heads, and names."""
REPEATED_KEYS = ("assignment", "lineage", "model_sha256", "newest_record")
"""Of an instruction's header, in the reply, as a board's agent repeats them."""


@dataclass(slots=True, kw_only=True)
class StockInstruction:
    """A message that a stock SuperNode was sent.

    Attributes:
        repeated: of its header, what the reply repeats.
        label: what it asks for, such as `train in round 3`.
        max_bytes: of its reply.
        sent_s: when, in seconds of a monotonic clock.
    """

    repeated: Json
    label: str
    max_bytes: int
    sent_s: float
    _num_received: int = field(default=0)

    @classmethod
    def create(cls, header: Mapping[str, Any], part: Json, content: Any, sent_s: float) -> Self:
        """Returns the record of a message, of the instruction's header and the message's."""
        return cls(
            repeated={key: header[key] for key in REPEATED_KEYS if key in header},
            label=format_label(part, content),
            max_bytes=int(header[JOB_LIMITS]["max_part_bytes"]) + OVERHEAD_BYTES,
            sent_s=sent_s,
        )

    @property
    def assignment(self) -> str:
        return str(self.repeated["assignment"])

    def add_received(self, num_bytes: int) -> bool:
        """Counts bytes of the reply; returns whether they are still within the limit."""
        self._num_received += num_bytes
        return self._num_received <= self.max_bytes


def read_part(body: bytes) -> tuple[Json, Any]:
    """Returns header (`type`, `group`) and content of the message in a part of a Flower app's run.

    Raises:
        DataError: it is no such part.
    """
    _, message = split_envelope(body)
    header, content = decode_message(message)
    if content is None or not {"type", "group"} <= header.keys():
        raise DataError("a Flower message without content, type or group")
    return header, content


def encode_stock_reply(
    instruction: StockInstruction, content: Any, error: tuple[int, str] | None, *, elapsed_s: float
) -> tuple[Json, bytes]:
    """Returns header and body of a SuperNode's reply, as a board's would be.

    Args:
        instruction: that it answers.
        content: of the reply; None for an error.
        error: Flower's code and the reason; None where there is none.
        elapsed_s: since the message was sent.
    """
    code, reason = error or (0, "")
    line = f"{instruction.label}: {reason or (format_metrics(content) if content is not None else 'done')}"
    metrics = {"iterations": 1, "num_examples": 0, "loss": None, "compute_s": elapsed_s}
    header = {**instruction.repeated, "metrics": metrics, JOB_LOG: parse_job_log([line])}
    if error is not None:
        return header, encode_message({"error": code, "reason": reason[:MAX_REASON_CHARS]})
    return header, encode_message({}, content)
