"""Makes a process believe that nothing is installed which boards' locks leave out; lies on PYTHONPATH of a device."""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

LEFT_OUT = Path(__file__).parents[3] / "provisioning/locks/not-on-boards.txt"
IMPORTED_AS = {"grpcio": "grpc", "grpcio-health-checking": "grpc_health", "pyyaml": "yaml"}
LINES = [line for line in LEFT_OUT.read_text().splitlines() if not line.startswith("#")]
ABSENT = {IMPORTED_AS.get(line, line) for line in LINES} | {"torch", "sklearn", "prometheus_client", "segno"}


class BoardPackages(PathFinder):
    """Finds what is installed, but for these."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in ABSENT else super().find_spec(fullname, path, target)


sys.meta_path[:] = [BoardPackages if finder is PathFinder else finder for finder in sys.meta_path]
