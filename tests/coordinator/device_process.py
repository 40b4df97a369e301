"""A device without a trainer: link and heart as the agent has them, in a process that tests may kill.

Arguments: one JSON object. Writes a line for everything that happens to it.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import uuid
from pathlib import Path

from edgefl.device.hardware.health import HealthReader
from edgefl.device.mqtt.connection import HeartbeatPublisher, MqttConnection
from edgefl.device.mqtt.session import MqttCallbacks, MqttIdentity
from edgefl.system.atomic_files import TlsFiles


def main() -> None:
    settings = json.loads(sys.argv[1])
    counter = Path(settings["counter"])
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())

    def say(word: str) -> None:
        sys.stdout.write(word + "\n")
        sys.stdout.flush()

    def next_session_no() -> int:
        number = int(counter.read_text()) + 1 if counter.exists() else 1
        counter.write_text(str(number))
        return number

    link = MqttConnection(
        [tuple(address) for address in settings["addresses"]],
        TlsFiles(**{name: Path(path) for name, path in settings["tls"].items()}),
        MqttIdentity(fleet=settings["fleet"], device_id=settings["device"], boot_id=uuid.uuid4().hex),
        MqttCallbacks(
            on_wake_up=lambda: say("bell"),
            on_command=lambda command: say(f"command {command.kind}"),
            on_connection=lambda up: say("up" if up else "down"),
        ),
        next_session_no=next_session_no,
        max_backoff_s=settings["max_backoff_s"],
    )
    heart = HeartbeatPublisher(
        link.publish_heartbeat, HealthReader(counter.parent).read, interval_s=settings["heartbeat_s"]
    )
    link.start()
    heart.start()
    stopping.wait()
    heart.stop()
    link.stop()


if __name__ == "__main__":
    main()
