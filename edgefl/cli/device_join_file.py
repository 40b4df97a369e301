"""`edgefl device join --file`: unattended join at a device's first boot."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgefl.core.errors import ConfigError, EdgeflError, UsageError

if TYPE_CHECKING:
    from edgefl.core.types import Json
    from edgefl.device.enrolment.enroll import EnrolmentOptions
    from edgefl.device.enrolment.join_file import JoinFile
    from edgefl.device.state_dir import DeviceStateDir
    from edgefl.tasks.sharding.shard_files import ShardReport

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinDependencies:
    """Dependencies injected by `join`: shard reader and capability report."""

    load_shard_report: Callable[[str, str], ShardReport]
    collect_facts: Callable[[Mapping[str, str], str], Json]
    accelerator: str
    threads: int | None
    peer_port: int


def read_join_file(path: str) -> JoinFile:
    """Returns the join file at `path`; `-` is the standard input.

    Raises:
        ConfigError: it cannot be read, or is no join file; the message never shows the token.
    """
    from edgefl.device.enrolment.join_file import JoinFile  # noqa: PLC0415 fast start

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


def join_from_file(
    path: str, dependencies: JoinDependencies, *, root: Path, should_retry: bool, should_delete: bool
) -> DeviceStateDir:
    """Returns the device state after the join requested by the file.

    Args:
        path: the join file; `-` is the standard input.
        dependencies: of the device.
        root: the state directory.
        should_retry: retry until it succeeds.
        should_delete: overwrite and remove the file after the join.

    Raises:
        ConfigError: it is no join file. Errors of `join` pass.
    """
    from edgefl.core.protocol import JoinToken  # noqa: PLC0415 likewise
    from edgefl.device.enrolment.enroll import enroll  # noqa: PLC0415 fast start
    from edgefl.device.enrolment.retry import RetryPolicy, delete_secret_file, enroll_with_retry, wait_for_clock  # noqa: PLC0415 likewise

    if should_delete and path == "-":
        raise UsageError("--delete-file needs a file; the standard input cannot be removed")
    file = read_join_file(path)
    token = JoinToken.parse(file.token)
    if should_retry:
        wait_for_clock(RetryPolicy())
    options = _make_join_request(file, dependencies)
    token = replace(token, addresses=tuple(dict.fromkeys([*file.addresses, *token.addresses])))
    state = (enroll_with_retry if should_retry else enroll)(token, options, root=root)
    if should_delete:
        delete_secret_file(Path(path))
    return state


def _make_join_request(file: JoinFile, dependencies: JoinDependencies) -> EnrolmentOptions:
    from edgefl.device.enrolment.enroll import EnrolmentOptions, get_host_slug  # noqa: PLC0415 fast start

    faults: dict[str, str] = {}
    reports = {
        task: report
        for task, path in file.shards.items()
        if (report := _load_shard_report(dependencies, task, path, faults))
    }
    return EnrolmentOptions(
        name=file.name or get_host_slug(),
        role=file.role,
        # All of them: an unreadable shard is used as soon as it is readable, and the doctor reports it until then.
        shards=file.shards,
        examples={task: report.num_examples for task, report in reports.items()},
        accelerator=dependencies.accelerator,
        threads=dependencies.threads,
        peer_port=dependencies.peer_port,
        facts={**dependencies.collect_facts(file.shards, file.role), **({"shard_errors": faults} if faults else {})},
    )


def _load_shard_report(
    dependencies: JoinDependencies, task: str, path: str, shard_errors: dict[str, str]
) -> ShardReport | None:
    """Returns the shard's report or None: at an unattended join, data may come later."""
    try:
        return dependencies.load_shard_report(task, path)
    except (EdgeflError, OSError) as error:
        log.warning("joining without data for %s: %s; it is used as soon as it can be read", task, error)
        shard_errors[task] = str(error)
        return None
