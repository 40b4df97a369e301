"""A collector as a process of its own, and what it has kept."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgefl.device.collect.store_state import read_store_state


@contextmanager
def run_collector_process(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `edgefl device collect` of a file; it is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "edgefl", "device", "collect", str(path)], stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def count_kept_rows(folder: Path) -> int:
    """Returns the rows of a shard; 0 before there is one."""
    state = read_store_state(folder)
    return state.num_rows if state else 0
