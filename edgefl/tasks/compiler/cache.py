"""Compiled tasks of earlier compilations, found by what they were made of.

One file an entry, `KEY-SOURCES.entry`: a line of JSON, then the artefact. KEY is the hash of the task's name, options
and batch size, and of the versions of what compiles. The line has the hashes of the modules that the compilation
imported, and the versions of their packages: an entry counts only while all of them are the same. So a lookup imports
nothing but what the task itself does, and a change of a module that the network is built in is seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edgefl import __version__
from edgefl.core.errors import DataError, StoreError
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json, Scalar, Task
from edgefl.system.atomic_files import compute_sha256 as hash_file
from edgefl.system.atomic_files import make_private_directory, make_store_error, open_atomic, remove_temporary_files
from edgefl.tasks.compiled.artefact import MAX_ARTEFACT_BYTES, compute_sha256, encode_artefact
from edgefl.tasks.onnx_graph import import_onnx
from edgefl.tasks.registry import import_extra, import_torch

log = logging.getLogger(__name__)

VERSION = 1
SUFFIX = ".entry"
MAX_CACHE_BYTES = 256 << 20
"""Of all entries; those that were not used for the longest time are removed."""
MAX_LINE_BYTES = 4 << 20
MAX_CANDIDATES = 16
"""Entries of one key that a lookup reads, the newest first: of the same task with other sources."""
COMPILING_PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy")
_SITE_FOLDERS = frozenset({"site-packages", "dist-packages"})
_MAIN_MODULES = frozenset({"__main__", "__mp_main__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """A compilation.

    Attributes:
        content: the artefact.
        report: of the compilation, as JSON.
        modules: the SHA-256 of the file of each module that it was made of.
        packages: the version of each distribution that took part.
    """

    content: bytes
    report: Json
    modules: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompileCache:
    """Entries in one folder, which several processes may share.

    Attributes:
        folder: of the entries; made when the first one is added.
        max_bytes: of all of them.
    """

    folder: Path
    max_bytes: int = MAX_CACHE_BYTES

    def find(self, key: str) -> CacheEntry | None:
        """Returns the entry of a key whose sources are as they were; a damaged one is removed."""
        for path in sorted(self._list(f"{key}-*"), key=_get_use_time, reverse=True)[:MAX_CANDIDATES]:
            try:
                entry = parse_entry(path.read_bytes())
            except (OSError, DataError):
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            if _is_unchanged(entry):
                with contextlib.suppress(OSError):  # a folder that is only read
                    os.utime(path)
                return entry
        return None

    def add(self, key: str, task: Task, entry: CacheEntry, *, since_s: float, names: Iterable[Scalar] = ()) -> None:
        """Adds what was compiled in this process, and removes the oldest entries beyond `max_bytes`.

        Modules of packages that `names` lead to, as `module:factory`, count as those of the task's own package.
        Where a module was changed after the Unix time `since_s`, nothing is added: it may have been read before.

        Raises:
            StoreError: it cannot be written.
        """
        modules = dict(_list_own_modules(task, names))
        if any(path.stat().st_mtime >= since_s for path in modules.values()):
            return
        sources = {"modules": {name: hash_file(path) for name, path in modules.items()}, "packages": _list_packages()}
        line = {"v": VERSION, "sha256": compute_sha256(entry.content), **sources, "report": entry.report}
        text = json.dumps(line).encode()
        make_private_directory(self.folder)
        remove_temporary_files(self.folder)
        path = self.folder / f"{key}-{_hash(sources)[:16]}{SUFFIX}"
        try:
            with open_atomic(path) as file:
                file.write(text + b"\n" + entry.content)
        except OSError as error:
            raise make_store_error(path, error) from None
        self._evict(path)

    def _evict(self, newest: Path) -> None:
        paths = sorted(self._list("*"), key=lambda path: (path == newest, _get_use_time(path)), reverse=True)
        total = 0
        for path in paths:
            with contextlib.suppress(OSError):  # another process has removed it
                total += path.stat().st_size
                if total > self.max_bytes and path != newest:
                    path.unlink()

    def _list(self, stem: str) -> list[Path]:
        return list(self.folder.glob(f"{stem}{SUFFIX}"))


def find_or_compile(  # noqa: PLR0913 all but two by name
    cache: CompileCache,
    task: Task,
    *,
    name: str,
    options: Mapping[str, Scalar],
    batch_size: int,
    since_s: float,
    constant: Collection[str] = (),
) -> tuple[CacheEntry, bool]:
    """Returns a task as an artefact with its report, and whether an earlier compilation made it.

    A cache that cannot be written changes nothing but that. `since_s` is a Unix time before the task was imported.

    Raises:
        TaskError, DataError: as `compile_task`; or torch, onnx, onnxscript or onnxruntime is missing.
    """
    key = compute_key(name=name, options=options, batch_size=batch_size, constant=constant)
    if (found := cache.find(key)) is not None:
        return found, True
    import_packages()
    from edgefl.tasks.compiler.compilation import compile_task  # noqa: PLC0415 it imports these

    compiled, report = compile_task(task, name=name, options=options, batch_size=batch_size, constant=constant)
    entry = CacheEntry(content=encode_artefact(compiled), report=asdict(report))
    try:
        cache.add(key, task, entry, since_s=since_s, names=(name, *options.values()))
    except (StoreError, OSError) as error:
        log.warning("a compiled task is not kept for later: %s", error)
    return entry, False


def import_packages() -> None:
    """Imports what a compilation needs.

    Raises:
        TaskError: torch, onnx, onnxscript or onnxruntime is missing.
    """
    import_torch()
    import_onnx()
    import_extra("onnxscript", "a task is compiled with onnxscript")
    import_extra("onnxruntime", "a compiled task is checked with onnxruntime")


def compute_key(*, name: str, options: Mapping[str, Scalar], batch_size: int, constant: Collection[str] = ()) -> str:
    """Returns the key of a compilation: all that it depends on besides the sources of imported modules.

    An option that names a file counts with the file's size and time of change. The optimiser is no part of a graph.
    """
    files = {value: [info.st_size, info.st_mtime_ns] for value, info in _list_files(options)}
    value = {
        "name": name,
        "options": dict(options),
        "files": files,
        "batch_size": batch_size,
        "constant": sorted(constant),
        "edgefl": __version__,
        "python": platform.python_version(),
        "packages": {package: _get_version(package) for package in COMPILING_PACKAGES},
    }
    return _hash(value)[:32]


def _list_files(options: Mapping[str, Scalar]) -> Iterator[tuple[str, os.stat_result]]:
    for value in options.values():
        if isinstance(value, str):
            with contextlib.suppress(OSError, ValueError):
                yield value, Path(value).stat()


def parse_entry(content: bytes) -> CacheEntry:
    """Returns what is in the file of an entry.

    Raises:
        DataError: it is damaged, too large, or of another version.
    """
    text, _, artefact = content.partition(b"\n")
    if len(text) > MAX_LINE_BYTES or len(artefact) > MAX_ARTEFACT_BYTES:
        raise DataError(f"an entry of {len(content)} bytes is too large")
    try:
        line = parse_json(text)
        sources = line["modules"], line["packages"]
        if line["v"] != VERSION or compute_sha256(artefact) != line["sha256"]:
            raise ValueError("another version, or damaged")  # noqa: TRY301 one message for all
        if not all(isinstance(found, dict) for found in (*sources, line["report"])):
            raise ValueError("its sources and its report must be tables")  # noqa: TRY301 likewise
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"an entry of compiled tasks cannot be read: {error!r:.200}") from None
    modules, packages = sources
    return CacheEntry(content=artefact, report=line["report"], modules=modules, packages=packages)


def _is_unchanged(entry: CacheEntry) -> bool:
    return all(_get_version(name) == version for name, version in entry.packages.items()) and all(
        _hash_module(name) == sha256 for name, sha256 in entry.modules.items()
    )


def _hash_module(name: str) -> str | None:
    """Returns the hash of the file that an import of a module would find now; None if there is none."""
    try:
        spec = importlib.util.find_spec(name)
        return hash_file(Path(spec.origin)) if spec is not None and spec.origin is not None else None
    except Exception:  # noqa: BLE001 the package that holds it is imported for that, and may raise anything
        return None


def _list_own_modules(task: Task, names: Iterable[Scalar]) -> Iterator[tuple[str, Path]]:
    """Yields imported modules: of the task's and the named packages, and all that are no part of installed ones."""
    named = (name.partition(":")[0] for name in names if isinstance(name, str) and ":" in name)
    packages = {module.partition(".")[0] for module in (type(task).__module__, *named)}
    standard = tuple(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("stdlib", "platstdlib"))
    for name, module in sorted(sys.modules.items()):
        path = _get_path(module)
        if path is None or name in _MAIN_MODULES or getattr(module, "__spec__", None) is None:
            continue
        is_installed = not _SITE_FOLDERS.isdisjoint(path.parts)
        if name.partition(".")[0] in packages or not (is_installed or str(path).startswith(standard)):
            yield name, path


def _list_packages() -> dict[str, str | None]:
    """Returns the version of each installed distribution of which a module is imported."""
    tops = {name.partition(".")[0] for name in sys.modules}
    owners = importlib.metadata.packages_distributions()
    return {name: _get_version(name) for top in sorted(tops) for name in owners.get(top, ())}


def _get_path(module: object) -> Path | None:
    file = getattr(module, "__file__", None)
    path = Path(file) if isinstance(file, str) else None
    return path if path is not None and path.is_file() else None


def _get_version(distribution: str) -> str | None:
    """Returns the version; with the hash of the list of files where it was installed of a folder, file or address.

    Source: PEP 610. Such a package may be installed again in the same version.
    """
    try:
        found = importlib.metadata.distribution(distribution)
        is_direct = found.read_text("direct_url.json") is not None
        return f"{found.version}+{_hash(found.read_text('RECORD'))}" if is_direct else found.version
    except (importlib.metadata.PackageNotFoundError, ValueError):  # it is not installed; a name that is none
        return None


def _get_use_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
