"""Writes a Flower app that runs the strategy and task of a run file without a coordinator of ours."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from edgefl import __version__
from edgefl.config import RunConfig
from edgefl.errors import ConfigError, DataError, UsageError
from edgefl.types import Json

PACKAGE = "edgefl_app"
_PLACE = re.compile(r"@([A-Z]+)@")
_INSTALLED = {"site-packages", "dist-packages"}


def write_flower_app(config: RunConfig, out: Path, *, scheme: str, name: str | None = None) -> list[Path]:
    """Returns the files of the app, written into `out`.

    A strategy or task of the user's own (`module:Class`) that is one file and not installed goes into the app.

    Args:
        config: the run, written out with every default.
        out: a folder that does not exist yet, or is empty.
        scheme: how nodes without a shard cut the task's data set.
        name: of the app; None takes the run's.

    Raises:
        UsageError: there is something in `out`.
        ConfigError: what the run file names is not on this machine, or cannot be done by stock nodes.
        DataError: `out` cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not an empty folder; choose another one with --out")
    if config.strategy.name == "esync" and config.strategy.options.get("mode") == "live":
        raise ConfigError(
            "strategy.mode = 'live' needs devices that can be recalled, which stock Flower nodes cannot be; "
            "export it with mode = 'budget'"
        )
    values = _values(config, scheme, name)
    contents = {
        f"{PACKAGE}/__init__.py": f'"""{values["DESCRIPTION"]}."""\n',
        f"{PACKAGE}/run.toml": to_toml(config.to_json()),
    }
    for template in ("pyproject.toml", "README.md", "server_app.py", "client_app.py"):
        text = files("edgefl.adapters").joinpath("app_template", f"{template}.txt").read_text(encoding="utf-8")
        place = f"{PACKAGE}/{template}" if template.endswith(".py") else template
        contents[place] = _PLACE.sub(lambda found: values[found[1]], text)
    contents |= {path.name: path.read_text(encoding="utf-8") for path in _own_modules(config)}
    return [_write(out / place, text) for place, text in contents.items()]


def to_toml(sections: Mapping[str, Mapping[str, object]]) -> str:
    """Returns tables of texts, numbers, truth values and lists of them as TOML."""
    lines = ["# Every setting of the run, defaults too.\n"]
    for section, table in sections.items():
        lines.append(f"[{section}]\n")
        lines += [f"{_key(key)} = {_toml_value(value)}\n" for key, value in table.items()]
    return "".join(lines)


def _values(config: RunConfig, scheme: str, name: str | None) -> dict[str, str]:
    strategy, task = config.strategy.name, config.run.task
    slug = re.sub(r"[^a-z0-9]+", "-", (name or config.run.name or f"{strategy}-{task}").lower()).strip("-")
    missing = "" if config.run.init is None else f"\nThe first model is read from `{config.run.init}`.\n"
    needed = [each for each in (strategy, task) if ":" in each and not _is_flowers(each)]
    extra = missing + "".join(
        f"\n`{each}` must be importable on every machine, or lie in this folder.\n" for each in needed
    )
    return {
        "NAME": slug or "edgefl-run",
        "DESCRIPTION": f"{_text(strategy)} on {_text(task)}, as edgefl runs it",
        "VERSION": __version__,
        "PACKAGE": PACKAGE,
        "SCHEME": _text(scheme),
        "DATA": _text(config.simulation.data or ""),
        "EXTRA": extra,
    }


def _own_modules(config: RunConfig) -> list[Path]:
    """Returns the files of the user's own modules that no package brings to the nodes."""
    own = []
    for name in (config.strategy.name, config.run.task):
        module, _, attribute = name.partition(":")
        if not attribute or _is_flowers(name):
            continue
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            found = None
        if found is None or found.origin is None:
            raise ConfigError(f"the module of {name} is not found; it must be importable here, as with edgefl run")
        path = Path(found.origin)
        if "." not in module and path.suffix == ".py" and path.stem == module and not _INSTALLED & set(path.parts):
            own.append(path)
    return own


def _is_flowers(name: str) -> bool:
    return name.startswith("flwr:")


def _write(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None
    return path


def _text(value: str) -> str:
    """Returns a text as it stands between the quotes of a TOML string."""
    return json.dumps(value, ensure_ascii=False)[1:-1]


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _toml_value(value: Json | object) -> str:
    # JSON's texts, truth values and lists of texts are TOML's; a float keeps its point, or it would come back whole.
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
