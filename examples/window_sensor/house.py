"""Simulated rooms with Zigbee sensors, as Zigbee2MQTT publishes them: climate, CO2, and a contact at the window.

While the window is open the room comes near the air outside; else people breathe in it and the heating is on.
"""

from __future__ import annotations

import json
import random
import threading
import time

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

TICK_S, TICKS_PER_DAY = 0.1, 144
"""A tick stands for ten minutes."""


class Room:
    """A room with a window that somebody opens a few times a day."""

    def __init__(self, name: str, people: int, outside_c: float, seed: int) -> None:
        self.name, self._people, self._outside_c, self._luck = name, people, outside_c, random.Random(seed)
        self._c, self._rh, self._co2, self.is_open = 20.0, 50.0, 600.0, False

    def step(self) -> dict[str, dict[str, float | bool]]:
        """Lets ten minutes pass; returns the message of each sensor."""
        self.is_open = self._luck.random() < (0.85 if self.is_open else 0.06)
        share = 0.35 if self.is_open else 0.03
        self._c += share * (self._outside_c - self._c) + 0.25 * (21.5 - self._c) + self._luck.gauss(0, 0.25)
        self._rh += share * (35 - self._rh) + 0.8 * self._people + self._luck.gauss(0, 1.0) - 0.02 * self._rh
        self._co2 += share * (420 - self._co2) + 25 * self._people + self._luck.gauss(0, 25)
        climate = {"temperature": round(self._c, 2), "humidity": round(self._rh, 2), "battery": 97}
        return {"climate": climate, "air": {"co2": round(self._co2)}, "window": {"contact": not self.is_open}}


class House:
    """Rooms whose sensors send to a broker; `truth` says when windows were open, by room and time."""

    def __init__(self, rooms: list[Room], port: int) -> None:
        self.truth: dict[str, list[tuple[float, bool]]] = {room.name: [] for room in rooms}
        self._rooms, self._client = rooms, mqtt.Client(CallbackAPIVersion.VERSION2)
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()

    def pass_day(self) -> None:
        """Lets a day pass, in about fifteen seconds."""
        next_s, waiting = time.monotonic(), threading.Event()
        for _ in range(TICKS_PER_DAY):
            for room in self._rooms:
                for sensor, message in room.step().items():
                    if message != {"contact": True}:  # the window's contact sends while it is open
                        self._client.publish(f"zigbee2mqtt/{room.name} {sensor}", json.dumps(message))
                self.truth[room.name].append((time.time(), room.is_open))
            next_s += TICK_S
            waiting.wait(max(0.0, next_s - time.monotonic()))

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()
