"""Remote call in a subprocess, which isolates this process from memory use and crashes.

Request and reply are one JSON object each. The child ends with its parent, however that ends.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable

from edgefl.core import errors
from edgefl.core.errors import EdgeflError
from edgefl.core.types import Json
from edgefl.system.process_control import exit_with_parent

log = logging.getLogger(__name__)


def call_in_subprocess(module: str, request: Json, *, description: str, timeout_s: float | None = None) -> Json:
    """Returns the reply of `python -m MODULE`, which calls `serve_call`; errors name `description`.

    Raises:
        EdgeflError: the one that the child raised; or it timed out or crashed.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        process = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=timeout_s,
            check=False,
            start_new_session=True,  # Ctrl-C is for us; a child must not answer it with a traceback
            preexec_fn=exit_with_parent,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        raise EdgeflError(f"{description} took more than {timeout_s:g} s") from None
    try:
        reply: Json = json.loads(process.stdout)
        error = reply.pop("error", None)
    except (ValueError, AttributeError):
        error_lines = process.stderr.decode(errors="replace").strip().splitlines()
        raise EdgeflError(
            f"{description} ended with code {process.returncode}: {error_lines[-1] if error_lines else 'no word'}"
        ) from None
    if error is None:
        return reply
    if error["trace"]:
        log.warning("%s: %s", description, error["trace"])
    raise getattr(errors, error["kind"])(error["message"])


def serve_call(handle: Callable[[Json], Json]) -> None:
    """Answers the request on the standard input; an exception is encoded as reply.

    Output printed meanwhile goes to the standard error, since custom tasks may print.
    """
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)
        try:
            reply = handle(json.load(sys.stdin))
        except Exception as error:  # noqa: BLE001 the boundary of the process: the parent needs a reply in any case
            reply = {"error": _encode_error(error)}
        json.dump(reply, stdout)


def _encode_error(error: Exception) -> Json:
    if isinstance(error, EdgeflError):
        kind = next(cls for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
        return {"kind": kind.__name__, "message": str(error), "trace": ""}
    trace = "".join(traceback.format_exception(error))
    return {"kind": EdgeflError.__name__, "message": f"{type(error).__name__}: {error}", "trace": trace}
