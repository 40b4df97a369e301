"""A run of `make fuzz` with a tally goes on from the runs before, however they ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from fuzz import feed_readers
from fuzz.reader import HANG_TICKS, Reader, Trial
from fuzz.tally import Found, Tally, TallyError, Told, tree_of

READER = "peer-frames"
FOUND = Found(what="KeyError: 'x'", where="a.py:1 f", input="first", count=2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "fuzz" / "tally.json"


def told_in(file: Path, reader: str = READER) -> Told:
    return Told.load(json.loads(file.read_text())["readers"][reader])


def run(monkeypatch: pytest.MonkeyPatch, file: Path, num_cases: int) -> int:
    arguments = ["--engine", "blind", "--workers", "1", "--reader", READER, "--cases", str(num_cases)]
    monkeypatch.setattr(sys, "argv", ["feed_readers.py", *arguments, "--tally", str(file)])
    return feed_readers.main()


def once_it_counts(file: Path, act: Callable[[], None]) -> threading.Thread:
    """Starts a thread that does something to a run as soon as inputs stand in its tally."""

    def watch() -> None:
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:
            if file.exists() and file.read_text().find('"cases"') > 0 and told_in(file).cases > 0:
                act()
                return
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)  # the test fails, and does not feed a billion inputs

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def kill_the_reader_s_process() -> None:
    for child in psutil.Process().children(recursive=True):
        if "--child" in child.cmdline():
            child.send_signal(signal.SIGSEGV)


@pytest.mark.extended
def test_a_run_that_is_told_to_end_shows_its_table_and_the_next_one_goes_on_to_the_very_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    monkeypatch.setattr(feed_readers, "TALLY_EVERY_S", 0.1)
    stopping = once_it_counts(file, lambda: os.kill(os.getpid(), signal.SIGTERM))
    status, fed = run(monkeypatch, file, 10**9), told_in(file)
    stopping.join()
    assert (status, fed.findings) == (0, ())
    assert f"{fed.cases} cases; 0 of 1 readers have {10**9}" in capsys.readouterr().out

    assert run(monkeypatch, file, fed.cases + 500) == 0
    assert told_in(file).cases == fed.cases + 500
    assert f"{fed.cases + 500} cases; 1 of 1" in capsys.readouterr().out
    assert told_in(file).read > fed.read
    assert not list(file.parent.glob("*.part"))


@pytest.mark.extended
def test_a_process_that_dies_is_a_finding_and_what_it_was_fed_still_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    monkeypatch.setattr(feed_readers, "TALLY_EVERY_S", 0.1)
    killing = once_it_counts(file, kill_the_reader_s_process)
    status, told = run(monkeypatch, file, 10**9), told_in(file)
    killing.join()
    (found,) = told.findings
    assert status == 1
    assert found.what == f"the process ended with {-signal.SIGSEGV}"
    assert Path(found.input).is_file()
    assert told.cases > 0
    capsys.readouterr()

    assert run(monkeypatch, file, 1) == 1, "there is nothing to feed, and the finding is still there"
    assert found.what in capsys.readouterr().out


def test_sums_count_inputs_together_and_keep_the_most_of_the_rest(file: Path) -> None:
    one = Told(cases=5, read=2, seconds=1.5, measured_bytes=9, resident_bytes=1, findings=(FOUND,))
    other = Found(what="KeyError: 'y'", where=FOUND.where, input="second", count=3)
    more = Told(cases=7, read=1, seconds=2.0, measured_bytes=4, resident_bytes=8, findings=(other,))
    with closing(Tally(file, "t")) as tally:
        tally.note(READER, one)
        tally.write()
    with closing(Tally(file, "t")) as tally:
        tally.note(READER, Told(cases=1))
        tally.note(READER, more)
        tally.write()
        tally.write()
    assert told_in(file) == Told(
        cases=12, read=3, seconds=3.5, measured_bytes=9, resident_bytes=8,
        findings=(Found(what=FOUND.what, where=FOUND.where, input="first", count=5),),
    )  # fmt: skip


def test_another_tree_begins_anew(file: Path) -> None:
    for tree in ("old", "new"):
        with closing(Tally(file, tree)) as tally:
            assert tally.of(READER) == Told()
            tally.note(READER, Told(cases=5, findings=(FOUND,) if tree == "old" else ()))
            tally.write()
    assert told_in(file) == Told(cases=5)


def test_the_next_run_is_given_another_seed_and_fewer_inputs(
    monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path
) -> None:
    given = []
    monkeypatch.setattr(feed_readers, "_Child", lambda _name, options, *_: given.append(options))
    monkeypatch.setattr(sys, "argv", ["feed_readers.py", "--tally", str(file), "--cases", "100"])
    options = feed_readers._options()
    for fed in (0, 40):
        with closing(Tally(file, "t")) as tally:
            feed_readers._Run([READER], options, tmp_path, tally)._started(READER, tmp_path)
            tally.note(READER, Told(cases=40 - fed))
            tally.write()
    assert [one.cases for one in given] == [100, 60]
    assert given[0].seed != given[1].seed


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is no tally"),
        ("[]", "is no tally"),
        ('{"v": 2, "tree": "t", "readers": {"x": {"cases": "9"}}}', "is no tally"),
        ('{"v": 3}', "has format 3, this program reads 2"),
    ],
)
def test_a_damaged_tally_or_one_of_a_newer_format_is_refused_and_left_as_it_is(
    file: Path, content: str, words: str
) -> None:
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(TallyError, match=words):
        Tally(file, "t")
    assert file.read_text() == content


def test_two_runs_do_not_write_to_one_tally(file: Path) -> None:
    with closing(Tally(file, "t")), pytest.raises(TallyError, match="in use by another run"):
        Tally(file, "t")
    Tally(file, "t").close()


def test_a_tree_is_another_one_when_the_package_or_a_reader_changes_and_not_when_a_test_does(tmp_path: Path) -> None:
    package, harness = tmp_path / "edgefl", tmp_path / "fuzz"
    package.mkdir()
    harness.mkdir()
    names = {tree_of(package, harness)}
    (harness / "test_readers.py").write_text("x")
    assert names == {tree_of(package, harness)}
    for path in (package / "profiles.toml", harness / "readers.py", harness / "file_readers.py"):
        path.write_text("x")
        names.add(tree_of(package, harness))
    assert len(names) == 4


def test_a_process_that_was_stopped_for_a_while_does_not_count_as_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.reader.HANGS_AFTER_S", 0.1)

    def stand_still(_data: bytes) -> None:
        """Hears nothing of the timer meanwhile, as when it is stopped; afterwards of the last tick alone."""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(0.3)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])

    trial = Trial(Reader(feed=stand_still, seeds=()))
    with trial.alarmed():
        trial.run(b"a")
    assert not trial.findings
    assert 0 < trial.ticks < HANG_TICKS


def test_an_error_of_the_harness_ends_its_process_and_stands_in_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Left to libFuzzer, the process stood still, and its reader was said to hang."""

    def fail(_options: object) -> None:
        raise MemoryError("in the mutator")

    monkeypatch.setattr(feed_readers, "_be_child", fail)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "argv", ["feed_readers.py", "--child", "x"])
    with pytest.raises(SystemExit) as ended:
        feed_readers.main()
    assert ended.value.code == 1
    assert "MemoryError: in the mutator" in capsys.readouterr().err
