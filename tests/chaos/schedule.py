"""Seeded schedules of faults: the same seed gives the same script, for real processes and for the simulator."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import fields

from edgefl.simulation.faults import Fault, FaultKind
from edgefl.simulation.local_fleet import COORDINATOR

BROKER = "broker"
KILLS: Mapping[tuple[str, FaultKind], float] = {
    (COORDINATOR, "kill"): 2.0,
    (BROKER, "kill"): 1.0,
    ("device", "kill"): 3.0,
}
"""Who is killed how often: of six, two coordinators, one broker, three devices."""
HARMLESS: Sequence[tuple[str, FaultKind]] = (
    (COORDINATOR, "kill"),
    (COORDINATOR, "freeze"),
    (COORDINATOR, "torn-tail"),
    (COORDINATOR, "damage"),
    (COORDINATOR, "full-disk"),
    (COORDINATOR, "clock"),
    (COORDINATOR, "cut"),
    (BROKER, "kill"),
    (BROKER, "freeze"),
    ("device", "freeze"),
    ("device", "loss"),
    ("device", "delay"),
    ("device", "rate"),
    ("device", "clock"),
)
"""What costs no device its place in a round, as long as it is short."""
GRAVE: Sequence[tuple[str, FaultKind]] = (
    ("device", "kill"),
    ("device", "kill"),
    ("device", "cut"),
    (COORDINATOR, "kill"),
    (COORDINATOR, "torn-tail"),
    (COORDINATOR, "damage"),
    (BROKER, "kill"),
    ("device", "freeze"),
)
"""What may cost a device its place, and what most shakes a run that applies each update as it comes."""
EVERYTHING: Sequence[tuple[str, FaultKind]] = (*HARMLESS, ("device", "kill"), ("device", "cut"))
AMOUNTS: Mapping[FaultKind, Sequence[float]] = {
    "loss": (0.05,),
    "delay": (0.3,),
    "rate": (8_000.0,),
    "clock": (3_600.0, -3_600.0, 86_400.0, -86_400.0),
}
FOR_S: Mapping[FaultKind, tuple[float, float]] = {
    "kill": (0.2, 1.0),
    "torn-tail": (0.2, 1.0),
    "damage": (0.2, 1.0),
    "freeze": (1.0, 4.0),
    "cut": (1.0, 4.0),
    "full-disk": (2.0, 4.0),
    "loss": (3.0, 6.0),
    "delay": (3.0, 6.0),
    "rate": (4.0, 6.0),
    "clock": (2.0, 4.0),
}
GAP_S = (0.1, 2.0)


def each_once(seed: int, kinds: Sequence[tuple[str, FaultKind]], devices: Sequence[str]) -> tuple[Fault, ...]:
    """Returns a script with one fault of every kind, in a random order."""
    rng = random.Random(seed)
    return _at_random_times(rng, rng.sample(kinds, len(kinds)), devices)


def random_kills(seed: int, number: int, devices: Sequence[str]) -> tuple[Fault, ...]:
    """Returns a script of so many kills, each of somebody."""
    rng = random.Random(seed)
    return _at_random_times(rng, rng.choices(list(KILLS), list(KILLS.values()), k=number), devices)


def _at_random_times(
    rng: random.Random, chosen: Sequence[tuple[str, FaultKind]], devices: Sequence[str]
) -> tuple[Fault, ...]:
    faults, at_s = [], 0.0
    for who, kind in chosen:
        at_s += rng.uniform(*GAP_S)
        for_s = rng.uniform(*FOR_S[kind])
        faults.append(
            Fault(
                device=rng.choice(devices) if who == "device" else who,
                at_s=round(at_s, 3),
                kind=kind,
                for_s=round(for_s, 3),
                amount=rng.choice(AMOUNTS[kind]) if kind in AMOUNTS else None,
            )
        )
        at_s += for_s
    return tuple(faults)


def render_fault_script(faults: Sequence[Fault]) -> str:
    """Returns the text of a fault script, which `load_faults` reads."""
    return "\n".join(
        "[[fault]]\n"
        # JSON strings and numbers are TOML's too.
        + "".join(
            f"{item.name} = {json.dumps(value)}\n"
            for item in fields(fault)
            if (value := getattr(fault, item.name)) is not None
        )
        for fault in faults
    )
