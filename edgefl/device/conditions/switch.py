"""Switch by which somebody lets a board train: a topic of a broker, a file, or a GPIO line."""

from __future__ import annotations

import errno
import itertools
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgefl.core.conditions import Switch
from edgefl.core.errors import ConfigError, TaskError
from edgefl.device.collect.mqtt_source import MqttSource
from edgefl.device.collect.readings import Reading, parse_message_values, parse_value
from edgefl.device.collect.settings import MqttSection
from edgefl.device.hardware.board_reader import read_text
from edgefl.tasks.registry import import_extra

if TYPE_CHECKING:
    import paho.mqtt.client as mqtt

COLUMN = "state"
EARLY_S = 5.0
"""A broker may send what it has kept before it confirms the subscription."""
POLL_S = 0.02
MAX_MESSAGE_BYTES = 4096
MAX_GPIO_TRIES = 5
"""Of a line that somebody has at the moment, such as a command of this board."""


class SwitchReader:
    """Reader of one switch, whose state is a number or on, off, true or false; not known while its broker is away.

    Args:
        switch: that is read.
        root: below which the file or the GPIO chip lies.
        wait_s: how long a broker may take to say the state before the first `read`.

    Raises:
        ConfigError: its topic, login or authority is none, or its GPIO line cannot be read.
    """

    def __init__(self, switch: Switch, root: Path, *, wait_s: float = 0.0) -> None:
        self._path = root / switch.file.lstrip("/") if switch.file else None
        self._line = _GpioLine(switch, root) if switch.gpio else None
        self._source = _make_source(switch) if switch.topic else None
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
        if self._line is not None:
            return self._line.read()
        assert self._source is not None
        for reading in self._source.read():
            self._newest = reading.time_s, reading.values[COLUMN]
        if self._newest is None or self._newest[0] < self._source.received_since_s - EARLY_S:
            return None
        return _parse_state(self._newest[1])

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


class _GpioLine:
    """Input line of a GPIO character device, which is taken for each reading: commands read it beside the agent.

    Raises:
        ConfigError: gpiod is not installed, or the line is not there, is in use, or may not be read.
    """

    def __init__(self, switch: Switch, root: Path) -> None:
        try:
            gpiod = import_extra("gpiod", "conditions.switch.gpio is read by gpiod")
        except TaskError as error:
            raise ConfigError(str(error)) from None
        chip, self._line = switch.gpio_line
        self._chip, self._gpiod, line = str(root / chip.lstrip("/")), gpiod, gpiod.line
        bias = getattr(line.Bias, switch.bias.replace("-", "_").upper())
        self._settings = {self._line: gpiod.LineSettings(direction=line.Direction.INPUT, bias=bias)}
        try:
            self._read()
        except (OSError, ValueError) as error:  # gpiod raises ValueError for what no line of the chip can be
            raise ConfigError(f"conditions.switch.gpio {switch.gpio}: {error}") from None

    def read(self) -> bool | None:
        """Returns whether the line is high; None where it cannot be read now."""
        try:
            return self._read()
        except (OSError, ValueError):
            return None

    def _read(self) -> bool:
        for num_tries in itertools.count(1):
            try:
                with self._gpiod.request_lines(self._chip, consumer="edgefl", config=self._settings) as request:
                    return bool(request.get_value(self._line) == self._gpiod.line.Value.ACTIVE)
            except OSError as error:
                if error.errno != errno.EBUSY or num_tries == MAX_GPIO_TRIES:
                    raise
                time.sleep(POLL_S)
        raise AssertionError


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
