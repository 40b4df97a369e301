"""Exports the strategy and task of a run file as a Flower app that needs no coordinator.

Flower installs an app's dependencies by name on every node, and an app cannot contain a wheel. So edgefl is not a
dependency: the app contains its source, which Flower imports before anything installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from importlib.resources import files
from pathlib import Path

from edgefl import DISTRIBUTION, __version__
from edgefl.core.analyses import ANALYSES
from edgefl.core.config import RunConfig
from edgefl.core.errors import ConfigError, DataError, UsageError
from edgefl.core.extensions import check_allowed
from edgefl.core.safe_parsing import format_toml
from edgefl.tasks.configured.options import NORMALISE, NORMALISED_TASKS
from edgefl.tasks.registry import is_torch_task, make_task

PACKAGE = "edgefl_app"
EXCLUDED_FOLDERS = frozenset({"cli", "coordinator", "history", "provision", "simulation", "system/bundles"})
"""Folders of edgefl that apps do not import."""
_EXTRA_DEPENDENCIES = ("safetensors", "zstandard")
"""Dependencies of edgefl in every app that Flower does not install."""
_TASK_DEPENDENCIES = {"digits": ("scikit-learn",)}
_SOURCE = Path(__file__).parents[1]
_EXTRA_MARKER = re.compile(r"""(?:;|\s+and)\s*extra == ['"][\w-]+['"]\Z""")
_PLACEHOLDER = re.compile(r"@([A-Z]+)@")
_INSTALL_FOLDERS = {"site-packages", "dist-packages"}


def export_flower_app(config: RunConfig, out: Path, *, scheme: str, name: str | None = None) -> list[Path]:
    """Returns the files of the app, written into `out`; edgefl's own source counts as one, its folder.

    A strategy or task of the user's own (`module:Class`) that is one file and not installed goes into the app.

    Args:
        config: the run, written out with every default.
        out: a folder that does not exist yet, or is empty.
        scheme: partitioning of the task's data set for nodes without a shard.
        name: of the app; None takes the run's.

    Raises:
        UsageError: `out` is not empty.
        ConfigError: the run file names something missing here, or unsupported by stock nodes.
        DataError: `out` cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not an empty folder; choose another one with --out")
    if config.job.name:
        raise ConfigError("job: a Flower app trains a model; a job needs a fleet of edgefl")
    if config.strategy.name in ANALYSES:
        raise ConfigError(
            f"strategy.name = {config.strategy.name!r} asks boards for sums; it needs a fleet of edgefl"
        )
    if config.run.task in NORMALISED_TASKS and config.task.get(NORMALISE):
        raise ConfigError(
            "task.normalise asks boards for sums before the first round; it needs a fleet of edgefl. Write the "
            "numbers of a run into means and scales"
        )
    mode = config.strategy.options.get("mode", "budget") if config.strategy.name == "esync" else "budget"
    if mode != "budget":
        raise ConfigError(
            f"strategy.mode = {mode!r} needs devices that can be recalled, which stock Flower nodes cannot be; "
            "export it with mode = 'budget'"
        )
    if config.aggregation.is_collective:
        raise ConfigError(
            f"aggregation.collective = {config.aggregation.collective!r} needs devices that connect to each other, "
            "which stock Flower nodes do not; export it with 'coordinator'"
        )
    user_modules = _find_user_modules(config)
    values = _make_template_values(config, scheme, name)
    contents = {
        "LICENSE": _get_distribution().read_text("licenses/LICENSE") or "Apache-2.0\n",
        f"{PACKAGE}/__init__.py": f'"""{values["DESCRIPTION"]}."""\n',
        f"{PACKAGE}/run.toml": "# Every setting of the run, defaults too.\n" + format_toml(config.to_json()),
    }
    for template in ("pyproject.toml", "README.md", "server_app.py", "client_app.py"):
        text = files("edgefl.flower").joinpath("app_template", f"{template}.txt").read_text(encoding="utf-8")
        target = f"{PACKAGE}/{template}" if template.endswith(".py") else template
        contents[target] = _PLACEHOLDER.sub(lambda match: values[match[1]], text)
    contents |= {path.name: path.read_text(encoding="utf-8") for path in user_modules}
    paths = [_write(out / target, text) for target, text in contents.items()]
    for source in sorted(_SOURCE.rglob("*.py")):
        if not any(source.is_relative_to(_SOURCE / folder) for folder in EXCLUDED_FOLDERS):
            _write(out / source.relative_to(_SOURCE.parent), source.read_text(encoding="utf-8"))
    return [*paths, out / _SOURCE.name]


def _make_template_values(config: RunConfig, scheme: str, name: str | None) -> dict[str, str]:
    strategy, task = config.strategy.name, config.run.task
    slug = re.sub(r"[^a-z0-9]+", "-", (name or config.run.name or f"{strategy}-{task}").lower()).strip("-")
    missing = "" if config.run.init is None else f"\nThe first model is read from `{config.run.init}`.\n"
    class_paths = [
        class_path for class_path in (strategy, task) if ":" in class_path and not _is_flower_name(class_path)
    ]
    modules = {name.partition(":")[0] for name in (*class_paths, str(config.task.get("model", ""))) if ":" in name}
    extra = missing + "".join(
        f"\n`{class_path}` must be importable on every machine, or lie in this folder.\n"
        for class_path in class_paths
    )
    return {
        "NAME": slug or "edgefl-run",
        "DESCRIPTION": f"{_format_text(strategy)} on {_format_text(task)}, as edgefl runs it",
        "VERSION": __version__,
        "DEPENDENCIES": json.dumps(_list_dependencies(config)),
        "PACKAGE": PACKAGE,
        "SCHEME": _format_text(scheme),
        "DATA": _format_text(config.simulation.data or ""),
        "EXTRA": extra,
        "MODULES": json.dumps(sorted(modules)),
    }


def _list_dependencies(config: RunConfig) -> list[str]:
    """Returns the app's dependencies, with edgefl's own version constraints."""
    names = {*_EXTRA_DEPENDENCIES, *_TASK_DEPENDENCIES.get(config.run.task, ())}
    if is_torch_task(make_task(config.run.task, config.task)):
        names.add("torch")
    requirements = _get_distribution().requires or []
    dependencies = [
        _EXTRA_MARKER.sub("", line) for line in requirements if re.split(r"[^\w.-]", line, maxsplit=1)[0] in names
    ]
    return sorted(set(dependencies))


def _get_distribution() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"what an app depends on is read from the installed {DISTRIBUTION}, and none is installed here; "
            "in a folder with its source: pip install -e ."
        ) from None


def _find_user_modules(config: RunConfig) -> list[Path]:
    """Returns the files of the user's modules that no package installs on the nodes."""
    module_files = []
    for name in (config.strategy.name, config.run.task):
        module, _, attribute = name.partition(":")
        if not attribute or _is_flower_name(name):
            continue
        check_allowed(name, "class", ConfigError)  # to find a module inside a package imports that package
        try:
            module_spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            module_spec = None
        if module_spec is None or module_spec.origin is None:
            raise ConfigError(f"the module of {name} is not found; it must be importable here, as with edgefl run")
        path = Path(module_spec.origin)
        if (
            "." not in module
            and path.suffix == ".py"
            and path.stem == module
            and not _INSTALL_FOLDERS & set(path.parts)
        ):
            module_files.append(path)
    return module_files


def _is_flower_name(name: str) -> bool:
    return name.startswith("flwr:")


def _write(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None
    return path


def _format_text(value: str) -> str:
    """Returns a text escaped for a quoted TOML string."""
    return json.dumps(value, ensure_ascii=False)[1:-1]
