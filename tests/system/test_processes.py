"""Processes: stop signals, children that end with their parent, calls in a subprocess, and the service manager."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgefl.core.errors import EdgeflError, NotFoundError
from edgefl.system import processes
from edgefl.system.processes import (
    ARROW_MEMORY_OPTIONS,
    LivenessMonitor,
    StoppedCallError,
    SystemdNotifier,
    call_in_subprocess,
    on_stop_signal,
    run_watchdog,
)

NATIVE = """
import ctypes, os, threading
from edgefl.system.processes import LowestPriorityThread, list_library_threads
libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)
def look(thread_id):
    return os.getpriority(os.PRIO_PROCESS, thread_id)
(native,), worker = list_library_threads(), LowestPriorityThread("training")
former = look(native)
ran = [worker.run(lambda: look(threading.get_native_id())) for _ in range(2)]
lowered = look(native)
worker.restore_libraries()
is_restored = os.geteuid() != 0 or look(native) == former
print(ran, lowered, is_restored, look(threading.get_native_id()) == former, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc: run it on Linux")
def test_what_yields_lowers_its_thread_and_those_of_libraries_but_not_the_callers():
    said = subprocess.run([sys.executable, "-c", NATIVE], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout == "[19, 19] 19 True True\n"


def test_no_thread_of_a_library_is_known_while_one_of_python_starts_or_without_proc(monkeypatch):
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.Thread()])
    assert processes.list_library_threads() == []

    def find_nothing(_path):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "iterdir", find_nothing)
    assert processes.list_library_threads() == []


def test_a_signal_stops_once_and_outside_the_handler():
    stopped, threads = threading.Event(), list[threading.Thread]()

    def stop():
        threads.append(threading.current_thread())
        stopped.set()

    with on_stop_signal(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped.wait(60)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_a_signal_that_comes_while_the_lock_of_stop_is_held_ends_in_no_deadlock():
    stopping, lock = threading.Event(), threading.Lock()

    def stop():
        with lock:
            stopping.set()

    with on_stop_signal(stop):
        with lock:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.wait(60)


def test_afterwards_the_handlers_are_as_before_and_no_thread_is_left():
    before, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
    with on_stop_signal(lambda: None):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    assert threading.active_count() == threads


def test_a_child_ends_when_the_process_that_started_it_is_killed():
    program = (
        "import subprocess, sys, time\n"
        "from edgefl.system.processes import exit_with_parent\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "child = subprocess.Popen(sleep, preexec_fn=exit_with_parent)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s and _is_running(child):
        time.sleep(0.02)
    assert not _is_running(child)


def test_nothing_is_loaded_between_fork_and_exec():
    program = (
        "import ctypes\n"
        "from edgefl.system.processes import exit_with_parent\n"
        "del ctypes.CDLL, ctypes.PyDLL\n"
        "exit_with_parent()\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=30).returncode == 0


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_opens_more_files_than_it_was_given_at_first():
    program = (
        "import resource, sys, os\n"
        "from edgefl.system.processes import raise_file_limit\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "assert raise_file_limit() == hard\n"
        "files = [os.pipe() for _ in range(100)]\n"
        "print(len(files))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "100", done.stderr


CHILD = """
import os, signal, sys, time
from edgefl.system.processes import serve_call
from edgefl.core.errors import NotFoundError

class OwnError(NotFoundError): ...

def answer(question):
    print("noise"); os.system("echo noise of a program")
    match question["do"]:
        case "tell": return {"it": question["it"]}
        case "own": raise OwnError("no such thing")
        case "fault": return {"it": 1 / 0}
        case "die": os._exit(3)
        case "sleep": time.sleep(60)
        case "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open(question["it"], "w").close()
            time.sleep(60)

serve_call(answer)
"""


@pytest.fixture(autouse=True)
def child(tmp_path, monkeypatch):
    (tmp_path / "asked_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)


def ask(do, within_s=None):
    return call_in_subprocess("asked_child", {"do": do, "it": [1, "two"]}, description="asking", timeout_s=within_s)


def test_the_answer_comes_back_whatever_the_child_prints():
    assert ask("tell") == {"it": [1, "two"]}


def test_an_error_of_ours_comes_back_as_the_kind_that_everybody_knows():
    with pytest.raises(NotFoundError, match=r"^no such thing$") as raised:
        ask("own")
    assert type(raised.value) is NotFoundError


def test_another_one_is_named_and_its_traceback_logged(caplog):
    with caplog.at_level(logging.WARNING), pytest.raises(EdgeflError, match="ZeroDivisionError: division by zero"):
        ask("fault")
    assert 'case "fault"' in caplog.text


def test_a_child_that_ends_without_an_answer_or_takes_too_long_is_an_error():
    with pytest.raises(EdgeflError, match="asking ended with code 3: noise of a program"):
        ask("die")
    with pytest.raises(EdgeflError, match=r"asking took more than 0\.2 s"):
        ask("sleep", within_s=0.2)


@pytest.mark.parametrize("do", ["sleep", "ignore"])
def test_a_call_that_is_stopped_ends_its_child_even_one_that_ignores_the_signal(tmp_path, monkeypatch, do):
    monkeypatch.setattr(processes, "KILL_AFTER_S", 0.3)
    started, pids = tmp_path / "started", []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **named: pids.append(popen(*args, **named)) or pids[-1])
    started_s = time.monotonic()
    with pytest.raises(StoppedCallError, match="asking was stopped"):
        call_in_subprocess(
            "asked_child",
            {"do": do, "it": str(started)},
            description="asking",
            should_stop=lambda: do == "sleep" or started.exists(),
        )
    assert time.monotonic() - started_s < 30
    assert pids[0].poll() == -(signal.SIGTERM if do == "sleep" else signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc: run it on Linux")
def test_a_child_whose_asker_is_killed_ends_without_a_word(tmp_path):
    """Whenever that is: while it starts, imports, reads or works."""
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from edgefl.system.processes import call_in_subprocess as ask\n"
        "print(flush=True)\n"
        "ask('asked_child', {'do': 'sleep'}, description='asking')"
    )
    for after_s in (0.0, 0.005, 0.02, 0.1, 0.3):
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asker:
            assert asker.stdout is not None
            asker.stdout.readline()
            time.sleep(after_s)
            asker.kill()
            assert asker.communicate(timeout=60)[1] == b""
        deadline_s = time.monotonic() + 60
        while children(tmp_path):
            assert time.monotonic() < deadline_s, f"still there, killed after {after_s} s: {children(tmp_path)}"
            time.sleep(0.02)


def children(folder):
    """Who has this folder in its PYTHONPATH, by process id."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] * (f"PYTHONPATH={folder}".encode() in path.read_bytes())
    return found


class Manager:
    """Stands for systemd: a datagram socket that keeps what it is told."""

    def __init__(self, folder):
        self.address = str(folder / "notify")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.address)

    def next(self, timeout_s):
        self.socket.settimeout(timeout_s)
        try:
            return self.socket.recv(4096).decode()
        except TimeoutError:
            return None


@pytest.fixture
def manager(tmp_path):
    manager = Manager(tmp_path)
    yield manager
    manager.socket.close()


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_ready_beats_and_stopping_come_in_this_order_and_no_beats_without_a_watchdog(manager):
    with run_watchdog(SystemdNotifier(address=manager.address, watchdog_s=0.2), LivenessMonitor()):
        assert [manager.next(5), manager.next(5)] == ["READY=1", "WATCHDOG=1"]
    told = []
    while (word := manager.next(0.1)) is not None:
        told.append(word)
    assert told[-1] == "STOPPING=1"
    with run_watchdog(SystemdNotifier(address=manager.address), LivenessMonitor()):
        pass
    assert [manager.next(5), manager.next(5), manager.next(0.1)] == ["READY=1", "STOPPING=1", None]


def test_beats_end_when_the_loop_is_stuck_and_come_again_with_it(manager):
    life = LivenessMonitor()
    with run_watchdog(SystemdNotifier(address=manager.address, watchdog_s=0.4), life):
        deadline_s = time.monotonic() + 60
        while manager.next(0.5) is not None:  # the loop, which is this one, does not come round
            assert time.monotonic() < deadline_s, "a stuck loop went on beating"
        life.record_progress()
        assert manager.next(5) == "WATCHDOG=1"


def test_outside_of_systemd_nothing_is_told_and_nothing_fails(tmp_path, caplog):
    SystemdNotifier().notify("READY=1")
    assert not caplog.records
    SystemdNotifier(address=str(tmp_path / "nobody")).notify("READY=1")
    assert "cannot be told READY=1" in caplog.text


def test_an_abstract_socket_is_reached():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0edgefl-test-{os.getpid()}")
        listener.settimeout(5)
        SystemdNotifier(address=f"@edgefl-test-{os.getpid()}").notify("READY=1")
        assert listener.recv(100) == b"READY=1"


OWN = {"WATCHDOG_PID": str(os.getpid())}


@pytest.mark.parametrize(
    ("found", "watchdog_s"),
    [
        ({"WATCHDOG_USEC": "180000000", **OWN}, 180.0),
        ({"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_what_systemd_set_for_this_process_is_taken_out_of_the_environment(found, watchdog_s):
    environment = {"NOTIFY_SOCKET": "/run/n", "A": "b", **found}
    assert SystemdNotifier.from_environment(environment) == SystemdNotifier(address="/run/n", watchdog_s=watchdog_s)
    assert environment == {"A": "b"}


def test_a_loop_at_leisure_must_come_round_after_work_too():
    clock = Clock()
    life = LivenessMonitor(clock=clock, work_timeout_s=1000)
    for now, is_alive in ((9.0, True), (11.0, False)):
        clock.now = now
        assert life.is_alive(10) is is_alive
    life.record_progress()
    assert life.is_alive(10)
    with life.track_work():
        clock.now = 600.0
    for now, is_alive in ((605.0, True), (611.0, False)):
        clock.now = now
        assert life.is_alive(10) is is_alive


@contextmanager
def at_work(life, work):
    """A thread that works in the loop's place until the block is over."""
    entered, leave = threading.Event(), threading.Event()

    def run():
        with life.track_work():
            entered.set()
            work(leave)

    worker = threading.Thread(target=run)
    worker.start()
    assert entered.wait(60)
    yield worker
    leave.set()
    worker.join()


def test_work_that_waits_is_given_its_time_and_no_more():
    clock = Clock()
    life = LivenessMonitor(clock=clock, work_timeout_s=1000)
    with at_work(life, lambda leave: leave.wait(30)):
        for now, is_alive in ((500.0, True), (1100.0, False)):
            clock.now = now
            assert life.is_alive(10) is is_alive
        life.record_progress()  # an iteration was done
        assert life.is_alive(10)


def test_work_that_computes_is_alive_however_long_it_takes():
    def compute(leave):
        while not leave.is_set():
            sum(range(1000))

    clock = Clock()
    life = LivenessMonitor(clock=clock, work_timeout_s=1.0)
    with at_work(life, compute) as worker:
        life.is_alive(1)
        cpu, deadline_s = time.pthread_getcpuclockid(worker.ident), time.monotonic() + 60
        for now in (1.5, 3.0, 4.5):
            # The clock of the loop is ours, that of the processor is real: let it run for a share of 1.5 s.
            until_s = time.clock_gettime(cpu) + 0.05
            while time.clock_gettime(cpu) < until_s:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            clock.now = now
            assert life.is_alive(1)
    clock.now = 10.0
    assert not life.is_alive(1), "a thread that is gone computes no more"


NOTIFYING_CHILD = """
import subprocess, sys
from edgefl.system.processes import LivenessMonitor, SystemdNotifier, run_watchdog
with run_watchdog(SystemdNotifier.from_environment(), LivenessMonitor()):
    program = 'import os; raise SystemExit("NOTIFY_SOCKET" in os.environ)'
    subprocess.run([sys.executable, "-c", program], check=True)
"""


def test_a_child_does_not_speak_for_its_parent(manager):
    environment = {**os.environ, "NOTIFY_SOCKET": manager.address}
    subprocess.run([sys.executable, "-c", NOTIFYING_CHILD], env=environment, check=True, timeout=30)
    assert manager.next(5) == "READY=1"


IMPORTS = """
import json, sys
from edgefl.system.processes import reduce_memory
{call}
import edgefl.device.agent
roots = [name.partition(".")[0] for name in sys.modules]
print(json.dumps({{
    "renderers": sum(name in ("pygments", "markdown_it") for name in roots),
    "flower": sum(name in ("flwr", "grpc") for name in roots),
}}))
"""
MEMORY = """
import json, re, resource, threading
from pathlib import Path
from edgefl.system.processes import reduce_memory
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
# glibc's further heaps are mappings without a file that begin at a multiple of 64 MiB; room to grow follows, up to
# the next multiple. A thread's stack, which may begin there by chance, has one page of another's guard behind it.
maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
spans = [[int(end, 16) for end in words[0].split("-")] for words in maps]
heaps = sum(
    start % (64 << 20) == 0 and end == spans[i + 1][0] and spans[i + 1][1] - start >= 64 << 20 and len(maps[i]) == 5
    and (maps[i][1], maps[i + 1][1]) == ("rw-p", "---p")
    for i, (start, end) in enumerate(spans[:-1])
)
print(json.dumps({{"faults": faults, "heaps": heaps}}))
barrier.wait(60)
"""


def told(program, call):
    command = [sys.executable, "-c", program.format(call=call)]
    environment = {name: value for name, value in os.environ.items() if name not in ARROW_MEMORY_OPTIONS}  # of others
    answer = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    return json.loads(answer.stdout)


def test_the_agent_imports_no_renderer_of_terminals_and_nothing_of_flower():
    usual, frugal = told(IMPORTS, ""), told(IMPORTS, "reduce_memory()")
    assert usual["renderers"] > 10
    assert (frugal["renderers"], frugal["flower"], usual["flower"]) == (0, 0, 0)


GAPS = """
import json
from pathlib import Path
from edgefl.system.processes import map_large_blocks, reduce_memory, reuse_large_blocks
reduce_memory()
{call}
def measure():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("Rss:")).split()[1])
before, small = measure(), []
blocks = []
for _ in range(20):
    blocks.append(bytearray(b"x") * 2_000_000)
    small.append(bytes(100_000))  # above it in the heap, so that nothing can be trimmed
del blocks
print(json.dumps(measure() - before))
"""


def test_large_blocks_that_are_freed_leave_no_gaps_once_they_are_mappings_of_their_own():
    assert told(GAPS, "") > 35_000_000
    assert told(GAPS, "map_large_blocks()") < 8_000_000
    assert told(GAPS, "map_large_blocks(); reuse_large_blocks()") > 35_000_000


CODE = """
import json, zlib
from pathlib import Path
import numpy
from edgefl.system.processes import drop_code_pages
def measure():
    found, is_code = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and len(words) > 1 and len(words[1]) == 4:
            is_code = words[1] == "r-xp" and "_multiarray_umath" in line
        elif is_code and words[0] == "Rss:":
            found += 1024 * int(words[1])
    return found
values = numpy.arange(1000.0).reshape(10, 100)
expected, before = (values @ values.T).tobytes(), measure()
dropped = drop_code_pages({call}"_multiarray_umath")
print(json.dumps([before, dropped, measure(), (values @ values.T).tobytes() == expected]))
"""


def test_the_code_of_a_library_is_unmapped_until_it_is_run_again_and_no_other_is():
    before, dropped, after, is_same = told(CODE, "")
    assert after < before / 2
    assert dropped >= before
    assert is_same
    before, dropped, after, _ = told(CODE, '"no-such-library" or ')
    assert (dropped, after >= before) == (0, True)


def test_threads_share_one_heap_and_what_a_round_frees_is_there_for_the_next_one():
    """Fresh pages are filled with zeros by the kernel: that was a third of what a round of 1 MB cost a device."""
    usual, frugal = told(MEMORY, ""), told(MEMORY, "reduce_memory()")
    assert usual["heaps"] >= 4
    assert usual["faults"] > 50_000
    assert frugal["heaps"] == 0
    assert frugal["faults"] < 3_500


ARROW_MEMORY = """
import json
from pathlib import Path
from edgefl.system.processes import reduce_memory
{call}
import pyarrow

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if "RssAnon" in line)

before = resident()
for _ in range(30):  # pages of columns, some of which are kept while others are read
    kept = [pyarrow.allocate_buffer(size) for size in range(500_000, 1_500_000, 100_000)]
    for buffer in kept:
        memoryview(buffer).cast("B")[:] = bytes(buffer.size)
    del buffer, kept
print(json.dumps({{"kilobytes": resident() - before}}))
"""


def test_what_pyarrow_frees_is_given_back():
    usual, frugal = told(ARROW_MEMORY, ""), told(ARROW_MEMORY, "reduce_memory()")
    assert frugal["kilobytes"] < 4_000 < usual["kilobytes"]
