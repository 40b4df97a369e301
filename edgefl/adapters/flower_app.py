"""Writes a Flower app that runs the strategy and task of a run file without a coordinator of ours.

Flower installs what an app depends on by its name, on every node, and an app can hold no wheel. So edgefl is none of
its dependencies: the app holds it as source, which Flower imports before anything that is installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from edgefl import DISTRIBUTION, __version__
from edgefl.config import RunConfig
from edgefl.errors import ConfigError, DataError, UsageError
from edgefl.tasks.backends import needs_torch
from edgefl.tasks.registry import make_task
from edgefl.types import Json

PACKAGE = "edgefl_app"
LEFT_OUT = frozenset({"bundles", "cli", "coordinator", "history", "provision", "simulation"})
"""Folders of edgefl that no app imports."""
_NOT_OF_FLOWER = ("safetensors", "zstandard")
"""What edgefl imports in every app and Flower does not bring."""
_OF_TASKS = {"digits": ("scikit-learn",)}
_SOURCE = Path(__file__).parents[1]
_EXTRA = re.compile(r"""(?:;|\s+and)\s*extra == ['"][\w-]+['"]\Z""")
_PLACE = re.compile(r"@([A-Z]+)@")
_INSTALLED = {"site-packages", "dist-packages"}


def write_flower_app(config: RunConfig, out: Path, *, scheme: str, name: str | None = None) -> list[Path]:
    """Returns the files of the app, written into `out`; edgefl's own source counts as one, its folder.

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
    own = _own_modules(config)
    values = _values(config, scheme, name)
    contents = {
        "LICENSE": _installed().read_text("licenses/LICENSE") or "Apache-2.0\n",
        f"{PACKAGE}/__init__.py": f'"""{values["DESCRIPTION"]}."""\n',
        f"{PACKAGE}/run.toml": to_toml(config.to_json()),
    }
    for template in ("pyproject.toml", "README.md", "server_app.py", "client_app.py"):
        text = files("edgefl.adapters").joinpath("app_template", f"{template}.txt").read_text(encoding="utf-8")
        place = f"{PACKAGE}/{template}" if template.endswith(".py") else template
        contents[place] = _PLACE.sub(lambda found: values[found[1]], text)
    contents |= {path.name: path.read_text(encoding="utf-8") for path in own}
    written = [_write(out / place, text) for place, text in contents.items()]
    for source in sorted(_SOURCE.rglob("*.py")):
        if source.relative_to(_SOURCE).parts[0] not in LEFT_OUT:
            _write(out / source.relative_to(_SOURCE.parent), source.read_text(encoding="utf-8"))
    return [*written, out / _SOURCE.name]


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
        "DEPENDENCIES": json.dumps(_dependencies(config)),
        "PACKAGE": PACKAGE,
        "SCHEME": _text(scheme),
        "DATA": _text(config.simulation.data or ""),
        "EXTRA": extra,
    }


def _dependencies(config: RunConfig) -> list[str]:
    """Returns what Flower is to install for the app, as edgefl itself requires it."""
    names = {*_NOT_OF_FLOWER, *_OF_TASKS.get(config.run.task, ())}
    if needs_torch(make_task(config.run.task, config.task)):
        names.add("torch")
    required = _installed().requires or []
    chosen = [_EXTRA.sub("", line) for line in required if re.split(r"[^\w.-]", line, maxsplit=1)[0] in names]
    return sorted(set(chosen))


def _installed() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"what an app depends on is read from the installed {DISTRIBUTION}, and none is installed here; "
            "in a folder with its source: pip install -e ."
        ) from None


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
