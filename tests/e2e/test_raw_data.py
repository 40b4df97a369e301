"""Raw data stay on the board: every byte that a device sends is read before it is encrypted."""

from __future__ import annotations

import io
import os
import struct

import numpy as np
import pytest

from edgefl.core.config import parse_run
from edgefl.core.errors import RunFailedError
from edgefl.device.collect.alignment import Row
from edgefl.device.collect.file_store import open_file_store
from edgefl.device.collect.row_store import StoreLimits, open_row_store
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

LIMITS = StoreLimits(max_bytes=10**8)
TAP = """
import os, socket, ssl, sys

if "device" in sys.orig_argv:
    _file = open(os.path.join(os.environ["EDGEFL_TEST_TAP"], str(os.getpid())), "ab", buffering=0)

    def _tap(owner, name, join=bytes):
        send = getattr(owner, name)

        def send_and_note(self, data, *rest):
            _file.write(join(data))
            return send(self, data, *rest)

        setattr(owner, name, send_and_note)

    for name in ("send", "sendall", "write"):
        _tap(ssl.SSLSocket, name)
    for name in ("send", "sendall", "sendto"):
        _tap(socket.socket, name)
    _tap(socket.socket, "sendmsg", b"".join)
"""
"""Module of a name that Python imports at its start."""
ROWS = {
    "run": {"task": "table", "rounds": 2, "evaluate_on": "devices"},
    "task": {"columns": ["power"], "target": "label", "labels": ["off", "on"], "model": "linear"},
    "strategy": {"name": "fedavg", "learning_rate": 0.01},
    "devices": {"min": 1},
}
PICTURES = {
    **ROWS,
    "run": {"task": "pictures", "rounds": 2, "evaluate_on": "devices"},
    "task": {"labels": ["cat", "dog"], "size": 8, "channels": 1, "model": "linear"},
}


def _rows(folder, values):
    """Writes rows with a text of their own in each, and their labels in a column that the task reads."""
    with open_row_store(folder, ("power", "room", "label"), LIMITS) as store:
        rows = [
            Row(1000.0 + at, (value, f"canary-room-{at}", "on" if at % 2 else "off"), 1)
            for at, value in enumerate(values)
        ]
        store.commit(rows, {}, {}, 0.0)
    return folder


def _pictures(folder, pixels):
    from PIL import Image  # noqa: PLC0415 an extra

    files = []
    with open_file_store(folder, LIMITS, "oldest") as store:
        for at, picture in enumerate(pixels):
            content = io.BytesIO()
            Image.fromarray(picture).save(content, "PNG")
            store.add(content.getvalue(), ("cat", "dog")[at % 2], ".png", 1000.0 + at)
            files.append(content.getvalue())
        store.commit(store.state, 0.0)
    return files


def _list_secrets(values, pixels, files):
    """Returns what may not leave the board, by what it is: values as text, float32 and float64, parts of pictures."""
    found = {f"canary-room-{at}".encode(): f"text of row {at}" for at in range(len(values))}
    for at, value in enumerate(values):
        found |= {repr(value).encode(): f"row {at}", f"{value:.6g}".encode(): f"row {at}, in six digits"}
        found |= {struct.pack(kind, value): f"row {at} as {kind}" for kind in ("<f", "<d")}
    for at, (picture, content) in enumerate(zip(pixels, files, strict=True)):
        found |= {picture.tobytes()[:24]: f"pixels of picture {at}", content[41:65]: f"file of picture {at}"}
    return found


def test_no_raw_value_text_or_picture_of_a_shard_leaves_the_board_in_runs_that_end_and_that_fail(tmp_path):
    rng = np.random.default_rng(5)
    values = [float(np.float32(value)) for value in rng.normal(20.0, 5.0, 60)]
    pixels = rng.integers(0, 256, (20, 8, 8), np.uint8)
    rows, tap = _rows(tmp_path / "rows", values), tmp_path / "tap"
    secrets = _list_secrets(values, pixels, _pictures(tmp_path / "pictures", pixels))
    lines = [f"{value!r},on" for value in values]
    (tmp_path / "cell.csv").write_text("\n".join(["power,label", *lines, "canary-cell,on"]))
    (tmp_path / "label.csv").write_text("\n".join(["power,label", *lines, "1.0,canary-label"]))
    secrets |= {b"canary-label": "a label that no task has", b"canary-cell": "a cell that is no number"}
    tap.mkdir()
    (tap / "sitecustomize.py").write_text(TAP)
    path = os.pathsep.join(filter(None, [str(tap), os.environ.get("PYTHONPATH")]))
    devices = [
        LocalDeviceSpec(name="good", shards={"table": str(rows), "pictures": str(tmp_path / "pictures")}),
        *(LocalDeviceSpec(name=name, shards={"table": str(tmp_path / f"{name}.csv")}) for name in ("cell", "label")),
    ]
    environment, reasons = {"PYTHONPATH": path, "EDGEFL_TEST_TAP": str(tap)}, []
    with LocalFleet(root=tmp_path / "fleet", devices=devices, environment=environment) as fleet:
        for run, chosen in ((ROWS, "good"), (PICTURES, "good"), (ROWS, "cell"), (ROWS, "label")):
            run_id = fleet.submit(parse_run({**run, "devices": {"min": 1, "names": [chosen]}}))
            try:
                reasons.append(fleet.wait_for_run(run_id)["status"])
            except RunFailedError as error:
                reasons.append(str(error))
    sent = b"".join(file.read_bytes() for file in tap.glob("[0-9]*"))
    assert reasons[:2] == ["finished", "finished"]
    assert "row 61: column 'power' must hold numbers" in reasons[2]
    assert "row 61 holds something else" in reasons[3]
    assert b"POST /" in sent
    assert [what for secret, what in secrets.items() if secret in sent] == []
