"""Round rules of a run file, independent of the strategy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from edgefl.strategies.server_optimizers import ServerOptimizer

Rescue = Literal["go-on", "ask-again", "none"]
"""Close the round with the received updates (k of n), ask the missing devices again, or do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRules:
    """Round rules of a run file.

    Attributes:
        min_devices: idle devices needed to open the first round; later ones continue with those that are left.
        max_devices: maximum of asked devices, None for all; drawn anew each round.
        fraction: likewise, as a fraction of the idle ones, rounded up.
        min_updates: k of n: the round closes when k updates are in, or with fewer when no device is left to ask; None
            waits for all live devices.
        deadline_s: an assignment that takes longer is given up; None for never.
        barrier_s: time that a round waits for the asked devices; then `rescue` is tried once, and after the same
            time again the run ends and names the missing ones. None waits without end.
        rescue: recovery from a passed barrier; see `Rescue`.
        codec: spec of the codec for updates.
        task: the task's name, under which devices list the blocks of their shards.
        updates_per_round: updates per round of an asynchronous run, by which learning rates change; None for the
            number of devices in the first dispatch.
        rounds: number of rounds of the run; None where another criterion ends it.
        server: optimiser from the mean displacement to the model's step.
        seed: of the selection of devices.
    """

    min_devices: int = 1
    max_devices: int | None = None
    fraction: float | None = None
    min_updates: int | None = None
    deadline_s: float | None = None
    barrier_s: float | None = None
    rescue: Rescue = "go-on"
    codec: str | None = None
    task: str = ""
    updates_per_round: int | None = None
    rounds: int | None = None
    server: ServerOptimizer = field(default_factory=ServerOptimizer)
    seed: int = 0
