"""How long the things take that a board does for a fleet: imports, signatures, checksums, its card, the way there."""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from edgefl.child_process import ask_child
from edgefl.device.board.programs import RunProgram, run_program
from edgefl.device.state import DeviceState
from edgefl.device.trust import pinned_context, say_hello
from edgefl.errors import EdgeflError
from edgefl.types import Json
from edgefl.untrusted import parse_json

IMPORTS = ("numpy", "cryptography.x509", "onnxruntime", "edgefl.device.agent", "torch")
IMPORT_S = 60.0
TRAINING_S = 60.0
MEASURE_S = 0.3
BLOCK_BYTES = 1 << 20
SMALL_BYTES = 4096
SMALL_WRITES = 15
LARGE_BYTES = 8 << 20
HELLOS = 3
HELLO_S = 3.0

# Said by a process that has imported nothing yet: its own seconds, and the memory that it took at the most.
_IMPORT = """
import importlib.util, json, resource, sys, time
begun = time.perf_counter()
name = sys.argv[1]
found = importlib.util.find_spec(name.partition(".")[0]) is not None
if found:
    __import__(name)
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"s": round(time.perf_counter() - begun, 3), "max_rss_bytes": used} if found else {"missing": True}))
"""


def import_times(names: Sequence[str], run: RunProgram = run_program) -> Json:
    """Returns for each library how long a fresh process imports it, and how much memory it has then."""
    found: Json = {}
    for name in names:
        told = run([sys.executable, "-c", _IMPORT, name], IMPORT_S)
        try:
            found[name] = parse_json(told or "")
        except ValueError:
            found[name] = {"error": f"it crashed, or took more than {IMPORT_S:g} s"}
    return found


def key_times() -> Json:
    """Returns seconds of a signature and of its check, for the keys that boards and releases have."""
    from cryptography.hazmat.primitives import hashes  # noqa: PLC0415 slow to load
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519  # noqa: PLC0415 likewise

    message, how = b"edgefl" * 10, ec.ECDSA(hashes.SHA256())
    p256, edwards = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
    signed, stamped = p256.sign(message, how), edwards.sign(message)
    return {
        "p256": {
            "make_s": _seconds(lambda: ec.generate_private_key(ec.SECP256R1())),
            "sign_s": _seconds(lambda: p256.sign(message, how)),
            "verify_s": _seconds(lambda: p256.public_key().verify(signed, message, how)),
        },
        "ed25519": {
            "sign_s": _seconds(lambda: edwards.sign(message)),
            "verify_s": _seconds(lambda: edwards.public_key().verify(stamped, message)),
        },
    }


def checksum_speeds() -> Json:
    """Returns how many bytes a second SHA-256 and CRC-32 take in."""
    block = bytes(BLOCK_BYTES)
    return {
        "sha256_bytes_per_s": round(BLOCK_BYTES / _seconds(lambda: hashlib.sha256(block).digest())),
        "crc32_bytes_per_s": round(BLOCK_BYTES / _seconds(lambda: zlib.crc32(block))),
    }


def card_times(folder: Path) -> Json:
    """Returns how long the card under a folder takes to keep a little, and how fast it keeps much."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".edgefl-card-") as inside:
        small = [_write(Path(inside) / f"{number}", SMALL_BYTES) for number in range(SMALL_WRITES)]
        large_s = _write(Path(inside) / "large", LARGE_BYTES)
    return {
        "small_bytes": SMALL_BYTES,
        "median_s": statistics.median(small),
        "worst_s": max(small),
        "large_bytes_per_s": round(LARGE_BYTES / max(large_s, 1e-9)),
    }


def training_speeds(tasks: Mapping[str, str | None], *, accelerator: str, threads: int | None) -> Json:
    """Returns what a short training of each task says, or why it cannot be trained here."""
    found: Json = {}
    for name, shard in tasks.items():
        question: Json = {"task": name, "shard": shard, "accelerator": accelerator, "threads": threads}
        begun_s = time.perf_counter()
        try:
            told = ask_child("edgefl.device.board.speed", question, what=f"training {name}", within_s=TRAINING_S)
        except EdgeflError as error:
            told = {"error": str(error)}
        found[name] = {**told, "whole_s": round(time.perf_counter() - begun_s, 3)}
    return found


def way_to(state: DeviceState) -> Json:
    """Returns for each address of the coordinator how long a TLS connection with one question takes."""
    context = pinned_context(state.ca.read_bytes())
    found: Json = {}
    for address in state.device.addresses:
        times = []
        try:
            for _ in range(HELLOS):
                begun_s = time.perf_counter()
                skew_s = say_hello(address, context, timeout_s=HELLO_S).skew_s
                times.append(time.perf_counter() - begun_s)
        except (EdgeflError, ValueError) as error:
            found[address] = {"error": str(error)}
            continue
        found[address] = {"median_s": statistics.median(times), "worst_s": max(times), "skew_s": round(skew_s, 3)}
    return found


def _seconds(act: Callable[[], object]) -> float:
    """Returns what one act takes, of as many as fit into the time."""
    act()
    done, begun_s = 0, time.perf_counter()
    while (spent_s := time.perf_counter() - begun_s) < MEASURE_S or not done:
        act()
        done += 1
    return float(f"{spent_s / done:.4g}")


def _write(path: Path, size: int) -> float:
    """Returns how long it takes until so many bytes are on the card for good."""
    content, begun_s = os.urandom(size), time.perf_counter()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - begun_s
