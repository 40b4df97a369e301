import asyncio
import os
import signal
import subprocess
import urllib.request
from pathlib import Path
from urllib.error import URLError

import pytest

from edgefl.simulation.local_fleet import find_free_port

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def log(harness):
    return harness("request_log")


def test_requests_outside_the_span_and_those_of_operators_do_not_count(log, tmp_path):
    (tmp_path / "log").write_text(
        "1.0 /v1/fleet/pull-messages\n2.0 /v1/fleet/pull-messages\n2.5 /edgefl/v1/runs/1/x y\n"
        "2.6 /v1/fleet/pull-messages\n2.7 /edgefl/v1/hello\n3.0 /v1/fleet/pull-messages\n"
    )
    found = log.read_requests(tmp_path / "log", 2.0, 3.0)
    assert found == {"/v1/fleet/pull-messages": 2, "/edgefl/v1/hello": 1}


def test_the_application_hears_of_every_request_as_before(log, tmp_path):
    async def app(scope, _receive, _send):
        heard.append(scope)

    heard, noted = [], log._Noted(app, tmp_path / "log")
    scopes = [{"type": "lifespan"}, {"type": "http", "path": "/a"}, {"type": "http", "path": "/b"}]
    for scope in scopes:
        asyncio.run(noted(scope, None, None))
    assert heard == scopes
    assert log.read_requests(tmp_path / "log", 0.0, 1e12) == {"/a": 1, "/b": 1}


@pytest.mark.extended
def test_a_stock_superlink_notes_what_it_is_asked(log, tmp_path):
    port, out = find_free_port(), tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS), "FLWR_HOME": str(tmp_path / "home")}
    process = subprocess.Popen(
        [*log.program(out, "flower-superlink"), "--insecure", "--port", str(port), "--isolation", "process"],
        env={**environment, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not answers(f"http://127.0.0.1:{port}/nothing-here"):
            assert process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    assert log.read_requests(out, 0.0, 1e12)["/nothing-here"] == 1


def answers(url):
    try:
        urllib.request.urlopen(url, timeout=5)
    except URLError as error:
        return hasattr(error, "code")  # any status at all
    return True
