"""The file of a field report: written whole, and read as something that a stranger sent."""

from __future__ import annotations

import io
import json
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgefl.device.board.board_files import plain
from edgefl.device.report.field_report import VERSION, FieldReport
from edgefl.errors import DataError, VersionError
from edgefl.files import open_whole
from edgefl.types import Json
from edgefl.untrusted import parse_json

FOLDER = "edgefl-report"
REPORT = f"{FOLDER}/report.json"
MAX_REPORT_BYTES = 4 << 20
MAX_NESTED = 6
SHOWN_ITEMS = 40


def write_report(path: Path, report: FieldReport) -> None:
    """Writes the archive, for its owner alone; `report.json` comes first.

    Raises:
        DataError: it cannot be written.
    """
    files = {REPORT: json.dumps(report.facts, indent=2, ensure_ascii=False)}
    files |= {
        f"{FOLDER}/{name}": text for name, text in {**report.texts, "summary.txt": summary(report.facts)}.items()
    }
    try:
        with open_whole(path) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, text in files.items():
                content = text.encode(errors="replace")
                member = tarfile.TarInfo(name)
                member.size, member.mtime, member.mode = len(content), int(report.facts["made_at"]), 0o600
                archive.addfile(member, io.BytesIO(content))
    except OSError as error:
        raise DataError(f"report {path} cannot be written: {error.strerror}") from None


def read_report(path: Path) -> Json:
    """Returns the `report.json` of an archive; nothing is unpacked to the disk, and no length is trusted.

    Raises:
        DataError: it is no field report.
        VersionError: a newer edgefl made it.
    """
    try:
        with tarfile.open(path, mode="r|gz") as archive:
            first = archive.next()
            file = archive.extractfile(first) if first is not None and first.name == REPORT else None
            raw = file.read(MAX_REPORT_BYTES + 1) if file is not None else b""
        facts: Any = parse_json(raw) if 0 < len(raw) <= MAX_REPORT_BYTES else None
    # TypeError: what tarfile makes of a file that ends within gzip's header.
    except (OSError, tarfile.TarError, zlib.error, EOFError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is no field report: {error}") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("v"), int):
        raise DataError(f"{path} is no field report: its first file must be {REPORT} of at most 4 MB")
    if facts["v"] > VERSION:
        raise VersionError(f"{path} is a report of version {facts['v']}, this edgefl reads {VERSION}: update it")
    return facts


def summary(facts: Mapping[str, Any]) -> str:
    """Returns the report for people: one fact a line, without what could move a terminal's cursor."""
    return "\n".join(_told(facts, ())) + "\n"


def _told(value: Any, where: Sequence[str]) -> list[str]:
    if isinstance(value, Mapping) and len(where) < MAX_NESTED:
        return [line for key, item in value.items() for line in _told(item, (*where, str(key)))]
    if isinstance(value, list) and len(where) < MAX_NESTED and any(isinstance(item, Mapping) for item in value):
        rows = [
            line for number, item in enumerate(value[:SHOWN_ITEMS]) for line in _told(item, (*where, str(number)))
        ]
        return [*rows, *([f"{'.'.join(where)}: {len(value)} in all"] if len(value) > SHOWN_ITEMS else [])]
    line = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return [f"{plain('.'.join(where)) or '-'}: {plain(line) or '-'}"]
