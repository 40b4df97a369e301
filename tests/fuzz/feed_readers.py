"""Feeds every reader of bytes from outside with damaged ones, guided by what of its code is reached: `make fuzz`.

    feed_readers.py [--reader NAME ...] [--cases N] [--seconds S] [--workers N] [--engine blind|guided]
    feed_readers.py --tally FILE [...]              goes on from what earlier runs with this file have fed
    feed_readers.py --reader NAME --input FILE      feeds one input again and lets its error through

Each reader has a process of its own, held to a cap of memory; an input that kills it, or never ends, is a finding as
well. Inputs of findings are kept in a folder that is named at the end. Exits with 1 when there was a finding.

Ctrl-C and SIGTERM end it within seconds, with the table of what was done. With a tally that is not lost: the file has
the sum of all runs on this tree, and `--cases` is what that sum goes up to. Another run feeds other inputs, and
begins with those by which the runs before came further into the code. When the package changes, its count begins
anew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import mmap
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.tally import Found, Tally, TallyError, Told, tree_of

NUM_CASES = 1_000_000
DATA_CAP_BYTES = 1 << 30
"""What a process may take beyond what it had when its reader was made."""
RESIDENT_CAP_BYTES = 256 << 20
"""What may stay of it: more is a leak, or one input that took too much."""
HUNG_AFTER_S = 60.0
REPORT_EVERY_S = 2.0
TALLY_EVERY_S = 30.0
ENDS_WITHIN_S = 20.0
"""How long a process that is told to end may take: as long as an input may, which gives up by itself."""
MOST_CURRENT_BYTES = (1 << 20) + 4096
_CURRENT = struct.Struct("<QI")


def main() -> int:
    options = _options()
    if options.child:
        _end_with_what_goes_wrong(options)
        return 0
    if options.input:
        _feed_again(options.reader[0], Path(options.input))
        return 0
    from fuzz.readers import READERS  # noqa: PLC0415 not before it can be instrumented, in the child

    names = options.reader or list(READERS)
    if unknown := set(names) - set(READERS):
        sys.exit(f"no reader {', '.join(sorted(unknown))}; there are: {', '.join(READERS)}")
    try:
        return _feed_all(names, options)
    except TallyError as error:
        sys.exit(str(error))


def _feed_all(names: list[str], options: argparse.Namespace) -> int:
    """Feeds readers and prints what became of them; returns the exit status."""
    kept = Path(
        options.keep or (f"{options.tally}.inputs" if options.tally else tempfile.mkdtemp(prefix="edgefl-fuzz-"))
    )
    kept.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # Without a file of the user's, one that nobody sees: there is one way to count.
        file = options.tally or Path(stack.enter_context(tempfile.TemporaryDirectory()), "tally.json")
        tally = stack.enter_context(contextlib.closing(Tally(file, tree_of())))
        run = _Run(names, options, kept, tally)
        with run.stopped_by_signals():
            run.feed()
        told = {name: tally.of(name) for name in names}
    num_findings = _print_told(told, options)
    print(f"{num_findings} findings, their inputs in {kept}")  # noqa: T201 a program
    return 1 if num_findings else 0


def _print_told(told: Mapping[str, Told], options: argparse.Namespace) -> int:
    """Prints what became of the readers and returns how many findings there are."""
    print(_table(told))  # noqa: T201 likewise
    for name, one in told.items():
        for found in one.findings:
            print(f"{name}: {found.count} times {found.what} at {found.where}; input {found.input}")  # noqa: T201
    num_done = sum(one.cases >= options.cases for one in told.values())
    num_cases = sum(one.cases for one in told.values())
    print(f"{num_cases} cases; {num_done} of {len(told)} readers have {options.cases}")  # noqa: T201 likewise
    return sum(len(one.findings) for one in told.values())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reader", nargs="*", default=[], help="names of the registry; all by default")
    parser.add_argument("--cases", type=int, default=NUM_CASES, help="for each reader (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most, for each reader, in this run")
    parser.add_argument("--tally", type=Path, metavar="FILE", help="goes on from this file, and adds to it")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--engine", choices=("guided", "blind"), default="guided" if _has_atheris() else "blind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", help="folder for the inputs of findings (with a tally: FILE.inputs)")
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--input")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def _has_atheris() -> bool:
    import importlib.util  # noqa: PLC0415 beside its use

    return importlib.util.find_spec("atheris") is not None


# The parent: one process a reader, `--workers` at a time.


class _Run:
    """Feeds readers until each has its cases, its time is over, or somebody wants it to end."""

    def __init__(self, names: list[str], options: argparse.Namespace, kept: Path, tally: Tally) -> None:
        self._options, self._kept, self._tally = options, kept, tally
        self._waiting = [name for name in names if tally.of(name).cases < options.cases]
        self._running: list[_Child] = []
        self._is_stopping, self._written_s = False, time.monotonic()

    @contextlib.contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Makes the first SIGINT or SIGTERM end the run; the second one has its usual effect."""
        former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def stop(_number: int, _frame: object) -> None:
            self._is_stopping = True
            for number, handler in former.items():
                signal.signal(number, handler)

        for number in former:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def feed(self) -> None:
        from fuzz.reader import scratch  # noqa: PLC0415 not before it can be instrumented, in the child

        with tempfile.TemporaryDirectory(prefix="edgefl-fuzz-", dir=scratch()) as folder:
            try:
                while (self._waiting and not self._is_stopping) or self._running:
                    self._step(Path(folder))
                    time.sleep(0.2)
            finally:
                for child in self._running:
                    child.kill()
                self._tally.write()

    def _step(self, folder: Path) -> None:
        if self._is_stopping:
            for child in self._running:
                child.stop()
        while self._waiting and len(self._running) < self._options.workers and not self._is_stopping:
            self._running.append(self._started(self._waiting.pop(0), folder))
        for child in [child for child in self._running if child.has_ended()]:
            self._running.remove(child)
            told = child.told()
            self._tally.note(child.name, told)
            self._tally.write()
            line = f"{child.name}: {told.cases} cases in {told.seconds:.0f} s, {len(told.findings)} findings"
            print(line, file=sys.stderr, flush=True)  # noqa: T201 likewise
        if time.monotonic() - self._written_s > TALLY_EVERY_S:
            self._written_s = time.monotonic()
            for child in self._running:
                self._tally.note(child.name, child.progress())
            self._tally.write()

    def _started(self, name: str, folder: Path) -> _Child:
        options = argparse.Namespace(**vars(self._options))
        num_fed = self._tally.of(name).cases
        options.cases -= num_fed
        if num_fed:  # by other seeds
            options.seed = zlib.crc32(f"{options.seed} {num_fed}".encode())
        options.corpus = self._kept / "corpus" / name if options.tally else folder / f"{name}.corpus"
        return _Child(name, options, folder, self._kept)


class _Child:
    """The process of one reader, and what it tells in files: its report, and the input that it is at."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path, kept: Path) -> None:
        self.name, self._kept, self._own = name, kept, folder / f"{name}.own"
        self.report, self.current = folder / f"{name}.json", folder / f"{name}.current"
        self.current.write_bytes(bytes(_CURRENT.size + MOST_CURRENT_BYTES))
        self._own.mkdir()
        options.corpus.mkdir(parents=True, exist_ok=True)
        self._log = (kept / f"{name}.log").open("wb")
        self._process = subprocess.Popen(
            [
                sys.executable, __file__, "--child", str(folder), "--reader", name, "--cases", str(options.cases),
                "--seconds", str(options.seconds), "--engine", options.engine, "--seed", str(options.seed), "--keep",
                str(kept), "--corpus", str(options.corpus),
            ],
            stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self._started_s = self._looked_s = time.monotonic()
        self._seen, self._still_s, self._hung, self._stopped_s = -1, 0.0, False, float("inf")

    def stop(self) -> None:
        """Tells the process to end after the input that it is at."""
        if self._stopped_s == float("inf"):
            self._stopped_s = time.monotonic()
            self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def has_ended(self) -> bool:
        if self._process.poll() is not None:
            return True
        at, now_s = self._at()[0], time.monotonic()
        # A look that comes late is one of a run that stood still itself, as after Ctrl-Z.
        self._still_s += min(now_s - self._looked_s, 1.0)
        self._looked_s = now_s
        if at != self._seen:
            self._seen, self._still_s = at, 0.0
        # Making a reader takes a while; only inputs are held to the time.
        self._hung = at > 0 and self._still_s > HUNG_AFTER_S
        if self._hung or now_s - self._stopped_s > ENDS_WITHIN_S:
            self._process.kill()
        return False

    def progress(self) -> Told:
        """Returns what the process has told until now."""
        return Told.load(json.loads(self.report.read_text())["told"]) if self.report.exists() else Told()

    def told(self) -> Told:
        """Returns what became of it, once it has ended."""
        self._log.close()
        shutil.rmtree(self._own, ignore_errors=True)  # a process that was killed leaves it; it may lie in memory
        is_done = self.report.exists() and json.loads(self.report.read_text())["is_done"]
        ends = (0, -signal.SIGTERM, -signal.SIGKILL)
        was_stopped = self._stopped_s < float("inf") and not self._hung and self._process.returncode in ends
        if was_stopped or (is_done and not self._process.returncode):
            return self.progress()
        cases, content = self._at()
        why = "an input never ended" if self._hung else f"the process ended with {self._process.returncode}"
        file = _keep(self._kept, self.name, content)
        found = Found(what=why, where=f"see {self._kept / self.name}.log", input=file)
        seconds = time.monotonic() - self._started_s
        return replace(self.progress().plus(Told(findings=(found,))), cases=cases, seconds=seconds)

    def _at(self) -> tuple[int, bytes]:
        raw = self.current.read_bytes()
        number, length = _CURRENT.unpack_from(raw)
        return number, raw[_CURRENT.size : _CURRENT.size + length]


def _table(told: Mapping[str, Told]) -> str:
    rows = [("reader", "cases", "s", "cases/s", "read", "findings", "KB a case", "MB resident")] + [
        (
            name, str(one.cases), f"{one.seconds:.0f}", f"{one.cases / max(one.seconds, 1e-9):.0f}",
            f"{one.read / max(one.cases, 1):.0%}", str(len(one.findings)), f"{one.measured_bytes / 1024:.0f}",
            f"{one.resident_bytes / 2**20:.0f}",
        )
        for name, one in told.items()
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


# The child: one reader.


def _end_with_what_goes_wrong(options: argparse.Namespace) -> None:
    """Ends the process with what is no error of the reader, too: libFuzzer would not let it end, nor go on."""
    try:
        _be_child(options)
    except BaseException:  # noqa: BLE001 it is the end, and the parent points to the log
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _be_child(options: argparse.Namespace) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    name, folder = options.reader[0], Path(options.child)
    if options.engine == "guided":
        import atheris  # noqa: PLC0415 for Linux on x86-64 alone

        with atheris.instrument_imports(include=["edgefl"]):
            from fuzz.readers import READERS  # noqa: PLC0415 imported while it is instrumented
    else:
        from fuzz.readers import READERS  # noqa: PLC0415 as above

    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when it is over: Ctrl-C reaches both
    reader = READERS[name].make(folder / f"{name}.own")
    warm_up(reader)
    warnings.simplefilter("error", RuntimeWarning)
    _cap_memory()
    with (folder / f"{name}.current").open("r+b") as file, mmap.mmap(file.fileno(), 0) as current:
        watched = _Watched(reader, options, folder / f"{name}.json", current)
        with watched.alarmed():
            (_guided if options.engine == "guided" and reader.is_guided else _blind)(reader, watched, options)


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
        self._parent, self._is_stopping = os.getppid(), False
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, _number: int, _frame: object) -> None:
        self._is_stopping = True

    def alarmed(self) -> contextlib.AbstractContextManager[None]:
        return self._trial.alarmed()

    def run(self, content: bytes) -> None:
        head = _CURRENT.pack(self._trial.num_cases + 1, min(len(content), MOST_CURRENT_BYTES))
        self._current[: len(head)] = head
        self._current[len(head) : len(head) + min(len(content), MOST_CURRENT_BYTES)] = content[:MOST_CURRENT_BYTES]
        self._trial.run(content)
        now_s = time.monotonic()
        if self.is_enough(now_s) or now_s - self._reported_s > REPORT_EVERY_S:
            self._tell(now_s)

    def is_enough(self, now_s: float) -> bool:
        has_enough = self._trial.num_cases >= self._options.cases or now_s - self._started_s > self._options.seconds
        return has_enough or self._is_stopping

    def _tell(self, now_s: float) -> None:
        from fuzz.reader import peak_bytes  # noqa: PLC0415 as above

        self._reported_s = now_s
        if os.getppid() != self._parent:
            os._exit(1)  # killed, so nobody counts any more
        trial, grown = self._trial, _resident_bytes() - self._resident_bytes
        findings = []
        for key, found in trial.findings.items():
            file = self._kept.setdefault(key, "") or _keep(
                Path(self._options.keep), self._options.reader[0], found.content
            )
            self._kept[key] = file
            findings.append(Found(what=found.what, where=found.where, input=file, count=found.count))
        if grown > RESIDENT_CAP_BYTES:
            what = f"{grown >> 20} MB more are resident than at the beginning"
            findings.append(Found(what=what, where="some input", input=""))
        is_done = self.is_enough(now_s)
        told = Told(
            cases=trial.num_cases,
            read=trial.num_read,
            seconds=now_s - self._started_s,
            findings=tuple(findings),
            measured_bytes=trial.most_measured_bytes,
            resident_bytes=peak_bytes(),
        )
        part = self._report.with_suffix(".part")
        part.write_text(json.dumps({"told": asdict(told), "is_done": is_done}))
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

    for number, seed in enumerate(reader.seeds):
        (options.corpus / f"{number:05d}").write_bytes(number.to_bytes(2, "little") + seed.content)
    longest = max(4096, 2 * max(len(seed.content) for seed in reader.seeds), 64 * 1024)
    arguments = [
        f"-max_len={longest}", "-len_control=0", f"-seed={options.seed}", "-runs=-1", "-timeout=0",
        "-rss_limit_mb=0", "-print_final_stats=1", "-handle_int=0", "-handle_term=0",
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *arguments, str(options.corpus)], feed, custom_mutator=mutate)
    atheris.Fuzz()


def _keep(folder: Path, name: str, content: bytes) -> str:
    import hashlib  # noqa: PLC0415 beside its use

    path = folder / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"
    path.write_bytes(content)
    return str(path)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _feed_again(name: str, path: Path) -> None:
    from fuzz.reader import scratch  # noqa: PLC0415 as above
    from fuzz.readers import READERS  # noqa: PLC0415 as above

    with tempfile.TemporaryDirectory(dir=scratch()) as own:
        READERS[name].make(Path(own)).feed(path.read_bytes())


if __name__ == "__main__":
    sys.exit(main())
