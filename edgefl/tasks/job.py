r"""Jobs: any computation in parts, each done by one board, whose results the coordinator combines.

```python
class Squares(Job):
    def work(self, context):
        return f"{context.part**2}\n".encode()
```

A job is a `Task` whose work is not training: a board does it where its owner has given it a shard for it, packs bring
it, and a run file names it, by the same rules. The constructor runs on the boards and at the coordinator; its keyword
arguments are the job's options in a run file.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgefl.core.errors import EdgeflError, TaskError
from edgefl.core.extensions import format_name
from edgefl.core.types import Array, Dataset, Learner, ModelSpec, Scalar, Task
from edgefl.tasks.noop import NoopLearner
from edgefl.tasks.registry import find_task_factory, make_task


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """One part of a job, as a board is given it.

    Attributes:
        part: number of the part, from 0.
        num_parts: of the job; 0 where every board does one part, on its own files.
        input: what `make_input` returned for this part.
        device_id: board that does it.
        path: board's shard for this job, a file or a folder; it may be read, and nothing there written.
        scratch: folder of the board for this job, to write in; what lies there stays for later parts and runs.
        run: of the part; another text once the run has begun anew, or goes on from an older state.
        log: adds a line to the history: of 300 characters, and 100 lines for a part; what is more is left out.
    """

    part: int
    num_parts: int
    input: bytes
    device_id: str
    path: Path
    scratch: Path
    log: Callable[[str], None]
    run: str = ""


class Job(Task):
    """Computation in parts; a subclass writes `work`, and where it needs them the others.

    A part may be done more than once, after a failure, and counts once. Methods may raise anything: a part that
    raises is tried again, preferably by another board.
    """

    name = "job"
    defaults: Mapping[str, Scalar] = {}

    def make_input(self, part: int, num_parts: int) -> bytes:  # noqa: ARG002 for subclasses
        """Returns the input of a part, at the coordinator; equal for equal arguments, also after a restart."""
        return b""

    def load(self) -> None:
        """Loads what parts need, on a board that gets ready for a run; may take `devices.ready_s`."""

    @abstractmethod
    def work(self, context: JobContext) -> bytes:
        """Returns the result of one part, on a board."""

    def combine(self, parts: Sequence[bytes]) -> bytes:
        """Returns the result of the job, at the coordinator.

        Args:
            parts: results in the order of their numbers, each read from disk when it is asked for; where every board
                does one part, in the order of the boards' names and without those that were skipped.
        """
        return b"".join(parts)

    # The Task: no model, no examples.

    def shapes(self) -> ModelSpec:
        return ()

    def init(self, seed: int) -> dict[str, Array]:  # noqa: ARG002 nothing is trained
        return {}

    def read(self, path: str) -> Dataset:
        """Returns a data set without content, of as many rows as the shard has files."""
        place = Path(path)
        count = sum(1 for _ in place.iterdir()) if place.is_dir() else 1
        return Dataset(inputs=np.zeros((count, 0), np.float32), targets=np.zeros(count, np.int64))

    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> Learner:  # noqa: ARG002 likewise
        return NoopLearner(())


def make_job(name: str, options: Mapping[str, Scalar]) -> Job:
    """Returns the job that `[job] name` names; nothing that is no job is constructed.

    Raises:
        TaskError: there is no such job, or the name is a task's.
        ConfigError: an option is unknown, or has a value that does not fit.
    """
    factory = find_task_factory(name)
    if not (isinstance(factory, type) and issubclass(factory, Job)):
        raise TaskError(f"job.name: {format_name(name)} is a task, which is trained; a job inherits from edgefl.Job")
    job = make_task(name, options, table="job")
    assert isinstance(job, Job)
    return job


class CheckedJob:
    """Calls of a job's methods by the coordinator, with bounded results and the job's name in errors.

    Args:
        name: in messages.
        job: of another author.
        num_parts: given to `make_input`.
        max_part_bytes: most bytes of the input, and of the result, of a part.
        max_result_bytes: most bytes of the combined result.
    """

    def __init__(self, name: str, job: Job, *, num_parts: int, max_part_bytes: int, max_result_bytes: int) -> None:
        self._name, self._job, self._num_parts = name, job, num_parts
        self._max_part_bytes, self._max_result_bytes = max_part_bytes, max_result_bytes

    def make_input(self, part: int) -> bytes:
        """Returns the input of a part.

        Raises:
            TaskError: it raises, or returns no bytes or too many.
        """
        return self._call(
            f"make_input({part}, {self._num_parts})",
            lambda: self._job.make_input(part, self._num_parts),
            self._max_part_bytes,
            "job.max_part_bytes",
        )

    def combine(self, parts: Sequence[bytes]) -> bytes:
        """Returns the result of the job; raises as `make_input`."""
        return self._call(
            "combine(parts)", lambda: self._job.combine(parts), self._max_result_bytes, "job.max_result_bytes"
        )

    def _call(self, call: str, work: Callable[[], bytes], limit: int, setting: str) -> bytes:
        try:
            return check_result(work(), limit, setting)
        except EdgeflError as error:
            raise TaskError(f"job {self._name}: {call}: {error}") from error
        except (Exception, SystemExit) as error:  # another author's code may raise anything
            raise TaskError(f"job {self._name}: {call} raised {type(error).__name__}: {error}") from error


def check_result(result: object, limit: int, setting: str) -> bytes:
    """Returns what a method of a job returned.

    Raises:
        TaskError: it is not bytes, or more than `limit` bytes, which the `setting` raises.
    """
    if not isinstance(result, bytes):
        raise TaskError(f"must return bytes, got {type(result).__name__}")
    if len(result) > limit:
        raise TaskError(
            f"returned {len(result)} bytes, at most {limit} are taken; raise {setting}, or make more parts"
        )
    return result
