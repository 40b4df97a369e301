"""Publisher of answers to a broker, in topics that Home Assistant finds by itself.

`TOPIC/answer` holds the newest answer as JSON, `TOPIC/available` says `online` or `offline`: the latter also when the
collector stops, and as its last will when it dies. The client's id is one of the topic, so that a broker ends the
connection of a board that lost its power, and sends its will, before the next one counts. Entities are announced by
retained messages below the prefix of Home Assistant's MQTT discovery; empty ones take them back. Answers are not
retained, and none waits for a broker.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.reasoncodes import ReasonCode

from edgefl.core.errors import NetworkError
from edgefl.core.types import Json
from edgefl.device.collect.settings import AnswerSection
from edgefl.system.home_assistant import OFFLINE, ONLINE, describe_device, make_discovery_id
from edgefl.system.retries import RateLimitedLog
from edgefl.system.server_access import KEEP_ALIVE_S, make_broker_client

log = logging.getLogger(__name__)

MAX_VALUES = 8
"""Of an answer that are entities; the others stand in the message alone."""
MAX_OPTIONS = 100
"""Classes that an entity lists."""
MAX_QUEUED = 100
"""Messages that wait for the broker's word."""
REPEAT_S = 60.0
"""After which the availability is published again, as somebody else may have overwritten it."""
WITHDRAW_TIMEOUT_S, CLOSE_TIMEOUT_S = 10.0, 1.0


class AnswerPublisher:
    """Connection that publishes; it reconnects for ever.

    Args:
        section: of the collect file.
        monotonic: seconds; it does not jump.

    Raises:
        ConfigError: the login or the authority is none.
    """

    def __init__(self, section: AnswerSection, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._section, self._log, self._monotonic = section, RateLimitedLog(log), monotonic
        self._is_available, self._published_s = False, -math.inf
        self._announced: dict[str, str] | None = None
        self._client = make_broker_client("answer", section, make_discovery_id(section.topic))
        self._client.will_set(f"{section.topic}/available", OFFLINE, qos=1, retain=True)
        self._client.on_connect, self._client.on_disconnect = self._on_connect, self._on_disconnect
        self._client.on_connect_fail, self._client.on_publish = self._on_connect_fail, self._on_publish
        self._client.max_queued_messages_set(MAX_QUEUED)

    def start(self) -> None:
        """Starts the thread that connects."""
        self._client.connect_async(*self._section.address, keepalive=KEEP_ALIVE_S, clean_start=True)
        self._client.loop_start()

    def publish(self, answer: Json, classes: Sequence[str]) -> bool:
        """Publishes an answer with a `class` or `values`; returns whether the broker was there."""
        if not self._client.is_connected():
            return False
        self._announce(make_entities(self._section, classes, len(answer.get("values", ()))))
        self.set_available(is_available=True)
        self._client.publish(f"{self._section.topic}/answer", json.dumps(answer, ensure_ascii=False))
        return True

    def set_available(self, *, is_available: bool) -> None:
        """Says whether there are answers now, where that has changed or was last said a while ago."""
        if is_available != self._is_available or self._monotonic() - self._published_s >= REPEAT_S:
            self._is_available = is_available
            self._publish_availability()

    def close(self) -> None:
        """Says that there are no answers any more, and disconnects."""
        self._is_available = False
        # The will is of a connection that breaks: this one ends orderly.
        if (message := self._publish_availability()) is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                message.wait_for_publish(CLOSE_TIMEOUT_S)
        self._client.disconnect()
        self._client.loop_stop()

    def _announce(self, entities: dict[str, str]) -> None:
        if self._section.discovery and self._announced != entities:
            for topic in list_entity_topics(self._section):
                self._client.publish(topic, entities.get(topic, ""), qos=1, retain=True)
            self._announced = entities

    def _publish_availability(self) -> mqtt.MQTTMessageInfo | None:
        if not self._client.is_connected():
            return None  # it is said once there is a connection
        self._published_s = self._monotonic()
        text = ONLINE if self._is_available else OFFLINE
        return self._client.publish(f"{self._section.topic}/available", text, qos=1, retain=True)

    def _on_connect(self, _client: Any, _data: Any, _flags: Any, reason: ReasonCode, _properties: Any) -> None:
        if reason.is_failure:
            self._log.warning("refused", "the broker of [answer] refuses the collector: %s", reason)
            return
        log.info("answers go to the broker at %s:%d", *self._section.address)
        # The will may have been sent, and this may be another broker.
        self._announced = None
        self._publish_availability()

    def _on_connect_fail(self, _client: Any, _data: Any) -> None:
        self._log.warning("away", "[answer] cannot reach its broker at %s:%d", *self._section.address)

    def _on_disconnect(self, _client: Any, _data: Any, _flags: Any, reason: ReasonCode, _properties: Any) -> None:
        if reason.is_failure:
            self._log.warning("lost", "[answer] lost its broker (%s); connecting again", reason)

    def _on_publish(self, _client: Any, _data: Any, _number: int, reason: ReasonCode, _properties: Any) -> None:
        if reason.is_failure:
            self._log.warning(
                "denied", "the broker of [answer] refuses a message (%s): %s; then start the collector again", reason,
                _format_rules(self._section),
            )  # fmt: skip


def make_entities(section: AnswerSection, classes: Sequence[str], num_values: int) -> dict[str, str]:
    """Returns the entities of answers as Home Assistant's discovery describes sensors, by the topic of each."""
    shared: Json = {
        "state_topic": f"{section.topic}/answer",
        "availability_topic": f"{section.topic}/available",
        **describe_device(make_discovery_id(section.topic), section.name or section.topic),
    }
    found = dict(zip(list_entity_topics(section), _list_sensors(section, classes, num_values), strict=True))
    return {
        topic: json.dumps({**shared, **sensor, "unique_id": topic.split("/")[-2]}, ensure_ascii=False)
        for topic, sensor in found.items()
        if sensor
    }


def list_entity_topics(section: AnswerSection) -> list[str]:
    """Returns the topics in which entities are announced, or were by an earlier model."""
    names = ("class", "probability", *(f"value_{number}" for number in range(1, MAX_VALUES + 1)))
    return [f"{section.discovery}/sensor/{make_discovery_id(section.topic)}_{name}/config" for name in names]


def _list_sensors(section: AnswerSection, classes: Sequence[str], num_values: int) -> Iterator[Json]:
    """Yields a sensor for each of the topics; an empty one where there is none now."""
    is_of_classes = not num_values
    known = {"device_class": "enum", "options": list(classes)} if 0 < len(classes) <= MAX_OPTIONS else {}
    attributes = {"json_attributes_topic": f"{section.topic}/answer"}
    sensor = {"name": "Class", "value_template": "{{ value_json['class'] }}", **known, **attributes}
    yield sensor if is_of_classes else {}
    percent = {"unit_of_measurement": "%", "state_class": "measurement"}
    template = "{{ (value_json.probability * 100) | round(1) }}"
    yield {"name": "Probability", "value_template": template, **percent} if is_of_classes else {}
    for place in range(MAX_VALUES):
        name = "Value" if num_values == 1 else f"Value {place + 1}"
        template = f"{{{{ value_json['values'][{place}] }}}}"
        yield {"name": name, "value_template": template, "state_class": "measurement"} if place < num_values else {}


def _format_rules(section: AnswerSection) -> str:
    prefix = f" and {section.discovery}" if section.discovery else ""
    return f"its rules must let the login write below {section.topic}{prefix}"


def withdraw_entities(section: AnswerSection) -> None:
    """Takes back what was announced and retained; returns when the broker has it.

    Raises:
        ConfigError: the login or the authority is none.
        NetworkError: the broker cannot be reached, or refuses the collector or a message.
    """
    client, refusals = make_broker_client("answer", section, make_discovery_id(section.topic)), list[ReasonCode]()

    def on_publish(_client: Any, _data: Any, _number: int, reason: ReasonCode, _properties: Any) -> None:
        if reason.is_failure:
            refusals.append(reason)

    client.on_publish = on_publish
    topics = [f"{section.topic}/available", *(list_entity_topics(section) if section.discovery else ())]
    host, port = section.address
    try:
        client.connect(host, port, keepalive=KEEP_ALIVE_S, clean_start=True)
        client.loop_start()
        sent = [client.publish(topic, "", qos=1, retain=True) for topic in topics]
        deadline_s = time.monotonic() + WITHDRAW_TIMEOUT_S
        for one in sent:
            one.wait_for_publish(max(0.0, deadline_s - time.monotonic()))
        if not all(one.is_published() for one in sent):
            raise NetworkError(f"the broker of [answer] at {host}:{port} does not take it; check its login and rules")
        if refusals:
            raise NetworkError(
                f"the broker of [answer] at {host}:{port} refuses {len(refusals)} of {len(topics)} messages "
                f"({refusals[0]}): {_format_rules(section)}"
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise NetworkError(f"the broker of [answer] at {host}:{port} cannot be reached: {error}") from None
    finally:
        client.disconnect()
        client.loop_stop()
