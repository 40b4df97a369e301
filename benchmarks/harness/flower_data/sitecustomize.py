"""Lets `datasets.load_dataset` read from the folder beside this file instead of the network.

A Python that has this folder on its path imports this when it starts. Nothing of an app or of a library is changed
but where data sets come from; and torchvision, built for a GPU, does without its operators, which it lacks beside a
torch without one. A file `seed` in that folder seeds torch where it is imported, as Flower
itself seeds nothing.
"""

import importlib.abc
import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

DATA = Path(__file__).parent / "data"
SEED = Path(__file__).with_name("data") / "seed"
OPERATORS = "torchvision._meta_registrations"


class _Changed(importlib.abc.Loader):
    """Loads a module, then changes it."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "torchvision":
            sys.modules[OPERATORS] = ModuleType(OPERATORS)
        self._inner.exec_module(module)
        if module.__name__ == "torch" and SEED.is_file():
            module.manual_seed(int(SEED.read_text()))
        if module.__name__ == "datasets":
            module.disable_caching()

            def load_dataset(path: str, *_: Any, split: str | None = None, **__: Any) -> Any:
                loaded = module.load_from_disk(str(DATA / path))
                return loaded if split is None else loaded[split]

            module.load_dataset = load_dataset


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        if name not in {"datasets", "torch", "torchvision"}:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changed(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
