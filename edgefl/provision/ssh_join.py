"""Joins boards that run already, over ssh: looks, copies the payload, installs, looks at the data, joins, waits.

Every step may be done again: what is there stays. The token goes last, to a board that can use it, through the
standard input of a command and never in its words.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from edgefl.device.joining.join_file import JoinFile
from edgefl.device.joining.shard_access import remedy
from edgefl.device.slots.layout import PROVISIONED
from edgefl.errors import ConfigError, DataError, EdgeflError, JoinError, NetworkError
from edgefl.provision import sources
from edgefl.provision.drop_ins import shard_drop_ins
from edgefl.provision.hosts_file import BoardHost
from edgefl.provision.payload import payload
from edgefl.provision.ssh import Connection, Told
from edgefl.provision.ssh_facts import BoardFacts
from edgefl.untrusted import parse_json

log = logging.getLogger(__name__)

PYTHON = "/opt/edgefl/current/bin/python"
_UNPACK = 'umask 077; d=$(mktemp -d /var/tmp/edgefl.XXXXXXXX) && echo "edgefl: folder $d" && tar -xf - -C "$d"'
_TAKE_JOIN_FILE = """set -e
mkdir -p /etc/edgefl
umask 077
cat >/etc/edgefl/join.json.new
mv /etc/edgefl/join.json.new /etc/edgefl/join.json
systemctl reset-failed edgefl-join.service 2>/dev/null || true
systemctl start --no-block edgefl-join.service
"""
_FOLDER = re.compile(r"/var/tmp/edgefl\.[A-Za-z0-9]+\Z")  # noqa: S108 on the board, made by mktemp


class Outcome(StrEnum):
    """What became of a board; `WOULD_` are answers of a dry run."""

    JOINED = "joined"
    ALREADY = "already joined"
    UPDATED = "updated"
    WOULD_JOIN = "would join"
    WOULD_UPDATE = "would update"
    FAILED = "failed"


class Step(StrEnum):
    """How far a board came."""

    REACH = "reach"
    COPY = "copy"
    INSTALL = "install"
    DATA = "data"
    JOIN = "join"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardResult:
    """One line of the table; `text` says what to do, or what else is worth knowing."""

    host: BoardHost
    outcome: Outcome
    step: Step
    seconds: float
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What all boards are visited with.

    Args:
        version: of edgefl, which they shall have.
        ca_fingerprint: the fleet, by its CA.
        token_for: makes a token for a board, once it is needed.
        extra: more files of the payload: wheels, a lock, signers.
        is_offline: `extra` has all wheels.
        become: the program that makes one root; empty for none.
        wait_s: how long a board may take to join.
        is_dry: only look.
        clock: monotonic seconds.
        now: unix seconds.
        options: more words for ssh.
        on_step: told of every step that begins.
    """

    version: str
    ca_fingerprint: str
    token_for: Callable[[BoardHost], str] = field(repr=False)
    clock: Callable[[], float]
    now: Callable[[], float]
    extra: Mapping[str, bytes | Path] = field(default_factory=dict)
    is_offline: bool = False
    become: str = "sudo"
    wait_s: int = 300
    is_dry: bool = False
    options: Sequence[str] = ()
    on_step: Callable[[BoardHost, Step], None] = lambda _host, _step: None


def visit_all(hosts: Sequence[BoardHost], visit: Visit, *, jobs: int) -> list[BoardResult]:
    """Returns what became of each board, in their order; so many are visited at a time, and none stops another."""
    with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="ssh") as pool:
        return list(pool.map(lambda host: visit_one(host, visit), hosts))


def visit_one(host: BoardHost, visit: Visit) -> BoardResult:
    """Returns what became of one board; never raises for what one board can do wrong."""
    began_s = visit.clock()
    board = _Board(host, visit)
    try:
        with Connection(host, visit.options) as connection:
            outcome, text = board.join(connection)
    except EdgeflError as error:
        outcome, text = Outcome.FAILED, str(error)
    except Exception as error:  # the boundary of one board: the others go on
        log.exception("%s", host.label)
        outcome, text = Outcome.FAILED, f"{type(error).__name__}: {error}; the log above says where"
    return BoardResult(
        host=host, outcome=outcome, step=board.step, seconds=visit.clock() - began_s, text=" ".join(text.split())
    )


class _Board:
    """One board under way; `step` is the one that it came to."""

    def __init__(self, host: BoardHost, visit: Visit) -> None:
        self._host, self._visit = host, visit
        self._become: tuple[str, ...] = ()
        self._packs_left_out = ""
        self.step = Step.REACH

    def join(self, connection: Connection) -> tuple[Outcome, str]:
        """Returns what became of it, and what is worth knowing."""
        visit, host = self._visit, self._host
        self._begin(Step.REACH)
        told = connection.run(
            "sh", "-s", "--", visit.become, script=sources.path("board/probe.sh").read_bytes(), within_s=120
        )
        facts = BoardFacts.of(told)
        is_member = self._is_member(facts)
        if is_member and facts.version == visit.version:
            if not facts.is_active:
                raise JoinError("it has joined, but its device does not run: sudo journalctl -u edgefl-device -n 20")
            return Outcome.ALREADY, self._notes(facts)
        facts.check(now=visit.now(), is_offline=visit.is_offline, target=host.target)
        if visit.is_dry:
            return (Outcome.WOULD_UPDATE if is_member else Outcome.WOULD_JOIN), self._notes(facts)
        self._become = facts.become or ()
        self._install(connection, restarts=is_member)
        if not is_member:
            self._check_data(connection)
        self._begin(Step.JOIN)
        if not is_member:
            self._hand_over(connection)
        self._wait(connection)
        return (Outcome.UPDATED if is_member else Outcome.JOINED), self._notes(facts)

    def _begin(self, step: Step) -> None:
        self.step = step
        self._visit.on_step(self._host, step)

    def _is_member(self, facts: BoardFacts) -> bool:
        device = facts.device
        if not device:
            return False
        fleet, known = device.get("fleet"), device.get("device_id")
        if device.get("ca_fingerprint") != self._visit.ca_fingerprint:
            raise JoinError(
                f"it belongs to another fleet, {fleet}, as {known}; to take it out of there: "
                "sudo systemctl stop edgefl-device && sudo rm -r /var/lib/edgefl"
            )
        if known != self._host.name:
            raise JoinError(f"it is in this fleet already, as {known}; correct its name in the hosts file")
        return True

    def _install(self, connection: Connection, *, restarts: bool) -> None:
        self._begin(Step.COPY)
        files = payload("", {**self._visit.extra, **shard_drop_ins(self._host.shards)})
        del files["join.json"]
        told = connection.send(files, "sh", "-c", _UNPACK)
        folder = told.values.get("folder", [""])[-1]
        try:
            if told.status or not _FOLDER.match(folder):
                raise NetworkError(f"the payload cannot be copied: {told.last_line()}")
            self._begin(Step.INSTALL)
            later = [] if restarts else ["--no-start"]
            told = self._as_root(connection, "sh", f"{folder}/install.sh", folder, *later)
            if told.status:
                raise ConfigError(told.last_line().removeprefix("edgefl-install: failed: "))
            self._packs_left_out = told.values.get("packs", [""])[-1]
        finally:
            if _FOLDER.match(folder):
                connection.run("rm", "-rf", folder, within_s=120)

    def _check_data(self, connection: Connection) -> None:
        self._begin(Step.DATA)
        paths = list(self._host.shards.values())
        if not paths:
            return
        told = self._as_root(connection, PYTHON, "-I", "-m", "edgefl.device.joining.shard_access", "edgefl", *paths)
        try:
            unreadable = dict(parse_json(told.output.splitlines()[-1])["unreadable"])
        except (ValueError, LookupError, TypeError):
            raise DataError(f"its data cannot be looked at: {told.last_line()}") from None
        for path, reason in unreadable.items():
            raise DataError(
                f"{path}: {reason}; nothing was changed. If it is there, let the device read it: "
                f"{remedy(path, 'edgefl')}"
            )

    def _hand_over(self, connection: Connection) -> None:
        host = self._host
        file = JoinFile(token=self._visit.token_for(host), name=host.name, role=host.role, shards=host.shards)
        told = self._as_root(connection, "sh", "-c", _TAKE_JOIN_FILE, script=file.text().encode())
        if told.status:
            raise JoinError(f"the join cannot be started: {told.last_line()}")

    def _wait(self, connection: Connection) -> None:
        wait_s = self._visit.wait_s
        script = sources.path("board/await.sh").read_bytes()
        told = self._as_root(connection, "sh", "-s", "--", str(wait_s), script=script, within_s=3 * wait_s + 60)
        if told.status:
            reason = told.values.get("reason", [""])[-1] or f"no word after {wait_s} s"
            raise JoinError(f"{reason}; more: sudo journalctl -u edgefl-join -u edgefl-device")

    def _as_root(self, connection: Connection, *words: str, script: bytes = b"", within_s: float = 3600.0) -> Told:
        return connection.run(*self._become, *words, script=script, within_s=within_s)

    def _notes(self, facts: BoardFacts) -> str:
        notes = [facts.skew_text(self._visit.now())]
        if self._packs_left_out:
            notes.append(f"without its task packs {self._packs_left_out}; bring them with edgefl devices install")
        known = facts.device.get("shards")
        if isinstance(known, dict) and known != dict(self._host.shards):
            told = ", ".join(f"{task}={path}" for task, path in known.items()) or "none"
            notes.append(f"its data is {told}; another with: {PROVISIONED.format('device shard add TASK PATH')}")
        return "; ".join(note for note in notes if note)


class TokenDesk:
    """Gives each board a token of its own, or all the same one that was brought; threads come one after the other."""

    def __init__(self, make: Callable[[str], str]) -> None:
        self._make, self._lock = make, threading.Lock()

    def __call__(self, host: BoardHost) -> str:
        with self._lock:
            return self._make(host.role)
