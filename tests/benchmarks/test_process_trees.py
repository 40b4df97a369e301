from __future__ import annotations

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
def parent():
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    yield process
    process.communicate("\n\n", timeout=10)


def test_a_tree_has_the_memory_of_its_children(trees, parent):
    pids = trees.tree(parent.pid, trees.children_by_parent())

    assert len(pids) == 2
    assert trees.look(pids).pss_bytes > 50_000_000
    assert trees.pss_bytes(parent.pid) < 50_000_000


def test_a_tree_keeps_the_cpu_time_of_children_that_ended(trees, parent):
    before = trees.look(trees.tree(parent.pid, trees.children_by_parent()))
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write("\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == "reaped\n"

    after = trees.look(trees.tree(parent.pid, trees.children_by_parent()))

    assert after.num_processes == 1
    assert after.cpu_s > 0.99 * before.cpu_s > 0


def test_a_process_that_is_gone_costs_nothing(trees):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()

    assert (trees.pss_bytes(process.pid), trees.cpu_s(process.pid), trees.command(process.pid)) == (0, 0.0, "")


def test_a_meter_sees_what_happens_while_it_is_entered(trees, parent):
    begin_s = time.time()
    with trees.Meter({"device": parent.pid}, interval_s=0.01) as meter:
        deadline_s = time.monotonic() + 60
        while len(meter.samples["device"]) < 3:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)

    assert meter.cost("device", begin_s, time.time()).peak_bytes > 50_000_000
    assert any("python" in name for name in meter.commands)


def test_a_span_with_one_look_is_too_short_to_measure(trees):
    meter = trees.Meter({"device": 1})
    meter.samples["device"].append(trees.Sample(at_s=5.0, pss_bytes=1, cpu_s=0.0, num_processes=1))

    with pytest.raises(ValueError, match="run more rounds"):
        meter.cost("device", 4.0, 6.0)


def test_cost_counts_only_what_lies_in_the_span(trees):
    meter = trees.Meter({"device": 1})
    meter.samples["device"] += [
        trees.Sample(at_s=at_s, pss_bytes=pss_bytes, cpu_s=cpu_s, num_processes=1)
        for at_s, pss_bytes, cpu_s in (
            (1.0, 900, 0.0),
            (2.0, 10, 3.0),
            (3.0, 30, 3.5),
            (4.0, 20, 4.0),
            (5.0, 900, 9.0),
        )
    ]

    assert meter.cost("device", 1.5, 4.5) == trees.Cost(peak_bytes=30, median_bytes=20, cores=0.5)


def test_other_cores_are_what_the_machine_did_beside_the_trees(trees):
    meter = trees.Meter({"device": 1})
    meter.samples["device"] += [
        trees.Sample(at_s=at_s, pss_bytes=1, cpu_s=cpu_s, num_processes=1) for at_s, cpu_s in ((1.0, 0.0), (3.0, 1.0))
    ]
    meter.machine += [(1.0, 100.0), (3.0, 103.0)]

    assert meter.other_cores(0.0, 4.0) == 1.0


def test_no_descendant_outlives_its_end_though_it_is_orphaned_and_ignores_sigterm(trees):
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN, str(HARNESS)], capture_output=True, text=True, timeout=20, check=True
    )

    assert trees.command(int(done.stdout)) == ""
