"""The virtual fleet as strategies see it: live, nothing is copied, and every look costs O(1)."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import overload

from edgefl.simulation.agenda import Agenda
from edgefl.simulation.boards import Board
from edgefl.types import DeviceInfo, Progress, Speed, Vitals


class Idle(Sequence[str]):
    """The boards without work, always in the fleet's order."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._places: list[int] = []

    def add(self, place: int) -> None:
        at = bisect.bisect_left(self._places, place)
        if at == len(self._places) or self._places[at] != place:
            self._places.insert(at, place)

    def remove(self, place: int) -> None:
        at = bisect.bisect_left(self._places, place)
        if at < len(self._places) and self._places[at] == place:
            del self._places[at]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self._names[place] for place in self._places[index]]
        return self._names[self._places[index]]

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        # A copy: who is given work while somebody iterates would make others be skipped.
        return (self._names[place] for place in list(self._places))


class Devices(Mapping[str, DeviceInfo]):
    """Those who are present, in the fleet's order whoever left and came back."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.present: dict[str, DeviceInfo] = {}

    def __getitem__(self, device_id: str) -> DeviceInfo:
        return self.present[device_id]

    def __contains__(self, device_id: object) -> bool:
        return device_id in self.present

    def __len__(self) -> int:
        return len(self.present)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._names if name in self.present])


class _Speeds(Mapping[str, Speed]):
    """Speeds of the boards that have brought something."""

    def __init__(self, boards: Mapping[str, Board]) -> None:
        self._boards = boards

    def __getitem__(self, device_id: str) -> Speed:
        speed = self._boards[device_id].speed
        if speed.seconds_per_iteration is None:
            raise KeyError(device_id)
        return speed

    def __iter__(self) -> Iterator[str]:
        return (name for name, board in self._boards.items() if board.speed.seconds_per_iteration is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Vitals(Mapping[str, Vitals]):
    """How the boards are whose profiles say it."""

    def __init__(self, boards: Mapping[str, Board], agenda: Agenda) -> None:
        self._boards, self._agenda = boards, agenda

    def __getitem__(self, device_id: str) -> Vitals:
        vitals = self._boards[device_id].vitals(self._agenda.now_s)
        if vitals is None:
            raise KeyError(device_id)
        return vitals

    def __iter__(self) -> Iterator[str]:
        return (name for name, board in self._boards.items() if board.vitals(self._agenda.now_s) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class VirtualView:
    """Implements `FleetView`. The fleet changes it, everybody else only looks."""

    def __init__(self, agenda: Agenda, boards: Sequence[Board], evaluators: Sequence[DeviceInfo]) -> None:
        self._agenda = agenda
        self.boards = {board.device_id: board for board in boards}
        names = [*self.boards, *(info.device_id for info in evaluators)]
        self.reports: dict[str, Progress] = {}
        self._devices, self._idle = Devices(names), Idle(names)
        self._devices.present |= {info.device_id: info for info in evaluators}
        self._occupied: dict[str, list[str]] = {}
        self._busy, self._progress = MappingProxyType(self._occupied), MappingProxyType(self.reports)
        self._speeds, self._vitals = _Speeds(self.boards), _Vitals(self.boards, agenda)
        self._members: frozenset[str] | None = None

    @property
    def now_s(self) -> float:
        return self._agenda.now_s

    @property
    def devices(self) -> Mapping[str, DeviceInfo]:
        return self._devices

    @property
    def idle(self) -> Sequence[str]:
        return self._idle

    @property
    def busy(self) -> Mapping[str, Sequence[str]]:
        return self._busy

    @property
    def speeds(self) -> Mapping[str, Speed]:
        return self._speeds

    @property
    def progress(self) -> Mapping[str, Progress]:
        return self._progress

    @property
    def vitals(self) -> Mapping[str, Vitals]:
        return self._vitals

    def close_doors(self) -> None:
        """Lets nobody in from now on who is not there, or was before."""
        if self._members is None:
            self._members = frozenset(self._devices.present)

    def enter(self, board: Board) -> bool:
        """Shows a board; False if it is shown already or comes too late."""
        name = board.device_id
        if name in self._devices.present or (self._members is not None and name not in self._members):
            return False
        self._devices.present[name] = board.info
        self._idle.add(board.index)
        return True

    def leave(self, board: Board) -> None:
        self._devices.present.pop(board.device_id, None)
        self._idle.remove(board.index)

    def occupy(self, board: Board, assignment_id: str) -> None:
        self._idle.remove(board.index)
        board.outstanding.append(assignment_id)
        self._occupied[board.device_id] = board.outstanding

    def release(self, board: Board, assignment_id: str) -> None:
        board.outstanding.remove(assignment_id)
        if not board.outstanding:
            del self._occupied[board.device_id]
            if board.is_present:
                self._idle.add(board.index)
