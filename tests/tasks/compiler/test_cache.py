"""The cache of compiled tasks: what finds an entry again, and what does not."""

from __future__ import annotations

import importlib
import os
import sys
import time
import types

import pytest

from edgefl.tasks.compiler import cache as cache_module
from edgefl.tasks.compiler.cache import CacheEntry, CompileCache, compute_key, find_or_compile

KEY = "ab" * 16
TASK = "from packed_nets import layers\nclass Mine:\n    name = 'mine'\n"
LAYERS = "WIDTH = 8\nimport packed_dep\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A task in a package of its own, which imports a module of it and an installed distribution."""
    site = tmp_path / "site-packages"
    files = {
        tmp_path / "packed_nets" / "__init__.py": "",
        tmp_path / "packed_nets" / "mine.py": TASK,
        tmp_path / "packed_nets" / "layers.py": LAYERS,
        site / "packed_dep.py": "",
        site / "packed_dep-1.0.dist-info" / "METADATA": "Metadata-Version: 2.1\nName: packed-dep\nVersion: 1.0\n",
        site / "packed_dep-1.0.dist-info" / "RECORD": "packed_dep.py,,\n",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, text)
    for folder in (site, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("packed_")]:
        del sys.modules[name]


def write(path, text):
    path.write_text(text)
    os.utime(path, (1.0, 1.0))


def make_task():
    return importlib.import_module("packed_nets.mine").Mine()


def add(cache, task, *, content=b"artefact", key=KEY, since_s=None):
    report = {"num_nodes": 3}
    cache.add(
        key, task, CacheEntry(content=content, report=report), since_s=time.time() if since_s is None else since_s
    )


def test_an_entry_is_found_until_a_module_that_the_task_imports_changes(project, tmp_path):
    cache, layers = CompileCache(tmp_path / "cache"), project / "packed_nets" / "layers.py"
    add(cache, make_task())
    found = cache.find(KEY)
    assert (found.content, found.report) == (b"artefact", {"num_nodes": 3})
    assert cache.find("cd" * 16) is None
    write(layers, "WIDTH = 16\nimport packed_dep\n")
    assert cache.find(KEY) is None
    write(layers, LAYERS)
    assert cache.find(KEY) is not None
    layers.unlink()
    assert cache.find(KEY) is None


def test_another_version_of_an_imported_package_finds_nothing(project, tmp_path):
    cache = CompileCache(tmp_path / "cache")
    add(cache, make_task())
    assert cache.find(KEY) is not None
    metadata = project / "site-packages" / "packed_dep-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    assert cache.find(KEY) is None


def test_another_text_of_an_installed_package_that_an_option_names_finds_nothing(project, tmp_path, monkeypatch):
    cache, task = CompileCache(tmp_path / "cache"), make_task()
    compiler = types.SimpleNamespace(compile_task=lambda *_, **__: (None, {}))
    monkeypatch.setitem(sys.modules, "edgefl.tasks.compiler.compilation", compiler)
    for name in ("import_packages", "encode_artefact", "asdict"):
        monkeypatch.setattr(cache_module, name, lambda *_: b"artefact")
    monkeypatch.setattr(cache_module, "asdict", dict)

    def find(**options):
        return find_or_compile(cache, task, name="n", options=options, batch_size=4, since_s=time.time())[1]

    for options in ({"model": "packed_dep:make"}, {"model": "other"}):
        assert [find(**options), find(**options)] == [False, True]
    write(project / "site-packages" / "packed_dep.py", "WIDTH = 16\n")
    assert not find(model="packed_dep:make")
    assert find(model="other"), "an installed package counts by its version"


def test_a_package_of_a_folder_that_is_installed_again_in_the_same_version_finds_nothing(project, tmp_path):
    cache, about = CompileCache(tmp_path / "cache"), project / "site-packages" / "packed_dep-1.0.dist-info"
    write(about / "direct_url.json", '{"url": "file:///nets", "dir_info": {}}')
    add(cache, make_task())
    assert cache.find(KEY) is not None
    write(about / "RECORD", "packed_dep.py,sha256=AAAA,9\n")
    assert cache.find(KEY) is None


def test_what_was_compiled_while_a_module_changed_is_not_kept(project, tmp_path):
    cache = CompileCache(tmp_path / "cache")
    add(cache, make_task(), since_s=0.5)
    assert cache.find(KEY) is None


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b[:10], lambda b: b + b"x", lambda _: b""])
def test_a_damaged_entry_is_never_returned_and_goes(project, tmp_path, change):
    cache = CompileCache(tmp_path / "cache")
    add(cache, make_task())
    (path,) = cache.folder.iterdir()
    path.write_bytes(change(path.read_bytes()))
    assert cache.find(KEY) is None
    assert not path.exists()


def test_what_was_not_used_for_the_longest_time_is_removed_and_so_is_what_a_killed_process_left(project, tmp_path):
    cache, task = CompileCache(tmp_path / "cache", max_bytes=0), make_task()
    add(cache, task, key="a" * 32)
    (path,) = cache.folder.iterdir()
    (cache.folder / f".{path.name[:40]}.abcd1234.tmp").write_bytes(b"half")
    cache = CompileCache(cache.folder, max_bytes=2 * path.stat().st_size)
    os.utime(path, (1000.0, 1000.0))
    add(cache, task, key="b" * 32)
    os.utime(cache.folder / path.name.replace("a" * 32, "b" * 32), (2000.0, 2000.0))
    assert cache.find("a" * 32) is not None
    add(cache, task, key="c" * 32)
    assert sorted(path.name[0] for path in cache.folder.iterdir()) == ["a", "c"]


def test_the_key_is_that_of_name_options_batch_and_the_files_that_options_name(tmp_path):
    classes = tmp_path / "classes.txt"
    write(classes, "cat")
    wanted = {"name": "mnist", "options": {"classes": str(classes), "model": "cnn"}, "batch_size": 4}
    key = compute_key(**wanted)
    assert key == compute_key(**{**wanted, "options": {"model": "cnn", "classes": str(classes)}})
    keys = {
        key,
        compute_key(**{**wanted, "name": "cifar-10"}),
        compute_key(**{**wanted, "batch_size": 5}),
        compute_key(**wanted, constant=["fc1.bias"]),
        compute_key(**{**wanted, "options": {"model": "mlp", "classes": str(classes)}}),
    }
    classes.write_text("dog")
    keys.add(compute_key(**wanted))
    assert len(keys) == 6


def test_a_version_of_a_compiling_package_is_part_of_the_key(monkeypatch):
    wanted = {"name": "mnist", "options": {}, "batch_size": 4}
    key = compute_key(**wanted)
    monkeypatch.setattr(cache_module, "COMPILING_PACKAGES", ("torch", "onnx"))
    assert compute_key(**wanted) != key


def test_an_earlier_compilation_is_returned_without_the_packages_that_compile(project, tmp_path, monkeypatch):
    cache, task, wanted = CompileCache(tmp_path / "cache"), make_task(), {"name": "n", "options": {}, "batch_size": 4}
    add(cache, task, key=compute_key(**wanted))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    entry, is_cached = find_or_compile(cache, task, **wanted, since_s=time.time())
    assert (entry.content, is_cached) == (b"artefact", True)
