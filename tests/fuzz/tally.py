"""What readers were fed, over many runs: a file that each run of `make fuzz` goes on from, and adds to.

It counts for one tree, which is what the package and its readers' seeds are, and begins anew with another: what a
million inputs did not find in other code says nothing of this one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

FORMAT = 2
PACKAGE = Path(__file__).parents[2] / "edgefl"
HARNESS = Path(__file__).parent


class TallyError(Exception):
    """The file is not one that a run can go on from; the text says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a reader did that it must not do, with the file of the first input that made it."""

    what: str
    where: str
    input: str
    count: int = 1

    @property
    def key(self) -> tuple[str, str]:
        return self.what.partition(":")[0], self.where


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What became of one reader, in one run or in many.

    Attributes:
        cases: inputs that it was fed; `read` of them were not refused.
        seconds: for how long it was fed.
        measured_bytes: the most that one measured input took.
        resident_bytes: the most that its process had at once.
    """

    cases: int = 0
    read: int = 0
    seconds: float = 0.0
    measured_bytes: int = 0
    resident_bytes: int = 0
    findings: tuple[Found, ...] = ()

    def plus(self, more: Told) -> Told:
        """Returns both together; what was found at the same place is one finding, with its first input."""
        counts: dict[tuple[str, str], Found] = {}
        for found in (*self.findings, *more.findings):
            first = counts.get(found.key)
            count = found.count + (first.count if first else 0)
            counts[found.key] = Found(**{**asdict(first or found), "count": count})
        return Told(
            cases=self.cases + more.cases,
            read=self.read + more.read,
            seconds=self.seconds + more.seconds,
            measured_bytes=max(self.measured_bytes, more.measured_bytes),
            resident_bytes=max(self.resident_bytes, more.resident_bytes),
            findings=tuple(counts.values()),
        )

    @classmethod
    def load(cls, value: Mapping[str, Any]) -> Self:
        """Returns what `asdict` made a mapping of; raises TypeError where it is none of those."""
        findings = tuple(Found(**found) for found in value.get("findings", ()))
        made = cls(**{**value, "findings": findings})
        for item in fields(cls):
            told, due = getattr(made, item.name), type(item.default)
            if not isinstance(told, due if due is not float else int | float):
                raise TypeError(f"{item.name} is {told!r}")
        return made


class Tally:
    """The sums of all runs on a file and a tree; nobody else can open it meanwhile.

    Raises:
        TallyError: the file is damaged, of another format, or in use by another run.
    """

    def __init__(self, path: Path, tree: str) -> None:
        self._path, self._tree = path, tree
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            lock = stack.enter_context(path.with_name(f"{path.name}.lock").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise TallyError(f"{path} is in use by another run: wait for its end, or name another file") from None
            self._before = _loaded(path, tree)
            self._open = stack.pop_all()
        self._now: dict[str, Told] = {}

    def close(self) -> None:
        self._open.close()

    def note(self, reader: str, told: Told) -> None:
        """Takes what this run has told of a reader until now; it takes the place of what it told before."""
        self._now[reader] = told

    def of(self, reader: str) -> Told:
        """Returns what became of a reader, in all runs together."""
        return self._before.get(reader, Told()).plus(self._now.get(reader, Told()))

    def write(self) -> None:
        """Writes the sums; whoever reads the file sees the old ones or the new."""
        readers = {name: asdict(self.of(name)) for name in {**self._before, **self._now}}
        part = self._path.with_name(f"{self._path.name}.part")
        part.write_text(json.dumps({"v": FORMAT, "tree": self._tree, "readers": readers}, indent=1) + "\n")
        part.replace(self._path)


def _loaded(path: Path, tree: str) -> dict[str, Told]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
        if value["v"] != FORMAT:
            raise TallyError(f"{path} has format {value['v']!r}, this program reads {FORMAT}: name another file")
        return {name: Told.load(told) for name, told in value["readers"].items() if value["tree"] == tree}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TallyError(f"{path} is no tally ({error!r}): move it away, or name another file") from None


def tree_of(package: Path = PACKAGE, harness: Path = HARNESS) -> str:
    """Returns what names the code that is fed and how: a hash over the package's files, and those of its readers."""
    readers = [*harness.glob("*_readers.py"), harness / "reader.py", harness / "readers.py"]
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    files += [path for path in readers if path.is_file() and not path.name.startswith(("feed_", "test_"))]
    together = hashlib.sha256()
    for path in sorted(files):
        inside = path.relative_to(package if path.is_relative_to(package) else harness)
        together.update(hashlib.sha256(f"{inside}\0".encode() + path.read_bytes()).digest())
    return together.hexdigest()[:12]
