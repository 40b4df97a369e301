"""An exported app on Flower as its authors ship it, in an environment of its own that has never seen edgefl."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from package_index import PackageIndex
from uv import find_uv_bin
from wheel_files import make_wheel

import edgefl
from edgefl.core.config import parse_run
from edgefl.flower.app_export import export_flower_app
from edgefl.simulation.local_fleet import find_free_port
from edgefl.storage.checkpoints import load_model_file
from edgefl.system.processes import exit_with_parent
from edgefl.tasks.datasets.central import create_shards

CONFIG = {
    "run": {"task": "digits", "rounds": 2, "seed": 11},
    "strategy": {"name": "fedavg", "learning_rate": 0.5, "epochs": 2.0},
    "compression": {"down": "dense|fp16"},
    "devices": {"min": 2},
}
CONNECTION = '[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'


class Site:
    """An index on which another project is called as edgefl is, and what asks there and nowhere else.

    Attributes:
        marker: a file that the other project writes when it is imported.
        environment: of every process.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.marker = root, root / "imported"
        body = f"open({str(self.marker)!r}, 'a').write(__name__)\n"
        foreign = [
            make_wheel(root / "foreign", name, version, {"edgefl/__init__.py": body})
            for name in ("edgefl", edgefl.DISTRIBUTION)
            for version in ("0.1.0", "0.2.0", "99.0")
        ]
        self.index = PackageIndex(root / "wheels", *foreign)
        plain = {
            key: value for key, value in os.environ.items() if not key.startswith(("UV_", "PIP_", "PYTHON", "FLWR_"))
        }
        self.environment = plain | {
            "UV_DEFAULT_INDEX": self.index.url,
            "UV_CACHE_DIR": str(root / "cache"),
            "NO_PROXY": "127.0.0.1",
            "UV_NO_CONFIG": "1",
            "UV_PYTHON_DOWNLOADS": "never",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }

    def uv(self, *arguments: str | Path) -> None:
        done = subprocess.run(
            [find_uv_bin(), *arguments], env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def install(self, venv: Path, *requirements: str) -> Path:
        """Returns the Python of a new environment with these."""
        self.uv("venv", "--python", sys.executable, venv)
        self.uv("pip", "install", "--python", venv / "bin" / "python", *requirements)
        return venv / "bin" / "python"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "site")
    yield site
    site.index.close()


class StockFlower:
    """A SuperLink and SuperNodes, which install what an app depends on."""

    def __init__(self, root: Path, python: Path, environment: Mapping[str, str], node_configs: Sequence[str]) -> None:
        self.root, self.python, self.port = root, python, find_free_port()
        self.environment = {**environment, "PATH": f"{python.parent}{os.pathsep}{environment['PATH']}"}
        self.processes: list[subprocess.Popen[bytes]] = []
        root.mkdir()
        self._start("superlink", "flower-superlink", "--insecure", "--port", str(self.port))
        self._wait(lambda: listens(self.port))
        for number, config in enumerate(node_configs):
            self._start(
                f"node-{number}", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}",
                "--port", str(find_free_port()), "--allow-runtime-dependency-installation", "--node-config", config,
            )  # fmt: skip

    def run(self, app: Path, result: Path, timeout_s: float) -> None:
        environment = self._home("user")
        (self.root / "home-user" / "config.toml").write_text(CONNECTION.format(port=self.port))
        command = [self.python.parent / "flwr", "run", app, "here", "--run-config", f'result="{result}"']
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        self._wait((result / "history.json").exists, timeout_s)

    def stop(self) -> None:
        for process in reversed(self.processes):
            os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _home(self, name: str) -> dict[str, str]:
        home = self.root / f"home-{name}"
        home.mkdir(exist_ok=True)
        return {**self.environment, "HOME": str(home), "FLWR_HOME": str(home)}

    def _start(self, name: str, program: str, *arguments: str) -> None:
        with (self.root / f"{name}.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    [self.python.with_name(program), *arguments],
                    env=self._home(name),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=exit_with_parent,  # noqa: PLW1509 one system call, no locks
                )
            )

    def _wait(self, is_true, timeout_s: float = 60) -> None:
        until_s = time.monotonic() + timeout_s
        while not is_true():
            logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in self.root.glob("*.log"))
            assert time.monotonic() < until_s, logs
            assert all(process.poll() is None for process in self.processes), logs
            threading.Event().wait(0.1)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_an_app_gives_our_model_and_never_asks_an_index_for_edgefl(site: Site, tmp_path: Path) -> None:
    python = site.install(tmp_path / "stock", "flwr")
    export_flower_app(parse_run(CONFIG), tmp_path / "app", scheme="iid")
    shards = create_shards("digits", "iid", 2, tmp_path / "cut", None, 11)
    nodes = [f'shard="{path}" name="{path.stem}"' for path in shards]
    flower = StockFlower(tmp_path / "flower", python, site.environment, nodes)
    try:
        flower.run(tmp_path / "app", tmp_path / "result", timeout_s=400)
    finally:
        flower.stop()
    rows = json.loads((tmp_path / "result" / "history.json").read_text())["versions"]
    assert [row["num_updates"] for row in rows] == [2, 2]
    assert {"safetensors", "zstandard"} <= site.index.asked, "Flower alone has neither: it was installed for the app"
    assert not site.marker.exists()
    assert not {"edgefl", edgefl.DISTRIBUTION} & site.index.asked
    ours = edgefl.run(CONFIG, devices=2, scheme="iid", root=tmp_path / "ours")
    model, expected = load_model_file(tmp_path / "result" / "model.safetensors"), load_model_file(ours.model)
    assert {name: tensor.tobytes() for name, tensor in model.items()} == {n: t.tobytes() for n, t in expected.items()}


@pytest.mark.parametrize("name", ["edgefl", edgefl.DISTRIBUTION])
def test_that_index_gives_another_project_under_both_names(site: Site, tmp_path: Path, name: str) -> None:
    python = site.install(tmp_path / "venv", f"{name}=={edgefl.__version__}")
    subprocess.run([python, "-I", "-c", "import edgefl"], cwd=tmp_path, check=True, timeout=60)
    assert site.marker.read_text() == "edgefl"
    assert name in site.index.asked
