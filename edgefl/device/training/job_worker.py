"""Work on one part of a job: its context, its log, and signs of life while another author's code runs."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from edgefl.core.errors import EdgeflError, TaskError
from edgefl.core.protocol import JOB_LIMITS, JOB_LOG, MAX_JOB_LOG_LINES, parse_job_log
from edgefl.core.types import Json, Task
from edgefl.tasks.job import Job, JobContext, check_result

log = logging.getLogger(__name__)

ALIVE_INTERVAL_S = 0.5
SCRATCH_FOLDER = "jobs"
"""In the state directory: a folder for each job."""


def is_part(header: Json, task: Task) -> bool:
    """Returns whether an instruction is a part of a job; a job is never trained, and nothing else does a part."""
    return JOB_LIMITS in header or isinstance(task, Job)


def run_part(  # noqa: PLR0913 an instruction and its board
    job: Task,
    header: Json,
    body: bytes,
    *,
    device_id: str,
    path: str,
    state_dir: Path,
    on_alive: Callable[[], None],
) -> tuple[Json, bytes]:
    """Returns the reply to a part, and its result; an error of the job's own is a reply, too.

    Args:
        job: of the instruction.
        header: of the instruction.
        body: input of the part.
        device_id: this board.
        path: its shard for the job.
        state_dir: has the jobs' scratch folders.
        on_alive: called every so often while the job works.

    Raises:
        TaskError: the instruction is not one of a job.
    """
    limits, lines, started_s = header.get(JOB_LIMITS), list[str](), time.monotonic()

    def add_line(line: str) -> None:
        if len(lines) < MAX_JOB_LOG_LINES:
            lines.extend(parse_job_log([line]))

    if not isinstance(job, Job):
        raise TaskError(f"{header.get('task')} is no job on this board; update the package that it comes from")
    if not isinstance(limits, Mapping) or not isinstance(header.get("block"), int):
        raise TaskError(f"{header.get('task')} is a job, and was to be trained: name it in [job]")
    scratch = state_dir / SCRATCH_FOLDER / re.sub(r"[^A-Za-z0-9_-]", "_", str(header.get("task")))
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    context = JobContext(
        part=header["block"],
        num_parts=int(limits["num_parts"]),
        input=body,
        device_id=device_id,
        path=Path(path),
        scratch=scratch,
        log=add_line,
        run=str(header.get("assignment", "")).rpartition("/")[0],
    )
    try:
        with _report_alive(on_alive):
            result = check_result(job.work(context), int(limits["max_part_bytes"]), "job.max_part_bytes")
    except (Exception, SystemExit) as error:  # another author's code may raise anything
        is_known = isinstance(error, EdgeflError)
        log.warning("part %d of %s failed: %s", context.part, header.get("task"), error, exc_info=not is_known)
        text = f"work: {error}" if is_known else f"work raised {type(error).__name__}: {error}"
        return {"error": text, JOB_LOG: lines}, b""
    metrics = {"iterations": 1, "num_examples": 0, "loss": None, "compute_s": time.monotonic() - started_s}
    return {"metrics": metrics, JOB_LOG: lines}, result


@contextmanager
def _report_alive(on_alive: Callable[[], None]) -> Iterator[None]:
    """Calls `on_alive` from another thread until the end of the block: a job says nothing while it computes."""
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(ALIVE_INTERVAL_S):
            on_alive()

    thread = threading.Thread(target=report, name="alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
