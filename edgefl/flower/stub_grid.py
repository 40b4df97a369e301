"""Stub of Flower's `Grid` for a strategy's `configure_train`: node ids, and no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from edgefl.core.errors import StrategyError

MAX_QUERIES = 6
"""Flower's `sample_nodes` queries, sleeps and repeats without end; no node joins during its sleep here."""


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
