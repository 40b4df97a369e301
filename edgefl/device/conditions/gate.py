"""Gate of a board: whether it may train now, by the file of its owner, the person beside it, the run and its budgets.

Everything is read anew: files that other processes change count within half a second of work. Without such files
a check is one look at each.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgefl.core.allowance import Allowance, BudgetLeft, Window
from edgefl.core.conditions import (
    BASES,
    DOWN,
    DOWNLOAD,
    NETWORK,
    NO_CONDITIONS,
    UP,
    Blocker,
    Conditions,
    ConditionsEndedError,
    RunConditions,
    find_blocker,
    parse_conditions,
)
from edgefl.core.errors import ConfigError, StoreError
from edgefl.core.safe_parsing import MAX_TOML_CHARS, parse_json
from edgefl.device.conditions.budgets import BudgetUsage, Clocks
from edgefl.device.conditions.facts import FactReader, read_boot_id
from edgefl.device.conditions.run_conditions import AdmittedRun, find_window
from edgefl.device.hardware.board_reader import BoardReader, read_text
from edgefl.system.atomic_files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

CONDITIONS_FILE, PAUSE_FILE = "conditions.toml", "pause.json"
CHECK_INTERVAL_S = 0.5
"""Interval of checks while it works."""
STEP_DECAY = 0.95
"""Factor of the longest step so far, with each step."""
FIRST_STEP_S = 60.0
"""How long the first iteration of a process may take at least, as it has seen none."""
STEP_FILE = "longest_step_s"
"""Has the longest iteration of earlier processes, if it is longer; written when that is a quarter more, or half."""
MAX_STEP_S = 7 * 86_400.0
STEP_MARGIN = 1.25
"""Of the longest step, for the next."""
MAX_RUNS = 8
"""Runs whose conditions are remembered: a node of one trains on, between the instructions of others."""
HOLD_S = 30.0
"""How long power, heat, load or network that did not hold must hold before it trains again: they flicker."""
SWITCH_WAIT_S = 2.0
"""How long a command waits for the state of the board's switch; the agent goes on."""
MIN_MEASURED_S = 1.0
"""A work that is shorter says nothing of what a second of work uses."""
NEVER_ENDS_S = 86_400.0
"""How long hours that no end was found of are taken to have none."""
SWITCH_RETRY_S = 10.0
"""Interval in which a switch is tried again whose login or authority cannot be read."""
_FLICKERING = frozenset({"power", "heat", "load", NETWORK, DOWNLOAD})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A pause that a person has asked for; without an end it lasts until `edgefl device resume`.

    `until_boot_s` counts since the boot `boot_id`, and holds in that boot, whatever the clock says.
    """

    until_s: float | None = None
    until_boot_s: float | None = None
    boot_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownWindow:
    """Hours that were looked up: `window`, on the board's clock, holds from `since_s` to `until_s`."""

    conditions: RunConditions
    since_s: float
    until_s: float
    window: Window | None


class ConditionGate:
    """Gate of one board. Thread-safe.

    Args:
        folder: state directory of the board.
        board: reads the board's files and programs.
        clocks: of the board.
        facts: reads what conditions ask of the board; by `board` for None.
        is_agent: whether it trains here; to any other process its work is that of another.
    """

    def __init__(
        self,
        folder: Path,
        *,
        board: BoardReader | None = None,
        clocks: Clocks | None = None,
        facts: FactReader | None = None,
        is_agent: bool = True,
    ) -> None:
        board, self._is_agent = board or BoardReader(), is_agent
        self._folder, self._facts = folder, facts or FactReader(board)
        self._paths = {name: folder / name for name in (PAUSE_FILE, CONDITIONS_FILE)}  # made once: it looks often
        self._clocks = clocks or Clocks(boot_id=read_boot_id(board.root))
        self._lock = threading.RLock()
        self._stamps: dict[str, tuple[int, int] | None] = {}
        self._conditions, self._run = NO_CONDITIONS, AdmittedRun()
        self._runs: OrderedDict[str, AdmittedRun] = OrderedDict()
        self._pause: Pause | None = None
        self._file_fault = self._store_fault = ""
        self._usage: BudgetUsage | None = None
        self._coordinator_s: tuple[float, float] | None = None
        self._held: dict[str, tuple[float, Blocker]] = {}
        self._checked_s = self._arrival_checked_s = -CHECK_INTERVAL_S
        self._saved_step_s = self._step_s = _load_step_s(folder)
        self._stepped_s = 0.0
        self._step_use: dict[str, float] = {}
        self._work_use: dict[str, float] = {}
        self._started_s = 0.0
        self._rates: dict[str, float] = {}
        self._windows: dict[str, _KnownWindow] = {}
        self._written_bytes: float | None = None
        self._retry_switch_s: float | None = None
        self._blocker: Blocker | None = None
        self._is_working = False
        self._work: tuple[float, float, float | None] | None = None

    @property
    def conditions(self) -> Conditions:
        """Returns the conditions of the owner's file, as last read."""
        return self._conditions

    def check(self) -> Blocker | None:
        """Returns why this board may not train now, and charges what its work has used; None where it may.

        The conditions of the run count within its work only.
        """
        with self._lock:
            self._reload()
            self._set_forward()
            self._charge_work()
            self._checked_s = self._clocks.boot_time()
            self._blocker = self._find_owner_blocker()
            if self._is_working and self._get_end() is None:
                of_run = self.find_run_blocker()
                self._blocker = of_run if of_run and of_run.kind != DOWNLOAD else self._blocker or of_run
            return self._blocker

    def find_owner_blocker(self) -> Blocker | None:
        """Returns why this board may not train at all; charges nothing."""
        with self._lock:
            self._reload()
            return self._find_owner_blocker()

    def admit(self, run_id: str, conditions: object, *, asks_metered: bool = False) -> None:
        """Makes a run the one whose conditions hold: in `work`, and in `find_run_blocker`.

        Args:
            run_id: of the run.
            conditions: as its instructions have them; None for none.
            asks_metered: whether it goes by whether the connection is metered; see `read_metered`.

        Raises:
            ConditionsEndedError: they do not hold now, or make no sense here.
        """
        with self._lock:
            former = self._runs.get(run_id, AdmittedRun())
            run = AdmittedRun.parse(run_id, conditions)
            run = replace(run, needs_base=former.needs_base, asks_metered=asks_metered)
            if run != former:
                self._held.pop(run_id, None)
            self._run = self._runs[run_id] = run
            self._runs.move_to_end(run_id)
            if len(self._runs) > MAX_RUNS:
                self._held.pop(self._runs.popitem(last=False)[0], None)
            blocker = self.find_run_blocker()
        if blocker is not None:
            raise ConditionsEndedError(blocker.reason, blocker)

    def read_metered(self) -> bool | None:
        """Returns whether the connection is metered; None where that is not known, or no admitted run asks."""
        with self._lock:
            is_asked = any(run.asks_metered for run in self._runs.values())
            return self._facts.read_metered() if is_asked else None

    def complete_run(self, run_id: str) -> None:
        """Drops the conditions of a run that is over."""
        with self._lock:
            self._runs.pop(run_id, None)
            self._held.pop(run_id, None)
            if self._run.run_id == run_id:
                self._run = AdmittedRun()

    def find_run_blocker(self, run_id: str | None = None) -> Blocker | None:
        """Returns which of its conditions keeps this board from work for a run; the owner's are apart.

        Args:
            run_id: one of the last `MAX_RUNS` admitted; None for the newest of them. Any other has no conditions.
        """
        with self._lock:
            run = self._run if run_id is None else self._runs.get(run_id, AdmittedRun())
            if not run.has_conditions:
                return None
            blocker = self._judge(run.conditions) if not run.fault else Blocker(kind="file", reason=run.fault)
            if blocker is None and run.needs_base:
                blocker = self._find_base_blocker(run.conditions)
            blocker = self._hold(run.run_id, blocker)
            return None if blocker is None else replace(blocker, run=run.run_id)

    def find_allowance(self) -> Allowance | None:
        """Returns what a work of the admitted run may use that begins now; None where nothing limits it.

        Times count from now. Reads no file: it is about what was checked last.
        """
        with self._lock:
            run = self._run
            window = self._find_window("", self._conditions)
            run_window = self._find_window(run.run_id, run.conditions) if run.has_conditions else None
            if window is None and run_window is None and not self._conditions.budgets:
                return None
            budgets: tuple[BudgetLeft, ...] = ()
            if self._conditions.budgets:
                with suppress(StoreError):  # it is told, and its work ends, where something is charged
                    budgets = self._get_usage().list_left(self._conditions, self._rates)
            name = "" if run_window is None else run.run_id
            return Allowance(window=window, run=name, run_window=run_window, budgets=budgets)

    def _find_window(self, whose: str, conditions: RunConditions) -> Window | None:
        """Returns the hours that hold now, from now on; the search for their end is done once."""
        if not conditions.hours and not conditions.weekdays:
            return None
        now_s, known = self._clocks.wall(), self._windows.get(whose)
        if known is None or known.conditions != conditions or not known.since_s <= now_s < known.until_s:
            window = find_window(conditions, now_s)
            if len(self._windows) >= MAX_RUNS:
                self._windows.clear()
            known = self._windows[whose] = _KnownWindow(
                conditions=conditions,
                since_s=now_s,
                until_s=_find_window_end_s(window, now_s),
                window=window,
            )
        if known.window is None:
            return None
        left = known.window.shift(-now_s)
        return replace(left, ends_s=max(0.0, left.ends_s))

    def check_often(self) -> Blocker | None:
        """Returns as `check`, which it calls every half a second at most; for use at every iteration."""
        if self._clocks.boot_time() - self._checked_s >= CHECK_INTERVAL_S:
            return self.check()
        return self._blocker

    def require(self) -> None:
        """Checks between two iterations, every half a second at most; the next must fit into hours and budgets.

        Raises:
            ConditionsEndedError: this board may not train now.
        """
        if self._clocks.boot_time() - self._stepped_s >= CHECK_INTERVAL_S:
            with self._lock:
                self._record_step()
                self.check()
        self._raise_end()

    def _get_end(self) -> Blocker | None:
        """Returns the blocker that ends work under way, by the last check; one of downloads alone does not."""
        return None if self._blocker is None or self._blocker.kind == DOWNLOAD else self._blocker

    def _raise_end(self) -> None:
        if (blocker := self._get_end()) is not None:
            raise ConditionsEndedError(blocker.reason, blocker)

    @contextmanager
    def work(self) -> Iterator[None]:
        """Charges what the block uses, and adds the admitted run's conditions to the owner's in it."""
        with self._lock:
            self._reload()
            self._is_working = True
            self._stepped_s = self._started_s = self._clocks.boot_time()
            self._step_use, self._work_use = {}, {}
            self._begin_measuring()
            self.check()  # the download may have taken long
        try:
            yield
        finally:
            with self._lock:
                self._record_step()
                self._record_rates()
                if max(self._step_s, FIRST_STEP_S) < self._saved_step_s / 2:
                    self._save_step_s()
                self._is_working, self._work = False, None
                if self._usage is not None:
                    self._try(lambda usage: usage.settle(self._conditions))

    def charge_traffic(self, num_bytes: int) -> None:
        """Charges a transfer before it begins; a number below 0 gives back what was not begun.

        Raises:
            ConditionsEndedError: it does not fit into a budget.
        """
        with self._lock:
            if not _has_budget(self._conditions, "traffic"):
                return
            self.require_traffic(num_bytes)
            self._charge({"traffic": float(num_bytes)})
            blocker = self._make_fault_blocker()
            if blocker is not None:
                raise ConditionsEndedError(blocker.reason, blocker)

    def charge_file(self, num_bytes: int) -> None:
        """Charges a file that is fetched and written to disk, before that begins.

        Raises:
            ConditionsEndedError: it does not fit into a budget, or as of `require_base`.
        """
        with self._lock:
            self._arrival_checked_s = -CHECK_INTERVAL_S
            self.require_base()
            use = {"written": float(num_bytes)}
            if _has_budget(self._conditions, "written") and (blocker := self._find_used_budget(use)) is not None:
                raise ConditionsEndedError(blocker.reason, blocker)
            self.charge_traffic(num_bytes)
            self.charge_copy(num_bytes)

    def charge_copy(self, num_bytes: int) -> None:
        """Charges a file that is written to disk, before that begins; a number below 0 gives back what was not.

        Raises:
            ConditionsEndedError: it does not fit into a budget.
        """
        with self._lock:
            if not _has_budget(self._conditions, "written"):
                return
            use = {"written": float(num_bytes)}
            if num_bytes > 0 and (blocker := self._find_used_budget(use)) is not None:
                raise ConditionsEndedError(blocker.reason, blocker)
            self._charge(use)
            # The kernel will count the same bytes.
            self._written_bytes = (self._written_bytes or 0.0) + num_bytes

    def require_base(self) -> None:
        """Checks before a base is fetched for the admitted run and while it arrives, every half a second at most.

        From then on the run is blocked until the connection is not metered; others may go on.

        Raises:
            ConditionsEndedError: this board may not go on, or the owner or the run forbids this network for bases.
        """
        with self._lock:
            if not self._is_arrival_check_due():
                return
            self.check()
            self._raise_end()
            blocker = self._find_base_blocker(self._run.conditions)
            run = replace(self._run, needs_base=blocker is not None)
            if run.run_id in self._runs:
                self._run = self._runs[run.run_id] = run
            if blocker is not None:
                raise ConditionsEndedError(blocker.reason, replace(blocker, run=run.run_id))

    def require_download(self) -> None:
        """Judges the network while a model arrives, every half a second at most; raises as `require_network`."""
        with self._lock:
            if self._is_arrival_check_due():
                self.require_network(UP, DOWN)

    def _is_arrival_check_due(self) -> bool:
        now_s = self._clocks.boot_time()
        is_due = now_s - self._arrival_checked_s >= CHECK_INTERVAL_S
        self._arrival_checked_s = now_s if is_due else self._arrival_checked_s
        return is_due

    def require_network(self, *directions: str) -> None:
        """Judges the network alone, for what is finished and may be sent after its hours.

        Args:
            directions: of `DIRECTIONS`; up without any.

        Raises:
            ConditionsEndedError: the owner or the run forbids this network.
        """
        with self._lock:
            self._reload()
            for run, conditions in (("", self._conditions), (self._run.run_id, self._run.conditions)):
                unmetered = tuple(conditions.unmetered_directions.intersection(directions or (UP,)))
                network = RunConditions(unmetered=unmetered, interfaces=conditions.interfaces)
                blocker = find_blocker(network, self._facts.read(network), self._clocks.wall())
                if blocker is not None:
                    raise ConditionsEndedError(blocker.reason, replace(blocker, run=run))

    def require_traffic(self, num_bytes: int) -> None:
        """Charges nothing yet.

        Raises:
            ConditionsEndedError: transfers of so many bytes do not fit into a budget.
        """
        with self._lock:
            blocker = self._find_used_budget({"traffic": float(num_bytes)}) if self._conditions.budgets else None
            if blocker is not None:
                raise ConditionsEndedError(blocker.reason, blocker)

    def observe_skew(self, skew_s: float) -> None:
        """Records the coordinator's clock, just read, by `skew_s` ahead of the board's.

        The time of budgets is set forward at this and any later check at which the board's clock agrees with it.
        """
        with self._lock:
            self._coordinator_s = self._clocks.wall() + skew_s, self._clocks.boot_time()
            self._set_forward()

    def _set_forward(self) -> None:
        """Sets the time of budgets forward where the coordinator's clock, as read last, goes with the board's."""
        if self._coordinator_s is not None and self._usage is not None:
            read_s, boot_s = self._coordinator_s
            self._usage.set_forward(read_s + self._clocks.boot_time() - boot_s - self._clocks.wall())

    def pause(self, seconds: float | None) -> None:
        """Lets the board train nothing for so long; None is until `resume`."""
        save_pause(self._folder, seconds, self._clocks)

    def resume(self) -> None:
        """Ends a pause."""
        clear_pause(self._folder)

    def describe_budgets(self) -> dict[str, str]:
        """Returns used and limit of every budget, for people."""
        with self._lock:
            self._reload()
            return self._get_usage().describe(self._conditions) if self._conditions.budgets else {}

    def list_unknown(self, conditions: Conditions) -> list[str]:
        """Returns the conditions that could never hold, as this board does not know what they ask.

        Raises:
            ConfigError: the topic, login or authority of a switch is none.
        """
        self._set_switch(conditions)
        facts = self._facts.read(conditions)
        missing = []
        if conditions.max_temperature_c is not None and facts.temperature_c is None:
            missing.append("max_temperature_c: it has no temperature sensor")
        if _has_budget(conditions, "energy") and self._facts.read_power_w() is None:
            missing.append("energy_j: it has no power sensor")
        if _has_budget(conditions, "written") and self._facts.read_written_bytes() is None:
            missing.append("written_mb: its kernel does not count what is written")
        return missing

    def _find_owner_blocker(self) -> Blocker | None:
        used_up = self._find_used_budget() if self._conditions.budgets else None  # first: it mends a failed write
        blocker = self._find_pause(self._clocks.wall()) or self._make_fault_blocker() or used_up
        if blocker is None and self._conditions != NO_CONDITIONS:
            blocker = self._judge(self._conditions)
        return self._hold("", blocker)

    def _judge(self, conditions: RunConditions) -> Blocker | None:
        facts = self._facts.read(conditions)
        facts = facts if self._is_agent else replace(facts, other_load=0.0)
        return find_blocker(conditions, facts, self._clocks.wall(), step_s=STEP_MARGIN * self._step_s)

    def _find_base_blocker(self, of_run: RunConditions) -> Blocker | None:
        """Returns why no base is fetched over this network, by the owner or a run."""
        if BASES not in self._conditions.unmetered_directions | of_run.unmetered_directions:
            return None
        is_metered = self._facts.read_metered()
        if is_metered is False:
            return None
        present = "its connection is metered" if is_metered else "it is not known to be unmetered"
        return Blocker(kind=DOWNLOAD, reason=f"it waits with the base of the run, as {present}")

    def _find_used_budget(self, needed: Mapping[str, float] | None = None) -> Blocker | None:
        found: list[Blocker | None] = []
        self._try(lambda usage: found.append(usage.find_blocker(self._conditions, needed=needed)))
        if found and found[0] is None and needed is None:
            return self._find_unknown_use()
        return found[0] if found else self._make_fault_blocker()

    def _find_unknown_use(self) -> Blocker | None:
        if _has_budget(self._conditions, "energy") and self._facts.read_power_w() is None:
            return Blocker(kind="budget", reason="its power is not known, so its energy cannot be counted")
        if _has_budget(self._conditions, "written") and self._facts.read_written_bytes() is None:
            return Blocker(kind="budget", reason="its kernel does not count what is written")
        return None

    def _hold(self, whose: str, blocker: Blocker | None) -> Blocker | None:
        boot_s = self._clocks.boot_time()
        if blocker is not None and blocker.kind in _FLICKERING:
            self._held[whose] = boot_s, blocker
        elif blocker is None and whose in self._held:
            since_s, held = self._held[whose]
            if boot_s - since_s < HOLD_S:
                return held
            del self._held[whose]
        return blocker

    def _find_pause(self, now_s: float) -> Blocker | None:
        pause = self._pause
        if pause is None:
            return None
        is_same_boot = pause.boot_id == self._clocks.boot_id and pause.until_boot_s is not None
        end, present_s = (pause.until_boot_s, self._clocks.boot_time()) if is_same_boot else (pause.until_s, now_s)
        if end is not None and present_s >= end:
            return None
        return Blocker(
            kind="pause", reason="paused on the board", free_at_s=None if end is None else now_s + end - present_s
        )

    def _make_fault_blocker(self) -> Blocker | None:
        fault = self._file_fault or (self._store_fault if self._conditions.budgets else "")
        return Blocker(kind="file", reason=fault) if fault else None

    def _reload(self) -> None:
        """Reads the files that have changed; a damaged one lets nothing be trained."""
        if self._has_changed(PAUSE_FILE):
            self._pause = _read_pause(self._paths[PAUSE_FILE])
        if not self._has_changed(CONDITIONS_FILE) and not self._is_switch_due():
            return
        former = self._file_fault
        self._file_fault, self._held, self._retry_switch_s = "", {}, None
        try:
            self._conditions = load_conditions(self._folder)
            self._retry_switch_s = self._clocks.boot_time() + SWITCH_RETRY_S
            self._set_switch(self._conditions)
            self._retry_switch_s = None
        except ConfigError as error:
            self._file_fault = f"{CONDITIONS_FILE}: {error}"
            if self._file_fault != former:
                log.warning("%s; it trains nothing until that is mended", self._file_fault)
        if self._work is None:
            self._begin_measuring()
        if self._written_bytes is None:
            self._measure_written()

    def _is_switch_due(self) -> bool:
        """Whether a switch that could not be read is tried again: its login or authority may be mended meanwhile."""
        return self._retry_switch_s is not None and self._clocks.boot_time() >= self._retry_switch_s

    def _set_switch(self, conditions: Conditions) -> None:
        self._facts.set_switch(conditions.switch, wait_s=0.0 if self._is_agent else SWITCH_WAIT_S)

    def _has_changed(self, name: str) -> bool:
        try:
            status = self._paths[name].stat()
            stamp = (status.st_mtime_ns, status.st_ino)
        except OSError:
            stamp = None
        has_changed = self._stamps.get(name) != stamp
        self._stamps[name] = stamp
        return has_changed

    def _get_usage(self) -> BudgetUsage:
        if self._usage is None:
            self._usage = BudgetUsage(self._folder, self._clocks, is_agent=self._is_agent)
            self._usage.keep_time()
        return self._usage

    def _begin_measuring(self) -> None:
        """Charges the first step of a work ahead, where there are budgets."""
        if self._is_working and self._conditions.budgets:
            self._work = self._measure()
            self._charge({"processor": 0.0, "energy": 0.0, **self._measure_written()})

    def _measure_written(self) -> dict[str, float]:
        """Returns what was written since this was asked last, or since there is a budget of it."""
        if not _has_budget(self._conditions, "written"):
            self._written_bytes = None
            return {}
        present, former = self._facts.read_written_bytes() or 0.0, self._written_bytes
        # A file that was charged ahead is not written yet.
        self._written_bytes = present if former is None else max(present, former)
        return {"written": 0.0 if former is None else self._written_bytes - former}

    def _measure(self) -> tuple[float, float, float | None]:
        return self._clocks.boot_time(), self._facts.read_processor_s(), self._facts.read_power_w()

    def _charge_work(self) -> None:
        """Charges what the work has used since the last time."""
        if self._work is None:
            return
        (since_s, former_s, former_w), self._work = self._work, self._measure()
        now_s, processor_s, power_w = self._work
        powers = [power for power in (former_w, power_w) if power is not None]
        energy_j = max(powers, default=0.0) * (now_s - since_s)
        used = {"processor": max(0.0, processor_s - former_s), "energy": energy_j, **self._measure_written()}
        for total in (self._step_use, self._work_use):
            total.update({kind: total.get(kind, 0.0) + amount for kind, amount in used.items()})
        self._charge(used)

    def _record_step(self) -> None:
        """Records what one step of the work takes, which the next must have room for."""
        self._charge_work()
        now_s = self._clocks.boot_time()
        self._step_s, self._stepped_s = max(STEP_DECAY * self._step_s, now_s - self._stepped_s), now_s
        if self._step_s > STEP_MARGIN * self._saved_step_s:
            self._save_step_s()
        if self._usage is not None:
            self._usage.record_step(self._step_use)
        self._step_use = {}

    def _save_step_s(self) -> None:
        """Saves the length of a step, which the first one after a restart must have room for in its hours."""
        both = self._conditions, self._run.conditions
        if self._is_agent and any(conditions.hours or conditions.weekdays for conditions in both):
            with suppress(StoreError):  # a full card: it is measured again
                write_atomic(self._folder / STEP_FILE, f"{self._step_s:.3f}\n".encode())
                self._saved_step_s = self._step_s

    def _record_rates(self) -> None:
        """Records what a second of the work that ends has used."""
        elapsed_s = self._clocks.boot_time() - self._started_s
        if elapsed_s >= MIN_MEASURED_S:
            self._rates.update({kind: amount / elapsed_s for kind, amount in self._work_use.items()})

    def _charge(self, used: Mapping[str, float]) -> None:
        self._try(lambda usage: usage.charge(self._conditions, used))

    def _try(self, change: Callable[[BudgetUsage], None]) -> None:
        try:
            change(self._get_usage())
        except StoreError as error:
            if not self._store_fault:
                log.warning("its budgets cannot be kept: %s; it trains nothing until they can", error)
            self._store_fault = f"its budgets cannot be kept: {error}"[:200]
        else:
            self._store_fault = ""


def _has_budget(conditions: Conditions, kind: str) -> bool:
    return any(kind in limits for limits in conditions.budgets.values())


def _load_step_s(folder: Path) -> float:
    """Returns how long the first iteration may take: as the longest one of an earlier process, if that was longer."""
    try:
        seconds = float((folder / STEP_FILE).read_bytes()[:32])
    except (OSError, ValueError):
        return FIRST_STEP_S
    return max(seconds, FIRST_STEP_S) if seconds <= MAX_STEP_S else FIRST_STEP_S  # a NaN is not


def load_conditions(folder: Path) -> Conditions:
    """Returns the conditions of a state directory; none where it has no file.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = folder / CONDITIONS_FILE
    try:
        with path.open("rb") as file:
            return parse_conditions(file.read(MAX_TOML_CHARS + 1))
    except FileNotFoundError:
        return NO_CONDITIONS
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def save_conditions(folder: Path, text: bytes | None) -> None:
    """Saves the owner's file, which was parsed before; None removes it."""
    if text is None:
        (folder / CONDITIONS_FILE).unlink(missing_ok=True)
    else:
        write_atomic(folder / CONDITIONS_FILE, text)


def save_pause(folder: Path, seconds: float | None, clocks: Clocks) -> None:
    """Saves that this board trains nothing for so long; None is until `clear_pause`."""
    pause = Pause(boot_id=clocks.boot_id)
    if seconds is not None:
        pause = replace(pause, until_s=clocks.wall() + seconds, until_boot_s=clocks.boot_time() + seconds)
    value = {"v": 1, "until_s": pause.until_s, "until_boot_s": pause.until_boot_s, "boot_id": pause.boot_id}
    write_atomic(folder / PAUSE_FILE, json.dumps(value).encode())


def clear_pause(folder: Path) -> bool:
    """Ends a pause; returns whether there was one."""
    was_paused = (folder / PAUSE_FILE).exists()
    (folder / PAUSE_FILE).unlink(missing_ok=True)
    return was_paused


def _find_window_end_s(window: Window | None, now_s: float) -> float:
    """Returns until when what was found of hours holds: to their end, outside of them to the next."""
    if window is not None and window.ends_s > now_s:
        return window.ends_s
    return now_s + NEVER_ENDS_S if window is None or window.reopens_s is None else window.reopens_s


def _read_pause(path: Path) -> Pause | None:
    """Returns the pause in a file; a damaged one has no end."""
    text = read_text(path)
    if text is None:
        return Pause() if path.exists() else None
    try:
        value: dict[str, Any] = parse_json(text)
        ends = [None if value[name] is None else float(value[name]) for name in ("until_s", "until_boot_s")]
        return Pause(until_s=ends[0], until_boot_s=ends[1], boot_id=str(value["boot_id"]))
    except (ValueError, TypeError, KeyError, OverflowError):
        log.warning("%s is damaged: it is paused until `edgefl device resume`", path)
        return Pause()
