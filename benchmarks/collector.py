"""What `edgefl device collect` takes of its board at 100 MQTT messages a second: a core's share, memory, writes.

    python benchmarks/collector.py [--rate 100] [--seconds 60] [--columns 10] [--json]

A Mosquitto and a publisher run beside it. The messages are JSON objects of 300 bytes, as of Zigbee2MQTT, on as many
topics as columns; a row is made every second. In the same run a bare subscriber gets the same messages: paho, and
`json.loads` of each. `PSS` shares out pages that several processes use; `RSS` is the peak. `cores` is CPU time by
time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
from harness import options
from harness.process_trees import PROC, Meter
from paho.mqtt.enums import CallbackAPIVersion

from edgefl.coordinator.brokers.mosquitto import find_mosquitto
from edgefl.device.collect.store_state import StoreState, read_store_state
from edgefl.simulation.local_fleet import find_free_port

WAIT_S = 30.0
HOST = "127.0.0.1"
PAD = "x" * 230
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    who: str
    cores: float
    pss_mb: float
    rss_mb: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=100, help="messages a second [%(default)s]")
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring [%(default)s]")
    parser.add_argument("--columns", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = options.parse(parser, seconds=2.0)
    program = find_mosquitto()
    if program is None:
        sys.stdout.write("no Mosquitto here: sudo apt-get install mosquitto\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows, state = measured(Path(folder), program, args.rate, args.seconds, args.columns)
    written = sum(state.written.values())
    if args.json:
        facts = {"rows": state.num_rows, "row_bytes": state.num_bytes, "written_bytes": written}
        sys.stdout.write(json.dumps({"v": 1, "costs": [asdict(row) for row in rows], **facts}) + "\n")
        return 0
    sys.stdout.write(f"{'':12}{'cores':>8}{'PSS MB':>9}{'RSS MB':>9}\n")
    for row in rows:
        sys.stdout.write(f"{row.who:12}{row.cores:8.3f}{row.pss_mb:9.1f}{row.rss_mb:9.1f}\n")
    bytes_per_row = written / max(1, state.num_rows)
    sys.stdout.write(
        f"{state.num_rows} rows in {state.num_bytes} bytes; {written} bytes written, {bytes_per_row:.0f} a row\n"
    )
    return 0


def measured(folder: Path, program: str, rate: int, seconds: float, num_columns: int) -> tuple[list[Row], StoreState]:
    """Returns what each process took, and what the collector has kept."""
    port, shard = find_free_port(), folder / "shard"
    (folder / "mosquitto.conf").write_text(f"listener {port} {HOST}\nallow_anonymous true\n")
    lines = ["[collect]", f'folder = "{shard}"', "every_s = 1", "[sources.house]", 'kind = "mqtt"']
    lines += [f'host = "{HOST}"', f"port = {port}", "[sources.house.columns]"]
    lines += [f'c{number} = "sensor/{number}#/temperature"' for number in range(num_columns)]
    (folder / "collect.toml").write_text("\n".join(lines) + "\n")
    collect = [sys.executable, "-m", "edgefl", "-q", "device", "collect", str(folder / "collect.toml")]
    with (
        _process([program, "-c", str(folder / "mosquitto.conf")]),
        _publisher(port) as client,
        _process(collect) as collector,
        _process([sys.executable, "-c", BARE, str(port)]) as bare,
    ):
        _publish(client, rate, 3.0, num_columns)  # until all have started
        processes = {"collector": collector.pid, "bare paho": bare.pid}
        with Meter(processes) as meter:
            begin_s = time.time()
            _publish(client, rate, seconds, num_columns)
            end_s = time.time()
        rows = [_row(who, pid, meter, begin_s, end_s) for who, pid in processes.items()]
        collector.terminate()
        collector.wait(WAIT_S)
    state = read_store_state(shard)
    if state is None or not state.num_rows:
        raise SystemExit("the collector has kept no row")
    return rows, state


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
