"""A board that tests may kill: says what it was brought, and sends its word to all neighbours.

Arguments: one JSON object. Writes "up" when it listens, and a line for each message.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path

from edgefl.device.mqtt_session import LinkTls
from edgefl.device.neighbours.direct import DirectCarrier, PeerPace


def main() -> None:
    settings = json.loads(sys.argv[1])
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())

    def say(word: str) -> None:
        sys.stdout.write(word + "\n")
        sys.stdout.flush()

    carrier = DirectCarrier(
        device_id=settings["device"],
        tls=LinkTls(**{name: Path(path) for name, path in settings["tls"].items()}),
        listen=tuple(settings["listen"]),
        hosts={name: (host, port) for name, (host, port) in settings["hosts"].items()},
        neighbours=list(settings["hosts"]),
        on_message=lambda sender, payload: say(f"{sender} {payload.decode()}"),
        pace=PeerPace(max_backoff_s=0.2),
    )
    carrier.start()
    say("up")
    for name in settings["hosts"]:
        carrier.send(name, settings["word"].encode())
    stopping.wait()
    carrier.stop()


if __name__ == "__main__":
    main()
