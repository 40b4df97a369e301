"""Isolation of a Flower strategy: a signing identity, the random generators, and a `Grid` without a network.

The only module here that uses a private module of Flower, and the only one that seeds the global generators, so that
the same seed gives the same run.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore.task_identity import TaskIdentity

from edgefl.core.errors import StrategyError

PLACEHOLDER_ID = 1
"""Messages of a strategy in this process never leave it; any number will do."""
MAX_QUERIES = 6
"""Flower's `sample_nodes` queries, sleeps and repeats without end; no node joins during its sleep here."""


def ensure_identity() -> None:
    """Makes `flwr.app.Message` usable in this process; an existing ServerApp or ClientApp identity stays."""
    for name in ("run_id", "task_id", "node_id"):
        try:
            getattr(TaskIdentity, name)
        except RuntimeError:
            setattr(TaskIdentity, name, PLACEHOLDER_ID)


@contextmanager
def seed_global_generators(seed: int) -> Iterator[None]:
    """Seeds the global generators for the block and restores them afterwards."""
    # A thread that draws meanwhile gets predictable numbers: secrets never come from these generators.
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 Flower's strategies use it
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 likewise
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002 likewise


class TooFewNodesError(Exception):
    """The strategy waits for more nodes than are idle."""


class StubGrid(Grid):
    """Grid that holds the ids of the nodes that may be asked now."""

    def __init__(self, node_ids: Sequence[int]) -> None:
        self._node_ids, self._num_queries = node_ids, 0

    def has_enough_for(self, strategy: Strategy) -> bool:
        """Returns whether a strategy with the usual settings would proceed without waiting for nodes."""
        settings: Any = strategy
        sample = max(
            int(len(self._node_ids) * getattr(settings, "fraction_train", 0.0)),
            getattr(settings, "min_train_nodes", 1),
        )
        return len(self._node_ids) >= max(sample, getattr(settings, "min_available_nodes", 1))

    def get_node_ids(self) -> Iterable[int]:
        self._num_queries += 1
        if self._num_queries > MAX_QUERIES:
            raise TooFewNodesError
        return list(self._node_ids)

    @property
    def run(self) -> Any:
        _reject("run")

    def set_run(self, run: Any) -> None:  # noqa: ARG002 Grid's
        _reject("set_run")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:  # noqa: ARG002 Grid's
        _reject("push_messages")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:  # noqa: ARG002 Grid's
        _reject("pull_messages")

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:  # noqa: ARG002 Grid's
        _reject("send_and_receive")


def _reject(method: str) -> NoReturn:
    raise StrategyError(f"configure_train calls grid.{method}; here it only says whom to ask, edgefl does the rest")
