"""Feeds every reader of bytes from outside with damaged ones, guided by what of its code is reached: `make fuzz`.

    feed_readers.py [--reader NAME ...] [--cases N] [--seconds S] [--workers N] [--engine blind|guided]
    feed_readers.py --reader NAME --input FILE      feeds one input again and lets its error through

Each reader has a process of its own, held to a cap of memory; an input that kills it, or never ends, is a finding as
well. Inputs of findings are kept in a folder that is named at the end. Exits with 1 when there was a finding.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import mmap
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

NUM_CASES = 1_000_000
DATA_CAP_BYTES = 1 << 30
"""What a process may take beyond what it had when its reader was made."""
RESIDENT_CAP_BYTES = 256 << 20
"""What may stay of it: more is a leak, or one input that took too much."""
HUNG_AFTER_S = 60.0
REPORT_EVERY_S = 2.0
MOST_CURRENT_BYTES = (1 << 20) + 4096
_CURRENT = struct.Struct("<QI")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What became of one reader."""

    reader: str
    cases: int
    read: int
    seconds: float
    measured_bytes: int
    resident_bytes: int
    findings: Sequence[tuple[str, str, str, int]]


def main() -> int:
    options = _options()
    if options.child:
        _be_child(options)
        return 0
    if options.input:
        _feed_again(options.reader[0], Path(options.input))
        return 0
    kept = Path(options.keep or tempfile.mkdtemp(prefix="edgefl-fuzz-"))
    kept.mkdir(parents=True, exist_ok=True)
    told = list(_run_all(options, kept))
    print(_table(told))  # noqa: T201 a program
    num_findings = sum(len(one.findings) for one in told)
    for one in told:
        for what, where, file, count in one.findings:
            print(f"{one.reader}: {count} times {what} at {where}; input {file}")  # noqa: T201 likewise
    print(f"{sum(one.cases for one in told)} cases, {num_findings} findings, their inputs in {kept}")  # noqa: T201
    return 1 if num_findings else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reader", nargs="*", default=[], help="names of the registry; all by default")
    parser.add_argument("--cases", type=int, default=NUM_CASES, help="for each reader (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most, for each reader")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--engine", choices=("guided", "blind"), default="guided" if _has_atheris() else "blind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", help="folder for the inputs of findings")
    parser.add_argument("--input")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def _has_atheris() -> bool:
    import importlib.util  # noqa: PLC0415 beside its use

    return importlib.util.find_spec("atheris") is not None


# The parent: one process a reader, `--workers` at a time.


def _run_all(options: argparse.Namespace, kept: Path) -> Iterator[Told]:
    from fuzz.readers import READERS  # noqa: PLC0415 not before it can be instrumented, in the child

    names = options.reader or list(READERS)
    if unknown := set(names) - set(READERS):
        sys.exit(f"no reader {', '.join(sorted(unknown))}; there are: {', '.join(READERS)}")
    waiting, running = list(names), list[_Child]()
    with tempfile.TemporaryDirectory(prefix="edgefl-fuzz-") as folder:
        while waiting or running:
            while waiting and len(running) < options.workers:
                running.append(_Child(waiting.pop(0), options, Path(folder), kept))
            time.sleep(0.2)
            for child in [child for child in running if child.has_ended()]:
                running.remove(child)
                told = child.told()
                line = f"{told.reader}: {told.cases} cases in {told.seconds:.0f} s, {len(told.findings)} findings"
                print(line, file=sys.stderr, flush=True)  # noqa: T201 likewise
                yield told


class _Child:
    """The process of one reader, and what it tells in files: its report, and the input that it is at."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path, kept: Path) -> None:
        self._name, self._kept = name, kept
        self.report, self.current = folder / f"{name}.json", folder / f"{name}.current"
        self.current.write_bytes(bytes(_CURRENT.size + MOST_CURRENT_BYTES))
        self._log = (kept / f"{name}.log").open("wb")
        self._process = subprocess.Popen(
            [
                sys.executable, __file__, "--child", str(folder), "--reader", name, "--cases", str(options.cases),
                "--seconds", str(options.seconds), "--engine", options.engine, "--seed", str(options.seed), "--keep",
                str(kept),
            ],
            stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self._started_s = self._moved_s = time.monotonic()
        self._seen, self._hung = -1, False

    def has_ended(self) -> bool:
        if self._process.poll() is not None:
            return True
        at = self._at()[0]
        if at != self._seen:
            self._seen, self._moved_s = at, time.monotonic()
        # Making a reader takes a while; only inputs are held to the time.
        self._hung = at > 0 and time.monotonic() - self._moved_s > HUNG_AFTER_S
        if self._hung:
            self._process.kill()
        return False

    def told(self) -> Told:
        self._log.close()
        value: dict[str, Any] = json.loads(self.report.read_text()) if self.report.exists() else {}
        findings = [tuple(one) for one in value.get("findings", [])]
        if self._process.returncode or not value.get("is_done"):
            cases, content = self._at()
            why = "an input never ended" if self._hung else f"the process ended with {self._process.returncode}"
            file = _keep(self._kept, self._name, content)
            findings.append((why, f"see {self._kept / self._name}.log", file, 1))
            value |= {"cases": cases, "seconds": time.monotonic() - self._started_s}
        return Told(
            reader=self._name, cases=value.get("cases", 0), read=value.get("read", 0), seconds=value.get("seconds",
            0.0),
            measured_bytes=value.get("measured_bytes", 0), resident_bytes=value.get("resident_bytes", 0),
            findings=findings,
        )  # fmt: skip

    def _at(self) -> tuple[int, bytes]:
        raw = self.current.read_bytes()
        number, length = _CURRENT.unpack_from(raw)
        return number, raw[_CURRENT.size : _CURRENT.size + length]


def _table(told: Sequence[Told]) -> str:
    rows = [("reader", "cases", "s", "cases/s", "read", "findings", "KB a case", "MB resident")]
    rows += [
        (
            one.reader, str(one.cases), f"{one.seconds:.0f}", f"{one.cases / max(one.seconds, 1e-9):.0f}",
            f"{one.read / max(one.cases, 1):.0%}", str(len(one.findings)), f"{one.measured_bytes / 1024:.0f}",
            f"{one.resident_bytes / 2**20:.0f}",
        )
        for one in told
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(widths[0]) if not at else cell.rjust(widths[at]) for at, cell in enumerate(row))
        for row in rows
    )


# The child: one reader.


def _be_child(options: argparse.Namespace) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    name, folder = options.reader[0], Path(options.child)
    if options.engine == "guided":
        import atheris  # noqa: PLC0415 for Linux on x86-64 alone

        with atheris.instrument_imports(include=["edgefl"]):
            from fuzz.readers import READERS  # noqa: PLC0415 imported while it is instrumented
    else:
        from fuzz.readers import READERS  # noqa: PLC0415 as above
    from fuzz.reader import alarmed, scratch  # noqa: PLC0415 as above

    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(dir=scratch()) as own, alarmed():
        reader = READERS[name].make(Path(own))
        warm_up(reader)
        warnings.simplefilter("error", RuntimeWarning)
        _cap_memory()
        with (folder / f"{name}.current").open("r+b") as file, mmap.mmap(file.fileno(), 0) as current:
            watched = _Watched(reader, options, folder / f"{name}.json", current)
            (_guided if options.engine == "guided" else _blind)(reader, watched, options)


def warm_up(reader: Any) -> None:
    """Feeds what is valid: what is imported and cached at the first time costs no later input anything."""
    for seed in reader.seeds:
        with contextlib.suppress(*reader.refuses):
            reader.feed(seed.close(seed.content))


def _cap_memory() -> None:
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + DATA_CAP_BYTES, virtual + DATA_CAP_BYTES))


class _Watched:
    """Feeds inputs, shows the parent which one it is at, and reports; ends the process when it is enough."""

    def __init__(self, reader: Any, options: argparse.Namespace, report: Path, current: mmap.mmap) -> None:
        from fuzz.reader import Trial  # noqa: PLC0415 as above

        self._trial, self._options, self._report, self._current = Trial(reader), options, report, current
        self._started_s = self._reported_s = time.monotonic()
        self._resident_bytes = _resident_bytes()
        self._kept: dict[tuple[str, str], str] = {}

    def run(self, content: bytes) -> None:
        head = _CURRENT.pack(self._trial.num_cases + 1, min(len(content), MOST_CURRENT_BYTES))
        self._current[: len(head)] = head
        self._current[len(head) : len(head) + min(len(content), MOST_CURRENT_BYTES)] = content[:MOST_CURRENT_BYTES]
        self._trial.run(content)
        now_s = time.monotonic()
        if self.is_enough(now_s) or now_s - self._reported_s > REPORT_EVERY_S:
            self._tell(now_s)

    def is_enough(self, now_s: float) -> bool:
        return self._trial.num_cases >= self._options.cases or now_s - self._started_s > self._options.seconds

    def _tell(self, now_s: float) -> None:
        self._reported_s = now_s
        trial, grown = self._trial, _resident_bytes() - self._resident_bytes
        findings = []
        for key, found in trial.findings.items():
            file = self._kept.setdefault(key, "") or _keep(
                Path(self._options.keep), self._options.reader[0], found.content
            )
            self._kept[key] = file
            findings.append((found.what, found.where, file, found.count))
        if grown > RESIDENT_CAP_BYTES:
            findings.append((f"{grown >> 20} MB more are resident than at the beginning", "some input", "", 1))
        is_done = self.is_enough(now_s)
        told = {
            "cases": trial.num_cases, "read": trial.num_read, "seconds": now_s - self._started_s,
            "findings": findings,
            "measured_bytes": trial.most_measured_bytes, "resident_bytes": _peak_bytes(), "is_done": is_done,
        }  # fmt: skip
        part = self._report.with_suffix(".part")
        part.write_text(json.dumps(told))
        part.replace(self._report)
        if is_done:
            os._exit(0)  # libFuzzer would go on, and threads of a coordinator hold nobody up


def _blind(reader: Any, watched: _Watched, options: argparse.Namespace) -> None:
    from fuzz.mutation import mutated  # noqa: PLC0415 as above

    luck = Random(options.seed)
    while True:
        seed = luck.choice(reader.seeds)
        with _closing(seed) as close:
            content = close(mutated(seed, luck, reader.words))
        watched.run(content)


@contextlib.contextmanager
def _closing(seed: Any) -> Iterator[Callable[[bytes], bytes]]:
    """Gives the seed's `close`, which is our own code: what goes wrong in it must not pass for a finding."""
    try:
        yield seed.close
    except Exception as error:
        raise AssertionError(f"a seed cannot be closed: {error!r}") from error


def _guided(reader: Any, watched: _Watched, options: argparse.Namespace) -> None:
    """An input of libFuzzer is the number of a seed (two bytes) and what is in the place of its content."""
    import atheris  # noqa: PLC0415 for Linux on x86-64 alone
    from fuzz.mutation import changed  # noqa: PLC0415 as above

    def seed_of(data: bytes) -> Any:
        return reader.seeds[int.from_bytes(data[:2], "little") % len(reader.seeds)]

    def feed(data: bytes) -> None:
        seed = seed_of(data)
        with _closing(seed) as close:
            content = close(data[2:])
        watched.run(content)

    def mutate(data: bytes, most: int, seed_number: int) -> bytes:
        luck = Random(seed_number)
        if len(data) < 2 or luck.random() < 0.1:
            number = luck.randrange(len(reader.seeds))
            data = number.to_bytes(2, "little") + reader.seeds[number].content
        if luck.random() < 0.4:
            return bytes(data[:2] + atheris.Mutate(data[2:], max(1, most - 2)))[:most]
        return (data[:2] + changed(data[2:], seed_of(data).form, luck, reader.words))[:most]

    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(reader.seeds):
            Path(corpus, f"{number:05d}").write_bytes(number.to_bytes(2, "little") + seed.content)
        longest = max(4096, 2 * max(len(seed.content) for seed in reader.seeds), 64 * 1024)
        arguments = [
            f"-max_len={longest}", "-len_control=0", f"-seed={options.seed}", "-runs=-1", "-timeout=0",
            "-rss_limit_mb=0",
            "-print_final_stats=1",
        ]  # fmt: skip
        atheris.Setup([sys.argv[0], *arguments, corpus], feed, custom_mutator=mutate)
        atheris.Fuzz()


def _keep(folder: Path, name: str, content: bytes) -> str:
    import hashlib  # noqa: PLC0415 beside its use

    path = folder / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"
    path.write_bytes(content)
    return str(path)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _feed_again(name: str, path: Path) -> None:
    from fuzz.reader import alarmed, scratch  # noqa: PLC0415 as above
    from fuzz.readers import READERS  # noqa: PLC0415 as above

    with tempfile.TemporaryDirectory(dir=scratch()) as own, alarmed():
        READERS[name].make(Path(own)).feed(path.read_bytes())


if __name__ == "__main__":
    sys.exit(main())
