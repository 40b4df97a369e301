from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
import pytest
from device.collect.test_collector import _mosquitto
from jsonschema import Draft202012Validator
from paho.mqtt.enums import CallbackAPIVersion
from requirements import needs
from small_fleet import eventually

from edgefl.coordinator.directory import StartOptions, change_addresses, init_directory, load_directory
from edgefl.coordinator.fleet.presence import PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.monitoring.home_assistant import HomeAssistantBridge
from edgefl.coordinator.runs.history_writer import HistoryRows
from edgefl.coordinator.runs.run_metrics import RunMetrics
from edgefl.coordinator.service import Coordinator
from edgefl.core.config import HomeAssistantSettings
from edgefl.core.errors import ConfigError
from edgefl.core.protocol import Heartbeat, StatusMessage
from edgefl.core.settings import from_mapping
from edgefl.engine.assembly.build import build_run
from edgefl.simulation.local_fleet import find_free_port
from edgefl.storage.repositories.records import RunRecord, RunStatus

NOW = 1_800_000_030.0
TEXT = {"type": "string", "minLength": 1}
ENTITY = {
    "type": "object",
    "required": ["platform", "unique_id", "value_template", "name"],
    "additionalProperties": False,
    "properties": {
        "platform": {"enum": ["sensor", "binary_sensor"]},
        "device_class": {
            "enum": ["connectivity", "running", "problem", "temperature", "data_size", "timestamp"],
        },
        "state_class": {"const": "measurement"},
        "entity_category": {"const": "diagnostic"},
        "unit_of_measurement": {"enum": ["°C", "MB"]},
        **dict.fromkeys(("unique_id", "value_template", "name"), TEXT),
    },
    "if": {"properties": {"platform": {"const": "binary_sensor"}}},
    "then": {"not": {"anyOf": [{"required": ["state_class"]}, {"required": ["unit_of_measurement"]}]}},
}
DISCOVERY = Draft202012Validator(
    {
        "type": "object",
        "required": ["device", "origin", "components"],
        "additionalProperties": False,
        "properties": {
            "device": {
                "type": "object",
                "required": ["identifiers"],
                "additionalProperties": False,
                "properties": {
                    "identifiers": {"type": "array", "items": TEXT, "minItems": 1},
                    **dict.fromkeys(("name", "manufacturer", "model", "sw_version", "via_device"), TEXT),
                },
            },
            "origin": {
                "type": "object",
                "required": ["name"],
                "additionalProperties": False,
                "properties": dict.fromkeys(("name", "sw_version", "support_url"), TEXT),
            },
            "components": {"type": "object", "additionalProperties": ENTITY, "minProperties": 1},
            **dict.fromkeys(("state_topic", "availability_topic"), TEXT),
        },
    }
)
"""What Home Assistant's MQTT integration takes as discovery of a device, as far as it is used."""


class Site:
    """A fleet in memory, the bridge, and what a listener of the broker has of it."""

    def __init__(self, port: int, topic: str = "edgefl") -> None:
        self.now_s = 1000.0
        self.registry = DeviceRegistry(PresenceTracker(heartbeat_s=5.0), lambda: self.now_s)
        self.registry.record_broker_link(connected=True)
        self.meter = RunMetrics(clock=lambda: self.now_s)
        settings = HomeAssistantSettings(host="127.0.0.1", port=port, every_s=0.1, topic=topic)
        self.bridge = HomeAssistantBridge(
            settings, fleet="lab", registry=self.registry, run_metrics=self.meter, clock=lambda: NOW
        )

    def add(self, *names: str) -> None:
        for name in names:
            self.registry.add(name, node_id=hash(name), role="trainer", groups=(), examples={})

    def beat(self, name: str, number: int = 1, **vitals: object) -> None:
        self.registry.record_status(name, StatusMessage(state="online", boot_id="b", session_no=1))
        self.registry.record_heartbeat(
            name,
            Heartbeat(seq=number, session_no=1, uptime_s=5.0, **vitals),  # type: ignore[arg-type]  # by name
        )


@contextmanager
def listener(port: int) -> Iterator[dict[str, str]]:
    """Gives what the broker keeps, by topic; a topic that is taken back is gone."""
    kept: dict[str, str] = {}
    client = mqtt.Client(CallbackAPIVersion.VERSION2)

    def on_message(_client: object, _data: object, message: mqtt.MQTTMessage) -> None:
        if message.payload:
            kept[message.topic] = message.payload.decode()
        else:
            kept.pop(message.topic, None)

    def is_connected() -> bool:
        try:
            return client.connect("127.0.0.1", port) == mqtt.MQTT_ERR_SUCCESS
        except OSError:
            return False

    client.on_message = on_message
    client.on_connect = lambda *_: client.subscribe("#", qos=1)
    eventually(is_connected)
    client.loop_start()
    yield kept
    client.disconnect()
    client.loop_stop()


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    with _mosquitto(tmp_path) as opened:
        yield opened


@pytest.fixture
def kept(port: int) -> Iterator[dict[str, str]]:
    with listener(port) as found:
        yield found


def announcements(kept: dict[str, str]) -> dict[str, Any]:
    found = (json.loads(text) for topic, text in kept.items() if topic.startswith("homeassistant/device/"))
    return {message["device"]["name"]: message for message in found}


@needs("mosquitto")
def test_boards_and_fleet_are_announced_as_home_assistant_takes_it(port: int, kept: dict[str, str]) -> None:
    site = Site(port)
    site.add("pi-1", "pi-2")
    site.bridge.start()
    try:
        eventually(lambda: announcements(kept).keys() == {"lab", "pi-1", "pi-2"})
        found = announcements(kept)
        for message in found.values():
            DISCOVERY.validate(message)
            assert message["availability_topic"] == "edgefl/available"
            # Each template finds its key in the state.
            state = json.loads(kept[message["state_topic"]])
            assert {each["value_template"] for each in message["components"].values()} == {
                f"{{{{ value_json.{key} }}}}" for key in state
            }
        ids = [each["unique_id"] for message in found.values() for each in message["components"].values()]
        assert len(ids) == len(set(ids))
        (fleet,) = found["lab"]["device"]["identifiers"]
        assert found["pi-1"]["device"]["via_device"] == fleet
        topics = [topic for topic in kept if topic.endswith("/config")]
        assert all(len(topic.split("/")) == 4 for topic in topics)
        assert kept["edgefl/available"] == "online"
    finally:
        site.bridge.stop()
    eventually(lambda: kept["edgefl/available"] == "offline")


@needs("mosquitto")
def test_states_follow_boards_and_run(port: int, kept: dict[str, str]) -> None:
    site = Site(port)
    site.add("pi-1")
    site.bridge.start()
    try:

        def state(name: str) -> Any:
            return json.loads(kept.get(f"edgefl/{name}", "{}"))

        eventually(lambda: state("boards/pi-1").get("present") == "OFF")
        assert state("boards/pi-1")["last_seen"] is None
        assert state("fleet") == {
            "running": "OFF", "run": None, "round": None, "version": None, "accuracy": None, "boards_present": 0,
        }  # fmt: skip
        site.beat("pi-1", temperature_c=61.5, throttled="capped", disk_free_bytes=5_400_000_000, assignment="a",
                  model="ab" * 32)  # fmt: skip
        eventually(lambda: state("boards/pi-1")["present"] == "ON")
        assert state("boards/pi-1") == {
            "present": "ON", "training": "ON", "throttled": "ON", "temperature": 61.5, "disk_free": 5400,
            "last_seen": "2027-01-15T08:00:00+00:00", "model": "abababababab",
        }  # fmt: skip
        record = RunRecord(
            run_id="r1", name="spring\n", task="digits", strategy="fedavg", config={}, status=RunStatus.RUNNING,
            reason=None, submitted_at=1.0, started_at=2.0, finished_at=None, rounds=0, version=0, accuracy=None,
            seed=7,
        )  # fmt: skip
        site.meter.on_run_started(record)
        site.meter.record_rows(record.run_id, HistoryRows(closed_rounds={3: (3, 2.0)}, accuracy=0.75))
        eventually(lambda: state("fleet")["round"] == 3)
        assert (state("fleet")["running"], state("fleet")["accuracy"], state("fleet")["boards_present"]) == (
            "ON", 0.75, 1,
        )  # fmt: skip
        assert "\n" not in state("fleet")["run"]
        site.now_s += 1000
        site.registry.tick()
        eventually(lambda: state("boards/pi-1")["present"] == "OFF")
        assert state("boards/pi-1")["temperature"] is None, "nobody knows"
    finally:
        site.bridge.stop()


@needs("mosquitto")
def test_a_removed_board_disappears_also_when_the_coordinator_was_away(port: int, kept: dict[str, str]) -> None:
    site = Site(port)
    site.add("pi-1", "pi-2", "pi-3")
    site.bridge.start()
    other = Site(port, topic="other")
    other.add("pi-1")
    other.bridge.start()
    try:
        eventually(
            lambda: {"edgefl/boards/pi-3", "other/boards/pi-1"} <= kept.keys() and len(announcements(kept)) == 4
        )
        site.registry.remove("pi-1")
        eventually(lambda: "edgefl/boards/pi-1" not in kept)
        eventually(lambda: sum(topic.endswith("pi-1/config") for topic in kept) == 1)
    finally:
        site.bridge.stop()
    again = Site(port)
    again.add("pi-3")
    again.bridge.start()
    try:
        eventually(lambda: announcements(kept).keys() == {"lab", "pi-3", "pi-1"})
        eventually(lambda: "edgefl/boards/pi-2" not in kept)
        assert {"edgefl/boards/pi-3", "other/boards/pi-1"} <= kept.keys(), "another fleet's stay"
    finally:
        again.bridge.stop()
        other.bridge.stop()


def test_what_a_broker_should_not_send_is_ignored() -> None:
    bridge = Site(find_free_port()).bridge
    right = f"homeassistant/device/{bridge._id}_board_pi-1/config"
    for name in ("\udcff", "x", "", right + "/x", "x/" + right, right.replace("pi-1", "pi/1"), right):
        message = mqtt.MQTTMessage(topic=name.encode(errors="surrogateescape"))
        message.payload = b"{}"
        bridge._on_message(None, None, message)
    assert bridge._announced == {right, "edgefl/boards/pi-1"}


@needs("mosquitto")
def test_a_broker_that_comes_back_empty_gets_everything_again(tmp_path: Path) -> None:
    with _mosquitto(tmp_path) as port:
        site = Site(port)
        site.add("pi-1")
        site.bridge.start()
        with listener(port) as kept:
            eventually(lambda: len(announcements(kept)) == 2)
    try:
        with _mosquitto(tmp_path, f"listener {port} 127.0.0.1", "allow_anonymous true"), listener(port) as kept:
            eventually(lambda: len(announcements(kept)) == 2)
            assert kept["edgefl/available"] == "online"
    finally:
        site.bridge.stop()


@needs("mosquitto")
def test_what_the_rules_of_the_broker_forbid_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rules = tmp_path / "rules"
    rules.write_text("topic read #\n")
    rules.chmod(0o600)
    with _mosquitto(tmp_path, "allow_anonymous true", f"acl_file {rules}", "user root") as port:
        site = Site(port)
        site.bridge.start()
        eventually(lambda: "refuses a message (Not authorized): its rules must let" in caplog.text)
        site.bridge.stop()


@needs("mosquitto")
def test_a_real_coordinator_shows_its_fleet(port: int, kept: dict[str, str], tmp_path: Path) -> None:
    directory = init_directory(tmp_path / "c", hosts=["127.0.0.1"], fleet="lab", port=find_free_port())
    with directory.settings.open("a") as settings:
        settings.write(f'\n[home_assistant]\nhost = "127.0.0.1"\nport = {port}\nevery_s = 0.1\n')
    change_addresses(directory.root, ["127.0.0.1"])
    directory = load_directory(directory.root)
    assert directory.home_assistant.every_s == 0.1
    options = StartOptions(host="127.0.0.1", port=directory.port, broker_port=find_free_port(), broker="embedded")
    with Coordinator(directory, options, build_run):
        eventually(lambda: announcements(kept).keys() == {"lab"})
    eventually(lambda: kept["edgefl/available"] == "offline")


@pytest.mark.parametrize(
    "value", [{"topic": "edgefl/#"}, {"discovery_prefix": "/x"}, {"port": 0}, {"every_s": 0}, {"pause": True}]
)
def test_settings_that_make_no_sense_are_refused(value: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="home_assistant"):
        from_mapping(HomeAssistantSettings, {"host": "x", **value}, "home_assistant")
