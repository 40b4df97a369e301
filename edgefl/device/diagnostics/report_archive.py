"""Archive of a diagnostic report: written atomically, and read as untrusted input."""

from __future__ import annotations

import io
import json
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgefl.core.errors import DataError, VersionError
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json
from edgefl.device.diagnostics.diagnostic_report import VERSION, DiagnosticReport
from edgefl.device.hardware.sysfs import sanitise_text
from edgefl.system.atomic_files import open_atomic

FOLDER = "edgefl-report"
REPORT_FILE = f"{FOLDER}/report.json"
MAX_REPORT_BYTES = 4 << 20
MAX_DEPTH = 6
MAX_ITEMS = 40


def write_report(path: Path, report: DiagnosticReport) -> None:
    """Writes the archive with owner-only access; `report.json` comes first.

    Raises:
        DataError: it cannot be written.
    """
    files = {REPORT_FILE: json.dumps(report.facts, indent=2, ensure_ascii=False)}
    files |= {
        f"{FOLDER}/{name}": text
        for name, text in {**report.texts, "summary.txt": format_summary(report.facts)}.items()
    }
    try:
        with open_atomic(path) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, text in files.items():
                content = text.encode(errors="replace")
                member = tarfile.TarInfo(name)
                member.size, member.mtime, member.mode = len(content), int(report.facts["made_at"]), 0o600
                archive.addfile(member, io.BytesIO(content))
    except OSError as error:
        raise DataError(f"report {path} cannot be written: {error.strerror}") from None


def read_report(path: Path) -> Json:
    """Returns the `report.json` of an archive; unpacks nothing to disk, trusts no length.

    Raises:
        DataError: it is no diagnostic report.
        VersionError: a newer edgefl made it.
    """
    try:
        with tarfile.open(path, mode="r|gz") as archive:
            first = archive.next()
            file = archive.extractfile(first) if first is not None and first.name == REPORT_FILE else None
            raw = file.read(MAX_REPORT_BYTES + 1) if file is not None else b""
        facts: Any = parse_json(raw) if 0 < len(raw) <= MAX_REPORT_BYTES else None
    # TypeError: raised by tarfile for a file that ends within gzip's header.
    except (OSError, tarfile.TarError, zlib.error, EOFError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is no field report: {error}") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("v"), int):
        raise DataError(f"{path} is no field report: its first file must be {REPORT_FILE} of at most 4 MB")
    if facts["v"] > VERSION:
        raise VersionError(f"{path} is a report of version {facts['v']}, this edgefl reads {VERSION}: update it")
    return facts


def format_summary(facts: Mapping[str, Any]) -> str:
    """Returns the report as text: one fact a line, without terminal control characters."""
    return "\n".join(_format_lines(facts, ())) + "\n"


def _format_lines(value: Any, path: Sequence[str]) -> list[str]:
    if isinstance(value, Mapping) and len(path) < MAX_DEPTH:
        return [line for key, item in value.items() for line in _format_lines(item, (*path, str(key)))]
    if isinstance(value, list) and len(path) < MAX_DEPTH and any(isinstance(item, Mapping) for item in value):
        rows = [
            line
            for number, item in enumerate(value[:MAX_ITEMS])
            for line in _format_lines(item, (*path, str(number)))
        ]
        return [*rows, *([f"{'.'.join(path)}: {len(value)} in all"] if len(value) > MAX_ITEMS else [])]
    line = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return [f"{sanitise_text('.'.join(path)) or '-'}: {sanitise_text(line) or '-'}"]
