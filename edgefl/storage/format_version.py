"""Version check of stored file formats."""

from __future__ import annotations

from edgefl.core.errors import StoreTooNewError


def check_format_version(what: str, found: object, supported: int) -> None:
    """Checks that a file's format is not newer than this program's.

    Raises:
        StoreTooNewError: it is.
        ValueError: there has never been such a format.
    """
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"format {found!r:.40}, this program knows {supported}")
    if found > supported:
        raise StoreTooNewError(
            f"{what} has format {found}, this program knows {supported}: "
            "a newer edgefl wrote it; start a newer edgefl"
        )
