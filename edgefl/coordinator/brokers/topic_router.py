"""Topic router: sessions, subscriptions, retained messages, and access rules. No input or output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from edgefl.coordinator.brokers.broker import MAX_RETAINED_BYTES, OnDenied, can_publish, can_subscribe, ignore_denied
from edgefl.coordinator.brokers.packets import MAX_QOS, SUBSCRIPTION_FAILED, PublishPacket

MAX_RETAINED_TOPICS = 10_000
"""Of one client."""
MAX_SUBSCRIPTIONS = 1000
"""Of one client."""

Value = TypeVar("Value")


class Subscriber(Protocol):
    """A client with a session."""

    identity: str

    def deliver(self, message: PublishPacket, qos: int, *, is_retained: bool) -> None:
        """Queues a message for the client."""

    def abort(self) -> None:
        """Cuts the connection; calls `TopicRouter.disconnect` with its will before it returns."""


class TopicRouter:
    """Passes messages to the sessions of a fleet. An identity has one session, which ends with its connection.

    `edgefl.coordinator.brokers.broker` has the access rules. Topics that begin with `$` need no rule of their own: no
    client may use them.
    """

    def __init__(self, fleet: str, on_denied: OnDenied = ignore_denied) -> None:
        self._fleet, self.on_denied = fleet, on_denied
        self._sessions: dict[str, Subscriber] = {}
        self._filters: dict[Subscriber, set[str]] = {}
        self._subscriptions = _TopicTree[dict[Subscriber, int]]()
        # Of each topic the publisher, towards whose limits it counts, and the message.
        self._retained = _TopicTree[tuple[str, PublishPacket]]()
        self._retained_topics: dict[str, set[str]] = {}
        self._retained_bytes: Counter[str] = Counter()
        self._revoked_names: frozenset[str] = frozenset()
        self._revoked_serials: frozenset[str] = frozenset()

    def revoke(self, names: Collection[str], serials: Collection[str]) -> None:
        """Ends the sessions of these identities, and drops their retained messages; see `Broker.revoke`."""
        self._revoked_names, self._revoked_serials = frozenset(names), frozenset(serials)
        for name in self._revoked_names:
            if name in self._sessions:
                self._sessions[name].abort()
            for topic in list(self._retained_topics.get(name, ())):
                self._remove_retained(topic)

    def is_revoked(self, identity: str, serial: str) -> bool:
        """Returns whether a client may not connect; `serial` is of its certificate, in hexadecimal."""
        return not identity or identity in self._revoked_names or serial in self._revoked_serials

    def connect(self, client: Subscriber) -> None:
        """Opens a session. An older one of the same identity ends first, and its will is published."""
        if (older := self._sessions.get(client.identity)) is not None:
            older.abort()
        self._sessions[client.identity], self._filters[client] = client, set()

    def disconnect(self, client: Subscriber, will: PublishPacket | None) -> None:
        """Closes a session with its subscriptions, and publishes its will unless the client was revoked."""
        del self._sessions[client.identity]
        for name in list(self._filters[client]):
            self.unsubscribe(client, name)
        del self._filters[client]
        if will is not None and client.identity not in self._revoked_names:
            self.publish(client.identity, will)

    def subscribe(self, client: Subscriber, name: str, qos: int) -> int:
        """Returns the QoS that is granted to a topic filter, or SUBSCRIPTION_FAILED."""
        filters = self._filters[client]
        is_full = len(filters) >= MAX_SUBSCRIPTIONS and name not in filters
        if is_full or not can_subscribe(self._fleet, client.identity, name):
            self.on_denied(client.identity, f"SUBSCRIBE to {name!r}")
            return SUBSCRIPTION_FAILED
        filters.add(name)
        granted_qos = min(qos, MAX_QOS)
        if (qos_by_client := self._subscriptions.get(name)) is None:
            self._subscriptions.put(name, {client: granted_qos})
        else:
            qos_by_client[client] = granted_qos
        return granted_qos

    def replay_retained(self, client: Subscriber, name: str, qos: int) -> None:
        """Delivers the retained messages that match a granted filter."""
        for _, message in self._retained.find_matching_topics(name):
            client.deliver(message, min(qos, message.qos), is_retained=True)

    def unsubscribe(self, client: Subscriber, name: str) -> None:
        qos_by_client = self._subscriptions.get(name) or {}
        if client in qos_by_client:
            self._filters[client].remove(name)
            del qos_by_client[client]
            if not qos_by_client:
                self._subscriptions.remove(name)

    def publish(self, identity: str, message: PublishPacket) -> None:
        """Delivers a message once to each client with a matching subscription, and retains it if flagged."""
        if not can_publish(self._fleet, identity, message.topic):
            self.on_denied(identity, f"PUBLISH to {message.topic!r}")
            return
        if message.is_retained:
            self._retain(identity, message)
        qos_by_client: dict[Subscriber, int] = {}  # of the filters that match [MQTT-3.3.5-1]
        for qos_of in self._subscriptions.find_matching_filters(message.topic):
            for client, qos in qos_of.items():
                qos_by_client[client] = max(qos, qos_by_client.get(client, 0))
        for client, qos in qos_by_client.items():
            client.deliver(message, min(qos, message.qos), is_retained=False)

    def _retain(self, owner: str, message: PublishPacket) -> None:
        """Retains a message in place of the previous one; an empty one clears it [MQTT-3.3.1-5, -10, -11]."""
        topic, previous = message.topic, self._retained.get(message.topic)
        if message.payload:
            topics, num_bytes = self._retained_topics.setdefault(owner, set()), self._retained_bytes[owner]
            if previous is not None and previous[0] == owner:
                num_bytes -= previous[1].num_bytes
            is_full = len(topics) >= MAX_RETAINED_TOPICS and topic not in topics
            if is_full or num_bytes + message.num_bytes > MAX_RETAINED_BYTES:
                action = f"RETAIN of {len(message.payload)} bytes at {topic!r}"
                self.on_denied(owner, f"{action}, beside {num_bytes} others in {len(topics)} topics")
                return
        self._remove_retained(topic)
        if message.payload:
            self._retained.put(topic, (owner, message))
            self._retained_topics[owner].add(topic)
            self._retained_bytes[owner] += message.num_bytes

    def _remove_retained(self, topic: str) -> None:
        if (retained := self._retained.get(topic)) is not None:
            owner, message = retained
            self._retained.remove(topic)
            self._retained_topics[owner].remove(topic)
            self._retained_bytes[owner] -= message.num_bytes


class _TopicTree(Generic[Value]):
    """Values by the levels of topics or of topic filters."""

    __slots__ = ("children", "value")

    def __init__(self) -> None:
        self.children: dict[str, _TopicTree[Value]] = {}
        self.value: Value | None = None

    def get(self, name: str) -> Value | None:
        node = self
        for level in name.split("/"):
            if level not in node.children:
                return None
            node = node.children[level]
        return node.value

    def put(self, name: str, value: Value) -> None:
        node = self
        for level in name.split("/"):
            node = node.children.setdefault(level, _TopicTree())
        node.value = value

    def remove(self, name: str) -> None:
        path = [(self, "")]
        for level in name.split("/"):
            path.append((path[-1][0].children[level], level))
        path[-1][0].value = None
        while len(path) > 1:
            node, level = path.pop()
            if node.children or node.value is not None:
                break
            del path[-1][0].children[level]

    def find_matching_filters(self, topic: str) -> Iterator[Value]:
        """Yields the values of the filters that match a topic."""
        nodes = [self]
        for level in topic.split("/"):
            yield from _values(node.children.get("#") for node in nodes)
            nodes = [child for node in nodes for key in (level, "+") if (child := node.children.get(key))]
        # The level above `#` matches as well [4.7.1.2].
        yield from _values(match for node in nodes for match in (node, node.children.get("#")))

    def find_matching_topics(self, name: str) -> Iterator[Value]:
        """Yields the values of the topics that match a filter."""
        nodes = [self]
        for level in name.split("/"):
            if level == "#":
                for node in nodes:  # it grows
                    nodes.extend(node.children.values())
                break
            if level == "+":
                nodes = [child for node in nodes for child in node.children.values()]
            else:
                nodes = [child for node in nodes if (child := node.children.get(level))]
        yield from _values(nodes)


def _values(nodes: Iterable[_TopicTree[Value] | None]) -> Iterator[Value]:
    return (node.value for node in nodes if node is not None and node.value is not None)
