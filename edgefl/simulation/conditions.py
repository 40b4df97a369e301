"""Conditions of a simulated board: the agent's own gate, in virtual time, with the facts of its profile's traces.

The gate is the one of a live board, with its files in a folder; only clocks and facts differ.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from edgefl.core.allowance import Allowance
from edgefl.core.conditions import (
    NO_CONDITIONS,
    Blocker,
    BoardFacts,
    Conditions,
    ConditionsEndedError,
    RunConditions,
)
from edgefl.core.errors import ConfigError
from edgefl.core.safe_parsing import format_toml
from edgefl.device.conditions.budgets import Clocks
from edgefl.device.conditions.facts import FactReader
from edgefl.device.conditions.gate import HOLD_S, ConditionGate, save_conditions
from edgefl.device.conditions.run_conditions import NO_RUN_CONDITIONS
from edgefl.simulation.profiles import DeviceProfile, value_at

POLL_S = 900.0
"""How often an idle board looks at its conditions, and at every step of its traces; one that said when it is free,
then."""
MIN_INTERVAL_S = 1.0
"""Least time between two looks: by rounding a day may end a little after its end."""
BOOT_S = 30.0
"""Age of a boot when the agent starts."""
DEFAULT_ZONE = "UTC"
RUN_ID = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionSettings:
    """Conditions of a simulated run.

    Attributes:
        folder: of the boards' files.
        starts_at_s: Unix seconds of the run's start.
        run: conditions of the run.
    """

    folder: Path
    starts_at_s: float
    run: RunConditions

    def make_conditions(
        self, device_id: str, profile: DeviceProfile, clock: Callable[[], float]
    ) -> SimulatedConditions | None:
        """Returns the conditions of a board; None where neither it nor the run has any.

        Raises:
            ConfigError: they could never hold, as its traces do not say what they ask.
        """
        if profile.conditions == NO_CONDITIONS and self.run == NO_RUN_CONDITIONS:
            return None
        return SimulatedConditions(device_id, profile, settings=self, clock=clock)


class TracedFacts(FactReader):
    """Facts of a simulated board, from its profile's traces.

    Args:
        profile: has the traces.
        clock: seconds of virtual time.

    Attributes:
        processor_s: processor seconds that its training has used.
    """

    def __init__(self, profile: DeviceProfile, clock: Callable[[], float]) -> None:
        super().__init__()
        self._profile, self._clock, self.processor_s = profile, clock, 0.0
        traces = (profile.mains, profile.charging, profile.battery, profile.temperature_c, profile.metered)
        steps_s = {at for trace in (*traces, profile.other_load) for at, _ in trace}
        self._steps_s = sorted({-math.inf, *steps_s, math.inf})

    def read(self, conditions: RunConditions) -> BoardFacts:  # noqa: ARG002 all are known
        """Returns the facts of this moment."""
        profile, now_s = self._profile, self._clock()
        charging, mains = value_at(profile.charging, now_s), value_at(profile.mains, now_s)
        status = None if not profile.battery and charging is None else "Charging" if charging else "Discharging"
        return BoardFacts(
            on_mains=None if mains is None else mains > 0,
            battery_fraction=value_at(profile.battery, now_s),
            battery_status=status,
            temperature_c=value_at(profile.temperature_c, now_s),
            other_load=value_at(profile.other_load, now_s) or 0.0,
            is_metered=self.read_metered(),
        )

    def read_metered(self) -> bool:
        """Returns whether the connection is metered now."""
        return (value_at(self._profile.metered, self._clock()) or 0.0) > 0

    def read_processor_s(self) -> float:
        """Returns the processor seconds of its training."""
        return self.processor_s

    def read_power_w(self) -> float | None:
        """Returns the power of its profile in watts; None where it has none."""
        return self._profile.power_w

    def find_near_steps(self) -> tuple[float, float]:
        """Returns when its traces had their last step and have the next, in virtual seconds; infinite without one."""
        index = bisect.bisect_right(self._steps_s, self._clock())
        return self._steps_s[index - 1], self._steps_s[index]


class SimulatedConditions:
    """Conditions of one simulated board, its owner's and the run's.

    Args:
        device_id: of the board.
        profile: has its owner's conditions, and the traces.
        settings: of the run.
        clock: seconds of virtual time.

    Raises:
        ConfigError: they could never hold, as its traces do not say what they ask.
    """

    def __init__(
        self, device_id: str, profile: DeviceProfile, *, settings: ConditionSettings, clock: Callable[[], float]
    ) -> None:
        zone = profile.conditions.zone or DEFAULT_ZONE
        owners = replace(profile.conditions, zone=zone)
        self._run = replace(settings.run, zone=settings.run.zone or zone)
        self._starts_at_s, self._clock, self._num_boots = settings.starts_at_s, clock, 0
        self._facts, self._folder = TracedFacts(profile, clock), settings.folder / device_id
        self._folder.mkdir()
        self._work, self._computed_s = ExitStack(), math.inf
        self._update_bytes: int | None = None
        if profile.conditions != NO_CONDITIONS:
            save_conditions(self._folder, format_toml({"conditions": owners.to_json()}).encode())
        self._check_simulated(profile.name, owners)
        self._gate = self._boot()
        self._check_known(profile.name, owners)

    def _boot(self) -> ConditionGate:
        """Returns the gate of a new boot; what it has on disk is as before."""
        self._num_boots += 1
        booted_s = self._clock() - BOOT_S
        clocks = Clocks(
            boot_id=str(self._num_boots),
            wall=lambda: self._starts_at_s + self._clock(),
            boot_time=lambda: self._clock() - booted_s,
        )
        gate = ConditionGate(self._folder, clocks=clocks, facts=self._facts)
        with suppress(ConditionsEndedError):
            gate.admit(RUN_ID, self._run.to_json())
        return gate

    def _check_simulated(self, name: str, owners: Conditions) -> None:
        """Checks that a simulated board can have what its owner's file asks.

        Raises:
            ConfigError: it can not.
        """
        if owners.switch is not None:
            raise ConfigError(f"profile {name}: conditions.switch: simulated boards have no switch; leave it out")
        if any("written" in limits for limits in owners.budgets.values()):
            raise ConfigError(f"profile {name}: conditions: written_mb is not simulated; leave it out")
        if owners.interfaces or self._run.interfaces:
            raise ConfigError(
                "conditions.interfaces: simulated boards have no network interfaces; use unmetered, and the trace "
                f"metered of profile {name}"
            )

    def _check_known(self, name: str, owners: Conditions) -> None:
        both = replace(owners, max_temperature_c=owners.max_temperature_c or self._run.max_temperature_c)
        if missing := self._gate.list_unknown(both):
            raise ConfigError(
                f"profile {name} could never train: conditions.{missing[0]}; give the profile temperature_c from "
                "second 0 on, or power_w"
            )

    def find_blocker(self) -> Blocker | None:
        """Returns why the board would not work for the run now; None where it would."""
        return self._gate.check() or self._gate.find_run_blocker(RUN_ID)

    def find_allowance(self) -> Allowance | None:
        """Returns what its hours and budgets allow, in virtual seconds; None where nothing limits it."""
        allowance = self._gate.find_allowance()
        return None if allowance is None else allowance.select_run(RUN_ID).shift(self._clock())

    def charge_download(self, num_bytes: int, *, base_bytes: int = 0) -> None:
        """Charges a model before its download, and of its bytes those of its base as a file.

        Raises:
            ConditionsEndedError: the board may not work now, or its budgets have no room.
        """
        if (blocker := self.find_blocker()) is not None:
            raise ConditionsEndedError(blocker.reason, blocker)
        self._gate.charge_traffic(num_bytes - base_bytes)
        if base_bytes:
            self._gate.charge_file(base_bytes)

    def start_work(self, first_bytes: int) -> None:
        """Begins a work of training; raises as `charge_download`, also where its update would not fit.

        The size of an update is that of the last one, `first_bytes` where this boot has made none.
        """
        self._computed_s = self._clock()
        self._work.enter_context(self._gate.work())
        self._gate.require_traffic(first_bytes if self._update_bytes is None else self._update_bytes)
        self._gate.require()

    def continue_work(self) -> None:
        """Charges the iterations since the last call, between two of them; raises as `charge_download`."""
        self._charge_processor()
        self._gate.require()

    def end_work(self) -> None:
        """Ends the work under way, if there is any."""
        self._charge_processor()
        self._work.close()
        self._computed_s = math.inf

    def _charge_processor(self) -> None:
        now_s = self._clock()
        self._facts.processor_s += max(0.0, now_s - self._computed_s)  # 0 outside of a work
        self._computed_s = now_s

    def charge_upload(self, num_bytes: int) -> None:
        """Charges an update before its upload, which may be after the hours; raises as `charge_download`."""
        self._update_bytes = num_bytes
        self._gate.require_network()
        self._gate.charge_traffic(num_bytes)

    def reboot(self) -> None:
        """Replaces the agent by that of a new boot, which knows only what is on disk."""
        self.end_work()
        self._gate, self._update_bytes = self._boot(), None

    def compute_next_check_s(self, blocker: Blocker | None) -> float:
        """Returns when an idle board looks again, in virtual seconds."""
        now_s = self._clock()
        if blocker is not None and blocker.free_at_s is not None:  # hours or a budget: nothing frees it before
            return max(now_s + MIN_INTERVAL_S, blocker.free_at_s - self._starts_at_s)
        last_s, next_s = self._facts.find_near_steps()
        times = [(math.floor(now_s / POLL_S) + 1) * POLL_S, next_s, last_s + HOLD_S]
        return max(now_s + MIN_INTERVAL_S, min(at_s for at_s in times if at_s > now_s))
