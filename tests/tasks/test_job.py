"""Jobs by name, and what the coordinator asks of their methods."""

import pytest
from gated_jobs import Greeting, Words

from edgefl.core.config import parse_run
from edgefl.core.errors import CodecError, ConfigError, TaskError
from edgefl.core.extensions import allow_modules
from edgefl.engine.assembly.build import build_run
from edgefl.tasks.job import CheckedJob, Job, make_job


def checked(job, **limits):
    return CheckedJob("mine", job, num_parts=4, **{"max_part_bytes": 100, "max_result_bytes": 100, **limits})


def test_only_a_job_is_made_of_a_name_and_nothing_of_another_class_is_called():
    with pytest.raises(TaskError, match=r"'digits' is a task, which is trained; a job inherits from edgefl\.Job"):
        make_job("digits", {})
    with pytest.raises(TaskError, match="the module gated_jobs is not allowed here"):
        make_job("gated_jobs:Greeting", {})
    with allow_modules(["gated_jobs", "gated_task"]):
        assert isinstance(make_job("gated_jobs:Greeting", {"bad_part": 1}), Greeting)
        with pytest.raises(ConfigError, match=r"job\.bad_prat: gated_jobs:Greeting has no such setting"):
            make_job("gated_jobs:Greeting", {"bad_prat": 1})
        with pytest.raises(TaskError, match=r"it must be a class of gated_jobs that inherits from edgefl\.Task"):
            make_job("gated_jobs:Path", {})


def test_a_job_is_never_trained_and_its_parts_must_fit_into_memory():
    with allow_modules(["gated_jobs"]):
        with pytest.raises(TaskError, match=r"run\.task: gated_jobs:Greeting is a job: give it as name in \[job\]"):
            build_run(parse_run({"run": {"task": "gated_jobs:Greeting"}}), "r")
        large = {"name": "gated_jobs:Greeting", "parts": 1000}
        with pytest.raises(
            ConfigError, match=r"1000 parts of job\.max_part_bytes = 16777216 are more than run\.max_state"
        ):
            build_run(parse_run({"job": large}), "r")
        components = build_run(parse_run({"job": large | {"max_part_bytes": 4}}), "r")
    with pytest.raises(CodecError, match="a result of 5 bytes, at most 4 are taken"):
        components.decode(b"12345")


def test_the_parts_are_joined_where_a_job_says_nothing_else():
    assert checked(Greeting()).combine([b"a", b"b"]) == b"ab"
    assert checked(Greeting()).make_input(3) == b"3/4"


def test_what_a_method_returns_is_bounded_and_its_errors_name_the_job():
    with pytest.raises(
        TaskError, match=r"job mine: combine\(parts\): returned 3 bytes, at most 2 are taken; raise job"
    ):
        checked(Greeting(), max_result_bytes=2).combine([b"abc"])
    with pytest.raises(TaskError, match=r"job mine: make_input\(0, 4\): returned 3 bytes, at most 1 are taken"):
        checked(Greeting(), max_part_bytes=1).make_input(0)
    with pytest.raises(TaskError, match=r"job mine: combine\(parts\) raised JSONDecodeError"):
        checked(Words()).combine([b"x"])


def test_a_class_without_work_is_no_job():
    class Idle(Job):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Idle()


def test_a_shard_of_a_job_has_as_many_rows_as_files(tmp_path):
    assert len(Greeting().read(str(tmp_path))) == 0
    for name in "ab":
        (tmp_path / name).touch()
    assert len(Greeting().read(str(tmp_path))) == 2
    assert len(Greeting().read(str(tmp_path / "a"))) == 1
