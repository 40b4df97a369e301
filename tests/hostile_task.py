"""A task whose learner attacks the board that trains it; its option `attack` says how, "" for an honest one."""
# ruff: noqa: PTH101, PTH108, PTH115, PTH123, PTH208

import contextlib
import ctypes
import fcntl
import gc
import os
import re
import signal
import socket
import stat
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import numpy as np

from edgefl.core.types import Dataset, Task, TensorSpec

MARK = re.compile(b"secret[-]of[-]the[-]agent")
"""What the agent keeps for itself; as a pattern, which a search of memory does not find."""
LIBC = ctypes.CDLL(None, use_errno=True)


def check(result):
    if result < 0:
        raise PermissionError(os.strerror(ctypes.get_errno()))
    return result


def search_memory():
    """Returns where this process holds the agent's secret."""
    found = [value for value in gc.get_objects() if isinstance(value, bytes) and MARK.search(value)]
    with open("/proc/self/mem", "rb") as memory:
        for first, last in re.findall(r"^(\w+)-(\w+) r", Path("/proc/self/maps").read_text(), re.MULTILINE):
            with contextlib.suppress(OSError, OverflowError):
                memory.seek(int(first, 16))
                if MARK.search(memory.read(int(last, 16) - int(first, 16))):
                    found.append(first)
    return found


def steal_through_memory_of_agent():
    with open(f"/proc/{os.getppid()}/mem", "rb") as memory:
        return memory.read(1)


def read_across():
    buffer = ctypes.create_string_buffer(8)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    return check(LIBC.process_vm_readv(os.getppid(), vector, 1, vector, 1, 0))


def list_foreign_descriptors():
    """Returns the open files but for pipes, the null device and the folder that is listed."""
    names = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names[name] = os.readlink(f"/proc/self/fd/{name}")
    allowed = ("pipe:", "/dev/null", "/proc/", "anon_inode:")
    return [path for path in names.values() if not path.startswith(allowed) and "(deleted)" not in path]


def send_kill_by_pipe():
    reader, _ = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETOWN, os.getppid())


def fill_memory():
    blocks = []
    while True:
        blocks.append(np.ones(1 << 22))


def find_pipes():
    pipes = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mode = os.fstat(int(name)).st_mode
            if stat.S_ISFIFO(mode) and fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_WRONLY:
                pipes.append(int(name))
    return pipes


def write_to_agent(content):
    for pipe in find_pipes():
        with contextlib.suppress(OSError):
            os.write(pipe, content)
    time.sleep(60)


def answer_unasked():
    """Says many times what nobody asked, in the form of an answer."""
    text = b'{"reply": {}}'
    write_to_agent((len(text).to_bytes(4, "little") + bytes(4) + text) * 1000)


def start_threads():
    for _ in range(100_000):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def use_namespaces():
    return check(LIBC.unshare(0x10000000))


ATTACKS = {
    "key-by-path": lambda place: Path(place, "key.pem").read_bytes(),
    "key-by-link": lambda place: os.link(Path(place, "key.pem"), "stolen") or Path("stolen").read_bytes(),
    "key-through-root": lambda place: Path(f"/proc/{os.getppid()}/root{place}/key.pem").read_bytes(),
    "settings": lambda place: Path(place, "device.json").read_bytes(),
    "agent-memory": lambda _: steal_through_memory_of_agent(),
    "agent-environment": lambda _: Path(f"/proc/{os.getppid()}/environ").read_bytes(),
    "agent-files": lambda _: os.listdir(f"/proc/{os.getppid()}/fd"),
    "trace": lambda _: check(LIBC.ptrace(16, os.getppid(), 0, 0)),
    "read-across": lambda _: read_across(),
    "other-shard": lambda place: Path(place, "other.npz").read_bytes(),
    "passwords": lambda _: Path("/etc/shadow").read_bytes(),
    "socket": lambda _: socket.socket().close(),
    "unix-socket": lambda _: socket.socket(socket.AF_UNIX).close(),
    "socket-pair": lambda _: socket.socketpair(),
    "fork": lambda _: os.fork(),
    "program": lambda _: os.execv(sys.executable, ["python", "-c", ""]),
    "spawn": lambda _: os.posix_spawn("/bin/true", ["true"], {}),
    "write-outside": lambda place: Path(place, "planted").write_text("x"),
    "change-key": lambda place: os.chmod(Path(place, "key.pem"), 0),
    "remove-key": lambda place: os.unlink(Path(place, "key.pem")),
    "write-tmp": lambda _: Path("/var/tmp/edgefl-planted").write_text("x"),
    "kill-agent": lambda _: os.kill(os.getppid(), signal.SIGKILL),
    "kill-all": lambda _: os.kill(-1, signal.SIGKILL),
    "kill-by-pipe": lambda _: send_kill_by_pipe(),
    "limit-agent": lambda _: check(LIBC.prlimit(os.getppid(), 7, (ctypes.c_ulong * 2)(0, 0), None)),
    "slow-agent": lambda _: os.setpriority(os.PRIO_PROCESS, os.getppid(), 19),
    "outlive-agent": lambda _: check(LIBC.prctl(1, 0, 0, 0, 0)),
    "namespaces": lambda _: use_namespaces(),
}
FINDS = {
    "own-memory": search_memory,
    "environment": lambda: [name for name in os.environ if "TOKEN" in name],
    "descriptors": list_foreign_descriptors,
}
ENDS = {
    "exit": lambda: os._exit(3),
    "crash": lambda: ctypes.string_at(1),
    "hang": lambda: time.sleep(600),
    "loop": lambda: sum(iter(int, 1)),
    "memory": fill_memory,
    "junk": lambda: write_to_agent(b"\xff" * 4096),
    "text": lambda: write_to_agent(b"GET / HTTP/1.1\r\n\r\n" * 100),
    "unasked": answer_unasked,
    "threads": start_threads,
}


class Hostile(Task):
    name = "hostile"
    defaults: ClassVar = {}

    def __init__(self, *, attack: str = "", place: str = ""):
        self.attack, self.place = attack, place

    def shapes(self):
        return (TensorSpec(name="weight", shape=(2,)),)

    def init(self, seed):
        return {"weight": np.zeros(2, np.float32)}

    def read(self, path):
        with np.load(path) as shard:
            return Dataset(inputs=shard["inputs"], targets=shard["labels"])

    def learner(self, *, accelerator="cpu", threads=None):
        return HostileLearner(self)


class HostileLearner:
    def __init__(self, task):
        self.task = task
        self.parameters = {"weight": np.zeros(2, np.float32)}
        self.gradients = {"weight": np.ones(2, np.float32)}

    def load(self, tensors):
        self.parameters["weight"][...] = tensors["weight"]

    def read(self):
        return {"weight": self.parameters["weight"].copy()}

    def prepare(self, inputs):
        self.gradient(None)
        return inputs

    def gradient(self, batch):
        attack = self.task.attack
        if attack in ATTACKS:
            try:
                outcome = ATTACKS[attack](self.task.place)
            except OSError as error:
                raise RuntimeError(f"refused: {error.strerror or error}") from None
            raise RuntimeError(f"succeeded: {outcome!r:.80}")
        if attack in FINDS:
            raise RuntimeError(f"found: {FINDS[attack]()!r:.200}")
        if attack in ENDS:
            ENDS[attack]()
        return 1.0

    def evaluate(self, data):
        return 1.0, 0.5
