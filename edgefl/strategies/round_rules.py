"""What a run file says about every round, whatever the strategy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from edgefl.strategies.server_optimizers import ServerOptimizer

Rescue = Literal["go-on", "ask-again", "none"]
"""Close the round with those that answered (k of n), ask those that did not once more, or do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRules:
    """What a run file says about every round.

    Attributes:
        min_devices: the first round opens when so many devices are idle; later ones go on with those that are left.
        max_devices: at most so many are asked, None for all; who it is changes from round to round.
        fraction: likewise, as a fraction of those that are idle, rounded up.
        min_updates: k of n: the round closes when k updates are in, or with fewer when nobody is left to ask; None
            waits for all that are alive.
        deadline_s: an assignment that takes longer is given up; None for never.
        barrier_s: so long a round waits for those that were asked; then `rescue` is tried once, and after the same
            time again the run ends and says whom it waited for. None waits without end.
        rescue: what is tried; see `Rescue`.
        codec: spec of the codec for updates.
        task: the task's name, under which devices list the blocks of their shards.
        updates_per_round: so many updates are a round of an asynchronous run, by which learning rates change; None
            for the number of devices that are asked first.
        rounds: after so many the run ends; None where something else decides.
        server: turns the mean displacement into the model's step.
        seed: decides who is asked where not all are.
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
