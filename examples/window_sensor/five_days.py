"""Five days of three boards: each collects and answers by day; at night they train together and get the new model.

It stands for what systemd, the operator and three boards do: broker, collectors, servers and a fleet are processes of
this machine, and a day takes fifteen seconds.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from string import Template

import paho.mqtt.client as mqtt
from house import TICKS_PER_DAY, House, Room
from paho.mqtt.enums import CallbackAPIVersion

from edgefl.core.config import load_run
from edgefl.device.collect.store_state import read_store_state
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet, find_free_port

ROOMS = {"kitchen": (2, 8.0), "office": (3, 11.0), "bedroom": (1, 5.0)}
"""People, and degrees outside."""
NUM_DAYS = 5
EDGEFL = [sys.executable, "-m", "edgefl", "device"]
HERE = Path("fleet").absolute()


class Answers:
    """The newest answers of all boards, judged by what the house knows."""

    def __init__(self, port: int) -> None:
        self._received: list[tuple[str, float, bool]] = []
        self._client = mqtt.Client(CallbackAPIVersion.VERSION2)
        self._client.on_message = self._on_message
        self._client.connect("127.0.0.1", port)
        self._client.subscribe("edgefl/+/answer")
        self._client.loop_start()

    def _on_message(self, _client: object, _data: object, message: mqtt.MQTTMessage) -> None:
        answer = json.loads(message.payload)
        self._received.append((message.topic.split("/")[1], answer["time"], answer["class"] == "false"))

    def judge(self, truth: dict[str, list[tuple[float, bool]]]) -> tuple[int, float]:
        """Returns how many answers there were since the last call, and the share of them that was right."""
        received, self._received = self._received, []
        right = 0
        for room, time_s, says_open in received:
            place = bisect.bisect_right(truth[room], (time_s, True)) - 1
            right += says_open == truth[room][max(0, place)][1]
        return len(received), right / max(1, len(received))


@contextlib.contextmanager
def processes(commands: list[list[str]]) -> Iterator[None]:
    """Runs commands until the end of the block."""
    running = list[subprocess.Popen[bytes]]()
    try:
        for number, command in enumerate(commands):
            with (HERE / f"{command[-1].rpartition('/')[2]}-{number}.log").open("a") as log:
                running.append(subprocess.Popen(command, stdout=log, stderr=log))
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(30)


def main() -> None:
    mosquitto = shutil.which("mosquitto", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if mosquitto is None:
        sys.exit("there is no mosquitto: sudo apt-get install mosquitto")
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    broker_port = find_free_port()
    (HERE / "mosquitto.conf").write_text(f"listener {broker_port} 127.0.0.1\nallow_anonymous true\n")
    servers = {room: find_free_port() for room in ROOMS}
    template = Template(Path("board.toml").read_text(encoding="utf-8"))
    for room in ROOMS:
        values = {"folder": str(HERE / "data" / room), "broker_port": broker_port, "server_port": servers[room]}
        (HERE / f"{room}.toml").write_text(template.substitute(values, room=room), encoding="utf-8")
    with processes([[mosquitto, "-c", str(HERE / "mosquitto.conf")]]):
        wait_for_broker(broker_port)
        with processes([[*EDGEFL, "collect", str(HERE / f"{room}.toml")] for room in ROOMS]):
            rooms = [Room(name, *facts, seed) for seed, (name, facts) in enumerate(ROOMS.items())]
            live(House(rooms, broker_port), Answers(broker_port), servers)


def live(house: House, answers: Answers, servers: dict[str, int]) -> None:
    """Lets the days pass, and trains at night."""
    time.sleep(3)  # the collectors connect
    print("day   rows  window open  answers  right")
    boards = [LocalDeviceSpec(name=room, shards={"series": str(HERE / "data" / room)}) for room in ROOMS]
    serve = [
        [*EDGEFL, "serve", "--state", str(HERE / "fleet" / room), "--port", str(port)]
        for room, port in servers.items()
    ]
    fleet = LocalFleet(root=HERE / "fleet", devices=boards)
    with contextlib.ExitStack() as stack:
        for day in range(1, NUM_DAYS + 1):
            house.pass_day()
            time.sleep(2)  # rows and labels are written
            num_answers, right = answers.judge(house.truth)
            ticks = [is_open for states in house.truth.values() for _, is_open in states[-TICKS_PER_DAY:]]
            rows = sum(state.num_rows for room in ROOMS if (state := read_store_state(HERE / "data" / room)))
            shown = f"{right:.3f}" if num_answers else "-"
            print(f"{day:3}  {rows:5}  {sum(ticks) / len(ticks):11.2f}  {num_answers:7}  {shown:>5}", flush=True)
            if day == NUM_DAYS:
                return
            if day == 1:
                stack.enter_context(fleet)
            fleet.wait_for_run(fleet.submit(load_run(Path("run.toml"))))
            fleet.run_command("model", "deploy", "latest", "--tolerance", "1", "--watch")
            if day == 1:
                stack.enter_context(processes(serve))
            time.sleep(2)  # the servers take it over


def wait_for_broker(port: int) -> None:
    """Returns when the broker answers."""
    for _ in range(200):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        time.sleep(0.1)
    sys.exit(f"mosquitto does not answer; its log is in {HERE}")


if __name__ == "__main__":
    main()
