"""Folder of a Flower app: its `pyproject.toml`, and the files that are sent; none of its code is run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from edgefl.core.errors import ConfigError
from edgefl.core.safe_parsing import parse_toml
from edgefl.core.types import Scalar

CONFIG_FILE = "pyproject.toml"
MAX_APP_BYTES = 10 * 1024 * 1024
"""Flower's own limit for a bundle."""
MAX_FILES = 2000
SENT_SUFFIXES = frozenset({".json", ".jsonl", ".md", ".py", ".toml", ".yaml", ".yml"})
SKIPPED_FOLDERS = frozenset({"__pycache__", "build", "dist", "eggs", "env", "node_modules", "venv"})
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,60}[A-Za-z0-9])?\Z")
_VERSION = re.compile(r"[0-9]+(\.[0-9]+){0,3}((a|b|rc)[0-9]+)?\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class AppFolder:
    """A Flower app as its files describe it.

    Attributes:
        root: the folder.
        name: of the project.
        version: of the project.
        server: `module:attribute` of the ServerApp.
        client: `module:attribute` of the ClientApp.
        config: run configuration by name, with dots between the names of nested tables.
        dependencies: of the project, as they are written.
        files: that are sent, sorted, relative to the folder.
        table: `[tool.flwr]`, whole.
    """

    root: Path
    name: str
    version: str
    server: str
    client: str
    config: Mapping[str, Scalar]
    dependencies: tuple[str, ...]
    files: tuple[PurePosixPath, ...]
    table: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum((self.root / file).stat().st_size for file in self.files)


def read_app(root: Path) -> AppFolder:
    """Returns the app in a folder.

    Raises:
        ConfigError: there is no `pyproject.toml`, or it does not describe an app with ServerApp and ClientApp.
    """
    path = root / CONFIG_FILE
    if root.suffix == ".fab":
        raise ConfigError(f"{root} is a bundle; give the folder that it was built from")
    try:
        content = parse_toml(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give the folder of a Flower app") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    project, flwr = _get_table(content, "project", path), _get_table(content, "tool.flwr", path)
    app = _get_table(content, "tool.flwr.app", path)
    components = _get_table(content, "tool.flwr.app.components", path)
    dependencies = project.get("dependencies", [])
    if not isinstance(dependencies, list) or not all(isinstance(line, str) for line in dependencies):
        raise ConfigError(f"{path}: project.dependencies must be a list of texts, got {dependencies!r:.80}")
    return AppFolder(
        root=root,
        name=_get_text(project, "name", "project", path, _NAME),
        version=_get_text(project, "version", "project", path, _VERSION),
        server=_get_component(components, "serverapp", path),
        client=_get_component(components, "clientapp", path),
        config=flatten_config(app.get("config", {}), f"{path}: tool.flwr.app.config"),
        dependencies=tuple(dependencies),
        files=tuple(_list_files(root, app, path)),
        table=flwr,
    )


def flatten_config(table: object, where: str) -> dict[str, Scalar]:
    """Returns a run configuration with dots between the names of nested tables, as Flower's apps get it.

    Raises:
        ConfigError: `where`, a value is no text, number or true/false.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table, got {table!r:.80}")
    values: dict[str, Scalar] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            values |= {f"{name}.{inner}": one for inner, one in flatten_config(value, f"{where}.{name}").items()}
        elif isinstance(value, str | int | float):
            values[name] = value
        else:
            raise ConfigError(f"{where}.{name} must be a text, a number or true/false, got {value!r:.80}")
    return values


def find_module(app: AppFolder, module: str) -> PurePosixPath | None:
    """Returns the file of a module among those that are sent; None for a module of somebody else."""
    parts = module.split(".")
    candidates = (PurePosixPath(*parts[:-1], f"{parts[-1]}.py"), PurePosixPath(*parts, "__init__.py"))
    return next((candidate for candidate in candidates if candidate in app.files), None)


def _get_table(content: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    table: Any = content
    for part in name.split("."):
        table = table.get(part) if isinstance(table, Mapping) else None
    if isinstance(table, Mapping):
        return table
    tool = content.get("tool")
    old = content.get("flower") or (isinstance(tool, Mapping) and isinstance(tool.get("flwr"), Mapping))
    hint = " (tables of Flower before 1.9 are not read)" if old and name.startswith("tool.flwr.app") else ""
    raise ConfigError(f"{path}: there is no table [{name}], so it is no Flower app{hint}")


def _get_text(table: Mapping[str, Any], key: str, where: str, path: Path, pattern: re.Pattern[str]) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not pattern.match(value):
        raise ConfigError(f"{path}: {where}.{key} must be a {key} such as {_EXAMPLES[key]}, got {value!r:.80}")
    return value


_EXAMPLES = {"name": "my-app", "version": "1.0.0"}


def _get_component(components: Mapping[str, Any], key: str, path: Path) -> str:
    value = components.get(key)
    module, _, attribute = value.partition(":") if isinstance(value, str) else ("", "", "")
    if not attribute.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(
            f"{path}: tool.flwr.app.components.{key} must be module:attribute, such as my_app.{key[:6]}_app:app, "
            f"got {value!r:.80}"
        )
    return f"{module}:{attribute}"


def _list_files(root: Path, app: Mapping[str, Any], path: Path) -> Iterator[PurePosixPath]:
    """Yields the files that are sent: of Flower's usual kinds, or those that `fab-include` names."""
    included, excluded = (_get_patterns(app, key, path) for key in ("fab-include", "fab-exclude"))
    num_files = 0
    for file in sorted(root.rglob("*")):
        place = PurePosixPath(file.relative_to(root).as_posix())
        if any(part.startswith(".") or part in SKIPPED_FOLDERS for part in place.parts):
            continue
        is_selected = _matches(place, included) if included else place.suffix in SENT_SUFFIXES
        if not is_selected or _matches(place, excluded) or not file.is_file() or file.is_symlink():
            continue
        num_files += 1
        if num_files > MAX_FILES:
            raise ConfigError(f"{root} has more than {MAX_FILES} files; leave out with tool.flwr.app.fab-exclude")
        yield place


def _get_patterns(app: Mapping[str, Any], key: str, path: Path) -> tuple[str, ...]:
    patterns = app.get(key, [])
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(f"{path}: tool.flwr.app.{key} must be a list of texts, got {patterns!r:.80}")
    return tuple(patterns)


def _matches(place: PurePosixPath, patterns: tuple[str, ...]) -> bool:
    return any(
        fnmatchcase(str(place), pattern.removeprefix("/"))
        or (pattern.startswith("**/") and fnmatchcase(str(place), pattern[3:]))
        for pattern in patterns
    )
