"""`edgefl device join --file`: what a board does at its first boot, with nobody beside it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgefl.errors import ConfigError, EdgeflError, UsageError

if TYPE_CHECKING:
    from edgefl.device.joining.enrolment import JoinWishes
    from edgefl.device.joining.join_file import JoinFile
    from edgefl.device.state import DeviceState
    from edgefl.tasks.shards import ShardReport
    from edgefl.types import Json

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardSide:
    """What `join` knows how to do and this module needs: read a shard, say what the board can do."""

    report: Callable[[str, str], ShardReport]
    facts: Callable[[Mapping[str, str], str], Json]
    accelerator: str
    threads: int | None
    peer_port: int


def read_join_file(path: str) -> JoinFile:
    """Returns the join file at `path`; `-` is the standard input.

    Raises:
        ConfigError: it cannot be read, or is no join file; the message never shows the token.
    """
    from edgefl.device.joining.join_file import JoinFile  # noqa: PLC0415 fast start

    try:
        if path == "-":
            text = sys.stdin.read(MAX_FILE_BYTES + 1)
        else:
            with Path(path).open(encoding="utf-8") as file:
                text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"the join file {path} cannot be read: {reason}") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"the join file {path} is longer than {MAX_FILE_BYTES} characters; it is none")
    return JoinFile.parse(text)


def join_from_file(path: str, side: BoardSide, *, root: Path, is_patient: bool, deletes: bool) -> DeviceState:
    """Returns the state after the join that the file asks for.

    Args:
        path: the join file; `-` is the standard input.
        side: the board.
        root: the state directory.
        is_patient: go on until it works.
        deletes: overwrite and remove the file after the join.

    Raises:
        ConfigError: the file is none. Errors of `join` pass.
    """
    from edgefl.device.joining.enrolment import join  # noqa: PLC0415 fast start
    from edgefl.device.joining.patient_join import Patience, destroy, join_patiently, wait_for_time  # noqa: PLC0415 likewise
    from edgefl.protocol import JoinToken  # noqa: PLC0415 likewise

    if deletes and path == "-":
        raise UsageError("--delete-file needs a file; the standard input cannot be removed")
    file = read_join_file(path)
    token = JoinToken.parse(file.token)
    if is_patient:
        wait_for_time(Patience())
    wishes = _wishes(file, side)
    token = replace(token, addresses=tuple(dict.fromkeys([*file.addresses, *token.addresses])))
    state = (join_patiently if is_patient else join)(token, wishes, root=root)
    if deletes:
        destroy(Path(path))
    return state


def _wishes(file: JoinFile, side: BoardSide) -> JoinWishes:
    from edgefl.device.joining.enrolment import JoinWishes, host_slug  # noqa: PLC0415 fast start

    faults: dict[str, str] = {}
    reports = {task: report for task, place in file.shards.items() if (report := _found(side, task, place, faults))}
    return JoinWishes(
        name=file.name or host_slug(),
        role=file.role,
        # All of them: what cannot be read yet is used as soon as it can be, and the doctor names it until then.
        shards=file.shards,
        examples={task: report.num_examples for task, report in reports.items()},
        accelerator=side.accelerator,
        threads=side.threads,
        peer_port=side.peer_port,
        facts={**side.facts(file.shards, file.role), **({"shard_errors": faults} if faults else {})},
    )


def _found(side: BoardSide, task: str, place: str, faults: dict[str, str]) -> ShardReport | None:
    """Nobody is beside the board to mend a shard, and its data may come later: it joins without."""
    try:
        return side.report(task, place)
    except (EdgeflError, OSError) as error:
        log.warning("joining without data for %s: %s; it is used as soon as it can be read", task, error)
        faults[task] = str(error)
        return None
