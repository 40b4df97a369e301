"""Says by its exit status whether a container is well: health.py coordinator|broker|device FOLDER."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

TIMEOUT_S = 10.0


def coordinator(folder: Path) -> None:
    """Asks /healthz, as a device would: with the fleet's own CA."""
    port = int(os.environ.get("EDGEFL_PORT", "8000"))
    trust = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    with urllib.request.urlopen(f"https://127.0.0.1:{port}/healthz", timeout=TIMEOUT_S, context=trust) as answer:
        if json.load(answer)["status"] != "ok":
            raise OSError("/healthz does not say ok")


def broker(folder: Path) -> None:
    """Shakes hands with the broker, with the coordinator's own certificate."""
    trust = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    trust.load_cert_chain(folder / "coordinator.pem", folder / "coordinator.key")
    port = int(os.environ.get("EDGEFL_BROKER_PORT", "8883"))
    with (
        socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as plain,
        trust.wrap_socket(plain, server_hostname="127.0.0.1"),
    ):
        pass


def device(folder: Path) -> None:
    """Asks whether this device has joined; that its coordinator is away is no illness of the device."""
    subprocess.run(
        [sys.executable, "-m", "edgefl", "device", "status", "--state", str(folder)],
        stdout=subprocess.DEVNULL,
        timeout=3 * TIMEOUT_S,
        check=True,
    )


def main(what: str, folder: str) -> int:
    try:
        {"coordinator": coordinator, "broker": broker, "device": device}[what](Path(folder))
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"{what} is not well: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
