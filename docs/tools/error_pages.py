"""The table of errors and exit codes, from the error tree and the text above it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from markup import code, table

from edgefl.core import errors as tree
from edgefl.core.errors import EdgeflError
from edgefl.core.protocol import error_code


def errors() -> str:
    """Returns exit code, class, code over HTTPS and meaning of every error, by exit code."""
    meanings = dict(re.findall(r"(\w+Error)\s+\d+\s+(.+)", tree.__doc__ or ""))
    rows = (
        (str(kind.exit_code), code(kind.__name__), code(error_code(kind(""))), meanings[kind.__name__])
        for kind in sorted(_kinds(EdgeflError), key=lambda kind: kind.exit_code)
    )
    return table(("exit code", "error", "over HTTPS", "meaning"), rows)


def _kinds(kind: type[EdgeflError]) -> Iterator[type[EdgeflError]]:
    if kind.__module__ == tree.__name__:
        yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)
