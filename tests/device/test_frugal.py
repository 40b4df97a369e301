"""What a device's process is spared."""

from __future__ import annotations

import subprocess
import sys

SEEN = """
import sys
from edgefl.device.frugal import be_frugal
{call}
import edgefl.device.agent
print(len([name for name in sys.modules if name.partition(".")[0] in ("pygments", "markdown_it")]))
"""
SERVER = """
import sys
from edgefl.device.frugal import STOOD_IN_FOR, be_frugal
{call}
import edgefl.device.agent
begun = "grpc", *STOOD_IN_FOR
print(len([name for name in sys.modules if name.startswith(begun) and getattr(sys.modules[name], "__file__", None)]))
"""
USED = """
from edgefl.device.frugal import be_frugal
be_frugal()
import edgefl.device.agent
from flwr.server import start_server
start_server()
"""
HEAPS = """
import re, threading
from pathlib import Path
from edgefl.device.frugal import be_frugal
{call}
kept = []
barrier = threading.Barrier(9)
def take():
    kept.append([bytes(1000) for _ in range(1000)])
    barrier.wait(60)
    barrier.wait(60)
for _ in range(8):
    threading.Thread(target=take, daemon=True).start()
barrier.wait(60)
# glibc's further heaps are mappings without a file that begin at a multiple of 64 MiB; room to grow follows.
maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
spans = [[int(end, 16) for end in words[0].split("-")] for words in maps]
print(sum(
    start % (64 << 20) == 0 and end == spans[i + 1][0] and len(maps[i]) == 5
    and (maps[i][1], maps[i + 1][1]) == ("rw-p", "---p")
    for i, (start, end) in enumerate(spans[:-1])
))
barrier.wait(60)
"""
ROUNDS = """
import resource
from edgefl.device.frugal import be_frugal
{call}
for _ in range(50):
    kept = [bytearray(b"x") * 1_000_000 for _ in range(6)]
    del kept
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


def said(program: str, call: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", program.format(call=call)], check=True, capture_output=True, timeout=120
    )
    return int(done.stdout)


def test_the_agent_imports_no_renderer_of_terminals() -> None:
    assert said(SEEN, "") > 10
    assert said(SEEN, "be_frugal()") == 0


def test_the_agent_imports_nothing_of_flower_s_server_and_no_grpc() -> None:
    assert said(SERVER, "") > 50
    assert said(SERVER, "be_frugal()") == 0


def test_whoever_wants_what_is_not_there_learns_why() -> None:
    done = subprocess.run([sys.executable, "-c", USED], check=False, capture_output=True, text=True, timeout=120)
    assert "a device's process does without flwr.server, so there is no start_server" in done.stderr


def test_threads_share_one_heap() -> None:
    assert said(HEAPS, "") >= 4
    assert said(HEAPS, "be_frugal()") == 0


def test_what_a_round_frees_is_there_for_the_next_one() -> None:
    """Fresh pages are filled with zeros by the kernel: that was a third of what a round of 1 MB cost a device."""
    assert said(ROUNDS, "") > 50_000
    assert said(ROUNDS, "be_frugal()") < 5_000
