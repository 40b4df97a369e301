"""A board as a container with an init of its own: real systemd and cloud-init, in seconds; on x86-64."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from boards.console import Console

from edgefl.system.processes import exit_with_parent

PROGRAMS = ("systemd-nspawn", "nsenter", "ip")
STOP_S = 60.0
# What the image of an emulated board has beyond Debian's: the card's place as Raspberry Pi OS names it, and the
# journal on the console.
IMAGE = {
    "etc/cloud/cloud.cfg.d/99-emulated.cfg": (
        "datasource_list: [NoCloud, None]\ndatasource: {NoCloud: {seedfrom: 'file:///boot/firmware/'}}\n"
    ),
    "etc/systemd/journald.conf.d/99-emulated.conf": "[Journal]\nForwardToConsole=yes\nMaxLevelConsole=info\n",
    "etc/machine-id": "",
}


def why_not() -> str | None:
    """Returns why this machine can have no such board, or None."""
    if os.geteuid() != 0:
        return "only root can start systemd-nspawn"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"no {', '.join(missing)} here (packages systemd-container, util-linux, iproute2)" if missing else None


@dataclass(slots=True)
class NspawnBoard:
    """A board in a folder; `start` and `stop` are its switch."""

    name: str
    root: Path
    console: Console
    number: int
    _process: subprocess.Popen[bytes] | None = None

    @classmethod
    def new(cls, image: Path, folder: Path, name: str, *, number: int) -> NspawnBoard:
        """Returns a board that was never switched on, from a root file system that stays as it is."""
        board = cls(name=name, root=folder / name, console=Console(folder / f"{name}.console"), number=number)
        subprocess.run(["cp", "-a", "--reflink=auto", str(image.resolve()), str(board.root)], check=True)
        for path, text in IMAGE.items():
            place = board.root / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        return board

    @staticmethod
    def number_of(place: int) -> int:
        """Returns a number that no other board of this machine has; `place` counts within this process."""
        return os.getpid() % 8000 * 8 + place

    @staticmethod
    def host_address_of(number: int) -> str:
        """Returns this machine's address on a board's wire, in the range for benchmarks (RFC 2544)."""
        return f"198.{18 + number // 256 % 2}.{number % 256}.1"

    @property
    def boot(self) -> Path:
        """Its boot partition; no file system of its own here."""
        return self.root / "boot" / "firmware"

    @property
    def host_address(self) -> str:
        return self.host_address_of(self.number)

    @property
    def address(self) -> str:
        return self.host_address.removesuffix(".1") + ".11"

    @property
    def wire(self) -> str:
        return f"efn{self.number}"

    def start(self) -> None:
        """Switches it on; its wire leads to this machine and nowhere else."""
        ours, its = pty.openpty()
        words = [
            "systemd-nspawn", "--quiet", f"--directory={self.root}", "--boot", "--register=no", "--keep-unit",
            "--private-network", f"--network-veth-extra={self.wire}:eth0", f"--machine={self.name}",
        ]  # fmt: skip
        # Without a terminal nspawn would give the board none either.
        self._process = subprocess.Popen(
            words,
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
            preexec_fn=exit_with_parent,  # noqa: PLW1509 one system call, no locks
        )
        os.close(its)
        self.console.follow(ours)
        self._until(lambda: Path(f"/sys/class/net/{self.wire}").exists(), "the board's wire to be there")
        _ip("address", "add", f"{self.host_address}/24", "dev", self.wire)
        _ip("link", "set", self.wire, "up")

    def stop(self) -> None:
        """Shuts it down in order."""
        if self._process is not None:
            self._end(self._process.pid, signal.SIGTERM)

    def cut_power(self) -> None:
        """Ends it where it stands: with its first process all others are gone at once."""
        self._end(self._init(), signal.SIGKILL)

    def run(self, *words: str, check: bool = True) -> str:
        """Returns what a program prints on the board, run as its root."""
        done = subprocess.run(self.inside(words), capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}"
        return done.stdout

    def inside(self, words: Sequence[str]) -> list[str]:
        """Returns the command that runs these words on the board."""
        return ["nsenter", "--target", str(self._init()), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup",
                "--", *words]  # fmt: skip

    def shows(self, unit: str, *names: str) -> dict[str, str]:
        """Returns properties of a unit, as `systemctl show` prints them."""
        lines = self.run("systemctl", "show", unit, f"--property={','.join(names)}").splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def files_with(self, secret: str) -> list[str]:
        """Returns the files on its disk that hold the text."""
        found = subprocess.run(
            [
                "grep",
                "--recursive",
                "--files-with-matches",
                "--fixed-strings",
                "--devices=skip",
                secret,
                str(self.root),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        return [line.removeprefix(str(self.root)) for line in found.stdout.splitlines()]

    def _end(self, pid: int, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        try:
            self._process.wait(STOP_S)
        finally:
            if self._process.poll() is None:
                self._process.kill()
            self._process = None
            self._until(lambda: not Path(f"/sys/class/net/{self.wire}").exists(), "the board's wire to go")

    def _init(self) -> int:
        """Returns the process that is number 1 on the board."""
        assert self._process is not None, f"{self.name} is switched off"
        for pid in _descendants(self._process.pid):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
                if len(numbers) > 1 and numbers[-1] == "1":
                    return pid
        raise AssertionError(f"{self.name} runs nothing:\n{self.console.tail()}")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + STOP_S
        while not condition():
            ended = self._process is not None and self._process.poll() is not None
            assert not ended, f"the board ended:\n{self.console.tail()}"
            assert time.monotonic() < until_s, f"waited {STOP_S:.0f} s for {what}:\n{self.console.tail()}"
            time.sleep(0.05)


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                yield child
                yield from _descendants(child)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
