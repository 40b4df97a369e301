"""Work loop: pulls instructions from Flower, executes them, caches and uploads the replies.

Replies are uploaded in a separate thread, while the next work is trained. A finished update is cached until the
coordinator reports it as used, and a repeated assignment is answered from the cache.
"""

from __future__ import annotations

import logging
import ssl
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from edgefl.core.types import Json
from edgefl.device.flower.reply_uploader import ReplyUploader
from edgefl.device.flower.supernode import ReplyContent, ReplyRejectedError, SuperNode
from edgefl.device.state_dir import DeviceStateDir
from edgefl.device.training.trainer import DeviceTrainer

log = logging.getLogger(__name__)

MAX_CACHED_REPLIES = 2
"""At most two assignments are outstanding per device, so no more finished updates can be requested again."""


class WorkLoop:
    """Work loop of the main thread; `list_held_assignments` and `get_log_context` by any.

    Args:
        state: has the key that signs requests; reloaded for each instruction.
        tls_context: verifies the coordinator.
        trainer: executes the work.
        clock: the coordinator's time in unix seconds.
        instance: of this agent process.
        on_work: called when there is work, before its execution.
        on_failure: called in another thread when a reply could not be sent; `uploader.check` then raises the error.

    Attributes:
        supernode: the connection to Flower.
        uploader: replies under way.
    """

    def __init__(  # noqa: PLR0913 one keyword per collaborator
        self,
        state: DeviceStateDir,
        *,
        tls_context: ssl.SSLContext,
        trainer: DeviceTrainer,
        clock: Callable[[], float],
        instance: str,
        on_work: Callable[[], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._state, self._trainer, self._on_work = state, trainer, on_work
        self._reply_cache: OrderedDict[str, tuple[Any, ReplyContent]] = OrderedDict()
        self._current: tuple[str, str] | None = None
        self.supernode = SuperNode(
            private_key_pem=state.key.read_bytes(),
            tls_context=tls_context,
            clock=clock,
            train=self._train,
            evaluate=trainer.evaluate,
            instance=instance,
        )
        self.uploader: ReplyUploader[tuple[str, Any]] = ReplyUploader(self._send_reply, on_failure)

    def run_once(self) -> bool:
        """Executes the next instruction; returns whether there was one.

        Raises:
            UnauthorisedError: the clock may have jumped; the next connect measures it again.
            NetworkError: the coordinator is unreachable.
        """
        instruction = self.supernode.pull()
        if instruction is None:
            return False
        self._on_work()
        self._state.reload()  # a shard may have been added since
        assignment = str(instruction.header.get("assignment"))
        for settled in instruction.header.get("settled", ()):
            self._reply_cache.pop(settled, None)
        self._current = str(instruction.header.get("run")), assignment
        version, cached_reply = self._reply_cache.get(assignment, (None, None))
        # Of another version it is other work: a coordinator restored from a backup reuses names.
        if cached_reply is not None and version == instruction.header.get("version"):
            reply = self.supernode.create_reply(instruction, cached_reply)
        else:
            reply = self.supernode.run_app(instruction)
        self._current = None
        del instruction  # frees its model before the upload
        self.uploader.add((assignment, reply))
        return True

    def list_held_assignments(self) -> tuple[str, ...]:
        """Returns the assignments of this device: finished, running or arriving."""
        current = self._trainer.current
        # Counts as held while its model arrives, else it would be sent again.
        incoming = self.supernode.incoming_assignment
        running = [current[1]] if current and current[1] else []
        return tuple(dict.fromkeys([*self._reply_cache, *running, *([incoming] if incoming else [])]))

    def get_log_context(self) -> tuple[str, str] | None:
        """Returns the run and assignment in progress."""
        current = self._trainer.current or self._current
        return (current[0], current[1]) if current is not None else None

    def _train(self, header: Json, body: bytes) -> ReplyContent:
        reply = self._trainer.train(header, body)
        _log_result(reply[0])
        if "error" not in reply[0] and "phase" not in header:
            self._reply_cache[str(header["assignment"])] = header.get("version"), reply
            while len(self._reply_cache) > MAX_CACHED_REPLIES:
                self._reply_cache.popitem(last=False)
        return reply

    def _send_reply(self, item: tuple[str, Any]) -> None:
        """Sends one reply; a rejected one is dropped."""
        assignment, reply = item
        try:
            self.supernode.push(reply)
        except ReplyRejectedError as error:
            log.info("the answer to %s is not wanted: %s", assignment, error)


def _log_result(header: Json) -> None:
    """Logs the result in one line; failures are logged elsewhere."""
    if isinstance(metrics := header.get("metrics"), dict):
        log.info(
            "%s: %s iterations, loss %.4g, %.3g s",
            header.get("assignment"), metrics.get("iterations"), _to_float(metrics.get("loss")),
            _to_float(metrics.get("compute_s")),
        )  # fmt: skip
    elif header.get("ready") is True:
        log.info("%s: ready", header.get("assignment"))


def _to_float(value: object) -> float:
    return value if isinstance(value, int | float) else float("nan")
