"""Folder of a Flower app: its `pyproject.toml`, and the files that are sent; none of its code is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from edgefl.core.errors import ConfigError
from edgefl.core.safe_parsing import parse_toml
from edgefl.core.safe_text import is_safe_text
from edgefl.core.types import DEMO_MARKER, Scalar

CONFIG_FILE = "pyproject.toml"
MAX_APP_BYTES = 10 * 1024 * 1024
"""Flower's own limit for a bundle."""
MAX_FILES = 2000
IGNORE_FILE = ".gitignore"
INCLUDED = ("*.json", "*.jsonl", "*.md", "*.py", "*.toml", "*.yaml", "*.yml", "/LICENSE")
"""Patterns as in a `.gitignore`: what Flower sends where the app names nothing else."""
EXCLUDED = (
    ".*", "__pycache__", "test_*.py", "*_test.py", "*.egg", "/build/", "/dist/", "/eggs/", "/env/", "/ENV/",
    "/env.bak/", "/lib/", "/lib64/", "/node_modules/", "/parts/", "/venv/", "/venv.bak/", "operator.toml",
)  # fmt: skip
"""What is never sent: what Flower leaves out, what begins with a dot, an operator's token, folders of tools."""
_MARKERS = frozenset({DEMO_MARKER, "coordinator.key"})
"""Files of a demo's and of a coordinator's folder: nothing of a folder with one is sent."""
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
        content: of `pyproject.toml`, without the federations of Flower, which boards need not know.
        has_federations: whether there are any.
    """

    root: Path
    name: str
    version: str
    server: str
    client: str
    config: Mapping[str, Scalar]
    dependencies: tuple[str, ...]
    files: tuple[PurePosixPath, ...]
    content: Mapping[str, Any]
    has_federations: bool

    @property
    def num_bytes(self) -> int:
        return sum((self.root / file).stat().st_size for file in self.files)


def read_app(root: Path, *, is_packed: bool = False) -> AppFolder:
    """Returns the app in a folder.

    Args:
        root: the folder.
        is_packed: it is one of a pack, where all files are those that were sent.

    Raises:
        ConfigError: there is no `pyproject.toml`, or it does not describe an app with ServerApp and ClientApp.
    """
    path = root / CONFIG_FILE
    try:
        content = parse_toml(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); give a Flower app, its folder or its .fab"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    project, flwr = _get_table(content, "project", path), _get_table(content, "tool.flwr", path)
    app = _get_table(content, "tool.flwr.app", path)
    components = _get_table(content, "tool.flwr.app.components", path)
    dependencies = project.get("dependencies", [])
    if not isinstance(dependencies, list) or not all(
        isinstance(line, str) and is_safe_text(line) for line in dependencies
    ):
        raise ConfigError(
            f"{path}: project.dependencies must be a list of texts of one line each, got {dependencies!r:.80}"
        )
    return AppFolder(
        root=root,
        name=_get_text(project, "name", "project", path, _NAME),
        version=_get_text(project, "version", "project", path, _VERSION),
        server=_get_component(components, "serverapp", path),
        client=_get_component(components, "clientapp", path),
        config=flatten_config(app.get("config", {}), f"{path}: tool.flwr.app.config"),
        dependencies=tuple(dependencies),
        files=tuple(_list_files(root, _select_all if is_packed else _make_selection(root, app, path))),
        content={**content, "tool": {**content["tool"], "flwr": _without_federations(flwr)}},
        has_federations="federations" in flwr,
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


def _without_federations(flwr: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flwr.items() if key != "federations"}


def _list_files(root: Path, select: Callable[[Iterable[str]], Iterable[str]]) -> Iterator[PurePosixPath]:
    """Yields the files that are sent, sorted; always `pyproject.toml`."""
    places = (
        file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file() and not file.is_symlink()
    )
    for number, place in enumerate(sorted({CONFIG_FILE, *select(places)})):
        if number >= MAX_FILES:
            raise ConfigError(f"{root} has more than {MAX_FILES} files; leave out with tool.flwr.app.fab-exclude")
        yield PurePosixPath(place)


def _select_all(places: Iterable[str]) -> Iterable[str]:
    """Returns the files of a pack: all but what Python compiled them to when they were installed."""
    return (place for place in places if "__pycache__" not in PurePosixPath(place).parts)


def _make_selection(root: Path, app: Mapping[str, Any], path: Path) -> Callable[[Iterable[str]], Iterable[str]]:
    """Returns what selects the files that are sent: `fab-include` or Flower's usual kinds, less what is ignored."""
    from pathspec import GitIgnoreSpec  # noqa: PLC0415 boards do not have it

    def parse(key: str, lines: Sequence[str]) -> GitIgnoreSpec:
        try:
            return GitIgnoreSpec.from_lines(lines)
        except ValueError as error:
            raise ConfigError(f"{root}: {key}: {error}") from None

    try:
        ignored = (root / IGNORE_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        ignored = []
    except (OSError, UnicodeDecodeError) as error:  # what it leaves out must not be sent
        raise ConfigError(f"{root / IGNORE_FILE} cannot be read: {error}") from None
    included = parse("fab-include", _get_patterns(app, "fab-include", path) or INCLUDED)
    excluded = [
        parse(key, lines)
        for key, lines in (
            (IGNORE_FILE, ignored),
            ("fab-exclude", _get_patterns(app, "fab-exclude", path)),
            ("", EXCLUDED),
        )
    ]

    def select(places: Iterable[str]) -> Iterable[str]:
        places = _leave_out_marked(places)
        for spec in excluded:
            places = spec.match_files(places, negate=True)
        return included.match_files(places)

    return select


def _leave_out_marked(places: Iterable[str]) -> list[str]:
    """Returns the files that are not in the folder of a demo, or of a coordinator, beside or in the app."""
    paths = [PurePosixPath(place) for place in places]
    marked = {path.parent for path in paths if path.name in _MARKERS} - {PurePosixPath()}
    return [str(path) for path in paths if marked.isdisjoint(path.parents)]


def _get_patterns(app: Mapping[str, Any], key: str, path: Path) -> tuple[str, ...]:
    patterns = app.get(key, [])
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(f"{path}: tool.flwr.app.{key} must be a list of texts, got {patterns!r:.80}")
    return tuple(patterns)
