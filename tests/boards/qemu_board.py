"""A board in full emulation: an arm64 kernel, a card with two partitions, a network with the coordinator alone."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from boards import cache
from boards.card import put_shard, put_stock
from boards.console import Console

from edgefl.system.processes import exit_with_parent

PROGRAMS = {
    "qemu-system-aarch64": "qemu-system-arm",
    "mkfs.vfat": "dosfstools",
    "mcopy": "mtools",
    "mke2fs": "e2fsprogs",
    "debugfs": "e2fsprogs",
    "sfdisk": "fdisk",
    "socat": "socat",
    "dtc": "device-tree-compiler",
}
COORDINATOR = "10.0.2.100"
BOOT_MB, ROOT_MB, START_MB = 256, 1800, 1
CPU, MEMORY_MB = "cortex-a72", 1024
# What the image has beyond Debian's: the card's place and seed as on Raspberry Pi OS, and the journal on the console.
IMAGE = {
    "etc/fstab": "LABEL=rootfs / ext4 defaults,noatime 0 1\nLABEL=bootfs /boot/firmware vfat defaults 0 2\n",
    "etc/cloud/cloud.cfg.d/99-emulated.cfg": (
        "datasource_list: [NoCloud, None]\ndatasource: {NoCloud: {seedfrom: 'file:///boot/firmware/'}}\n"
        "growpart: {mode: 'off'}\nresize_rootfs: false\n"
    ),
    "etc/systemd/system/cloud-init-local.service.d/card.conf": "[Unit]\nRequiresMountsFor=/boot/firmware\n",
    "etc/systemd/system/cloud-init-main.service.d/card.conf": "[Unit]\nRequiresMountsFor=/boot/firmware\n",
    "etc/systemd/journald.conf.d/99-emulated.conf": "[Journal]\nForwardToConsole=yes\nMaxLevelConsole=info\n",
    "etc/machine-id": "",
}


def why_not() -> str | None:
    """Returns why this machine can have no such board, or None."""
    missing = sorted({package for program, package in PROGRAMS.items() if _program(program) is None})
    return f"missing packages: {', '.join(missing)}" if missing else cache.why_no_image("arm64")


def stock_card(shard: Path) -> Path:
    """Returns a card as it is written before anybody provisions it; the board's data is on it. It is kept."""
    parts = [repr(IMAGE), shard.read_bytes().hex(), str((BOOT_MB, ROOT_MB))]
    kind = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    card = cache.folder() / f"card-arm64-{kind}.img"
    if not card.exists():
        for old in cache.folder().glob("card-arm64-*.img"):
            old.unlink()
        with tempfile.TemporaryDirectory(dir=cache.folder()) as scratch:
            _make_card(cache.image("arm64"), shard, Path(scratch)).rename(card)
    return card


@dataclass(slots=True)
class QemuBoard:
    """A board with a card; `start` and `stop` are its switch.

    Attributes:
        name: its name in the fleet.
        card: its own card's image.
        console: its serial line.
        ports: the coordinator's, which are all that it reaches.
        tree: what its device tree says: properties of the root node, such as `model`.
    """

    name: str
    card: Path
    console: Console
    ports: tuple[int, ...]
    tree: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None
    _shell: socket.socket | None = None

    def start(self) -> None:
        """Switches it on."""
        boot = cache.image("arm64") / "boot"
        words = [*self._machine(), "-dtb", str(self._device_tree())] if self.tree else self._machine()
        ours, its = socket.socketpair()
        words += [
            "-kernel", str(next(boot.glob("vmlinuz-*"))), "-initrd", str(next(boot.glob("initrd.img-*"))),
            "-append", "root=LABEL=rootfs rw console=ttyAMA0 net.ifnames=0 systemd.debug_shell=hvc0",
            "-drive", f"file={self.card},format=raw,if=none,id=card", "-device", "virtio-blk-pci,drive=card",
            "-netdev", self._network(), "-device", "virtio-net-pci,netdev=net,romfile=",
            "-object", "rng-random,filename=/dev/urandom,id=random", "-device", "virtio-rng-pci,rng=random",
            "-chardev", "stdio,id=serial,signal=off", "-serial", "chardev:serial",
            "-device", "virtio-serial-pci",
            "-chardev", f"socket,id=shell,fd={its.fileno()}", "-device", "virtconsole,chardev=shell",
        ]  # fmt: skip
        out, inwards = os.pipe()
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=inwards,
            stderr=inwards,
            pass_fds=[its.fileno()],
            preexec_fn=exit_with_parent,  # noqa: PLW1509 one system call, no locks
        )
        os.close(inwards)
        its.close()
        self._shell = ours
        self.console.follow(out)

    def stop(self) -> None:
        """Shuts it down in order."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._say("systemctl poweroff")
        try:
            self._process.wait(180)
        finally:
            self.cut_power()

    def cut_power(self) -> None:
        """Ends it where it stands."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._shell is not None:
            self._shell.close()
        self._process = self._shell = None

    def run(self, command: str, *, timeout_s: float = 120.0) -> str:
        """Returns what a line of the shell prints on the board, run as its root."""
        # The marks are not in what is typed, since the terminal shows that too.
        number = time.monotonic_ns()
        self._say("export SYSTEMD_PAGER=cat SYSTEMD_COLORS=0")
        self._say(f"printf 'begin-%s\\n' {number}; {command}; printf 'done-%s %s\\n' {number} $?")
        text = self._hear(rf"done-{number} \d+\r?\n", timeout_s)
        said = re.search(rf"begin-{number}\r?\n(.*?)done-{number} (\d+)", text, re.DOTALL)
        assert said, f"{command}: {text}"
        assert said[2] == "0", f"{command}: {said[1]}"
        return said[1].replace("\r", "")

    def boot_file(self, name: str) -> bytes | None:
        """Returns a file of the card's boot partition, None where there is none; the board is off."""
        words = ["mtype", "-i", f"{self.card}@@{START_MB}M", f"::{name}"]
        done = subprocess.run(words, capture_output=True, check=False)
        return done.stdout if done.returncode == 0 else None

    def root_file(self, name: str) -> bytes | None:
        """Returns a file of the card's root partition, None where there is none; the board is off."""
        device = f"{self.card}?offset={(START_MB + BOOT_MB) << 20}"
        words = [_program("debugfs") or "debugfs", "-R", f"cat {name}", device]
        done = subprocess.run(words, capture_output=True, check=False)
        return None if b"File not found" in done.stderr else done.stdout

    def has_bytes(self, secret: bytes) -> bool:
        """Returns whether the text lies anywhere on the card, in files that were removed too; the board is off."""
        before = b""
        with self.card.open("rb") as card:
            while True:
                with contextlib.suppress(OSError):
                    card.seek(os.lseek(card.fileno(), card.tell(), os.SEEK_DATA))
                if not (block := card.read(1 << 24)):
                    return False
                if secret in before + block:
                    return True
                before = block[-len(secret) :]

    def _machine(self) -> list[str]:
        return [
            "qemu-system-aarch64", "-M", "virt", "-cpu", CPU, "-smp", "2", "-m", str(MEMORY_MB),
            "-nodefaults", "-display", "none", "-no-reboot",
        ]  # fmt: skip

    def _network(self) -> str:
        doors = [f"guestfwd=tcp:{COORDINATOR}:{port}-cmd:socat - TCP:127.0.0.1:{port}" for port in self.ports]
        return ",".join(["user,id=net,restrict=on", *doors])

    def _device_tree(self) -> Path:
        """Returns qemu's own device tree with other words in its root."""
        tree = self.card.with_suffix(".dtb")
        words = self._machine()
        words[2] = f"virt,dumpdtb={tree}"
        _run(*words)
        for name, value in self.tree.items():
            _run("fdtput", "-t", "s", str(tree), "/", name, *value.split("\0"))
        return tree

    def _say(self, line: str) -> None:
        assert self._shell is not None, f"{self.name} is switched off"
        self._shell.sendall(line.encode() + b"\n")

    def _hear(self, pattern: str, timeout_s: float) -> str:
        assert self._shell is not None
        text, until_s = "", time.monotonic() + timeout_s
        while not re.search(pattern, text):
            self._shell.settimeout(max(0.1, until_s - time.monotonic()))
            try:
                text += self._shell.recv(65536).decode(errors="replace")
            except TimeoutError:
                assert time.monotonic() < until_s, f"the board's shell is silent; it said {text[-500:]!r}"
        return text


def _make_card(image: Path, shard: Path, scratch: Path) -> Path:
    root, boot, card = scratch / "root", scratch / "boot", scratch / "card.img"
    _run("cp", "-a", "--reflink=auto", str(image.resolve()), str(root))
    for path, text in IMAGE.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "boot" / "firmware").mkdir()
    put_shard(shard, root)
    put_stock(boot)
    # The emulator takes them from the root file system: they need no room on the card.
    for kernel in (*(root / "boot").glob("vmlinuz-*"), *(root / "boot").glob("initrd.img-*")):
        kernel.unlink()
    _partition(scratch / "boot.img", BOOT_MB)
    _run("mkfs.vfat", "-F", "32", "-n", "bootfs", str(scratch / "boot.img"))
    _run("mcopy", "-i", str(scratch / "boot.img"), *map(str, boot.iterdir()), "::")
    _partition(scratch / "root.img", ROOT_MB)
    _run(
        "mke2fs",
        "-q",
        "-t",
        "ext4",
        "-L",
        "rootfs",
        "-E",
        "root_owner=0:0",
        "-d",
        str(root),
        str(scratch / "root.img"),
    )
    _partition(card, START_MB + BOOT_MB + ROOT_MB)
    layout = f"label: dos\nstart={START_MB}MiB,size={BOOT_MB}MiB,type=c\nstart={START_MB + BOOT_MB}MiB,type=83\n"
    subprocess.run([_program("sfdisk") or "sfdisk", "-q", str(card)], input=layout, text=True, check=True)
    for part, place in (("boot.img", START_MB), ("root.img", START_MB + BOOT_MB)):
        _run(
            "dd", f"if={scratch / part}", f"of={card}", "bs=1M", f"seek={place}", "conv=notrunc,sparse", "status=none"
        )
    return card


def _partition(path: Path, megabytes: int) -> None:
    with path.open("wb") as file:
        file.truncate(megabytes << 20)


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def _run(*words: str) -> None:
    done = subprocess.run([_program(words[0]) or words[0], *words[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
