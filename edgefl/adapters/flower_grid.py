"""The `Grid` that a Flower strategy sees in its `configure_train`: node ids, and nothing else of the network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from edgefl.errors import StrategyError

MAX_QUESTIONS = 6
"""Flower's own `sample_nodes` asks, sleeps a second and asks again without end; nobody comes while it sleeps here."""


class TooFewNodesError(Exception):
    """The strategy waits for more nodes than are idle."""


class IdleGrid(Grid):
    """Knows the ids of the nodes that may be asked now."""

    def __init__(self, node_ids: Sequence[int]) -> None:
        self._node_ids, self._questions = node_ids, 0

    def has_enough_for(self, strategy: Strategy) -> bool:
        """Returns whether a strategy with the usual settings would go on at once instead of waiting for nodes."""
        settings: Any = strategy
        sample = max(
            int(len(self._node_ids) * getattr(settings, "fraction_train", 0.0)),
            getattr(settings, "min_train_nodes", 1),
        )
        return len(self._node_ids) >= max(sample, getattr(settings, "min_available_nodes", 1))

    def get_node_ids(self) -> Iterable[int]:
        self._questions += 1
        if self._questions > MAX_QUESTIONS:
            raise TooFewNodesError
        return list(self._node_ids)

    @property
    def run(self) -> Any:
        _refuse("run")

    def set_run(self, run: Any) -> None:  # noqa: ARG002 Grid's
        _refuse("set_run")

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
        _refuse("push_messages")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:  # noqa: ARG002 Grid's
        _refuse("pull_messages")

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:  # noqa: ARG002 Grid's
        _refuse("send_and_receive")


def _refuse(method: str) -> NoReturn:
    raise StrategyError(f"configure_train calls grid.{method}; here it only says whom to ask, edgefl does the rest")
