"""The pipe that mosquitto writes into, with its own words; the real one is in test_mosquitto and tests/e2e."""

from __future__ import annotations

import os
from pathlib import Path

from edgefl.coordinator.brokers.mosquitto import MAX_LOG_BYTES, MosquittoLog

STAMP = b"2026-08-01T12:00:00: "
TRACE = (
    b"Sending CONNACK to pi-1 (0, 0)\n",
    b"Received PUBLISH from pi-1 (d0, q1, r0, m1, 'edgefl/v1/lab/pi-1/status', ... (1 bytes))\n",
    b"No will message specified.\n",
)


def said(path: Path, *lines: bytes) -> tuple[list[tuple[str, str]], list[str]]:
    denied: list[tuple[str, str]] = []
    log = MosquittoLog(path, lambda who, what: denied.append((who, what)))
    write_end = log.open()
    with os.fdopen(write_end, "wb") as pipe:
        os.set_blocking(write_end, True)
        for line in lines:
            pipe.write(line)
    return denied, log.read_tail()


def test_what_was_denied_is_told_with_who_tried_it(tmp_path: Path) -> None:
    denied, _ = said(
        tmp_path / "m.log",
        STAMP + b"Denied PUBLISH from pi-1 (d0, q1, r0, m1, 'edgefl/v1/lab/pi-2/it's', ... (1 bytes))\n",
        STAMP + b"OpenSSL Error[0]: error:0A000086:SSL routines::certificate verify failed\n",
    )
    assert denied[0] == ("pi-1", 'PUBLISH to "edgefl/v1/lab/pi-2/it\'s"')
    assert denied[1][0] == ""


def test_lines_about_single_packets_are_not_kept_and_all_others_are(tmp_path: Path) -> None:
    kept = STAMP + b"New client connected from 127.0.0.1:4711 as pi-1 (p2, c1, k60, u'pi-1').\n"
    denied, lines = said(tmp_path / "m.log", *(STAMP + line for line in TRACE), kept)
    assert denied == []
    assert (tmp_path / "m.log").read_bytes() == kept
    assert lines == [kept.decode().strip()]


def test_a_flood_of_connections_does_not_fill_the_disk(tmp_path: Path) -> None:
    line = STAMP + b"New connection from 127.0.0.1:4711 on port 8883.\n"
    said(tmp_path / "m.log", *[line] * (3 * MAX_LOG_BYTES // len(line)))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2.1 * MAX_LOG_BYTES


def test_a_disk_that_takes_no_log_does_not_stop_the_pipe(tmp_path: Path) -> None:
    denied, _ = said(
        tmp_path / "missing" / "m.log",
        STAMP + b"New connection from 127.0.0.1:4711 on port 8883.\n",
        STAMP + b"Denied PUBLISH from pi-1 (d0, q1, r0, m1, 'elsewhere', ... (1 bytes))\n",
    )
    assert denied == [("pi-1", "PUBLISH to 'elsewhere'")]
