"""What the coordinator asks of a device, as the header of an instruction says it: read once, and checked."""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.errors import NetworkError
from edgefl.types import Json, LocalPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the header of an assignment or an evaluation says, checked; `origin` seeds its random streams."""

    run: str
    assignment_id: str
    version: int
    seed: int
    plan: LocalPlan
    spec: str
    block: int | None
    origin: tuple[int | str, ...]
    header: Json


def job_of(device_id: str, header: Json) -> Job:
    """Returns the job in a header.

    Raises:
        NetworkError: it is of another version.
        KeyError, TypeError, ValueError: something is missing or makes no sense.
    """
    if header.get("v") != 1:
        raise NetworkError(f"instruction of version {header.get('v')!r}, this agent reads 1: update it")
    block = None if header.get("block") is None else _whole(header["block"])
    seed, version = _whole(header["seed"]), _whole(header["version"])
    # Without the run's id, which is new for every submission: the same seed gives the same run. All who hold a
    # block draw the same numbers for it.
    source: tuple[int | str, ...] = (device_id,) if block is None else ("block", block)
    return Job(
        run=str(header["run"]),
        assignment_id=str(header["assignment"]),
        version=version,
        seed=seed,
        plan=LocalPlan.from_json(header.get("plan", {})),
        spec=str(header.get("codec", "dense")),
        block=block,
        origin=(seed, version, *source),
        header=header,
    )


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"must be a whole number, got {value!r:.40}")
    return value
