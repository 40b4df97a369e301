"""Bridge to Home Assistant: boards and fleet by MQTT discovery, on a broker that is not the fleet's.

It only publishes. A switch that pauses a board would let everybody act who may write to that broker, without the role
of an operator.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.reasoncodes import ReasonCode

from edgefl.coordinator.fleet.presence import PRESENT_STATES
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.runs.run_metrics import ActiveRun, RunMetrics
from edgefl.core.config import HomeAssistantSettings
from edgefl.core.protocol import EVALUATOR_NAME, Heartbeat, is_slug
from edgefl.core.safe_text import escape_start
from edgefl.core.types import Json
from edgefl.system.home_assistant import OFFLINE, ONLINE, describe_device, make_discovery_id
from edgefl.system.retries import RateLimitedLog
from edgefl.system.server_access import KEEP_ALIVE_S, make_broker_client

log = logging.getLogger(__name__)

MAX_QUEUED = 10_000
"""Messages that wait for the broker's word; more are published by a later look."""
MAX_ANNOUNCED = 10_000
"""Earlier announcements that are remembered, to be taken back."""
MAX_STATE_CHARS = 200
CLOSE_TIMEOUT_S = 1.0
LAST_SEEN_STEP_S = 60.0
MODEL_CHARS = 12
_SENSOR, _BINARY_SENSOR = {"platform": "sensor"}, {"platform": "binary_sensor"}
_MEASUREMENT = {**_SENSOR, "state_class": "measurement"}
_DIAGNOSTIC = {"entity_category": "diagnostic"}
BOARD_ENTITIES: Mapping[str, Json] = {
    "present": {**_BINARY_SENSOR, "name": "Present", "device_class": "connectivity"},
    "training": {**_BINARY_SENSOR, "name": "Training", "device_class": "running"},
    "throttled": {**_BINARY_SENSOR, "name": "Throttled", "device_class": "problem"},
    "temperature": {
        **_MEASUREMENT,
        "name": "Temperature",
        "device_class": "temperature",
        "unit_of_measurement": "°C",
    },
    "disk_free": {
        **_MEASUREMENT,
        **_DIAGNOSTIC,
        "name": "Free disk",
        "device_class": "data_size",
        "unit_of_measurement": "MB",
    },
    "last_seen": {**_SENSOR, **_DIAGNOSTIC, "name": "Last seen", "device_class": "timestamp"},
    "model": {**_SENSOR, **_DIAGNOSTIC, "name": "Model"},
}
"""By the key of the board's state."""
FLEET_ENTITIES: Mapping[str, Json] = {
    "running": {**_BINARY_SENSOR, "name": "Run active", "device_class": "running"},
    "run": {**_SENSOR, "name": "Run"},
    "round": {**_MEASUREMENT, "name": "Round"},
    "version": {**_MEASUREMENT, "name": "Model version"},
    "accuracy": {**_MEASUREMENT, "name": "Accuracy"},
    "boards_present": {**_MEASUREMENT, "name": "Boards present"},
}


class HomeAssistantBridge:
    """Connection that publishes what has changed; it reconnects for ever.

    Args:
        settings: its host must be set.
        fleet: its name.
        registry: of the devices.
        run_metrics: of the active run.
        clock: Unix seconds.

    Raises:
        ConfigError: the login or the authority is none.
    """

    def __init__(
        self,
        settings: HomeAssistantSettings,
        *,
        fleet: str,
        registry: DeviceRegistry,
        run_metrics: RunMetrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings, self._fleet, self._clock = settings, fleet, clock
        self._registry, self._run_metrics = registry, run_metrics
        self._log = RateLimitedLog(log)
        self._id = make_discovery_id(settings.topic)
        self._lock = threading.Lock()
        self._published: dict[str, str] = {}
        self._announced: set[str] = set()
        self._client = make_broker_client("home_assistant", settings, self._id)
        self._client.will_set(self._available_topic, OFFLINE, qos=1, retain=True)
        self._client.max_queued_messages_set(MAX_QUEUED)
        self._client.on_connect, self._client.on_disconnect = self._on_connect, self._on_disconnect
        self._client.on_connect_fail, self._client.on_publish = self._on_connect_fail, self._on_publish
        self._client.on_message = self._on_message
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="home-assistant", daemon=True)

    def start(self) -> None:
        """Starts the thread that connects, and the one that looks at the fleet."""
        self._client.connect_async(*self._settings.address, keepalive=KEEP_ALIVE_S, clean_start=True)
        self._client.loop_start()
        self._thread.start()

    def stop(self) -> None:
        """Says that nothing is known any more, and disconnects."""
        self._stopping.set()
        self._thread.join()
        if self._client.is_connected():
            # The will is of a connection that breaks: this one ends orderly.
            message = self._client.publish(self._available_topic, OFFLINE, qos=1, retain=True)
            with contextlib.suppress(RuntimeError, ValueError):
                message.wait_for_publish(CLOSE_TIMEOUT_S)
        self._client.disconnect()
        self._client.loop_stop()

    @property
    def _available_topic(self) -> str:
        return f"{self._settings.topic}/available"

    def _run(self) -> None:
        while not self._stopping.wait(self._settings.every_s):
            try:
                self._update()
            except Exception:  # the boundary of the thread: one failed look must not stop the next
                log.exception("Home Assistant could not be told of the fleet")

    def _update(self) -> None:
        """Publishes what differs from what the broker has; an empty message takes back what is no longer there."""
        if not self._client.is_connected():
            return
        messages = dict(self._list_messages())
        with self._lock:
            former = {topic: text for topic, text in self._published.items() if topic in messages}
            gone = (self._published.keys() | self._announced) - messages.keys()
            self._published, self._announced = former, set()
        changed = {topic: text for topic, text in messages.items() if former.get(topic) != text}
        for topic, text in {**dict.fromkeys(sorted(gone), ""), **changed}.items():
            if self._client.publish(topic, text, qos=1, retain=True).rc != mqtt.MQTT_ERR_SUCCESS:
                with self._lock:  # another look tries again
                    self._announced |= gone
                return
            if text:
                with self._lock:
                    self._published[topic] = text

    def _list_messages(self) -> Iterator[tuple[str, str]]:
        """Yields topics and payloads: states first, so that an entity has one when it is announced."""
        rows = [row for row in self._registry.list_status_rows() if row["device_id"] != EVALUATOR_NAME]
        heartbeats, now = self._registry.list_heartbeats(), self._clock()
        runs, topic = self._run_metrics.list_active_runs(), self._settings.topic
        num_present = sum(row["presence"] in PRESENT_STATES for row in rows)
        yield self._available_topic, ONLINE
        yield f"{topic}/fleet", _dump(make_fleet_state(runs[0] if runs else None, num_present))
        yield self._make_announcement("fleet", FLEET_ENTITIES, f"{topic}/fleet", self._fleet, model="edgefl fleet")
        for row in rows:
            name = row["device_id"]
            yield f"{topic}/boards/{name}", _dump(make_board_state(row, heartbeats.get(name), now))
            yield self._make_announcement(
                f"board_{name}", BOARD_ENTITIES, f"{topic}/boards/{name}", name, via_device=f"{self._id}_fleet"
            )

    def _make_announcement(
        self, name: str, entities: Mapping[str, Json], state_topic: str, label: str, **device: str
    ) -> tuple[str, str]:
        """Returns topic and payload that announce a device with its entities."""
        identifier = f"{self._id}_{name}"
        components = {
            key: {**entity, "unique_id": f"{identifier}_{key}", "value_template": f"{{{{ value_json.{key} }}}}"}
            for key, entity in entities.items()
        }
        message = {
            **describe_device(identifier, label, **device),
            "availability_topic": self._available_topic,
            "state_topic": state_topic,
            "components": components,
        }
        return f"{self._settings.discovery_prefix}/device/{identifier}/config", _dump(message)

    def _on_connect(self, _client: Any, _data: Any, _flags: Any, reason: ReasonCode, _properties: Any) -> None:
        if reason.is_failure:
            self._log.warning("refused", "the broker of [home_assistant] refuses the coordinator: %s", reason)
            return
        log.info("Home Assistant's broker is reached at %s:%d", *self._settings.address)
        # The will may have been sent, and this may be another broker.
        with self._lock:
            self._published = {}
        # What was announced by an earlier coordinator, of boards that were removed since.
        self._client.subscribe(f"{self._settings.discovery_prefix}/device/+/config", qos=1)

    def _on_message(self, _client: Any, _data: Any, message: mqtt.MQTTMessage) -> None:
        """Remembers an announcement of this fleet's, so that it is taken back where its board is no longer there."""
        try:
            topic = message.topic
        except UnicodeDecodeError:  # an error in paho's thread would end it
            return
        start, end = f"{self._settings.discovery_prefix}/device/{self._id}_board_", "/config"
        board = topic.removeprefix(start).removesuffix(end)
        if not message.payload or not is_slug(board) or topic != f"{start}{board}{end}":
            return
        with self._lock:
            if len(self._announced) < MAX_ANNOUNCED:
                self._announced |= {topic, f"{self._settings.topic}/boards/{board}"}

    def _on_connect_fail(self, _client: Any, _data: Any) -> None:
        self._log.warning("away", "[home_assistant] cannot reach its broker at %s:%d", *self._settings.address)

    def _on_disconnect(self, _client: Any, _data: Any, _flags: Any, reason: ReasonCode, _properties: Any) -> None:
        if reason.is_failure:
            self._log.warning("lost", "[home_assistant] lost its broker (%s); connecting again", reason)

    def _on_publish(self, _client: Any, _data: Any, _number: int, reason: ReasonCode, _properties: Any) -> None:
        if reason.is_failure:
            self._log.warning(
                "denied",
                "the broker of [home_assistant] refuses a message (%s): its rules must let the login write below "
                "%s and %s",
                reason,
                self._settings.topic,
                self._settings.discovery_prefix,
            )


def make_board_state(row: Mapping[str, Any], heartbeat: Heartbeat | None, now: float) -> Json:
    """Returns a board's state by the keys of `BOARD_ENTITIES`; None for what is not known now.

    Args:
        row: of `DeviceRegistry.list_status_rows`.
        heartbeat: its last one.
        now: Unix seconds.
    """
    is_present = row["presence"] in PRESENT_STATES
    current = heartbeat if is_present else None
    seen = None if row["silent_s"] is None else (now - row["silent_s"]) // LAST_SEEN_STEP_S * LAST_SEEN_STEP_S
    return {
        "present": _format_switch(is_present),
        "training": _format_switch(current is not None and current.assignment is not None),
        "throttled": None
        if current is None or current.throttled is None
        else _format_switch(current.throttled != "ok"),
        "temperature": current and current.temperature_c,
        "disk_free": None if current is None or current.disk_free_bytes is None else current.disk_free_bytes // 10**6,
        "last_seen": None if seen is None else datetime.fromtimestamp(seen, UTC).isoformat(),
        "model": None if heartbeat is None or heartbeat.model is None else heartbeat.model[:MODEL_CHARS],
    }


def make_fleet_state(run: ActiveRun | None, num_present: int) -> Json:
    """Returns the fleet's state by the keys of `FLEET_ENTITIES`; None for what is not known now.

    Of several active runs, `run` is the one that has been active for longest.
    """
    return {
        "running": _format_switch(run is not None),
        "run": run and escape_start(run.name or run.run_id, MAX_STATE_CHARS),
        "round": run and run.round,
        "version": run and run.version,
        "accuracy": run and run.accuracy,
        "boards_present": num_present,
    }


def _format_switch(is_on: bool) -> str:
    return "ON" if is_on else "OFF"


def _dump(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)
