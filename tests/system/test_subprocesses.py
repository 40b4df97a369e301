"""A question to a child process: its answer, its errors, and that it never outlives who asked."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgefl.core.errors import EdgeflError, NotFoundError
from edgefl.system.subprocesses import call_in_subprocess

CHILD = """
import os, sys, time
from edgefl.system.subprocesses import serve_call
from edgefl.core.errors import NotFoundError

class OwnError(NotFoundError): ...

def answer(question):
    print("noise"); os.system("echo noise of a program")
    match question["do"]:
        case "tell": return {"it": question["it"]}
        case "own": raise OwnError("no such thing")
        case "fault": return {"it": 1 / 0}
        case "die": os._exit(3)
        case "sleep": time.sleep(60)

serve_call(answer)
"""


@pytest.fixture(autouse=True)
def child(tmp_path, monkeypatch):
    (tmp_path / "asked_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)


def ask(do, within_s=None):
    return call_in_subprocess("asked_child", {"do": do, "it": [1, "two"]}, description="asking", timeout_s=within_s)


def test_the_answer_comes_back_whatever_the_child_prints():
    assert ask("tell") == {"it": [1, "two"]}


def test_an_error_of_ours_comes_back_as_the_kind_that_everybody_knows():
    with pytest.raises(NotFoundError, match=r"^no such thing$") as raised:
        ask("own")
    assert type(raised.value) is NotFoundError


def test_another_one_is_named_and_its_traceback_logged(caplog):
    with caplog.at_level(logging.WARNING), pytest.raises(EdgeflError, match="ZeroDivisionError: division by zero"):
        ask("fault")
    assert 'case "fault"' in caplog.text


def test_a_child_that_ends_without_an_answer_or_takes_too_long_is_an_error():
    with pytest.raises(EdgeflError, match="asking ended with code 3: noise of a program"):
        ask("die")
    with pytest.raises(EdgeflError, match=r"asking took more than 0\.2 s"):
        ask("sleep", within_s=0.2)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc: run it on Linux")
def test_a_child_whose_asker_is_killed_ends_without_a_word(tmp_path):
    """Whenever that is: while it starts, imports, reads or works."""
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from edgefl.system.subprocesses import call_in_subprocess as ask\n"
        "print(flush=True)\n"
        "ask('asked_child', {'do': 'sleep'}, description='asking')"
    )
    for after_s in (0.0, 0.005, 0.02, 0.1, 0.3):
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asker:
            assert asker.stdout is not None
            asker.stdout.readline()
            time.sleep(after_s)
            asker.kill()
            assert asker.communicate(timeout=60)[1] == b""
        deadline_s = time.monotonic() + 60
        while children(tmp_path):
            assert time.monotonic() < deadline_s, f"still there, killed after {after_s} s: {children(tmp_path)}"
            time.sleep(0.02)


def children(folder):
    """Who has this folder in its PYTHONPATH, by process id."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] * (f"PYTHONPATH={folder}".encode() in path.read_bytes())
    return found
