"""Parsing and validation of an instruction's header."""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.core.errors import NetworkError
from edgefl.core.types import Json, TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedInstruction:
    """Validated header of an assignment or evaluation; `seed_key` seeds its random streams."""

    run: str
    assignment_id: str
    version: int
    seed: int
    plan: TrainConfig
    codec_spec: str
    block: int | None
    seed_key: tuple[int | str, ...]
    header: Json


def parse_instruction(device_id: str, header: Json) -> ParsedInstruction:
    """Returns the instruction in a header.

    Raises:
        NetworkError: it has another version.
        KeyError, TypeError, ValueError: an entry is missing or malformed.
    """
    if header.get("v") != 1:
        raise NetworkError(f"instruction of version {header.get('v')!r}, this agent reads 1: update it")
    block = None if header.get("block") is None else _parse_int(header["block"])
    seed, version = _parse_int(header["seed"]), _parse_int(header["version"])
    # Without the run's id, which is new for every submission: the same seed gives the same run. All devices with a
    # block use the same random numbers for it.
    source: tuple[int | str, ...] = (device_id,) if block is None else ("block", block)
    return ParsedInstruction(
        run=str(header["run"]),
        assignment_id=str(header["assignment"]),
        version=version,
        seed=seed,
        plan=TrainConfig.from_json(header.get("plan", {})),
        codec_spec=str(header.get("codec", "dense")),
        block=block,
        seed_key=(seed, version, *source),
        header=header,
    )


def _parse_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"must be a whole number, got {value!r:.40}")
    return value
