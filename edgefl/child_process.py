"""One question to a process of its own: what takes much memory, or may crash, does not do so in ours.

Both sides speak JSON objects, one each way. The child ends with whoever started it, however that one ends.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable

from edgefl import errors
from edgefl.errors import EdgeflError
from edgefl.processes import end_with_parent
from edgefl.types import Json

log = logging.getLogger(__name__)


def ask_child(module: str, question: Json, *, what: str, within_s: float | None = None) -> Json:
    """Returns what `python -m MODULE` answers, which calls `answer_once`; errors say `what` it was about.

    Raises:
        EdgeflError: the one that the child raised; otherwise it took too long, or something unforeseen ended it.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps(question).encode(),
            capture_output=True,
            timeout=within_s,
            check=False,
            start_new_session=True,  # Ctrl-C is for us; a child must not answer it with a traceback
            preexec_fn=end_with_parent,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        raise EdgeflError(f"{what} took more than {within_s:g} s") from None
    try:
        answer: Json = json.loads(done.stdout)
        error = answer.pop("error", None)
    except (ValueError, AttributeError):
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise EdgeflError(f"{what} ended with code {done.returncode}: {said[-1] if said else 'no word'}") from None
    if error is None:
        return answer
    if error["trace"]:
        log.warning("%s: %s", what, error["trace"])
    raise getattr(errors, error["kind"])(error["message"])


def answer_once(answer: Callable[[Json], Json]) -> None:
    """Answers the question on the standard input; an exception is the answer too.

    What is printed meanwhile goes to the standard error: tasks of users' own may print.
    """
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        try:
            told = answer(json.load(sys.stdin))
        except Exception as error:  # noqa: BLE001 the boundary of the process: the asker needs a word, whatever it was
            told = {"error": _told(error)}
        json.dump(told, out)


def _told(error: Exception) -> Json:
    if isinstance(error, EdgeflError):
        kind = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
        return {"kind": kind.__name__, "message": str(error), "trace": ""}
    trace = "".join(traceback.format_exception(error))
    return {"kind": EdgeflError.__name__, "message": f"{type(error).__name__}: {error}", "trace": trace}
