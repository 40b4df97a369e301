"""Every benchmark runs to its end with `--quick`: no command that the documentation names may be broken."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from requirements import real_data_at, require

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

FOLDER = Path(__file__).parents[2] / "benchmarks"
NEED_DATA = {
    "active_labels",
    "adacomp_claim",
    "codec_convergence",
    "consistency",
    "esync_claim",
    "fedavg_reference",
    "flare_edge",
    "flotilla_scale",
    "isvr_claim",
    "lss_merge",
    "lss_sizes",
    "presets",
    "private_accuracy",
    "simulator_peer",
    "split_learning",
}
NEED_BROWSER = {"dashboard"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_runs_to_its_end(path: Path, tmp_path: Path) -> None:
    if path.stem in NEED_DATA:
        real_data_at(".")
    if path.stem in NEED_BROWSER:
        require("chromium")
    words = [sys.executable, str(path), "--quick"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()


def test_the_programs_within_benchmarks_import_what_exists() -> None:
    """They run in processes of their own, and some only with real data."""
    gone = []
    for path in sorted(FOLDER.rglob("*.py")):
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        for program in (text for text in texts if isinstance(text, str) and "\nfrom edgefl" in text):
            for node in ast.walk(ast.parse(program)):
                if isinstance(node, ast.ImportFrom) and node.module.startswith("edgefl"):
                    module = importlib.import_module(node.module)
                    gone += [
                        (path.name, node.module, one.name) for one in node.names if not hasattr(module, one.name)
                    ]
    assert gone == []
