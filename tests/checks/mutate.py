"""Changes one operator, number or condition of the source at a time, and counts the changes that tests notice.

    make mutants ARGS="--room strategies --sample 100 --seed 1 --out before.jsonl"
    make mutants ARGS="--room strategies --sample 100 --seed 1 --out after.jsonl --against before.jsonl"

The same seed draws the same mutants from the same source, so that two sets of tests can be compared: `--tree` names
another checkout to draw from and to test, `--only` repeats the mutants of these names. A mutant meets the tests of
its room that run its statement, until one fails. Everything happens in copies of the checkout.
"""

import argparse
import ast
import json
import math
import os
import queue
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from coverage import Coverage

ROOMS: dict[str, tuple[str, list[str]]] = {
    "compression": ("edgefl/compression/**/*.py", ["tests/compression"]),
    "journal": ("edgefl/storage/journal/**/*.py", ["tests/storage"]),
    "peer_algorithms": ("edgefl/strategies/peer_algorithms/**/*.py", ["tests/strategies/peer_algorithms"]),
    "protocol": ("edgefl/core/protocol.py", ["tests/core/test_protocol.py"]),
    "simulation": ("edgefl/simulation/**/*.py", ["tests/simulation"]),
    "storage": ("edgefl/storage/**/*.py", ["tests/storage"]),
    "strategies": ("edgefl/strategies/**/*.py", ["tests/strategies"]),
}
"""Which source and which tests; `--source` and `--tests` name others."""
PRELOADED = (
    "numpy",
    "torch",
    "sqlalchemy",
    "alembic",
    "fastapi",
    "uvicorn",
    "flwr.supercore.constant",
    "safetensors",
)
"""What tests import from others: imported once, every mutant's process is forked from it."""
QUIET = ["-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
NO_OPERATORS = ("core/VariableReplacer", "core/VariableInserter")
ANY_TEST = ""
"""In place of a test's name: run at import, or by a fixture of the session."""
GRACE_S = 60
MOST_BYTES = 16 << 30

type_of_fork = get_context("fork")


@dataclass(frozen=True, order=True)
class Mutant:
    path: str
    line: int
    column: int
    operator: str
    occurrence: int

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.column}:{self.operator.removeprefix('core/')}:{self.occurrence}"

    def source(self, tree: Path) -> str:
        return str(mutate_code((tree / self.path).read_text(), get_operator(self.operator)(), self.occurrence))


@dataclass(frozen=True)
class Verdict:
    name: str
    is_killed: bool
    by: str
    """The test that failed, or `import`, `stuck` (too slow, or dead), `survived`, `no test` (runs the statement)."""
    num_tests: int
    seconds: float
    change: tuple[str, str]


@dataclass(frozen=True)
class Runs:
    """Which test runs which line, and for how many seconds."""

    lines: dict[str, dict[str, list[str]]]
    seconds: dict[str, float]

    def tests_of(self, mutant: Mutant, source: str, most_s: float) -> list[str]:
        """The shortest case of each test first, file by file, then the other cases as far as the time goes."""
        lines = self.lines.get(mutant.path, {})
        contexts = {name for line in statement_lines(source, mutant.line) for name in lines.get(str(line), ())}
        if ANY_TEST in contexts:
            # What a class has from its decorator runs no line of its own: all tests of these files may use it.
            names = {name for names in lines.values() for name in names if name != ANY_TEST}
            contexts = {name.partition("::")[0] for name in names}
        chosen = {test for test in self.seconds if test in contexts or test.partition("::")[0] in contexts}
        ordered: list[tuple[bool, str, str]] = []
        seen: set[str] = set()
        for test in sorted(chosen, key=lambda test: (self.seconds[test], test)):
            function = test.partition("[")[0]
            ordered.append((function in seen, test.partition("::")[0] if function not in seen else "", test))
            seen.add(function)
        kept, sum_s = [], 0.0
        for _, _, test in sorted(ordered, key=lambda each: each[:2]):
            sum_s += self.seconds[test]
            if sum_s <= most_s or not kept:
                kept.append(test)
        return kept


class Recorder:
    """Tells the coverage which test runs, and how long each took."""

    def __init__(self, coverage: Coverage) -> None:
        self.coverage = coverage
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []
        self._context = ANY_TEST

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._context = item.nodeid
        self.coverage.switch_context(item.nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        shared = {
            "session": ANY_TEST,
            "package": ANY_TEST,
            "module": request.node.nodeid,
            "class": request.node.nodeid,
        }
        if fixturedef.scope in shared:
            self.coverage.switch_context(shared[fixturedef.scope].partition("::")[0])
        yield
        self.coverage.switch_context(self._context)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            return
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)


class Selection:
    """Runs these tests of those that were collected, in this order, and writes down the first that fails."""

    def __init__(self, tests: list[str], failed: Path) -> None:
        self._places = {test: place for place, test in enumerate(tests)}
        self._failed = failed

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._places), key=lambda item: self._places[item.nodeid]
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.write_text(report.nodeid)


def main() -> int:
    options = read_options()
    pattern, tests = ROOMS[options.room]
    num_places, mutants = drawn(options.tree, options.source or pattern, options.sample, options.seed)
    if options.only:
        mutants = [mutant for mutant in mutants if mutant.name in options.only]
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for place in range(options.jobs):
            copies.put(copied(options.tree, Path(folder) / str(place)))
        runs = recorded(copies.queue[0], options.tests or tests)

        def judged(mutant: Mutant) -> Verdict:
            copy = copies.get()
            try:
                verdict = tried(mutant, copy, runs, options.most_s)
            finally:
                copies.put(copy)
            if options.out:
                with options.out.open("a") as out:
                    out.write(json.dumps(asdict(verdict)) + "\n")
            return verdict

        if options.out:
            options.out.write_text("")
        with ThreadPoolExecutor(options.jobs) as pool:
            verdicts = list(pool.map(judged, mutants))
    print(f"{options.room}, seed {options.seed}: {len(verdicts)} mutants from {num_places} places")
    return reported(verdicts, options.against)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", choices=sorted(ROOMS), required=True)
    parser.add_argument("--sample", type=int, default=50, metavar="N", help="how many mutants are drawn (50)")
    parser.add_argument("--seed", type=int, default=1, help="which are drawn (1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many are tested at a time")
    parser.add_argument("--most-s", type=float, default=60, help="seconds of tests for one mutant at most (60)")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[2], help="another checkout")
    parser.add_argument("--source", metavar="GLOB", help="other source than that of the room")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="other tests than those of the room")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these of the drawn mutants")
    parser.add_argument("--out", type=Path, metavar="FILE", help="one line of JSON for each mutant")
    parser.add_argument("--against", type=Path, metavar="FILE", help="fail where one was killed there only")
    return parser.parse_args()


def drawn(tree: Path, pattern: str, sample: int, seed: int) -> tuple[int, list[Mutant]]:
    """One mutant each of places drawn at random; annotations and what does not parse are no places."""
    places: dict[tuple[str, int, int], list[Mutant]] = defaultdict(list)
    for file in sorted(tree.glob(pattern)):
        for mutant in mutants_of(file.relative_to(tree).as_posix(), file.read_text()):
            places[mutant.path, mutant.line, mutant.column].append(mutant)
    rng = random.Random(seed)
    chosen: list[Mutant] = []
    for place in rng.sample(sorted(places), len(places)):
        mutant = rng.choice(sorted(places[place]))
        if len(chosen) == sample:
            break
        with suppress(AttributeError):  # of Cosmic Ray, on an exception with a dotted name
            if is_change((tree / mutant.path).read_text(), mutant.source(tree)):
                chosen.append(mutant)
    return len(places), chosen


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    nodes = list(ast_nodes(get_ast(source)))
    for name in operator_names():
        if name in NO_OPERATORS:
            continue
        operator = get_operator(name)()
        positions = (position for node in nodes for position in operator.mutation_positions(node))
        for occurrence, ((line, column), _) in enumerate(positions):
            yield Mutant(path, line, column, name, occurrence)


def is_change(source: str, mutated: str) -> bool:
    try:
        return without_annotations(source) != without_annotations(mutated)
    except SyntaxError:
        return False


def without_annotations(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def statement_lines(source: str, line: int) -> Iterable[int]:
    """The lines of the innermost statement around a line, of a compound one only its head."""
    innermost = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        if first <= line <= max(last, first):
            innermost = range(first, max(last, first) + 1)
    return innermost


def copied(tree: Path, copy: Path) -> Path:
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=tree, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0"):
        if name and (tree / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, copy / name)
    return copy


def recorded(copy: Path, tests: list[str]) -> Runs:
    """Runs all tests once without a change."""
    notes = copy / "runs.json"

    def run() -> int:
        coverage = Coverage(data_file=None, source=[str(copy / "edgefl")], config_file=False)
        recorder = Recorder(coverage)
        coverage.start()
        pytest.main([*QUIET, *tests], plugins=[recorder])
        coverage.stop()
        data = coverage.get_data()
        lines = {
            Path(file).relative_to(copy).as_posix(): data.contexts_by_lineno(file) for file in data.measured_files()
        }
        notes.write_text(json.dumps({"lines": lines, "seconds": recorder.seconds, "failed": recorder.failed}))
        return 0

    started(copy, run).join()
    if not notes.exists():
        sys.exit(f"the tests cannot be run: see {copy / 'output.txt'}")
    found = json.loads(notes.read_text())
    if found["failed"]:
        sys.exit(f"tests must pass before the source is changed, these fail: {' '.join(found['failed'])}")
    return Runs(found["lines"], found["seconds"])


def tried(mutant: Mutant, copy: Path, runs: Runs, most_s: float) -> Verdict:
    file, failed = copy / mutant.path, copy / "failed.txt"
    original, mutated = file.read_text(), mutant.source(copy)
    tests = runs.tests_of(mutant, original, most_s)
    failed.unlink(missing_ok=True)
    kept = file.rename(file.with_suffix(".kept"))
    file.write_text(mutated)
    begun, code = time.monotonic(), 0
    try:
        if tests:
            files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
            selection = Selection(tests, failed)
            child = started(copy, lambda: int(pytest.main([*QUIET, "-x", *files], plugins=[selection])))
            code = ended(child, 4 * sum(runs.seconds[test] for test in tests) + GRACE_S)
    finally:
        kept.rename(file)
    if code in (pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR):
        sys.exit(f"{mutant.name}: no test ran, see {copy / 'output.txt'}")
    by = "no test" if not tests else "survived" if code == 0 else "stuck" if code < 0 else "import"
    by = failed.read_text() if failed.exists() else by
    seconds = round(time.monotonic() - begun, 1)
    return Verdict(mutant.name, code != 0, by, len(tests), seconds, changed_lines(original, mutated))


def started(copy: Path, run: Callable[[], int]) -> BaseProcess:
    """Calls the function in a process of its own, at home in the copy."""

    def enter() -> None:
        os.setsid()
        os.chdir(copy)
        with (copy / "output.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        sys.path.insert(0, str(copy))
        # A mutant that takes all memory dies alone.
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        # A change within one second of the last would pass for compiled.
        sys.dont_write_bytecode = True
        # Where CI is set, hypothesis draws the same examples each time, and none has a deadline.
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "CI": "true"}
        os._exit(run())

    process = type_of_fork.Process(target=enter)
    process.start()
    return process


def ended(process: BaseProcess, most_s: float) -> int:
    process.join(most_s)
    code = process.exitcode
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return -1 if code is None else code


def changed_lines(original: str, mutated: str) -> tuple[str, str]:
    pairs = zip(original.split("\n"), mutated.split("\n"), strict=False)
    return next(((old.strip(), new.strip()) for old, new in pairs if old.strip() != new.strip()), ("", ""))


def reported(verdicts: list[Verdict], against: Path | None) -> int:
    """Prints what survived, and the share that was killed with Wilson's interval of 95 %."""
    for verdict in verdicts:
        if not verdict.is_killed:
            print(f"{verdict.by} after {verdict.num_tests} tests: {verdict.name}")
            print(f"    - {verdict.change[0]}\n    + {verdict.change[1]}")
    num, killed = len(verdicts), sum(verdict.is_killed for verdict in verdicts)
    if num:
        share, z = killed / num, 1.96
        middle = (share + z * z / (2 * num)) / (1 + z * z / num)
        half = z / (1 + z * z / num) * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
        print(f"{killed} of {num} killed: {share:.1%}, between {middle - half:.1%} and {middle + half:.1%}")
    if not against:
        return 0
    before = {each["name"]: each["is_killed"] for each in map(json.loads, against.read_text().splitlines())}
    lost = [verdict.name for verdict in verdicts if before.get(verdict.name) and not verdict.is_killed]
    print(f"{len(lost)} of them were killed before", *lost, sep="\n    ")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
