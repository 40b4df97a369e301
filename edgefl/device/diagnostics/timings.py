"""Timings of a board: imports, signatures, checksums, storage, training, coordinator latency."""

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

from edgefl.core.errors import EdgeflError
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json
from edgefl.device.hardware.board_reader import RunProgram, run_program
from edgefl.device.state_dir import DeviceStateDir
from edgefl.system.https_client import create_pinned_context, fetch_coordinator_info
from edgefl.system.processes import call_in_subprocess

IMPORT_NAMES = ("numpy", "cryptography.x509", "onnxruntime", "edgefl.device.agent", "torch")
IMPORT_TIMEOUT_S = 60.0
TRAINING_TIMEOUT_S = 60.0
MEASURE_S = 0.3
BLOCK_BYTES = 1 << 20
SMALL_BYTES = 4096
NUM_SMALL_WRITES = 15
LARGE_BYTES = 8 << 20
NUM_REQUESTS = 3
REQUEST_TIMEOUT_S = 3.0

# Printed by a fresh process: its own seconds, and its peak memory.
_IMPORT_SCRIPT = """
import importlib.util, json, resource, sys, time
begun = time.perf_counter()
name = sys.argv[1]
found = importlib.util.find_spec(name.partition(".")[0]) is not None
if found:
    __import__(name)
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"s": round(time.perf_counter() - begun, 3), "max_rss_bytes": used} if found else {"missing": True}))
"""


def measure_import_times(names: Sequence[str], run: RunProgram = run_program) -> Json:
    """Returns for each library its import time and memory in a fresh process."""
    times: Json = {}
    for name in names:
        output = run([sys.executable, "-c", _IMPORT_SCRIPT, name], IMPORT_TIMEOUT_S)
        try:
            times[name] = parse_json(output or "")
        except ValueError:
            times[name] = {"error": f"it crashed, or took more than {IMPORT_TIMEOUT_S:g} s"}
    return times


def measure_key_times() -> Json:
    """Returns seconds to make and check a signature, for keys of boards and releases."""
    from cryptography.hazmat.primitives import hashes  # noqa: PLC0415 slow to load
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519  # noqa: PLC0415 likewise

    message, algorithm = b"edgefl" * 10, ec.ECDSA(hashes.SHA256())
    p256, edwards = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
    p256_signature, ed25519_signature = p256.sign(message, algorithm), edwards.sign(message)
    return {
        "p256": {
            "make_s": _measure_seconds(lambda: ec.generate_private_key(ec.SECP256R1())),
            "sign_s": _measure_seconds(lambda: p256.sign(message, algorithm)),
            "verify_s": _measure_seconds(lambda: p256.public_key().verify(p256_signature, message, algorithm)),
        },
        "ed25519": {
            "sign_s": _measure_seconds(lambda: edwards.sign(message)),
            "verify_s": _measure_seconds(lambda: edwards.public_key().verify(ed25519_signature, message)),
        },
    }


def measure_checksum_rates() -> Json:
    """Returns the bytes per second of SHA-256 and CRC-32."""
    block = bytes(BLOCK_BYTES)
    return {
        "sha256_bytes_per_s": round(BLOCK_BYTES / _measure_seconds(lambda: hashlib.sha256(block).digest())),
        "crc32_bytes_per_s": round(BLOCK_BYTES / _measure_seconds(lambda: zlib.crc32(block))),
    }


def measure_storage(folder: Path) -> Json:
    """Returns the latency of small and the rate of large durable writes in a folder."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".edgefl-card-") as scratch:
        small_writes_s = [
            _measure_write_s(Path(scratch) / f"{number}", SMALL_BYTES) for number in range(NUM_SMALL_WRITES)
        ]
        large_write_s = _measure_write_s(Path(scratch) / "large", LARGE_BYTES)
    return {
        "small_bytes": SMALL_BYTES,
        "median_s": statistics.median(small_writes_s),
        "worst_s": max(small_writes_s),
        "large_bytes_per_s": round(LARGE_BYTES / max(large_write_s, 1e-9)),
    }


def measure_training(tasks: Mapping[str, str | None], *, accelerator: str, threads: int | None) -> Json:
    """Returns the result of a short training of each task, or its error."""
    results: Json = {}
    for name, shard in tasks.items():
        request: Json = {"task": name, "shard": shard, "accelerator": accelerator, "threads": threads}
        started_s = time.perf_counter()
        try:
            result = call_in_subprocess(
                "edgefl.device.hardware.benchmark",
                request,
                description=f"training {name}",
                timeout_s=TRAINING_TIMEOUT_S,
            )
        except EdgeflError as error:
            result = {"error": str(error)}
        results[name] = {**result, "whole_s": round(time.perf_counter() - started_s, 3)}
    return results


def measure_coordinator_latency(state: DeviceStateDir) -> Json:
    """Returns for each address of the coordinator the time of a TLS connection with one request."""
    context = create_pinned_context(state.ca.read_bytes())
    results: Json = {}
    for address in state.settings.addresses:
        times = []
        try:
            for _ in range(NUM_REQUESTS):
                started_s = time.perf_counter()
                skew_s = fetch_coordinator_info(address, context, timeout_s=REQUEST_TIMEOUT_S).skew_s
                times.append(time.perf_counter() - started_s)
        except (EdgeflError, ValueError) as error:
            results[address] = {"error": str(error)}
            continue
        results[address] = {"median_s": statistics.median(times), "worst_s": max(times), "skew_s": round(skew_s, 3)}
    return results


def _measure_seconds(run: Callable[[], object]) -> float:
    """Returns the mean seconds of a call, over as many as fit into the time."""
    run()
    count, started_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - started_s) < MEASURE_S or not count:
        run()
        count += 1
    return float(f"{elapsed_s / count:.4g}")


def _measure_write_s(path: Path, size: int) -> float:
    """Returns the seconds of a durable write of so many bytes."""
    content, started_s = os.urandom(size), time.perf_counter()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started_s
