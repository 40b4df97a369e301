"""What of a Flower app runs on boards, found by reading its files; none of its code is run.

Names are followed from the two components through the app's own modules, so a script beside the app, such as one for
a simulation, does not count.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from edgefl import DISTRIBUTION
from edgefl.flower.app_bundle import NO_PUBLISHER, get_publisher
from edgefl.flower.app_folder import MAX_APP_BYTES, AppFolder, find_module

Verdict = Literal["works", "check", "fails"]
HANDLERS = ("train", "evaluate", "query")
OLDER_OPTIONS = frozenset({"client_fn", "client_manager", "config", "server", "server_fn", "strategy"})
"""Of ClientApp and ServerApp."""
STARTERS = frozenset({"start_client", "start_numpy_client", "start_server", "start_simulation", "run_simulation"})
"""Functions of Flower that open connections or a simulation of their own."""
DOWNLOADERS = frozenset({
    "datasets", "flwr_datasets", "huggingface_hub", "kagglehub", "medmnist", "requests", "socket",
    "torchvision.datasets", "transformers", "urllib.request", "wandb",
})  # fmt: skip
"""Modules that mostly need the network."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a check."""

    verdict: Verdict
    where: str
    what: str


def check_app(app: AppFolder) -> list[Finding]:
    """Returns what works, what the user has to look at, and what does not work."""
    return [
        *_check_size(app),
        *_check_component(app, "ServerApp", app.server),
        *_check_component(app, "ClientApp", app.client),
        *(finding for line in app.dependencies for finding in _check_dependency(line)),
        *_check_options(app),
    ]


def _check_size(app: AppFolder) -> Iterator[Finding]:
    size = app.num_bytes
    text = f"{len(app.files)} files, {size} bytes"
    if size > MAX_APP_BYTES:
        yield Finding("fails", app.name, f"{text}; at most {MAX_APP_BYTES} are sent: leave out with fab-exclude")
    else:
        yield Finding("works", app.name, text)


def _check_component(app: AppFolder, kind: str, reference: str) -> Iterator[Finding]:
    module, _, attribute = reference.partition(":")
    if (file := find_module(app, module)) is None:
        yield Finding("fails", reference, f"the {kind}'s module is no file that is sent")
        return
    trees = dict[PurePosixPath, ast.Module]()
    for path, tree in _read_modules(app, file):
        if isinstance(tree, str):
            yield Finding("fails", str(path), f"it is no Python: {tree}")
        else:
            trees[path] = tree
    if file not in trees:
        return
    made = _find_assigned_call(trees[file], attribute)
    if made is None:
        yield Finding("check", str(file), f"{attribute} is not assigned here by {kind}(…), and was not looked into")
    elif made.args or any(word.arg in OLDER_OPTIONS for word in made.keywords):
        yield Finding("works", str(file), f"{kind} of functions or objects, Flower's older interface")
    elif kind == "ClientApp":
        yield from _check_handlers(file, trees[file], attribute)
    else:
        yield Finding("works", str(file), f"{kind} with a main function")
    for path, tree in trees.items():
        yield from _check_names(path, tree, kind)


def _check_handlers(file: PurePosixPath, tree: ast.Module, attribute: str) -> Iterator[Finding]:
    found = set[str]()
    for node in tree.body:
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) and call.value.id == attribute:
                found.add(call.attr)
    handlers = [name for name in HANDLERS if name in found]
    if handlers:
        yield Finding("works", str(file), f"ClientApp that answers {', '.join(handlers)}")
    else:
        yield Finding("fails", str(file), f"no function is marked @{attribute}.train(), .evaluate() or .query()")


def _check_names(path: PurePosixPath, tree: ast.Module, kind: str) -> Iterator[Finding]:
    imported = set(_list_imports(tree, path))
    for name in sorted(DOWNLOADERS):
        if kind == "ClientApp" and any(one == name or one.startswith(f"{name}.") for one in imported):
            yield Finding(
                "check",
                str(path),
                f"imports {name}: a board's process has no network; give it files, and read them from there",
            )
    nodes = [*ast.walk(tree)]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {node.id for node in nodes if isinstance(node, ast.Name)}
    for name in sorted(used & STARTERS):
        yield Finding("fails", str(path), f"{name}: it makes a connection, or a simulation, of its own")


def _check_dependency(line: str) -> Iterator[Finding]:
    try:
        requirement = Requirement(line)
    except InvalidRequirement as error:
        yield Finding(
            "fails", "dependencies", f"{line[:100]!r} is no requirement: {str(error).splitlines()[0][:100]}"
        )
        return
    name = canonicalize_name(requirement.name)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return
    installed, text = _list_board_packages().get(name), line[:100]
    if requirement.url:
        yield Finding("fails", "dependencies", f"{text}: boards fetch nothing; bring its wheel in the pack")
    elif installed is None:
        yield Finding("check", "dependencies", f"{text}: boards need it already, or its wheel in the pack")
    elif not requirement.specifier.contains(installed, prereleases=True):
        yield Finding("fails", "dependencies", f"{text}: edgefl has {name} {installed}, on boards too")
    else:
        yield Finding("works", "dependencies", f"{text}: {installed} is here")


def _check_options(app: AppFolder) -> Iterator[Finding]:
    if get_publisher(app) is None:
        yield Finding("check", "tool.flwr.app", NO_PUBLISHER)
    if app.has_federations:
        yield Finding("works", "tool.flwr.federations", "not used: the boards are those of the fleet")
    if app.config:
        yield Finding("works", "tool.flwr.app.config", ", ".join(sorted(app.config)))


def _read_modules(app: AppFolder, first: PurePosixPath) -> Iterator[tuple[PurePosixPath, ast.Module | str]]:
    """Yields the modules of the app that one imports, itself first; a text where one cannot be parsed."""
    pending, seen = [first], {first}
    while pending:
        path = pending.pop(0)
        try:
            tree = ast.parse((app.root / path).read_bytes())
        except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
            yield path, str(error)[:100]
            continue
        yield path, tree
        for name in _list_imports(tree, path):
            found = find_module(app, name)
            if found is not None and found not in seen:
                seen.add(found)
                pending.append(found)


def _list_imports(tree: ast.Module, path: PurePosixPath) -> Iterator[str]:
    """Yields the names of imported modules, and of what may be one."""
    folder = path.parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module:
                yield module
            yield from (f"{module}.{alias.name}".strip(".") for alias in node.names)


def _find_assigned_call(tree: ast.Module, attribute: str) -> ast.Call | None:
    """Returns the call whose result the module assigns to a name; None where there is none."""
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Call):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if attribute in {target.id for target in targets if isinstance(target, ast.Name)}:
            return node.value
    return None


def _list_board_packages() -> Mapping[str, str]:
    """Returns the versions of what edgefl itself needs, which every board therefore has."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]
    versions = dict[str, str]()
    for name in names:
        try:
            versions[canonicalize_name(name)] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
