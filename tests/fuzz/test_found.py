"""What fuzzing has found once, as the smallest input that did it: refused now, and by the right words."""

from __future__ import annotations

import base64
import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from fastapi import APIRouter, Body
from fuzz.api_readers import Port
from fuzz.codec_readers import zipped
from fuzz.join_readers import armoured, csr_pem
from fuzz.message_readers import Fleet
from fuzz.reader import Reader
from fuzz.shard_readers import bomb, pickled
from made_wheels import make_wheel

from edgefl.coordinator.api.server import make_app
from edgefl.core.errors import EdgeflError
from edgefl.core.protocol import Topic

DEEP = b"[" * 5000 + b"]" * 5000
FAR = "nested deeper than 100"


def with_version(number: int) -> bytes:
    """A certificate request whose version is none that there is."""
    der = base64.b64decode(b"".join(csr_pem().strip().splitlines()[1:-1]))
    place = der.index(b"\x02\x01\x00")
    return der[: place + 2] + bytes([number]) + der[place + 3 :]


def with_header(header: bytes) -> bytes:
    """A shard whose inputs have this for a header."""
    array = io.BytesIO()
    np.save(array, np.array([0, 1]))
    member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(16)
    return zipped({"inputs": member, "labels": array.getvalue()})


def motion(**changes: Any) -> bytes:
    arrays = {
        "q": np.zeros((9, 300), np.int16), "scale": np.array(0.01), "length": np.array([150, 150]),
        "subject": np.array([1, 2]), "activity": np.array([0, 3]), "trial": np.array([1, 11]),
    }  # fmt: skip
    out = io.BytesIO()
    np.savez(out, **{**arrays, **changes})
    return out.getvalue()


def checkpoint_note(**changes: Any) -> bytes:
    return json.dumps({"v": 2, "sha256": "ab" * 32, "last_record": 7, "bytes_file": 1, **changes}).encode()


def archive_of(name: str) -> bytes:
    """An archive of one empty file, whose name stands in an extended header."""
    out, member = io.BytesIO(), tarfile.TarInfo("x")
    member.pax_headers = {"path": name}
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member)
    return out.getvalue()


def wheel(tmp_path: Path, metadata: bytes) -> bytes:
    """The wheel of the reader, with other metadata."""
    made, out = make_wheel(tmp_path / "w", "mytask", "1.0", {"mytask.py": b""}), io.BytesIO()
    with zipfile.ZipFile(made) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            new.writestr(info, metadata if info.filename.endswith("METADATA") else old.read(info))
    return out.getvalue()


MERGES = b"u#cloud-config\nm0: &m0 {a: 1, b: 2}\n" + b"".join(
    b"m%d: &m%d {<<: [*m%d, *m%d]}\n" % (n, n, n - 1, n - 1) for n in range(1, 60)
)
"""Tables that each have what the one before has, twice."""
NO_WHOLE_LENGTH = (
    b'{"device_id":"a","base_version":0,"received_s":0,"metrics":{},"format":"codec","length":0.0,"messages":[]}'
)
INFINITIES = base64.b64decode(
    "ZUUxAQEAAAACAAAAAQAAAAEAAAABAAAAAXYAAAB5RUZMQwECIAAAAAAAAgAAAFYAAADmk9lOAQACAC4uBU//PxTaH///LwACAHIA"
    "AAAAAAAAAADbNQCeg8l//yTjAQAMAACkAAAAf8cv/Q4AAAEAnfUyALkANUTUapXJ19sFT/8/FNofL8p7AgCAADUAAACRns4AAA=="
)
"""A difference of minus infinity to a part that is infinite."""
ED448 = armoured(bytes.fromhex("3043300506032b6571033a00") + bytes(57), "PUBLIC KEY").encode()

FOUND = [
    ("mqtt-heartbeat", b'{"v":1,"seq":1,"session_no":9,"uptime_s":' + DEEP + b"}", FAR),
    ("mqtt-capabilities", b'{"v":1,"facts":{"model":-Infinity}}', "-Infinity is no number"),
    ("mqtt-capabilities", b'{"v":1,"facts":{"model":1e999}}', "1e999 is no number"),
    ("mqtt-heartbeat", b'{"v":1,"seq":1' + b"0" * 30 + b',"session_no":1,"uptime_s":1.0}', "at most 64 bits"),
    ("mqtt-heartbeat", b'{"v":1,"seq":1,"session_no":9,"uptime_s":1.0,"memory_fraction":1e308}', None),
    ("edge-bodies", INFINITIES, None),
    ("mqtt-command", b'c{"v":1,"id":"a","kind":"logs","argument":"' + b"[" * 5000 + b'"}', "no JSON object"),
    ("peer-messages", b'{"v":2,"run":"r","messages":' + DEEP + b"}\n", FAR),
    ("file-graph", b'{"nodes":' + DEEP + b"}", FAR),
    ("file-join", DEEP, FAR),
    ("file-token", b"efl1." + base64.urlsafe_b64encode(b"abc" + DEEP)[:4000], "damaged"),
    ("file-run", b"a=" + DEEP, FAR),
    ("file-run", b".".join([b"a"] * 2000) + b" = 1", FAR),
    ("file-run", b'["a"' + b" . 'b'" * 200 + b"]", FAR),
    ("file-faults", b'[[fault]]\ndevice = "a"\nkind = "kill"\nat_s = 0x' + b"f" * 5000, "at most 64 bits"),
    ("file-operator", b"url = " + DEEP, FAR),
    ("operator-answers", b"\x00" + DEEP, "without JSON"),
    ("card-user-data", b"u#cloud-config\nusers: [!!int x]\n", "no cloud-config"),
    ("card-user-data", b"u#cloud-config\nusers: " + DEEP, "no cloud-config"),
    ("card-user-data", b"u#cloud-config\nusers: &a [*a, *a]\n", "no cloud-config"),
    ("card-user-data", b"u#cloud-config\nx: {? 0x" + b"f" * 5000 + b" : 1}", "no cloud-config"),
    ("card-user-data", MERGES, "no cloud-config"),
    ("card-preseed", b"user = 5", "no tables where they are due"),
    ("card-preseed", b"[runcmd]\nearly = 1e-9", "no tables where they are due"),
    ("card-preseed", b"[user]\nname = 07:32:00", "user.name, which cannot be kept"),
    ("card-preseed", b'[user]\n"a b" = 1', "user.a b, which cannot be kept"),
    ("card-preseed", b"[user]\nname = inf", "user.name, which cannot be kept"),
    ("shard-npz", with_header(b"{'descr': '|u1',"), "not a readable"),
    ("shard-npz", with_header(b"{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999,), }"),
    "16 are there"),
    ("shard-npz", bomb("inputs", 80 << 20), "more than 100 times as much"),
    ("shard-npz", pickled(), "pickled objects"),
    ("shard-idx", b"\0\0\x08\x03" + b"\xff" * 8 + b"\0" * 4, "is no shape of an array"),
    ("shard-card", b'{"task":"digits","sha256":"","counts":{"0":1e999}}', "OverflowError"),
    ("shard-motion", motion(activity=np.array([0])), "one a recording"),
    ("shard-motion", motion(trial=np.array([11, 12])), "recordings of trials before 11"),
    ("shard-motion", motion(scale=np.array(1e300)), "no finite float32"),
    ("shard-motion", motion(length=np.array([0.5, 1.0])), "whole numbers"),
    ("infer-rows", b"ca,b\n,2.5\n", "'', not a number"),
    ("infer-rows", b"c4e51,2.5\n", "no row of numbers"),
    ("infer-rows", b"y\x93NUMPY\x01\x00\x06\x00{'a':(", "no .npy array"),
    ("join-renew", json.dumps({"v": 1, "csr": armoured(with_version(64))}).encode(), "64 is not a valid CSR version"),
    ("bundle-keys", ED448, "is no Ed25519 key"),
    ("disk-records", b"\x01" + b'\x03\x00\x00\x00"a"', "makes no sense"),
    ("disk-records", b'\x05\x13\x00\x00\x00{"orders":[{"a":[]}]}', "makes no sense"),
    ("disk-records", b"\x01" + struct.pack("<I", len(NO_WHOLE_LENGTH)) + NO_WHOLE_LENGTH, "cannot be interpreted"),
    ("disk-device", b"s-1", None),
    ("disk-device", b'd{"v":1,"device_id":[],"fleet":"a"}', "is damaged"),
    ("disk-notes", b's{"trial":{"step":"trial","id":{}}}', None),
    ("disk-notes", b'l{"packs":{},"serials":{"a":1e999}}', "is damaged"),
    ("disk-logbook", b'{"n":1,"at":"x"}', None),
    ("disk-checkpoints", b'{"v":2,"sha256":"\\u0000","last_record":7,"bytes_file":1}', "no checkpoint"),
    ("history-places", b"[" + b"1" * 350 + b",2]", "a place in the history is"),
    ("history-places", b"[1,18446744073709551616]", "a place in the history is"),
    ("report-archive", b"\x1f\x8b\x08", "no field report"),
    ("disk-backup", b"\x1f\x8b\x08", "no whole backup"),
    ("disk-backup", archive_of("a\0b"), "no whole backup"),
    ("disk-checkpoints", checkpoint_note(snapshot_sha256={}), "no checkpoint"),
    ("disk-checkpoints", checkpoint_note(snapshot_sha256=False), "no checkpoint"),
    ("disk-checkpoints", b'{"v":2,"sha256":[],"last_record":7,"bytes_file":1}', "no checkpoint"),
    ("infer-requests", b"POST /predict HTTP/1.1\r\nContent-Length: 6\r\n\r\n[4e51]", None),
    ("operator-api", b'POST /edgefl/v1/run-files\n{"toml":Infinity}', "Infinity is no number"),
    ("operator-api", b'POST /edgefl/v1/run-files\n{"toml":1e999}', "1e999 is no number"),
    ("operator-api", b'POST /edgefl/v1/installations\n"\\ud800"', "Input should be a valid dictionary"),
    ("operator-api", b'POST /edgefl/v1/runs\n{"config":{"run":{"task":"\\ud800"},"strategy":{"name":"fedavg"}}}',
    "unknown task '?'"),
    ("operator-api", b"GET /edgefl/v1/history/events?after=%5B9223372036854775808%2C1%5D\n", "a place in the"),
    ("operator-api", b"GET /edgefl/v1/history/why?run=first&round=-9223372036854775809\n", "has no round -92233"),
    ("operator-api", b"GET /edgefl/v1/runs?\xff\n", "must be ASCII"),
]  # fmt: skip


@pytest.mark.parametrize("name", sorted({name for name, _, _ in FOUND}))
def test_what_was_found_once_is_refused_with_a_reason(made: Callable[[str], Reader], name: str) -> None:
    reader = made(name)
    for _, content, words in (found for found in FOUND if found[0] == name):
        if words is None:  # such files count as missing, or lose one line
            reader.feed(content)
            continue
        with pytest.raises(EdgeflError) as refused:
            reader.feed(content)
        assert words in str(refused.value), content[:200]


def test_a_wheel_whose_metadata_are_no_text_is_refused(made: Callable[[str], Reader], tmp_path: Path) -> None:
    for metadata in (b"Name: \xff\nVersion: 1.0\n", b"Name: mytask\nVersion: \xff\n"):
        with pytest.raises(EdgeflError, match="says inside that it is"):
            made("bundle-wheel").feed(wheel(tmp_path, metadata))


def test_a_version_of_half_a_character_does_not_end_the_coordinator(tmp_path: Path) -> None:
    """It was written to the store with the next flush, in the loop that keeps the coordinator alive."""
    fleet = Fleet(tmp_path)
    fleet.diary.on_message(
        "pi", Topic.STATUS, b'{"v":1,"state":"online","boot_id":"b","session_no":1,"version":"1\\ud800"}'
    )
    fleet.diary.flush()
    found = fleet.store.get_device("pi").version
    fleet.store.close()
    assert found == "1?"


def test_halves_of_characters_go_out_of_what_the_api_is_told(tmp_path: Path) -> None:
    router, heard = APIRouter(), list[Any]()

    @router.post("/x")
    def take(value: Annotated[Any, Body()]) -> None:
        heard.append(value)

    port = Port(make_app(make_app, [router]))  # type: ignore[arg-type]  # nobody asks the other
    assert port.ask("POST", b"/x", b"", [(b"content-type", b"application/json")], b'{"a":"\\ud800\\u00e4"}')[0] == 200
    port.close()
    assert heard == [{"a": "?ä"}]
