"""Boards that are network namespaces of this machine: a network of their own, real packets, limits and losses.

Each board has one wire, to a switch where this machine has an address too. There is no route to anywhere else.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from requirements import missing

from edgefl.simulation.local_fleet import EDGEFL_COMMAND

# Sends what it is asked for to this machine and waits for the one byte of thanks.
_SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30) as wire:
    wire.sendall(bytes(int(sys.argv[3])))
    wire.recv(1)
"""


def why_not() -> str | None:
    """Returns why this machine can have no such boards, or None."""
    if reason := missing("root", "iproute2", "nftables"):
        return reason
    probe = f"efp{os.getpid() % 100_000}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False, env=_env())
    if done.returncode:
        return f"no network namespaces here, {done.stderr.strip()}: run it outside of a container"
    _run("ip", "netns", "delete", probe)
    return None


@dataclass(slots=True)
class BoardNetwork:
    """A switch and the boards on it; a context manager that takes everything away again."""

    boards: Sequence[str]
    _tag: str = field(default_factory=lambda: f"{os.getpid() % 100_000}")

    @property
    def address(self) -> str:
        """This machine's address on the switch."""
        return f"{self._net}.1"

    def address_of(self, board: str) -> str:
        """The board's address on the switch."""
        return f"{self._net}.{11 + list(self.boards).index(board)}"

    def program(self, board: str, program: Sequence[str] = EDGEFL_COMMAND) -> tuple[str, ...]:
        """Returns the `edgefl` of a board, for `LocalDeviceSpec.program`."""
        return ("ip", "netns", "exec", self._space(board), *program)

    def __enter__(self) -> Self:
        try:
            _run("ip", "link", "add", self._switch, "type", "bridge")
            _run("ip", "address", "add", f"{self.address}/24", "dev", self._switch)
            _run("ip", "link", "set", self._switch, "up")
            for board in self.boards:
                self._add(board)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for board in self.boards:
            subprocess.run(
                ["ip", "netns", "delete", self._space(board)], capture_output=True, check=False, env=_env()
            )
        subprocess.run(["ip", "link", "delete", self._switch], capture_output=True, check=False, env=_env())

    def limit(self, board: str, *, megabits_per_s: float) -> None:
        """Limits what the board sends and what it receives, each to this rate."""
        rule = ["tbf", "rate", f"{megabits_per_s}mbit", "burst", "16kb", "latency", "200ms"]
        _run("tc", "qdisc", "replace", "dev", self._wire(board), "root", *rule)
        self.within(board, "tc", "qdisc", "replace", "dev", "eth0", "root", *rule)

    def lose(self, board: str, *, percent: int) -> None:
        """Loses so many of the packets that reach the board."""
        chain = f"type filter hook input priority 0;\nnumgen random mod 100 < {percent} counter drop\n"
        self.within(board, "nft", f"table inet weather {{\nchain arriving {{\n{chain}}}\n}}\n")

    def calm(self, board: str) -> None:
        """Takes back what `limit` and `lose` have done."""
        for within in ((), self._exec(board)):
            wire = "eth0" if within else self._wire(board)
            subprocess.run(
                [*within, "tc", "qdisc", "delete", "dev", wire, "root"], capture_output=True, check=False, env=_env()
            )
        self.within(board, "nft", "flush ruleset")

    def num_lost(self, board: str) -> int:
        """Returns how many packets were lost on purpose so far."""
        words = self.within(board, "nft", "list", "table", "inet", "weather").split()
        return int(words[words.index("packets") + 1])

    def cut(self, board: str) -> None:
        """Pulls the board's cable."""
        _run("ip", "link", "set", self._wire(board), "down")

    def mend(self, board: str) -> None:
        """Puts the cable back."""
        _run("ip", "link", "set", self._wire(board), "up")

    def num_bytes_sent(self, board: str) -> int:
        """Returns what has left the board over its wire."""
        return int(self.within(board, "cat", "/sys/class/net/eth0/statistics/tx_bytes"))

    def num_bytes_received(self, board: str) -> int:
        """Returns what has come to the board over its wire."""
        return int(self.within(board, "cat", "/sys/class/net/eth0/statistics/rx_bytes"))

    def seconds_to_send(self, board: str, num_bytes: int) -> float:
        """Returns how long so many bytes take from the board to this machine over TCP."""
        with socket.create_server((self.address, 0)) as server:
            words = [self.address, str(server.getsockname()[1]), str(num_bytes)]
            sender = subprocess.Popen([*self._exec(board), sys.executable, "-c", _SEND, *words], env=_env())
            server.settimeout(30)
            wire, _ = server.accept()
            started_s, left = time.monotonic(), num_bytes
            with wire:
                while left:
                    left -= len(wire.recv(65536))
                took_s = time.monotonic() - started_s
                wire.sendall(b"!")
            assert sender.wait(30) == 0
        return took_s

    def within(self, board: str, *words: str) -> str:
        """Returns what a program prints that runs on the board."""
        return _run(*self._exec(board), *words)

    def _add(self, board: str) -> None:
        space, wire = self._space(board), self._wire(board)
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "link", "set", wire, "master", self._switch, "up")
        self.within(board, "ip", "address", "add", f"{self.address_of(board)}/24", "dev", "eth0")
        self.within(board, "ip", "link", "set", "lo", "up")
        self.within(board, "ip", "link", "set", "eth0", "up")

    def _exec(self, board: str) -> list[str]:
        return ["ip", "netns", "exec", self._space(board)]

    @property
    def _net(self) -> str:
        # Two processes of a test run have networks of their own, in the range for benchmarks (RFC 2544).
        number = int(self._tag)
        return f"198.{18 + number // 256 % 2}.{number % 256}"

    @property
    def _switch(self) -> str:
        return f"efs{self._tag}"

    def _space(self, board: str) -> str:
        return f"ef{self._tag}-{board}"

    def _wire(self, board: str) -> str:
        return f"ef{self._tag}w{list(self.boards).index(board)}"


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=_env())
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
    return done.stdout


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _env() -> dict[str, str]:
    return {**os.environ, "PATH": _path()}
