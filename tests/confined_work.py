"""A process that confines itself, and tells what it can still do: `python confined_work.py KIND STATE FILTER WORK…`.

KIND is `landlock`, or `namespaces` as on a kernel without it. FILTER names the system calls that a unit allows, with
commas between them, or is empty.
"""

import ctypes
import json
import os
import shutil
import socket
import sys
from pathlib import Path

from edgefl.system import confinement


def filter_calls(names):
    library = confinement._load_seccomp()
    context = library.seccomp_init(0x00050001)
    for name in names:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:
            assert library.seccomp_rule_add_array(context, 0x7FFF0000, number, 0, None) == 0
    assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0
    assert library.seccomp_load(context) == 0


def train_with_torch():
    import torch  # noqa: PLC0415 only where it is asked for

    torch.set_num_threads(2)
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 26 * 26, 10))
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(3):
        torch.nn.functional.cross_entropy(network(torch.randn(4, 1, 28, 28)), torch.arange(4)).backward()
        optimiser.step()


def train_with_numpy():
    import numpy as np  # noqa: PLC0415 it starts threads, which nothing that is confined has before

    assert float((np.ones((300, 300)) @ np.ones((300, 300)))[0, 0]) == 300


def run_onnx(model):
    import numpy as np  # noqa: PLC0415 likewise
    import onnxruntime  # noqa: PLC0415 likewise

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 2
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    found = session.get_inputs()[0]
    session.run(
        None, {found.name: np.zeros([size if isinstance(size, int) else 1 for size in found.shape], np.float32)}
    )


def attempt(work, *arguments):
    try:
        work(*arguments)
    except Exception as error:  # noqa: BLE001 told to the test
        return f"{type(error).__name__}: {error}"
    return "done"


def main():
    kind, state, names, *works = sys.argv[1:]
    state, report = Path(state), {}
    if names:
        filter_calls(names.split(","))
    if kind == "namespaces":
        confinement.get_landlock_version = lambda: 0
    report["gaps"] = confinement.confine(
        confinement.Confinement(
            secret=str(state),
            readable=[str(state / "shard"), str(Path(__file__).parent)],
            writable=[str(state / "own")],
        )
    )
    report["key"] = attempt((state / "key").read_text)
    report["shard"] = attempt((state / "shard").read_text)
    report["own"] = attempt((state / "own" / "x").write_text, "x")
    report["copy"] = attempt(shutil.copy, state / "shard", state / "own" / "copy")
    report["mode"] = attempt(os.chmod, state / "key", 0o777)
    report["socket"] = attempt(socket.socket)
    report["fork"] = attempt(os.fork)
    report["agent"] = attempt(Path(f"/proc/{os.getppid()}/mem").read_bytes)
    for work in works:
        name, _, argument = work.partition("=")
        tried = {"torch": train_with_torch, "numpy": train_with_numpy, "onnx": run_onnx}[name]
        report[name] = attempt(tried, *([argument] if argument else []))
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
