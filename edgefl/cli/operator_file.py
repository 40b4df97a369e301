"""Writes the operator file of this machine's user; `edgefl.system.api_client` reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgefl.system.api_client import OperatorFile, get_operator_path, load_operator_file

if TYPE_CHECKING:
    from edgefl.coordinator.directory import CoordinatorDirectory


def save_operator_file(content: OperatorFile, path: Path | None = None) -> Path | None:
    """Writes the file; returns the new path of another fleet's file, which is kept beside it."""
    from edgefl.system.atomic_files import write_atomic  # noqa: PLC0415 only `coordinator` commands write

    path = path or get_operator_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    moved_path = None
    if path.exists():
        other = load_operator_file(path)
        if other.ca_fingerprint != content.ca_fingerprint:
            moved_path = path.with_name(f"operator.{other.fleet}-{other.ca_fingerprint[:8]}.toml")
            path.replace(moved_path)
    write_atomic(path, content.to_toml().encode())
    return moved_path


def grant_access(
    directory: CoordinatorDirectory, path: Path | None = None
) -> tuple[CoordinatorDirectory, Path | None]:
    """Gives this machine's user an operator file for a coordinator, unless a valid one exists.

    Returns:
        The directory with the hashes of the new tokens, and the new path of another fleet's file.
    """
    from edgefl.coordinator.directory import add_access_tokens, hash_token  # noqa: PLC0415 as above

    path = path or get_operator_path()
    url = f"https://127.0.0.1:{directory.port}"
    existing = load_operator_file(path) if path.exists() else None
    if existing and hash_token(existing.operator_token) in directory.operator_sha256:
        if existing.url != url and existing.url.startswith("https://127.0.0.1:"):
            save_operator_file(replace(existing, url=url), path)
        return directory, None
    directory, operator, viewer = add_access_tokens(directory)
    content = OperatorFile(
        url=url,
        fleet=directory.fleet,
        ca_fingerprint=directory.compute_ca_fingerprint(),
        ca_pem=directory.ca_cert.read_text(),
        operator_token=operator,
        viewer_token=viewer,
    )
    return directory, save_operator_file(content, path)
