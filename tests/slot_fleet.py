"""A fleet with a board in slots: bundles reach it through a real coordinator, and real pip installs them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wheel_files import Signer, edgefl_wheel, make_slots

from edgefl import __version__
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet

SUPERVISOR = Path(__file__).parent / "e2e" / "slot_supervisor.py"


@dataclass
class SlotFleet:
    """`board` runs in slots and trusts the signer, `manual` is an edgefl that somebody installed by hand."""

    fleet: LocalFleet
    tools: Any
    signer: Signer
    root: Path
    folder: Path

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.fleet.start_command(arguments)
        output = process.communicate(timeout=300)[0].decode()
        return process.returncode, output

    def on_board(self, *arguments: str) -> str:
        """Returns what `edgefl ...` of the board's slot in use prints."""
        board = next(device for device in self.fleet.devices if device.name == "board")
        process = self.fleet.start_command([*arguments, "--state", str(self.fleet.root / "board")], board.program)
        return process.communicate(timeout=60)[0].decode()

    def device(self, name: str = "board") -> Any:
        return self.fleet.make_client().get(f"/edgefl/v1/devices/{name}")

    def release(self, version: str, changes: Any = None) -> str:
        wheel = edgefl_wheel(self.folder / version, version, changes)
        return str(self.signer.bundle(self.folder / f"{version}.bundle", wheel, version=version))

    def events(self) -> list[str]:
        return [
            row["kind"]
            for row in self.fleet.list_history("events", device="board")
            if row["kind"].startswith("installation")
        ]


@contextmanager
def slot_fleet(folder: Path, tools: Any, *also_importable: Path) -> Iterator[SlotFleet]:
    """Gives a fleet that is up; what lies in `also_importable` is installed beside its coordinator alone."""
    signer = Signer(folder / "operator")
    root = make_slots(folder / "opt", edgefl_wheel(folder / "first", __version__), borrow=True)
    board, manual = tools.devices(2)
    program = (sys.executable, str(SUPERVISOR), str(root), str(signer.trusted))
    devices = [
        LocalDeviceSpec(name="board", shards=board.shards, program=program),
        LocalDeviceSpec(name="manual", shards=manual.shards),
    ]
    confined = {"EDGEFL_CONFINE": "auto"}
    with tools.fleet(folder / "fleet", devices, also_importable=also_importable, environment=confined) as fleet:
        made = SlotFleet(fleet, tools, signer, root, folder)
        for name in ("board", "manual"):
            tools.eventually(lambda name=name: "installs" in made.device(name)["capabilities"], 30, name)
        yield made
