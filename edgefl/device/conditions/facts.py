"""Facts that conditions ask of this board: power, temperature, load of other processes, network; its use of power.

Files lie below a replaceable root, as everywhere in `hardware`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from edgefl.core.conditions import DOWN, UP, BoardFacts, Conditions, RunConditions, Switch
from edgefl.device.hardware.board_reader import BoardReader, parse_int, read_power_w, read_supply_status, read_text
from edgefl.device.hardware.health import find_interface, read_cpu_counters, read_temperature_c

if TYPE_CHECKING:
    from edgefl.device.conditions.switch import SwitchReader

NMCLI_S = 2.0
NETWORK_MANAGER = "run/NetworkManager"
"""Folder that is there where NetworkManager has run in this boot."""
MAX_PROCESSES = 64
METERED_PREFIXES = ("wwan", "ppp", "rmnet", "usb")
"""Interfaces that are metered where NetworkManager says nothing: modems and phones."""
LOAD_INTERVAL_S = 1.0
"""Least time between two readings of the load."""


class FactReader:
    """Fact reader of one board; reads only what conditions ask for.

    Args:
        board: reads files and programs.
    """

    def __init__(self, board: BoardReader | None = None) -> None:
        self._board = board or BoardReader()
        self._ticks_per_s = float(os.sysconf("SC_CLK_TCK"))
        self._counters: tuple[int, int, int] | None = None
        self._other_load: float | None = None
        self._switch: tuple[Switch, SwitchReader] | None = None

    def set_switch(self, switch: Switch | None, *, wait_s: float) -> None:
        """Reads this switch from now on, in place of any other.

        Args:
            switch: of the owner; None for none.
            wait_s: how long a broker may take to say its state before this returns.

        Raises:
            ConfigError: its topic, login or authority is none.
        """
        if self._switch is not None and switch == self._switch[0]:
            return
        if self._switch is not None:
            self._switch[1].close()
            self._switch = None
        if switch is not None:
            from edgefl.device.conditions.switch import SwitchReader  # noqa: PLC0415 MQTT only where it is asked for

            self._switch = switch, SwitchReader(switch, self._board.root, wait_s=wait_s)

    def read(self, conditions: RunConditions) -> BoardFacts:
        """Returns the facts that the conditions ask for; the others are None."""
        values: dict[str, object] = {}
        if conditions.mains or conditions.charging or conditions.min_battery is not None:
            values |= read_supply_status(self._board)
        if conditions.max_temperature_c is not None:
            values["temperature_c"] = read_temperature_c(self._board)
        if conditions.max_other_load is not None:
            values["other_load"] = self._measure_other_load()
        asks_metered = not conditions.unmetered_directions.isdisjoint({UP, DOWN})
        if asks_metered or conditions.interfaces:
            values["interface"] = find_interface(self._board.root) or ""
        if asks_metered:
            values["is_metered"] = self.read_metered()
        if isinstance(conditions, Conditions) and conditions.switch is not None and self._switch is not None:
            values["switch_is_on"] = self._switch[1].read()
        return BoardFacts(**values)  # type: ignore[arg-type]  # by the names of its fields

    def read_metered(self) -> bool | None:
        """Returns whether the default route's interface is metered; None where it is not known."""
        interface = find_interface(self._board.root)
        return None if interface is None else self._is_metered(interface)

    def read_processor_s(self) -> float:
        """Returns the processor seconds of this process and all below it, ended ones included."""
        return self._read_own_ticks() / self._ticks_per_s

    def read_power_w(self) -> float | None:
        """Returns the board's power in watts; None where it is not known."""
        return read_power_w(self._board)

    def read_written_bytes(self) -> float | None:
        """Returns the bytes that this process and all below it have written to disks; None where it is not known.

        Of a process of another user they count once it has ended.
        """
        total: float | None = None
        for process in self._list_own_processes():
            lines = (read_text(self._board.root / "proc" / process / "io") or "").splitlines()
            for count in (parse_int(line.partition(":")[2]) for line in lines if line.startswith("write_bytes:")):
                total = (total or 0.0) + (count or 0)
        return total

    def _measure_other_load(self) -> float | None:
        """Returns the share of all cores that other processes had since the last reading."""
        counters = read_cpu_counters(self._board.root)
        if counters is None:
            return None
        busy, total, own = *counters, self._read_own_ticks()
        former = self._counters
        if former is None:
            self._counters = busy, total, own
            return self._other_load
        elapsed = total - former[1]
        if elapsed < LOAD_INTERVAL_S * self._ticks_per_s:
            return self._other_load
        self._counters = busy, total, own
        others = (busy - former[0]) - max(0, own - former[2])
        self._other_load = min(1.0, max(0.0, others / elapsed))
        return self._other_load

    def _read_own_ticks(self) -> int:
        ticks = 0
        for process in self._list_own_processes():
            fields = (read_text(self._board.root / "proc" / process / "stat") or "").rpartition(")")[2].split()
            ticks += sum(parse_int(field) or 0 for field in fields[11:15])
        return ticks

    def _list_own_processes(self) -> list[str]:
        """Returns the folders below /proc of this process and those below it."""
        proc, processes = self._board.root / "proc", ["self"]
        for process in processes:  # grows meanwhile
            tasks = sorted((proc / process / "task").glob("*/children"))[:MAX_PROCESSES]
            children = [child for task in tasks for child in (read_text(task) or "").split() if child.isdecimal()]
            processes += children[: MAX_PROCESSES - len(processes)]
        return processes

    def _is_metered(self, interface: str) -> bool | None:
        """Returns what NetworkManager says, or the interface's name; None where NetworkManager runs and is silent."""
        arguments = ["nmcli", "-g", "GENERAL.METERED", "device", "show", interface]
        answer = self._board.get_program_output(arguments, NMCLI_S)
        if answer is None and (self._board.root / NETWORK_MANAGER).exists():
            return None
        answer = answer or ""
        if answer.startswith(("yes", "no")):
            return answer.startswith("yes")
        return interface.startswith(METERED_PREFIXES)


def read_boot_id(root: Path) -> str:
    """Returns the kernel's id of this boot; empty where it has none."""
    return read_text(root / "proc/sys/kernel/random/boot_id") or ""
