"""Stands in for the registry behind Flower's Fleet API: notes who asks, and refuses whom it is told to."""

from __future__ import annotations


class NotedCalls:
    """Attributes: `contacts` are signs of life, `calls` node, instance and stamp of each request."""

    def __init__(self) -> None:
        self.contacts: list[int] = []
        self.calls: list[tuple[int, str, str]] = []
        self.refused: dict[str, str] = {}
        self.now = "life.1"

    def record_contact(self, node_id: int) -> None:
        self.contacts.append(node_id)

    def record_request(self, node_id: int, instance: str, *, stamp: str, address: str) -> str | None:
        self.calls.append((node_id, instance, stamp))
        return self.refused.get(instance)

    def get_stamp(self, _node_id: int) -> str:
        return self.now
