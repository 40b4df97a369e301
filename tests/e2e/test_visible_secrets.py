"""No token stands in the list of processes while boards join and a fleet runs."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

import pytest

from edgefl.core.protocol import JoinToken

pytestmark = pytest.mark.extended


class ArgumentWatch:
    """Reads the arguments of all processes until it is closed, and keeps those with one of the secrets."""

    def __init__(self, mark: bytes) -> None:
        self.mark, self.seen, self.num_reads = mark, set[bytes](), 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(0.02):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    arguments = path.read_bytes()
                except OSError:  # it has just ended
                    continue
                self.num_reads += 1
                if self.mark in arguments:
                    self.seen.add(arguments)


@pytest.mark.parametrize("way", ["file", "input", "variable"])
def test_no_token_stands_in_the_arguments_of_a_process(module_fleet: Any, tmp_path: Path, way: str) -> None:
    token = module_fleet.make_client().post("/edgefl/v1/tokens", {"uses": 1})["token"]
    path = tmp_path / "token"
    path.write_text(token)
    words = [sys.executable, "-m", "edgefl.cli.main", "device", "join", "--name", way, "--state", str(tmp_path / way)]
    words += {"file": ["--token-file", str(path)], "input": ["--token-file", "-"], "variable": []}[way]
    variables = {"PYTHONPATH": module_fleet.environment["PYTHONPATH"], "PATH": "/usr/bin"}
    variables |= {"EDGEFL_JOIN_TOKEN": token} if way == "variable" else {}
    with ArgumentWatch(token[:40].encode()) as watch:
        given = token if way == "input" else ""
        done = subprocess.run(  # noqa: PLW1510 its code is looked at below
            words, input=given, env=variables, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 0, done.stderr
    assert "better" not in done.stderr
    assert (watch.seen, watch.num_reads > 100) == (set(), True)
    assert JoinToken.parse(token).secret not in done.stderr + done.stdout


def make_fleet(tools: Any, root: Path) -> Any:
    return tools.fleet(root, [])


def test_a_token_among_the_arguments_is_seen_and_warned_of(module_fleet: Any, tmp_path: Path) -> None:
    token = module_fleet.make_client().post("/edgefl/v1/tokens", {"uses": 1})["token"]
    with ArgumentWatch(token[:40].encode()) as watch:
        process = module_fleet.start_command(
            ["device", "join", "--token", token, "--name", "seen", "--state", str(tmp_path / "seen")]
        )
        output, _ = process.communicate(timeout=60)
    assert watch.seen, "the watch sees what there is to see"
    assert output.decode().count("every user of this machine sees --token") == 1
