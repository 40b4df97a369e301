"""From a sensor's messages to a trained model: a real broker, a collector and a device, each a process of its own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from peer_boards import eventually
from requirements import PARTS, needs

from edgefl.core.config import parse_run
from edgefl.device.collect.store_state import read_store_state
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet, find_free_port

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300), needs("mosquitto")]

RUN = {
    "run": {"task": "series", "rounds": 1, "evaluate_on": "devices"},
    "task": {
        "columns": ["temperature", "power"], "window": 4, "step": 1, "ahead": 1, "target": "temperature",
        "group": "span", "model": "linear",
    },
    "strategy": {"name": "fedavg", "learning_rate": 0.01},
    "devices": {"min": 1},
}  # fmt: skip
COLLECT = """[collect]
folder = "{folder}"
every_s = 0.05
flush_s = 0.2
[sources.house]
kind = "mqtt"
host = "127.0.0.1"
port = {port}
[sources.house.columns]
temperature = "zigbee2mqtt/window#/temperature"
power = "heater/power"
"""


class Sensor:
    """A sensor and a broker between it and the collector; all end with the test.

    It publishes all along: rows made of a held value are copies of one example, which the split keeps on one side.
    """

    def __init__(self, folder):
        self.processes, self.shard, port = [], folder / "shard", find_free_port()
        (folder / "mosquitto.conf").write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\n")
        (folder / "collect.toml").write_text(COLLECT.format(folder=self.shard, port=port))
        self._start(PARTS["mosquitto"].path(), "-c", str(folder / "mosquitto.conf"))
        self.client = mqtt.Client(CallbackAPIVersion.VERSION2)
        eventually(lambda: self._is_connected(port))
        self.client.loop_start()
        self._start(sys.executable, "-m", "edgefl", "device", "collect", str(folder / "collect.toml"))
        self.is_closed = threading.Event()
        self.publisher = threading.Thread(target=self._publish)
        self.publisher.start()

    def wait_for(self, num_rows):
        """Waits until the shard has so many rows."""
        eventually(lambda: self.count_rows() >= num_rows, timeout_s=60)

    def count_rows(self):
        state = read_store_state(self.shard) if self.shard.is_dir() else None
        return state.num_rows if state else 0

    def close(self):
        self.is_closed.set()
        self.publisher.join()
        self.client.disconnect()
        self.client.loop_stop()
        for process in reversed(self.processes):
            process.terminate()
            process.wait(20)

    def _publish(self):
        while not self.is_closed.wait(0.02):
            value = {"temperature": 0.5 * math.sin(time.monotonic()), "battery": 90}
            self.client.publish("zigbee2mqtt/window", json.dumps(value))
            self.client.publish("heater/power", "0.5")

    def _start(self, *words):
        self.processes.append(subprocess.Popen(words, stderr=subprocess.DEVNULL))

    def _is_connected(self, port):
        try:
            return self.client.connect("127.0.0.1", port) == mqtt.MQTT_ERR_SUCCESS
        except OSError:
            return False


@pytest.fixture
def sensor(tmp_path):
    sensor = Sensor(tmp_path)
    yield sensor
    sensor.close()


def test_what_a_sensor_says_is_trained_on_and_new_rows_count_in_the_next_run(sensor, tmp_path):
    sensor.wait_for(40)
    device = LocalDeviceSpec(name="board-1", shards={"series": str(sensor.shard)})
    with LocalFleet(root=tmp_path / "fleet", devices=[device]) as fleet:
        numbers = []
        for num_more in (0, 60):
            sensor.wait_for(sensor.count_rows() + num_more)
            run_id = fleet.submit(parse_run(RUN))
            assert fleet.wait_for_run(run_id)["status"] == "finished"
            (update,) = fleet.list_history("updates", run=run_id)
            numbers.append(update["num_examples"])
    assert numbers[0] >= 20
    assert numbers[1] > numbers[0]
