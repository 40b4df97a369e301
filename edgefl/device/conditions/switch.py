"""Switch by which somebody lets a board train: a topic of a broker, or a file such as of a GPIO line."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgefl.core.conditions import Switch
from edgefl.core.errors import ConfigError
from edgefl.device.collect.mqtt_source import MqttSource
from edgefl.device.collect.readings import Reading, parse_message_values, parse_value
from edgefl.device.collect.settings import MqttSection
from edgefl.device.hardware.board_reader import read_text

if TYPE_CHECKING:
    import paho.mqtt.client as mqtt

COLUMN = "state"
EARLY_S = 5.0
"""A broker may send what it has kept before it confirms the subscription."""
POLL_S = 0.02
MAX_MESSAGE_BYTES = 4096


class SwitchReader:
    """Reader of one switch, whose state is a number or on, off, true or false; not known while its broker is away.

    Args:
        switch: that is read.
        root: below which the file lies.
        wait_s: how long a broker may take to say the state before the first `read`.

    Raises:
        ConfigError: its topic, login or authority is none.
    """

    def __init__(self, switch: Switch, root: Path, *, wait_s: float = 0.0) -> None:
        self._path = root / switch.file.lstrip("/") if switch.file else None
        self._source = None if switch.file else _make_source(switch)
        self._newest: tuple[float, object] | None = None
        if self._source is not None:
            self._source.start()
            until_s = time.monotonic() + wait_s
            while self.read() is None and time.monotonic() < until_s:
                time.sleep(POLL_S)

    def read(self) -> bool | None:
        """Returns whether it is on; None where that is not known."""
        if self._path is not None:
            return _parse_state(read_text(self._path))
        assert self._source is not None
        for reading in self._source.read():
            self._newest = reading.time_s, reading.values[COLUMN]
        if self._newest is None or self._newest[0] < self._source.received_since_s - EARLY_S:
            return None
        return _parse_state(self._newest[1])

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


class _SwitchSource(MqttSource):
    """Source whose messages that cannot be read count as an unknown state: what was said before does not hold on."""

    def _on_message(self, client: Any, data: Any, message: mqtt.MQTTMessage) -> None:
        num_dropped = self._counts.total()
        super()._on_message(client, data, message)
        if self._counts.total() > num_dropped:
            self._unread.add(Reading(values={COLUMN: None}, time_s=self._clock()))

    def _add(self, topic: str, payload: bytes) -> None:
        values, _ = parse_message_values(self._paths.get(topic, ()), payload, self._texts)
        self._unread.add(Reading(values={COLUMN: None, **values}, time_s=self._clock()))


def _make_source(switch: Switch) -> MqttSource:
    section = MqttSection(
        host=switch.host, port=switch.port, login_file=switch.login_file, tls=switch.tls, ca_file=switch.ca_file,
        columns={COLUMN: switch.topic}, retained=True, max_message_bytes=MAX_MESSAGE_BYTES,
    )  # fmt: skip
    try:
        # Nobody sees the times: only their order counts, which a clock that is set would change.
        return _SwitchSource("switch", section, (), Counter(), clock=time.monotonic)
    except ConfigError as error:
        message = str(error).replace(f"sources.switch.columns.{COLUMN}", "conditions.switch.topic")
        raise ConfigError(message.replace("sources.switch", "conditions.switch")) from None


def _parse_state(value: object) -> bool | None:
    try:
        number = parse_value(value, is_text=False)
    except ValueError:
        return None
    return None if number is None else number != 0.0
