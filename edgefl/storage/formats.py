"""Formats of files that are kept: what is said of one that only a newer edgefl can read."""

from __future__ import annotations

from edgefl.errors import StoreTooNewError


def check_format(what: str, found: object, known: int) -> None:
    """Makes sure that a file is not of a later format than this program knows.

    Raises:
        StoreTooNewError: it is.
        ValueError: there has never been such a format.
    """
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"format {found!r:.40}, this program knows {known}")
    if found > known:
        raise StoreTooNewError(
            f"{what} has format {found}, this program knows {known}: a newer edgefl wrote it; start a newer edgefl"
        )
