"""A compiled task on an emulated arm64 processor, with the wheels of a board's lock: the same numbers as here."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from boards import cache, compiled_training
from boards.check_wheels import cross_install

from edgefl.provision.wheels import get_platform, load_lock_text, parse_lock
from edgefl.tasks.compiled.artefact import encode_artefact
from edgefl.tasks.registry import make_task

pytestmark = [pytest.mark.board, pytest.mark.timeout(3600)]

REPOSITORY = Path(__file__).parents[2]
EMULATOR, CPU = "qemu-aarch64-static", "cortex-a72"
NAME, MODEL, BATCH_SIZE = "mnist", "cnn-small", 8


def why_not() -> str | None:
    """Returns why no arm64 program can be run here, or None."""
    if os.geteuid() != 0:
        return "only root can enter a board's root file system: run it as root"
    if shutil.which(EMULATOR) is None:
        return f"no {EMULATOR} here: install qemu-user-static"
    return cache.why_no_image("arm64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a compiled task, its first weights and a shard of 40 patterns under noise."""
    if reason := why_not():
        pytest.skip(reason)
    pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    pytest.importorskip("onnxscript", reason="needs onnxscript: pip install '.[export]'")
    from edgefl.tasks.compiler.compilation import compile_task  # noqa: PLC0415 with torch

    folder, options = tmp_path_factory.mktemp("compiled"), {"model": MODEL}
    task = make_task(NAME, options)
    compiled, _ = compile_task(task, name=NAME, options=options, batch_size=BATCH_SIZE)
    (folder / "task").write_bytes(encode_artefact(compiled))
    np.savez(folder / "task.npz", **task.init(3))
    rng, labels = np.random.default_rng(4), np.arange(40) % 10
    patterns = np.random.default_rng(1).integers(0, 256, (10, 28, 28))
    inputs = np.clip(0.5 * patterns[labels] + rng.normal(64, 40, (40, 28, 28)), 0, 255).astype(np.uint8)
    (folder / "shard").mkdir()
    np.savez(folder / "shard" / "day.npz", inputs=inputs, labels=labels)
    return folder


def test_it_trains_on_arm64_without_torch_to_the_weights_of_this_machine(folder: Path) -> None:
    family = get_platform("pi-cp313")
    cross_install(family, parse_lock(load_lock_text(family, "")), cache.wheels(family), folder / "site")
    shutil.copytree(REPOSITORY / "edgefl", folder / "site" / "edgefl")
    machine, board = train(folder, "board", enter_board(folder), seen=Path("/mnt"))
    assert machine == "aarch64 without torch"
    machine, here = train(folder, "here", [], seen=folder)
    assert machine.split()[0] == platform.machine()
    assert board.keys() == here.keys()
    for name, value in here.items():
        np.testing.assert_allclose(board[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    with np.load(folder / "task.npz") as first:  # far from where they began, so that equal ones say something
        assert all(np.abs(here[name] - first[name]).max() > 1e-3 for name in first)


def enter_board(folder: Path) -> list[str]:
    """Returns the words before a Python program that an emulated processor runs, with the folder at /mnt.

    The board's own root: outside of it onnxruntime was seen to crash, maybe for what /sys says of the processor.
    """
    root = cache.image("arm64")
    shutil.copy(str(shutil.which(EMULATOR)), folder / EMULATOR)
    mount = f'mount --bind "{folder}" "{root}/mnt" && exec chroot "{root}" "$@"'
    return ["unshare", "--mount", "sh", "-ec", mount, "sh", f"/mnt/{EMULATOR}", "-cpu", CPU, "/usr/bin/python3"]


def train(folder: Path, name: str, python: list[str], *, seen: Path) -> tuple[str, dict[str, np.ndarray]]:
    """Returns what `compiled_training.py` says, and its tensors; `seen` is where it sees the folder."""
    shutil.copy(compiled_training.__file__, folder)
    files = [str(seen / file) for file in (Path(compiled_training.__file__).name, "task", "shard", f"{name}.npz")]
    done = subprocess.run(
        [*(python or [sys.executable]), files[0], NAME, MODEL, *files[1:]],
        capture_output=True, text=True, check=False, timeout=1800,
        env={
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(seen / "site" if python else REPOSITORY),
            "HOME": "/tmp",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with np.load(folder / f"{name}.npz") as tensors:
        return done.stdout.strip(), dict(tensors)
