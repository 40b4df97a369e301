"""A board with real slots, whose agent is a process that a stand-in for systemd restarts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from wheel_files import Signer, link_slots, make_slots, make_wheel, stand_in

from edgefl.device.updates.protocol import InstallRequest, InstallResult, write_request
from edgefl.device.updates.slots import Slots
from edgefl.device.updates.updater import TrialTimeouts, Updater
from edgefl.system.atomic_files import is_locked

QUICK = TrialTimeouts(health_s=4.0, settle_s=0.5, away_s=8.0)


class SlotBoard:
    """Version 1.0 is in slot `a` and runs."""

    def __init__(self, folder: Path, made: Path) -> None:
        self.folder, self.wheels = folder, folder / "wheels"
        self.signer = Signer(folder)
        self.slots = Slots(link_slots(made, folder / "opt"))
        self.state = folder / "state"
        (self.state / "updates").mkdir(parents=True)
        self.restarts = 0
        self.children: list[subprocess.Popen[bytes]] = []
        self._requests = 0
        self.restart()

    def restart(self) -> None:
        self.stop()
        self.restarts += 1
        agent = subprocess.Popen(
            [str(self.slots.root / "current" / "bin" / "python"), "-I", "-m", "edgefl", "device", "start", "--state",
             str(self.state)],
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline_s = time.monotonic() + 60
        self.children.append(agent)
        (self.folder / "pid").write_text(str(agent.pid))
        while agent.poll() is None and not is_locked(self.state / "lock"):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    def stop(self) -> None:
        """Ends the agent, also one that an updater started that was killed since."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((self.folder / "pid").read_text()), signal.SIGKILL)
        for child in self.children:
            child.kill()
            child.wait()
        deadline_s = time.monotonic() + 60
        while is_locked(self.state / "lock"):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    def killed_at(self, step: str) -> None:
        """Runs the updater in a process of its own that is killed right after a step."""
        child = os.fork()
        if not child:
            try:
                self.updater(lambda done: os.kill(os.getpid(), signal.SIGKILL) if done == step else None).run()
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, f"the updater never came to {step!r}"

    def release(self, version: str, mode: str = "works", *more: Path, **options: object) -> Path:
        wheel = stand_in(self.wheels, version, mode)
        return self.signer.bundle(self.folder / f"{version}-{mode}.bundle", wheel, *more, version=version, **options)  # type: ignore[arg-type]

    def pack(
        self, name: str = "gulls", version: str = "0.1", body: str = "class Gulls:\n    pass\n", **wheel: object
    ) -> Path:
        module = name.replace("-", "_")
        points = f"[edgefl.tasks]\n{name} = {module}:Gulls\n"
        made = make_wheel(self.wheels, name, version, {f"{module}/__init__.py": body}, points=points, **wheel)  # type: ignore[arg-type]
        return self.signer.bundle(self.folder / f"{name}-{version}.bundle", made, kind="pack", version=version)

    def ask(self, bundle: Path) -> str:
        """Leaves the bundle alone and a request, as the agent does; returns the id of the request."""
        self._requests += 1
        for former in (self.state / "updates").glob("*.bundle"):
            former.unlink()
        sha256, asked = hashlib.sha256(bundle.read_bytes()).hexdigest(), f"r{self._requests}"
        shutil.copyfile(bundle, self.state / "updates" / f"{sha256}.bundle")
        write_request(self.state, InstallRequest(id=asked, sha256=sha256))
        return asked

    def ask_again(self) -> None:
        """Leaves another request for what lies in the inbox."""
        self._requests += 1
        (path,) = (self.state / "updates").glob("*.bundle")
        write_request(self.state, InstallRequest(id=f"r{self._requests}", sha256=path.stem))

    def removal(self, name: str = "gulls", version: str = "0.1") -> Path:
        out = self.folder / f"no-{name}-{version}.bundle"
        return self.signer.bundle(out, kind="removal", version=version, name=name)

    def updater(
        self,
        on_step: Callable[[str], None] = lambda _: None,
        *,
        restart: Callable[[], None] | None = None,
        pace: TrialTimeouts = QUICK,
    ) -> Updater:
        restart = restart or self.restart
        return Updater(
            slots=self.slots,
            state_dir=self.state,
            signers=self.signer.trusted,
            restart_agent=restart,
            timeouts=pace,
            on_step=on_step,
        )

    def install(self, bundle: Path) -> InstallResult:
        self.ask(bundle)
        outcome = self.updater().run()
        assert outcome is not None
        return outcome

    def runs(self) -> tuple[str, str]:
        """The slot and the version of the agent that runs now, as it says itself."""
        assert is_locked(self.state / "lock")
        said = json.loads((self.state / "health.json").read_bytes())
        return said["slot"], said["version"]

    def python(self, program: str) -> str:
        """What the slot in use prints."""
        python = str(self.slots.root / "current" / "bin" / "python")
        done = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, check=False)
        return done.stdout.strip() or done.stderr.strip().rsplit("\n", 1)[-1]

    def tree(self, slot: str) -> dict[str, tuple[int, str]]:
        """Every file of a slot: inode and hash."""
        top = self.slots.path(slot)
        return {
            str(path.relative_to(top)): (path.stat().st_ino, hashlib.sha256(path.read_bytes()).hexdigest())
            for path in sorted(top.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }


@pytest.fixture(scope="session")
def made_slots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1.0 in slot `a`, installed once for all boards."""
    folder = tmp_path_factory.mktemp("made")
    return make_slots(folder / "opt", stand_in(folder / "wheels", "1.0"))


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one waits for all disks of this machine."""
    monkeypatch.setattr(os, "sync", lambda: None)


@pytest.fixture(scope="session")
def board_kind() -> type[SlotBoard]:
    return SlotBoard


@pytest.fixture
def board(tmp_path: Path, made_slots: Path) -> Iterator[SlotBoard]:
    made = SlotBoard(tmp_path, made_slots)
    yield made
    made.stop()
