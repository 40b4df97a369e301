"""What `edgefl device collect` takes of its board: 100 MQTT messages a second, or 5 frames: a core's share, memory.

    python benchmarks/collector.py [--rate 100] [--frames 5] [--seconds 60] [--columns 10] [--window 30] [--json]

A Mosquitto and a publisher run beside it. The messages are JSON objects of 300 bytes, as of Zigbee2MQTT, on as many
topics as columns; a row is made every second. In the same run a bare subscriber gets the same messages: paho, and
`json.loads` of each. A second collector has `[answer]`: each second it asks about the newest rows, `--window` of
them, and publishes the answer. The server is a stub: the model's own time is that of `edgefl device serve`. `PSS`
shares out pages that several processes use; `RSS` is the peak. `cores` is CPU time by time.

Then come collectors of a camera: a video of JPEG frames of 320 x 240 with new noise in each, as cameras of USB send
them. One keeps every frame, one has `motion_levels = 8`, and a bare process decodes the same with OpenCV and no more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import paho.mqtt.client as mqtt
from harness import options
from harness.process_trees import PROC, Meter
from paho.mqtt.enums import CallbackAPIVersion

from edgefl.coordinator.brokers.mosquitto import find_mosquitto
from edgefl.device.collect.store_state import StoreState, read_store_state
from edgefl.simulation.local_fleet import find_free_port

WAIT_S, START_S = 30.0, 3.0
HOST = "127.0.0.1"
PAD = "x" * 230
PREDICTION = {"class": "open", "index": 1, "probability": 0.75, "margin": 0.5}
BARE = """
import json, sys
import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion
client = mqtt.Client(CallbackAPIVersion.VERSION2)
client.on_message = lambda _client, _data, message: json.loads(message.payload)
client.connect("127.0.0.1", int(sys.argv[1]))
client.subscribe("sensor/#")
client.loop_forever()
"""
BARE_CAMERA = """
import sys, time
import cv2
cv2.setNumThreads(1)
capture, every_s, due_s = cv2.VideoCapture(sys.argv[1]), float(sys.argv[2]), time.monotonic()
while capture.read()[0]:
    due_s += every_s
    time.sleep(max(0.0, due_s - time.monotonic()))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    who: str
    cores: float
    pss_mb: float
    rss_mb: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=100, help="messages a second [%(default)s]")
    parser.add_argument("--frames", type=float, default=5.0, help="of a camera a second [%(default)s]")
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring [%(default)s]")
    parser.add_argument("--columns", type=int, default=10)
    parser.add_argument("--window", type=int, default=30, help="rows of an answer [%(default)s]")
    parser.add_argument("--json", action="store_true")
    args = options.parse(parser, seconds=2.0, window=1)
    program = find_mosquitto()
    if program is None:
        sys.stdout.write("no Mosquitto here: sudo apt-get install mosquitto\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows, state, num_answers = measured(Path(folder), program, args.rate, args.seconds, args.columns, args.window)
        rows += measure_camera(Path(folder), args.frames, args.seconds)
    written = sum(state.written.values())
    if args.json:
        facts = {
            "rows": state.num_rows,
            "row_bytes": state.num_bytes,
            "written_bytes": written,
            "answers": num_answers,
        }
        sys.stdout.write(json.dumps({"v": 1, "costs": [asdict(row) for row in rows], **facts}) + "\n")
        return 0
    sys.stdout.write(f"{'':14}{'cores':>8}{'PSS MB':>9}{'RSS MB':>9}\n")
    for row in rows:
        sys.stdout.write(f"{row.who:14}{row.cores:8.3f}{row.pss_mb:9.1f}{row.rss_mb:9.1f}\n")
    bytes_per_row = written / max(1, state.num_rows)
    sys.stdout.write(
        f"{state.num_rows} rows in {state.num_bytes} bytes; {written} bytes written, {bytes_per_row:.0f} a row; "
        f"{num_answers} answers\n"
    )
    return 0


def measured(
    folder: Path, program: str, rate: int, seconds: float, num_columns: int, window: int
) -> tuple[list[Row], StoreState, int]:
    """Returns what each process took, what the collector has kept, and how often it was answered."""
    port, answers = find_free_port(), Answers(window)
    (folder / "mosquitto.conf").write_text(f"listener {port} {HOST}\nallow_anonymous true\n")
    collect = partial(_collector, folder, port, num_columns)
    with (
        _process([program, "-c", str(folder / "mosquitto.conf")]),
        answers.served() as server_port,
        _publisher(port) as client,
        _process(collect("shard")) as collector,
        _process(collect("answered", server_port)) as answered,
        _process([sys.executable, "-c", BARE, str(port)]) as bare,
    ):
        _publish(client, rate, 3.0 + window, num_columns)  # until all have started, and there is a whole window
        processes = {"collector": collector.pid, "with [answer]": answered.pid, "bare paho": bare.pid}
        with Meter(processes) as meter:
            begin_s, num_before = time.time(), answers.num_sent
            _publish(client, rate, seconds, num_columns)
            end_s = time.time()
            num_answers = answers.num_sent - num_before
        rows = [_row(who, pid, meter, begin_s, end_s) for who, pid in processes.items()]
        collector.terminate()
        collector.wait(WAIT_S)
    state = read_store_state(folder / "shard")
    if state is None or not state.num_rows:
        raise SystemExit("the collector has kept no row")
    return rows, state, num_answers


def measure_camera(folder: Path, rate: float, seconds: float) -> list[Row]:
    """Returns what collectors of a camera take, and a bare process; nothing without OpenCV."""
    try:
        import cv2  # noqa: PLC0415 an extra
    except ImportError:
        sys.stderr.write("no OpenCV here: pip install -e '.[camera]' -c constraints.txt\n")
        return []
    video, rng = folder / "video.avi", np.random.default_rng(1)
    writer = cv2.VideoWriter(str(video), cv2.VideoWriter_fourcc(*"MJPG"), 30, (320, 240))
    scene = np.kron(rng.uniform(40, 200, (6, 8, 3)), np.ones((40, 40, 1)))
    for _ in range(int(2 * rate * (seconds + START_S))):
        writer.write(np.clip(scene + rng.normal(0, 4, scene.shape), 0, 255).astype(np.uint8))
    writer.release()
    commands = {"bare OpenCV": [sys.executable, "-c", BARE_CAMERA, str(video), str(1 / rate)]}
    for who, levels in (("camera", 0), ("camera, motion", 8)):
        path = folder / f"{who}.toml"
        path.write_text(
            f'[collect]\nfolder = "{folder / who}"\n[sources.camera]\nkind = "camera"\npath = "{video}"\n'
            f"every_s = {1 / rate}\nmotion_levels = {levels}\n"
        )
        commands[who] = [sys.executable, "-m", "edgefl", "-q", "device", "collect", str(path)]
    rows = []
    for who, command in commands.items():  # one after the other: each has the machine to itself
        with _process(command) as process:
            time.sleep(START_S)
            begin_s = time.time()
            with Meter({who: process.pid}) as meter:
                time.sleep(seconds)
            rows.append(_row(who, process.pid, meter, begin_s, time.time()))
    return rows


class Answers:
    """Stub of `edgefl device serve`, which answers the same to any rows; `num_sent` counts."""

    def __init__(self, window: int) -> None:
        identity = {"v": 1, "model": "ab", "deployment": "d1"}
        self._model = json.dumps({**identity, "classes": ["shut", "open"], "rows": window}).encode()
        self._prediction = json.dumps({**identity, "rows": [PREDICTION]}).encode()
        self.num_sent = 0

    @contextlib.contextmanager
    def served(self) -> Iterator[int]:
        answers = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(answers._model)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                answers.num_sent += 1
                self._send(answers._prediction)

            def _send(self, content: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer((HOST, 0), Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield server.server_port
            server.shutdown()


def _collector(folder: Path, port: int, num_columns: int, name: str, server_port: int = 0) -> list[str]:
    """Returns the command line of a collector, with `[answer]` where there is a port of answers."""
    lines = ["[collect]", f'folder = "{folder / name}"', "every_s = 1", "[sources.house]", 'kind = "mqtt"']
    lines += [f'host = "{HOST}"', f"port = {port}", "[sources.house.columns]"]
    lines += [f'c{number} = "sensor/{number}#/temperature"' for number in range(num_columns)]
    if server_port:
        lines += ["[answer]", f'host = "{HOST}"', f"port = {port}", 'topic = "answers"', "every_s = 1"]
        lines.append(f"server_port = {server_port}")
    path = folder / f"{name}.toml"
    path.write_text("\n".join(lines) + "\n")
    return [sys.executable, "-m", "edgefl", "-q", "device", "collect", str(path)]


def _row(who: str, pid: int, meter: Meter, begin_s: float, end_s: float) -> Row:
    cost = meter.cost(who, begin_s, end_s)
    status: Mapping[str, Any] = dict(
        line.split(":", 1) for line in (PROC / str(pid) / "status").read_text().splitlines() if ":" in line
    )
    rss_mb = int(status["VmHWM"].split()[0]) * 1024 / 1e6
    return Row(who=who, cores=cost.cores, pss_mb=cost.peak_bytes / 1e6, rss_mb=rss_mb)


def _publish(client: mqtt.Client, rate: int, seconds: float, num_columns: int) -> None:
    begin_s = time.monotonic()
    for number in range(int(rate * seconds)):
        payload = {"temperature": 20 + number % 7 / 10, "linkquality": 90, "pad": PAD}
        client.publish(f"sensor/{number % num_columns}", json.dumps(payload), qos=1)
        time.sleep(max(0.0, begin_s + (number + 1) / rate - time.monotonic()))


@contextlib.contextmanager
def _process(words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def _publisher(port: int) -> Iterator[mqtt.Client]:
    client, end_s = mqtt.Client(CallbackAPIVersion.VERSION2), time.monotonic() + WAIT_S
    while True:
        try:
            client.connect(HOST, port)
            break
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)
    client.loop_start()
    yield client
    client.disconnect()
    client.loop_stop()


if __name__ == "__main__":
    sys.exit(main())
