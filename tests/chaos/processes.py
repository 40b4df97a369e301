"""A fleet of real processes to which things can be done: to coordinator, broker and devices, wires, disk and clocks.

Where root may make network namespaces, each device is in one of its own, on a wire that can be pulled, limited and
made lossy; else all are on loopback, and what cannot be done there is left out with the reason. Between devices and
servers stands a proxy, which delays. Processes that end are started again, as systemd does it: see `look_after`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Self

import psutil
from boards import namespaces
from boards.namespaces import BoardNetwork
from chaos.doctored import Control
from chaos.wire import EVERYBODY, Proxy, Weather

from edgefl.coordinator.brokers.mosquitto import find_mosquitto
from edgefl.core.errors import NetworkError
from edgefl.core.types import Json
from edgefl.simulation.faults import Fault
from edgefl.simulation.local_fleet import COORDINATOR, LOOPBACK, LocalDeviceSpec, LocalFleet
from edgefl.storage.journal.file_format import list_journal_files
from edgefl.system.https_client import create_pinned_context, request

HERE = Path(__file__).parent
BROKER = "broker"
DISK = "256m"
WITHIN_LOOPBACK = "127.0.0.9"
"""Where devices find the proxies on a machine without namespaces: all of 127/8 is this machine."""
RESTART_S = 0.5
"""How long after its end a process is started again."""
VIRTUAL = frozenset({"slow", "link"})
OF_COORDINATOR = frozenset({"full-disk", "torn-tail", "damage"})
DIES_WITHIN_S = 10.0
ANSWERS_WITHIN_S = 2.0


@dataclass(slots=True, kw_only=True)
class ChaosFleet(LocalFleet):
    """A fleet whose coordinator listens on loopback alone: devices reach it through the proxy."""

    def start_coordinator(self) -> None:
        self.launch()
        self._wait_until(self._is_answering, "the coordinator to answer")

    def launch(self) -> None:
        """Starts the coordinator and does not wait for it."""
        self._start_process(
            COORDINATOR, self.program, "coordinator", "start", "--dir", str(self.directory), "--host", LOOPBACK,
            "--broker", self.broker, "--broker-port", str(self.broker_port),
        )  # fmt: skip

    def launch_broker(self, program: Sequence[str]) -> None:
        """Starts the broker's unit and does not wait for it."""
        self._start_process(
            BROKER, program, "coordinator", "broker", "--dir", str(self.directory), "--host", LOOPBACK,
            "--port", str(self.broker_port),
        )  # fmt: skip


@dataclass
class Site:
    """Use it as a context manager.

    Attributes:
        root: the folder for all of it.
        shards: one for each device.
        task: what they are shards of.
        lacks: what this machine lacks, by kind of fault, with the reason.
        run_id: the run whose files are torn and damaged.
        damaged: files of checkpoints that were.
        torn: how many bytes at the end of the journal were not synced, and how many of them were left.
    """

    root: Path
    shards: Sequence[Path]
    task: str
    python_path: Sequence[Path] = ()
    lacks: dict[str, str] = field(default_factory=dict)
    fleet: ChaosFleet = field(init=False)
    weather: dict[str, Weather] = field(default_factory=lambda: {EVERYBODY: Weather()})
    run_id: str = ""
    damaged: list[Path] = field(default_factory=list)
    torn: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = [f"device-{number:02}" for number in range(1, len(self.shards) + 1)]
        self._held: set[str] = set()
        self._ended_s: dict[str, float] = {}
        self._network: BoardNetwork | None = None
        self._closers = contextlib.ExitStack()

    def notes(self, name: str) -> Path:
        """Where a process's notes lie, see `doctored`."""
        return self.root / "notes" / name

    def log(self, name: str) -> str:
        path = self.root / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self._closers.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, COORDINATOR, BROKER):
            self._signal(name, signal.SIGCONT)
        self._closers.close()

    def _open(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        for name in (*self.names, COORDINATOR, BROKER):
            Control(self.notes(name)).prepare()
        if find_mosquitto() is None:
            self.lacks["mosquitto"] = "mosquitto is not installed: the broker is the embedded one"
        address = self._lay_wires()
        self._mount()
        paths = [HERE.parents[1], HERE.parent, *self.python_path]
        self.fleet = ChaosFleet(
            root=self.root,
            devices=[
                LocalDeviceSpec(name=name, shards={self.task: str(shard)}, program=self._program(name))
                for name, shard in zip(self.names, self.shards, strict=True)
            ],
            hosts=[address],
            environment={
                "PYTHONPATH": os.pathsep.join(map(str, paths)),
                "EDGEFL_ALLOW_MODULES": self.task.partition(":")[0],
            },
            program=self._doctored(COORDINATOR),
        )
        fleet = self.fleet
        fleet.broker = f"mqtts://{LOOPBACK}:{fleet.broker_port}"
        for port in (fleet.port, fleet.broker_port):
            self._closers.enter_context(Proxy((address, port), (LOOPBACK, port), self.weather))
        fleet.run_command(
            "coordinator", "init", "--dir", str(fleet.directory), "--port", str(fleet.port), "--host", address
        )
        self._closers.callback(self._end_broker)
        fleet.launch_broker(self._doctored(BROKER))
        self._closers.enter_context(fleet)

    def _lay_wires(self) -> str:
        """Returns the address under which devices find the servers."""
        if reason := namespaces.why_not():
            self.lacks["loss"] = reason
            self.lacks["namespaces"] = f"{reason}: a cut, a delay or a rate of one device is one of all of them"
            return WITHIN_LOOPBACK
        self._network = self._closers.enter_context(BoardNetwork(self.names))
        self.weather |= {self._network.address_of(name): Weather() for name in self.names}
        return self._network.address

    def _mount(self) -> None:
        """Gives the coordinator a small file system of its own, which can be filled up."""
        place = self.root / "disk"
        place.mkdir(mode=0o700, exist_ok=True)
        (self.root / COORDINATOR).symlink_to(place)
        words = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=700", "tmpfs", str(place)]
        done = subprocess.run(words, capture_output=True, text=True, check=False) if os.geteuid() == 0 else None
        if done is None or done.returncode != 0:
            self.lacks["full-disk"] = (
                "only root can mount a small file system"
                if done is None
                else f"a small file system cannot be mounted here: {done.stderr.strip()}"
            )
            return
        self._closers.callback(subprocess.run, ["umount", "--lazy", str(place)], check=True)

    def _doctored(self, name: str) -> tuple[str, ...]:
        return (sys.executable, str(HERE / "doctored.py"), str(self.notes(name)))

    def _program(self, device: str) -> tuple[str, ...]:
        own = self._doctored(device)
        return own if self._network is None else self._network.program(device, own)

    def get(self, path: str) -> Json | None:
        """Returns what the coordinator's API says, None when it does not answer soon: it may stand still."""
        operator = self.fleet.make_client()
        address, trust = f"{LOOPBACK}:{self.fleet.port}", create_pinned_context(operator.ca_pem.encode())
        headers = {"Authorization": f"Bearer {operator.token}"}
        try:
            status, body = request(address, trust, "GET", path, headers=headers, timeout_s=ANSWERS_WITHIN_S)
        except NetworkError:
            return None
        return None if status != 200 else json.loads(body)

    def presence(self) -> list[str]:
        """Returns what the coordinator thinks of each device; nothing when it does not answer."""
        return [row["presence"] for row in (self.get("/edgefl/v1/devices") or {"rows": []})["rows"]]

    # What is done to it.

    def why_not(self, fault: Fault) -> str | None:
        """Returns why a fault cannot be played here, or None."""
        if fault.kind in VIRTUAL:
            return "only virtual time has it"
        if fault.for_s is None:
            return "it never ends, and nobody could serve again"
        if fault.kind in OF_COORDINATOR and fault.device != COORDINATOR:
            return "it is done to the coordinator alone"
        if fault.kind == "loss" and not set(self.hit(fault)) <= set(self.names):
            return "it is done to devices alone"
        return self.lacks.get(fault.kind)

    def begin(self, fault: Fault, rng: random.Random) -> None:
        """Does what a fault says to all that it hits; returns when it is done."""
        for name in self.hit(fault):
            match fault.kind:
                case "kill":
                    self._kill(name)
                case "freeze":
                    self._signal(name, signal.SIGSTOP)
                case "torn-tail":
                    self._tear(rng)
                case "damage":
                    self._damage(rng)
                case "clock":
                    Control(self.notes(name)).set_clock(fault.amount or 0.0)
                case "full-disk":
                    self._fill()
                case _:
                    self._change_wire(name, fault)

    def end(self, fault: Fault) -> None:
        """Undoes it; what has ended meanwhile is started again by `look_after`."""
        for name in self.hit(fault):
            match fault.kind:
                case "kill" | "torn-tail" | "damage":
                    self._held.discard(name)
                    self._ended_s[name] = -math.inf
                case "freeze":
                    self._signal(name, signal.SIGCONT)
                case "clock":
                    Control(self.notes(name)).set_clock(0.0)
                case "full-disk":
                    (self.fleet.directory / "filler").unlink()
                case _:
                    self._calm_wire(name)

    def hit(self, fault: Fault) -> list[str]:
        """Returns the names of those that a fault hits."""
        return [name for name in (COORDINATOR, BROKER, *self.names) if fnmatchcase(name, fault.device)]

    def look_after(self) -> None:
        """Starts again what has ended and is not held down, as a service manager does."""
        now_s = time.monotonic()
        for name in (BROKER, COORDINATOR, *self.names):
            if name in self._held or self.fleet.processes[name].poll() is None:
                continue
            if now_s - self._ended_s.setdefault(name, now_s) < RESTART_S:
                continue
            del self._ended_s[name]
            if name == COORDINATOR:
                self.fleet.launch()
            elif name == BROKER:
                self.fleet.launch_broker(self._doctored(BROKER))
            else:
                self.fleet.start_device(name)

    def is_up(self) -> bool:
        """Says whether no process has ended."""
        return all(process.poll() is None for process in self.fleet.processes.values())

    def _kill(self, name: str) -> None:
        self._held.add(name)
        self._signal(name, signal.SIGKILL)
        self.fleet.processes[name].wait()

    def _signal(self, name: str, number: int) -> None:
        """Sends a signal to a process and to those that it has started."""
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            process = psutil.Process(self.fleet.processes[name].pid)
            for each in (*process.children(recursive=True), process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.send_signal(number)

    def _fill(self) -> None:
        with (self.fleet.directory / "filler").open("wb", buffering=0) as file:
            for size in (1 << 20, 4096, 512, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"x" * size)

    # Its wires.

    def _change_wire(self, name: str, fault: Fault) -> None:
        amount, network = fault.amount or 0.0, self._network
        weather = self._weather_of(name)
        if network is None or name not in self.names:
            weather.is_cut = weather.is_cut or fault.kind == "cut"
            weather.bytes_per_s = amount if fault.kind == "rate" else weather.bytes_per_s
            weather.delay_s = amount if fault.kind == "delay" else weather.delay_s
            return
        match fault.kind:
            case "cut":
                network.cut(name)
            case "loss":
                network.lose(name, percent=round(100 * amount))
            case "rate":
                network.limit(name, megabits_per_s=amount * 8 / 1e6)
            case "delay":
                weather.delay_s = amount

    def _calm_wire(self, name: str) -> None:
        weather = self._weather_of(name)
        weather.is_cut, weather.bytes_per_s, weather.delay_s = False, None, 0.0
        if self._network is not None and name in self.names:
            self._network.mend(name)
            self._network.calm(name)

    def _weather_of(self, name: str) -> Weather:
        """Returns the weather of a device; of a server, or without namespaces, that of all."""
        if self._network is None or name not in self.names:
            return self.weather[EVERYBODY]
        return self.weather[self._network.address_of(name)]

    # Its disk.

    def _tear(self, rng: random.Random) -> None:
        """Kills the coordinator before a sync, and takes away a piece of what it wrote since the one before."""
        control, process = Control(self.notes(COORDINATOR)), self.fleet.processes[COORDINATOR]
        self._held.add(COORDINATOR)
        control.die_at_next_sync()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DIES_WITHIN_S)
        self._kill(COORDINATOR)
        control.die_at_next_sync(shall=False)
        if not (files := list_journal_files(self._journal)):
            return
        durable, size = self._durable_bytes(files[-1]), files[-1].stat().st_size
        # Where nothing is unsynced: room that was made for a record whose bytes never came.
        left = rng.randint(durable, size) if size > durable else size + rng.randint(1, 400)
        os.truncate(files[-1], left)
        self.torn.append((size - durable, left - durable))

    def _durable_bytes(self, path: Path) -> int:
        name = str(path.resolve())
        sizes = [
            int(size)
            for line in (self.notes(COORDINATOR) / "syncs").read_text().splitlines()
            for size, _, noted in [line.partition(" ")]
            if noted == name
        ]
        return max(sizes, default=0)

    def _damage(self, rng: random.Random) -> None:
        """Kills the coordinator and turns a bit over in what the newest of two checkpoints is made of.

        One time in three it is in the journal before that checkpoint, which stands on its own.
        """
        self._kill(COORDINATOR)
        folder = self._run_folder / "checkpoints"
        notes = sorted(folder.glob("*.checkpoint.json"))
        if len(notes) < 2:
            return
        named = [folder / f"{value}.safetensors" for value in json.loads(notes[-1].read_bytes()).values()]
        path, before = rng.choice([file for file in named if file.is_file()]), list_journal_files(self._journal)[:-1]
        if before and rng.random() < 1 / 3:
            path = rng.choice(before)
            self._pristine.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self._pristine / path.name)
        else:
            self.damaged.append(path)
        with path.open("r+b") as file:
            at = rng.randrange(path.stat().st_size)
            file.seek(at)
            (old,) = file.read(1)
            file.seek(at)
            file.write(bytes([old ^ 1 << rng.randrange(8)]))

    @property
    def _run_folder(self) -> Path:
        return self.fleet.directory / "runs" / self.run_id

    @property
    def _journal(self) -> Path:
        return self._run_folder / "journal"

    @property
    def _pristine(self) -> Path:
        return self.notes(COORDINATOR) / "pristine" / self.run_id

    def journal_folders(self) -> list[Path]:
        """Returns where the files of the run's journal lie: let go of, there, and as they were before the damage."""
        return [self.notes(COORDINATOR) / "journal" / self.run_id, self._journal, self._pristine]

    def _end_broker(self) -> None:
        self._signal(BROKER, signal.SIGKILL)
