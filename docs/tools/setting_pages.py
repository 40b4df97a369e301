"""The reference of settings, from the configuration classes and from what strategies declare."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import griffe
from click.testing import CliRunner
from markup import code, names_joined, prose, sections, table

from edgefl.cli.main import edgefl
from edgefl.compression.registry import STAGE_DESCRIPTIONS, list_stages
from edgefl.core import config

_BOUNDS = {"above": ">", "at_least": "≥", "below": "<", "at_most": "≤"}
_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def run_file() -> str:
    """Returns a part for each section of a run file."""
    return sections(
        part
        for item in fields(config.RunConfig)
        if is_dataclass(kind := get_type_hints(config.RunConfig)[item.name])
        for part in _section(kind, f"[{item.name}]")
    )


def coordinator_settings() -> str:
    """Returns a part for each table of the coordinator's settings.toml that an owner may change."""
    tables = {
        "[alerts]": config.AlertSettings,
        "[certificates]": config.CertificateSettings,
        "[connections]": config.ConnectionSettings,
        "[home_assistant]": config.HomeAssistantSettings,
    }
    return sections(part for title, kind in tables.items() for part in _section(kind, title))


def strategy_settings() -> str:
    """Returns a table for each strategy that is built in, as `edgefl strategies list --format json` tells them."""
    rows = json.loads(CliRunner().invoke(edgefl, ["strategies", "list", "--format", "json"]).stdout)
    parts = []
    for row in rows["rows"] if isinstance(rows, dict) else rows:
        if row["settings"]:
            settings = ((code(name), _shown(default)) for name, default in row["settings"].items())
            parts += [f"### `{row['name']}`", row["summary"], table(("setting", "default"), settings)]
    return sections(parts)


def codec_stages() -> str:
    """Returns a table of the stages of codecs that are built in, as `edgefl codecs list` has them."""
    own = [row for row in list_stages() if row.name in STAGE_DESCRIPTIONS]
    rows = ((code(row.name), row.argument and code(row.argument), row.kind, prose(row.summary)) for row in own)
    return table(("stage", "argument", "kind", "what it does"), rows)


def _section(kind: Any, title: str) -> Iterator[str]:
    text, meanings = _docstring(kind)
    yield f"## `{title}`"
    yield re.sub(r"^`\[\w+\]`(?: in the coordinator's `settings.toml`)?: (.)", lambda found: found[1].upper(), text)
    hints = get_type_hints(kind)
    rows = [
        (
            code(item.name),
            _kind(hints[item.name], item),
            _default(item),
            *([meanings.get(item.name, "")] if meanings else []),
        )
        for item in fields(kind)
        if item.name != "options"
    ]
    yield table(("setting", "value", "default", *(["meaning"] if meanings else [])), rows)


def _docstring(kind: Any) -> tuple[str, dict[str, str]]:
    """Returns the text of a class and the meaning of each attribute; one line may speak of several."""
    texts, meanings = [], {}
    for part in griffe.Docstring(names_joined(kind.__doc__ or ""), parser="google").parsed:
        if part.kind is griffe.DocstringSectionKind.text:
            texts.append(part.value)
        else:
            for item in part.value:
                meanings |= {name.strip(): item.description for name in item.name.split(",")}
    return "\n\n".join(texts), meanings


def _kind(kind: Any, item: Field[Any]) -> str:
    if get_origin(kind) in (UnionType, Union):
        return " or ".join(_kind(option, item) for option in get_args(kind) if option is not NoneType)
    if get_origin(kind) is Literal:
        return " or ".join(code(f'"{value}"') for value in get_args(kind))
    bounds = [
        f"{sign} {item.metadata[name]:g}"
        for name, sign in _BOUNDS.items()
        if name in item.metadata and item.metadata[name] != config.MAX_SEED
    ]
    if kind not in _WORDS:
        return "list of texts" if get_origin(kind) is tuple else "table"
    return " ".join([_WORDS[kind], ", ".join(bounds) if kind in (int, float) else ""]).strip()


def _default(item: Field[Any]) -> str:
    if item.default_factory is not MISSING:
        return "empty"
    if item.default is MISSING:
        return "*needed*"
    return "" if item.default in (None, ()) else _shown(item.default)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        value = list(value)
    return code(json.dumps(value, ensure_ascii=False))
