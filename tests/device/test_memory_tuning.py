"""What a device's process is spared, in processes that are frugal and others that are not."""

import json
import subprocess
import sys

IMPORTS = """
import json, sys
from edgefl.device.memory_tuning import STUBBED_MODULES, reduce_memory
{call}
import edgefl.device.agent
told = None
if {call!r}:  # the real one would serve
    from flwr.server import start_server
    try:
        start_server()
    except RuntimeError as error:
        told = str(error)
begun = "grpc", *STUBBED_MODULES
print(json.dumps({{
    "renderers": len([name for name in sys.modules if name.partition(".")[0] in ("pygments", "markdown_it")]),
    "server": len([
        name for name, module in sys.modules.items() if name.startswith(begun) and getattr(module, "__file__", None)
    ]),
    "error": told,
}}))
"""
MEMORY = """
import json, re, resource, threading
from pathlib import Path
from edgefl.device.memory_tuning import reduce_memory
{call}
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    kept = [bytearray(b"x") * 1_000_000 for _ in range(6)]
    del kept
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
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
heaps = sum(
    start % (64 << 20) == 0 and end == spans[i + 1][0] and len(maps[i]) == 5
    and (maps[i][1], maps[i + 1][1]) == ("rw-p", "---p")
    for i, (start, end) in enumerate(spans[:-1])
)
print(json.dumps({{"faults": faults, "heaps": heaps}}))
barrier.wait(60)
"""


def told(program, call):
    command = [sys.executable, "-c", program.format(call=call)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)


def test_the_agent_imports_no_renderer_of_terminals_no_grpc_and_no_server_and_says_so():
    usual, frugal = told(IMPORTS, ""), told(IMPORTS, "reduce_memory()")
    assert min(usual["renderers"], usual["server"]) > 10
    assert (frugal["renderers"], frugal["server"]) == (0, 0)
    assert "a device's process does without flwr.server, so there is no start_server" in frugal["error"]


def test_threads_share_one_heap_and_what_a_round_frees_is_there_for_the_next_one():
    """Fresh pages are filled with zeros by the kernel: that was a third of what a round of 1 MB cost a device."""
    usual, frugal = told(MEMORY, ""), told(MEMORY, "reduce_memory()")
    assert usual["heaps"] >= 4
    assert usual["faults"] > 50_000
    assert frugal["heaps"] == 0
    assert frugal["faults"] < 3_500
