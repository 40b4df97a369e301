"""Writes the operator's file for the user of this machine; `edgefl.client` reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgefl.client import OperatorFile, load_operator_file, operator_path

if TYPE_CHECKING:
    from edgefl.coordinator.directory import CoordinatorDirectory


def save_operator_file(content: OperatorFile, path: Path | None = None) -> Path | None:
    """Writes the file and returns where another fleet's went: it is kept beside it."""
    from edgefl.files import write_whole  # noqa: PLC0415 only `coordinator` commands write

    path = path or operator_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = None
    if path.exists():
        other = load_operator_file(path)
        if other.ca_fingerprint != content.ca_fingerprint:
            kept = path.with_name(f"operator.{other.fleet}-{other.ca_fingerprint[:8]}.toml")
            path.replace(kept)
    write_whole(path, content.text().encode())
    return kept


def grant_access(
    directory: CoordinatorDirectory, path: Path | None = None
) -> tuple[CoordinatorDirectory, Path | None]:
    """Gives the user of this machine an operator file for a coordinator, unless he has a valid one.

    Returns:
        The directory, which now knows the hashes of the new tokens, and where another fleet's file was moved to.
    """
    from edgefl.coordinator.directory import add_access, token_hash  # noqa: PLC0415 as above

    path = path or operator_path()
    url = f"https://127.0.0.1:{directory.port}"
    known = load_operator_file(path) if path.exists() else None
    if known and token_hash(known.operator_token) in directory.operator_sha256:
        if known.url != url and known.url.startswith("https://127.0.0.1:"):
            save_operator_file(replace(known, url=url), path)
        return directory, None
    directory, operator, viewer = add_access(directory)
    content = OperatorFile(
        url=url,
        fleet=directory.fleet,
        ca_fingerprint=directory.ca_fingerprint(),
        ca_pem=directory.ca_cert.read_text(),
        operator_token=operator,
        viewer_token=viewer,
    )
    return directory, save_operator_file(content, path)
