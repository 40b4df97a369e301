"""A program that writes down each HTTP request which its server is asked, where the request comes in.

    python -m harness.request_log OUT edgefl|flower-superlink ARGUMENT ...

The program is the one that its console script calls, with one layer of ASGI around what it gives to uvicorn.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAMS = {
    "edgefl": ("edgefl.cli.main", "main"),
    "flower-superlink": ("flwr.superlink.cli", "flower_superlink"),
}
BY_OPERATORS = ("/edgefl/v1/runs", "/edgefl/v1/devices", "/edgefl/v1/tokens", "/healthz", "/v1/control/")
"""What neither a device nor Flower's own processes ask for, but who starts the fleet and the run."""


def program(out: Path, name: str) -> tuple[str, ...]:
    """Returns the beginning of the command line of a program that notes its requests in `out`."""
    return (sys.executable, "-m", "harness.request_log", str(out), name)


def read_requests(out: Path, begin_s: float, end_s: float) -> Counter[str]:
    """Returns how often each path was asked for in a span of Unix time, operators left out."""
    found: Counter[str] = Counter()
    for line in out.read_text().splitlines():
        at_s, path = line.split(" ", 1)
        if begin_s <= float(at_s) < end_s and not path.startswith(BY_OPERATORS):
            found[path] += 1
    return found


class _Noted:
    """An ASGI application that notes when and for what it is asked, and hands everything on."""

    def __init__(self, app: Any, out: Path) -> None:
        self._app = app
        # Unbuffered, so that nothing is lost however the process ends.
        self._file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            os.write(self._file, f"{time.time():.6f} {scope['path']}\n".encode())
        await self._app(scope, receive, send)


def _note_requests(out: Path) -> None:
    import uvicorn  # noqa: PLC0415 reading a log needs none

    plain = uvicorn.Config.__init__

    def noting(config: Any, app: Any, *arguments: Any, **options: Any) -> None:
        plain(config, _Noted(app, out), *arguments, **options)

    uvicorn.Config.__init__ = noting  # type: ignore[method-assign]


def main(arguments: Sequence[str]) -> None:
    out, name = Path(arguments[0]), arguments[1]
    _note_requests(out)
    sys.argv = [name, *arguments[2:]]
    module, function = PROGRAMS[name]
    sys.exit(getattr(importlib.import_module(module), function)())


if __name__ == "__main__":
    main(sys.argv[1:])
