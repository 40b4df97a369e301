import subprocess
import sys
import time
from pathlib import Path

import pytest

HARNESS = Path(__file__).parents[2] / "benchmarks" / "harness"
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "x = bytearray(b'x' * 50_000_000); print(1, flush=True); input()"],
                         stdin=subprocess.PIPE)
input()
child.communicate(b"\\n")
print("reaped", flush=True)
input()
"""
ORPHAN = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
from process_trees import adopt_orphans, end_descendants
adopt_orphans()
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(300)"
shell = f'{sys.executable} -c "{stubborn}" & echo $!; wait -n 2>/dev/null; exit'
process = subprocess.Popen(["bash", "-c", shell], stdout=subprocess.PIPE, text=True)
pid = process.stdout.readline().strip()
process.stdout.readline()
process.kill()
process.wait()
end_descendants(timeout_s=0.3)
print(pid)
"""


@pytest.fixture(scope="module")
def trees(harness):
    return harness("process_trees")


@pytest.fixture
def meter(trees):
    """A meter with samples at these times, of so much memory and processor time."""

    def make(*samples):
        made = trees.Meter({"device": 1})
        made.samples["device"] += [
            trees.Sample(at_s=at_s, pss_bytes=pss_bytes, cpu_s=cpu_s, num_processes=1)
            for at_s, pss_bytes, cpu_s in samples
        ]
        return made

    return make


def test_a_tree_has_the_memory_of_its_children_and_keeps_their_processor_time_after_their_end(trees):
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "1\n"
    begin_s = time.time()
    with trees.Meter({"device": process.pid}, interval_s=0.01) as meter:
        deadline_s = time.monotonic() + 60
        while len(meter.samples["device"]) < 3:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
    assert meter.cost("device", begin_s, time.time()).peak_bytes > 50_000_000
    assert any("python" in name for name in meter.commands)
    pids = trees.tree(process.pid, trees.children_by_parent())
    before = trees.look(pids)
    assert (len(pids), before.pss_bytes > 50_000_000, trees.pss_bytes(process.pid) < 50_000_000) == (2, True, True)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "reaped\n"
    after = trees.look(trees.tree(process.pid, trees.children_by_parent()))
    assert after.num_processes == 1
    assert after.cpu_s > 0.99 * before.cpu_s > 0
    process.communicate("\n", timeout=10)
    assert (trees.pss_bytes(process.pid), trees.cpu_s(process.pid), trees.command(process.pid)) == (0, 0.0, "")


def test_cost_counts_only_what_lies_in_the_span(trees, meter):
    samples = [(1.0, 900, 0.0), (2.0, 10, 3.0), (3.0, 30, 3.5), (4.0, 20, 4.0), (5.0, 900, 9.0)]
    assert meter(*samples).cost("device", 1.5, 4.5) == trees.Cost(peak_bytes=30, median_bytes=20, cores=0.5)
    with pytest.raises(ValueError, match="run more rounds"):
        meter((5.0, 1, 0.0)).cost("device", 4.0, 6.0)


def test_other_cores_are_what_the_machine_did_beside_the_trees(meter):
    made = meter((1.0, 1, 0.0), (3.0, 1, 1.0))
    made.machine += [(1.0, 100.0), (3.0, 103.0)]
    assert made.other_cores(0.0, 4.0) == 1.0


def test_no_descendant_outlives_its_end_though_it_is_orphaned_and_ignores_sigterm(trees):
    command = [sys.executable, "-c", ORPHAN, str(HARNESS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert trees.command(int(done.stdout)) == ""
