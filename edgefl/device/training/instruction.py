"""Parsing and validation of an instruction's header."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgefl.core.errors import NetworkError
from edgefl.core.protocol import INSTRUCTION_VERSION
from edgefl.core.types import Json, Scalar, TrainConfig


class FullModelRequiredError(NetworkError):
    """Missing base model: this device lacks the model that the instruction builds on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedInstruction:
    """Validated header of an assignment or evaluation.

    Attributes:
        seed_key: seeds its random streams.
        used_assignments: the device's newest used assignments, reported by the coordinator.
        is_held: the coordinator believes that its update is still on this board.
        keeps_model: the next model may come as a delta to this one.
        root_examples: number of its examples that an evaluator trains on, 0 for none; it evaluates on the others.
        base_version: of the stored model that the body is a delta to; None for a full body.
        prefetched_version: of the model fetched ahead, which the body lacks.
        is_durable: its state is stored on disk at once.
        messages: index of the neighbours' messages in the body.
        header: as received, stored for a reboot.
    """

    run: str
    assignment_id: str
    version: int
    seed: int
    task: str
    options: Mapping[str, Scalar]
    test_fraction: float
    root_examples: int
    plan: TrainConfig
    codec_spec: str
    block: int | None
    seed_key: tuple[int | str, ...]
    used_assignments: tuple[str, ...]
    has_stored_reply: bool
    keeps_model: bool
    base_version: int | None
    prefetched_version: int | None
    is_durable: bool
    messages: list[Json]
    header: Json


def parse_instruction(device_id: str, header: Json) -> ParsedInstruction:
    """Returns the instruction in a header.

    Raises:
        NetworkError: it has another version.
        KeyError, TypeError, ValueError: an entry is missing or malformed.
    """
    check_instruction_version(header)
    block = _parse_optional_int(header.get("block"))
    seed, version = _parse_int(header["seed"]), _parse_int(header["version"])
    # Without the run's id, which is new for every submission: the same seed gives the same run. All devices with a
    # block use the same random numbers for it.
    source: tuple[int | str, ...] = (device_id,) if block is None else ("block", block)
    return ParsedInstruction(
        run=str(header["run"]),
        assignment_id=str(header["assignment"]),
        version=version,
        seed=seed,
        task=str(header["task"]),
        options=dict(header.get("options", {})),
        test_fraction=float(header["test_fraction"]),
        root_examples=max(0, _parse_int(header.get("root_examples", 0))),
        plan=TrainConfig.from_json(header.get("plan", {})),
        codec_spec=str(header.get("codec", "dense")),
        block=block,
        seed_key=(seed, version, *source),
        used_assignments=tuple(map(str, header.get("used_assignments", ()))),
        has_stored_reply=bool(header.get("has_stored_reply")),
        keeps_model=bool(header.get("keeps_model")),
        base_version=_parse_optional_int(header.get("base_version")),
        prefetched_version=_parse_optional_int(header.get("prefetched_version")),
        is_durable=header.get("residuals") == "durable",
        messages=header.get("messages", []),
        header=header,
    )


def check_instruction_version(header: Json) -> None:
    """Checks that a header has this agent's version.

    Raises:
        NetworkError: it has another.
    """
    if header.get("v") != INSTRUCTION_VERSION:
        raise NetworkError(
            f"instruction of version {header.get('v')!r}, this agent reads {INSTRUCTION_VERSION}: update it"
        )


def _parse_optional_int(value: object) -> int | None:
    return None if value is None else _parse_int(value)


def _parse_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"must be a whole number, got {value!r:.40}")
    return value
