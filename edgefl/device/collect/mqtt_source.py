"""Source `mqtt`: values in the messages of a broker, which need not be the fleet's.

The broker is asked for no message above a size (MQTT 5), messages above a rate are left out, and of messages that the
collector has not read yet the newest stay. What is left out is counted.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from edgefl.core.errors import ConfigError
from edgefl.core.types import Scalar
from edgefl.device.collect.readings import Counts, Reading, UnreadReadings, parse_message_values, parse_pointer
from edgefl.device.collect.settings import MqttSection
from edgefl.system.retries import RateLimitedLog
from edgefl.system.server_access import KEEP_ALIVE_S, make_broker_client

log = logging.getLogger(__name__)

MAX_TOPIC_BYTES = 65_535
PACKET_OVERHEAD_BYTES = 128 + MAX_TOPIC_BYTES
"""Of an MQTT packet beside its payload, at most."""

ColumnPaths = Mapping[str, Sequence[tuple[str, tuple[str, ...]]]]
"""By topic, each column and the keys that lead to its value."""


class MqttSource:
    """Subscription that reconnects for ever.

    Args:
        name: of the source, for counts and the log.
        section: its settings.
        texts: which of its columns hold texts.
        counts: what is left out is added to it.
        clock: seconds since 1970; it may jump.
        monotonic: seconds; it does not.

    Raises:
        ConfigError: a topic, a pointer, the login or the authority is none.
    """

    def __init__(
        self,
        name: str,
        section: MqttSection,
        texts: Sequence[str],
        counts: Counts,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._section, self._texts, self._counts, self._clock = name, section, set(texts), counts, clock
        self._monotonic = monotonic
        self._paths = parse_columns(section.columns, f"sources.{name}.columns")
        self.columns = tuple(section.columns)
        self._unread = UnreadReadings(name, counts)
        self._second, self._num_in_second = 0, 0
        self._log = RateLimitedLog(log)
        self._subscribed_s = math.inf
        self._client = self._create_client()

    @property
    def received_since_s(self) -> float:
        """Returns since when there is a subscription, by the clock of now; infinite while there is none.

        That is while the broker is away or refuses a topic.
        """
        return self._clock() - self._monotonic() + self._subscribed_s

    def start(self) -> None:
        """Starts the thread that connects, and reconnects whenever it breaks."""
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.MaximumPacketSize = self._section.max_message_bytes + PACKET_OVERHEAD_BYTES
        self._client.connect_async(
            *self._section.address, keepalive=KEEP_ALIVE_S, clean_start=True, properties=properties
        )
        self._client.loop_start()

    def read(self) -> list[Reading]:
        """Returns what came since the last call."""
        return self._unread.take()

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def _create_client(self) -> mqtt.Client:
        client = make_broker_client(f"sources.{self._name}", self._section)
        client.on_connect, client.on_disconnect = self._on_connect, self._on_disconnect
        client.on_connect_fail, client.on_subscribe = self._on_connect_fail, self._on_subscribe
        client.on_message = self._on_message
        return client

    def _on_connect(self, client: mqtt.Client, _data: Any, _flags: Any, reason: ReasonCode, _properties: Any) -> None:
        if reason.is_failure:
            self._log.warning("refused", "the broker of source %s refuses the connection: %s", self._name, reason)
            return
        log.info("source %s is connected to its broker", self._name)
        # Of a value that is lost in a broken connection the next one is as good: without acknowledgements.
        client.subscribe([(topic, 0) for topic in self._paths])

    def _on_connect_fail(self, _client: mqtt.Client, _data: Any) -> None:
        host, port = self._section.address
        self._log.warning("away", "source %s cannot reach its broker at %s:%d", self._name, host, port)

    def _on_subscribe(
        self, _client: Any, _data: Any, _number: int, reasons: Sequence[ReasonCode], _properties: Any
    ) -> None:
        is_refused = any(reason.is_failure for reason in reasons)
        self._subscribed_s = math.inf if is_refused else self._monotonic()
        if is_refused:
            self._log.warning("deaf", "the broker of source %s refuses a topic; check its rules", self._name)

    def _on_disconnect(self, _client: Any, _data: Any, _flags: Any, reason: ReasonCode, _properties: Any) -> None:
        self._subscribed_s = math.inf
        if reason.is_failure:
            self._log.warning("lost", "source %s lost its broker (%s); connecting again", self._name, reason)

    def _on_message(self, _client: Any, _data: Any, message: mqtt.MQTTMessage) -> None:
        if message.retain and not self._section.retained:
            self._counts[f"{self._name}.retained"] += 1
        elif len(message.payload) > self._section.max_message_bytes:
            self._counts[f"{self._name}.too_large"] += 1
        elif self._is_too_fast():
            self._counts[f"{self._name}.too_fast"] += 1
        else:
            self._add(message.topic, bytes(message.payload))

    def _add(self, topic: str, payload: bytes) -> None:
        values, num_refused = parse_message_values(self._paths.get(topic, ()), payload, self._texts)
        if num_refused:
            self._counts[f"{self._name}.refused"] += num_refused
        if values:
            self._unread.add(Reading(values=values, time_s=self._clock()))

    def _is_too_fast(self) -> bool:
        second = int(self._clock())
        self._num_in_second = self._num_in_second + 1 if second == self._second else 1
        self._second = second
        return self._num_in_second > self._section.max_per_s


def parse_columns(columns: Mapping[str, Scalar], path: str) -> ColumnPaths:
    """Returns the columns by topic, of texts such as `TOPIC` and `TOPIC#/KEY/KEY`.

    Raises:
        ConfigError: one of them is none; `path` is the setting's.
    """
    paths: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for column, text in columns.items():
        topic, _, pointer = str(text).partition("#")
        if not topic or "+" in topic or "\0" in topic or len(topic.encode()) > MAX_TOPIC_BYTES:
            raise ConfigError(
                f"{path}.{column:.80} must be TOPIC or TOPIC#/KEY/KEY without wildcards, got {text!r:.120}"
            )
        try:
            paths.setdefault(topic, []).append((column, parse_pointer(pointer)))
        except ValueError as error:
            raise ConfigError(f"{path}.{column:.80}: {error}") from None
    return paths
