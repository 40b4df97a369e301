"""Makes a process believe that torch is not installed; lies on PYTHONPATH of devices that are to have none."""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


class WithoutTorch(PathFinder):
    """Finds what is installed, but for torch."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] == "torch" else super().find_spec(fullname, path, target)


sys.meta_path[:] = [WithoutTorch if finder is PathFinder else finder for finder in sys.meta_path]
