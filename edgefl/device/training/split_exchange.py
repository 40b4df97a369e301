"""Exchange of a split network's batches with the coordinator, over HTTPS, signed by this device."""

from __future__ import annotations

import logging
import struct
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from urllib.parse import urlencode

import numpy as np
from numpy.random import Generator

from edgefl.compression.split_bodies import BatchCodec
from edgefl.core.errors import (
    CodecError,
    DataError,
    NetworkError,
    NotAllowedError,
    NotFoundError,
    SplitSessionError,
    TaskError,
    UsageError,
)
from edgefl.core.protocol import MAX_SPLIT_BYTES, SPLIT_LOSS_BYTES, SPLIT_PATH, error_from_code, load_json
from edgefl.core.settings import from_mapping
from edgefl.core.types import Array
from edgefl.device.rollouts.download import DownloadSource
from edgefl.system.https_client import KeptConnection
from edgefl.system.retries import Backoff, RateLimitedLog
from edgefl.tasks.learners.torch_split import compute_loss_gradient

if TYPE_CHECKING:
    from edgefl.core.config import SplitSection

log = logging.getLogger(__name__)

TIMEOUT_S = 120.0
"""A batch waits for those of other boards at the coordinator."""
UNKNOWN_S = 60.0
"""Time within which a coordinator that came back goes on with its runs; then an assignment that it does not know is
over."""
AWAY_S = 1800.0
"""Time without a coordinator after which the assignment fails, and the agent looks for it at other addresses."""
_LOSS = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Where the network of an instruction is cut, and the number of its outputs."""

    section: SplitSection
    num_outputs: int

    @classmethod
    def parse(cls, header: object) -> Self | None:
        """Returns the plan in an instruction's header; None where there is none.

        Raises:
            ConfigError, DataError: it makes no sense.
        """
        if header is None:
            return None
        from edgefl.core.config import SplitSection  # noqa: PLC0415 a device without it saves its memory

        if not isinstance(header, Mapping):
            raise DataError("the instruction's split must be a table")
        values = dict(header)
        num_outputs = values.pop("num_outputs", None)
        section = from_mapping(SplitSection, values, "split")
        if section.after is None or not isinstance(num_outputs, int) or num_outputs < 1:
            raise DataError(
                f"the instruction's split makes no sense: after {section.after!r}, {num_outputs!r} outputs"
            )
        return cls(section, num_outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeLink:
    """How batches reach the coordinator: its address and our signature, and what to do while it is away.

    `check_waiting` is called every so often, and raises where the work is no longer wanted.
    """

    get_source: Callable[[], DownloadSource]
    check_waiting: Callable[[], None]


class CoordinatorExchange:
    """Implements `Exchange`: one session of an assignment, from its first batch on.

    Args:
        plan: of the instruction.
        assignment_id: on the wire.
        rng: of the codec.
        link: to the coordinator.
    """

    def __init__(self, plan: SplitPlan, *, assignment_id: str, rng: Generator, link: ExchangeLink) -> None:
        self._section = plan.section
        self._codecs: tuple[BatchCodec, BatchCodec] | None = None
        self._outputs = BatchCodec("dense", (plan.num_outputs,))
        self._assignment_id, self._rng, self._link = assignment_id, rng, link
        self.session = uuid.uuid4().hex
        self._number = 0
        self._connection: KeptConnection | None = None
        self._log = RateLimitedLog(log)

    def __call__(self, activations: Array, labels: Array) -> tuple[float, Array]:
        """Returns loss and gradient; raises `SplitSessionError` where the assignment must begin again."""
        shape = activations.shape[1:]
        up, down = self._codecs = self._codecs or (
            BatchCodec(self._section.up, shape),
            BatchCodec(self._section.down, shape),
        )
        num_examples, body = len(activations), up.encode(activations, self._rng)
        if self._section.labels == "coordinator":
            answer = self._post(np.asarray(labels).astype("<i4").tobytes() + body, num_examples)
            if len(answer) <= SPLIT_LOSS_BYTES:
                raise CodecError("the coordinator's answer to a batch is cut off")
            loss = float(_LOSS.unpack(answer[:SPLIT_LOSS_BYTES])[0])
            return loss, down.decode(answer[SPLIT_LOSS_BYTES:], num_examples)
        outputs = self._outputs.decode(self._post(body, num_examples), num_examples)
        loss, output_gradient = compute_loss_gradient(outputs, labels)
        answer = self._post(self._outputs.encode(output_gradient, self._rng), num_examples)
        return loss, down.decode(answer, num_examples)

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _post(self, body: bytes, num_examples: int) -> bytes:
        """Returns the answer to the next request; sent again until there is one, and counted once there.

        Raises:
            SplitSessionError: the session is lost.
            TaskError: the coordinator is away for too long, or has no such assignment.
            EdgeflError: it refuses the batch.
        """
        query = {
            "assignment": self._assignment_id,
            "session": self.session,
            "number": self._number,
            "examples": num_examples,
        }
        path = f"{SPLIT_PATH}?{urlencode(query)}"
        backoff, started_s = Backoff(initial_s=0.1, max_s=3.0), time.monotonic()
        unknown_since_s: float | None = None
        while True:
            try:
                answer = self._send(path, body)
            except SplitSessionError:
                raise
            except (NotFoundError, UsageError, NotAllowedError) as error:  # as one says that has just started
                unknown_since_s = time.monotonic() if unknown_since_s is None else unknown_since_s
                if time.monotonic() - unknown_since_s > UNKNOWN_S:
                    raise TaskError(f"the coordinator takes no batches of this assignment: {error}") from None
            except NetworkError as error:
                unknown_since_s = None
                self.close()
                self._log.warning("away", "the rest of the network cannot be reached: %s; trying again", error)
                if time.monotonic() - started_s > AWAY_S:
                    raise TaskError(f"the rest of the network was away for {AWAY_S:.0f} s: {error}") from None
            else:
                self._number += 1
                return answer
            self._link.check_waiting()
            time.sleep(backoff.next_s())

    def _send(self, path: str, body: bytes) -> bytes:
        source = self._link.get_source()
        if self._connection is None or self._connection.address != source.address:
            self.close()
            self._connection = KeptConnection(source.address, source.tls_context, timeout_s=TIMEOUT_S)
        status, answer = self._connection.request(
            "POST",
            path,
            body=body,
            headers={"Content-Type": "application/octet-stream", **source.sign("POST", path, body)},
            max_bytes=MAX_SPLIT_BYTES,
        )
        if status == 200:
            return answer
        if status == 422:
            raise TaskError("the coordinator does not understand a batch of this edgefl: update the older of both")
        value = load_json(answer)
        raise error_from_code(str(value.get("error")), str(value.get("message", f"it answered {status}")))
