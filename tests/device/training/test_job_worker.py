"""One part of a job on a board."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from gated_jobs import Greeting

from edgefl.core.errors import TaskError
from edgefl.core.protocol import JOB_LIMITS, MAX_JOB_LOG_CHARS, MAX_JOB_LOG_LINES
from edgefl.device.training.job_worker import run_part
from edgefl.tasks.job import Job

HEADER = {
    "task": "mine", "block": 2, JOB_LIMITS: {"num_parts": 4, "max_part_bytes": 100, "deadline_s": 9.0},
}  # fmt: skip


def run(job, header=HEADER, body=b"", on_alive=lambda: None):
    with TemporaryDirectory() as folder:
        board = {"device_id": "pi", "path": "/data", "state_dir": Path(folder)}
        return run_part(job, header, body, **board, on_alive=on_alive)


class Reporting(Job):
    def __init__(self, result=b"done", num_lines=1):
        self.result, self.num_lines = result, num_lines

    def work(self, context):
        self.context = context
        (context.scratch / "kept").touch(exist_ok=False)
        for number in range(self.num_lines):
            context.log(f"{number}\n" + "x" * 1000)
        return self.result


def test_a_part_is_told_its_number_its_input_its_board_and_its_files():
    job = Reporting()
    reply, result = run(job, body=b"input")
    assert result == b"done"
    assert (reply["metrics"]["iterations"], reply["metrics"]["loss"]) == (1, None)
    context = job.context
    assert (context.part, context.num_parts, context.input) == (2, 4, b"input")
    assert (context.device_id, context.path) == ("pi", Path("/data"))


def test_a_log_is_bounded_and_each_of_its_lines_is_one():
    reply, _ = run(Reporting(num_lines=MAX_JOB_LOG_LINES + 5))
    assert len(reply["log"]) == MAX_JOB_LOG_LINES
    assert {len(line) for line in reply["log"]} == {MAX_JOB_LOG_CHARS}
    assert reply["log"][0].startswith("0\\nxx")


@pytest.mark.parametrize(
    ("job", "error"),
    [
        (Greeting(bad_part=2), "work raised RuntimeError: broken on purpose"),
        (Reporting("text"), "work: must return bytes, got str"),
        (Reporting(b"x" * 101), "work: returned 101 bytes, at most 100 are taken"),
    ],
)
def test_what_goes_wrong_is_a_reply_with_the_log_until_then(job, error):
    reply, result = run(job)
    assert result == b""
    assert reply["error"].startswith(error)
    assert len(reply["log"]) == 1


def test_a_job_that_is_to_be_trained_is_refused():
    with pytest.raises(TaskError, match=r"mine is a job, and was to be trained: name it in \[job\]"):
        run(Reporting(), {"task": "mine", "block": 2})


def test_a_sign_of_life_comes_while_the_job_says_nothing():
    alive = []

    class Waiting(Job):
        def work(self, context):
            while not alive:
                pass
            return b""

    assert run(Waiting(), on_alive=lambda: alive.append(1))[1] == b""
