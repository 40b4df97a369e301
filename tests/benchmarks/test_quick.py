"""Every benchmark runs to its end with `--quick`: no command that the documentation names may be broken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

FOLDER = Path(__file__).parents[2] / "benchmarks"
DATA = os.environ.get("EDGEFL_DATA")
NEED_DATA = {"adacomp_claim", "codec_convergence", "esync_claim", "fedavg_reference", "isvr_claim", "lss_sizes"}
NEED_BROWSER = {"dashboard"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_runs_to_its_end(path: Path, tmp_path: Path) -> None:
    if path.stem in NEED_DATA and DATA is None:
        pytest.skip("it needs real data: export EDGEFL_DATA=DIR")
    if path.stem in NEED_BROWSER and shutil.which("chromium") is None:
        pytest.skip("it needs Chromium: apt-get install chromium")
    words = [sys.executable, str(path), "--quick"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
