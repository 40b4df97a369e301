"""How soon a large fleet is on the screen or scraped, and what open pages cost a round.

    python benchmarks/dashboard.py [--devices 1000] [--rounds 10000] [--pages 20] [--turns 3] [--json]

Load: a coordinator with so many devices and a run of so many rounds in its store, its devices heard every five
seconds; a fresh headless Chromium context each time, from the request to the drawn view. Rounds: a coordinator and
four device processes train digits in turns with no page and with so many readers of the feed open (in one process of
their own, reading all they are sent); ratio of the medians, and the coordinator's CPU time a round, which other
programs on the machine change less. Scrapes: /metrics of the large fleet over one HTTPS connection, beside /healthz.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import shutil
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import feed_readers, options
from harness.crowd import add_devices, add_run, names_of

from edgefl.core.config import parse_run
from edgefl.simulation.local_fleet import LocalFleet, partition_devices
from edgefl.storage.store import Store
from edgefl.system.api_client import load_operator_file

HERE = Path(__file__).parent
SCRAPES = 60
RUN_ID = "20260101-000000-aaaaaa"
CHROMIUM_ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
VIEWS = {
    "now": ("#/", "figure[data-points]", "tiles"),
    "fleet": ("#/fleet", "tbody tr:nth-child(100)", "map"),
    "run": (f"#/runs/{RUN_ID}", "figure[data-points]", "facts"),
}
DRAWN = """([selector, place]) => document.querySelector(selector) && document.querySelector('.' + place)
    && (window.drawnMs ??= performance.now())"""

FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? performance.now()"


def main() -> int:
    arguments = _parse()
    root = Path(tempfile.mkdtemp(prefix="edgefl-dashboard-"))
    try:
        found: dict[str, Any] = {}
        if not arguments.only or arguments.only == "load":
            found["load_ms"] = measure_load(root / "load", arguments.devices, arguments.rounds, arguments.turns)
        if not arguments.only or arguments.only == "scrapes":
            found["scrape_ms"] = measure_scrapes(root / "scrapes", arguments.devices)
        if not arguments.only or arguments.only == "rounds":
            found["rounds"] = measure_rounds(root / "rounds", arguments.pages, arguments.turns, arguments.run_rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(found, indent=2) if arguments.json else _text(found, arguments))
    return 0


@contextmanager
def crowded(root: Path, num_devices: int, num_rounds: int) -> Iterator[LocalFleet]:
    """Yields a coordinator that has heard of all its devices."""
    fleet = LocalFleet(
        root=root,
        devices=(),
        program=(sys.executable, "-m", "harness.crowded_coordinator"),
        environment={"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])},
    )
    root.mkdir(parents=True)
    fleet.run_command("coordinator", "init", "--dir", str(fleet.directory), "--host", "127.0.0.1", "--port",
                  str(fleet.port))  # fmt: skip
    names, now = names_of(num_devices), time.time()
    with Store.open(fleet.database) as store:
        add_devices(store, names, at=now - 9e5)
        add_run(store, RUN_ID, name="long", num_rounds=num_rounds, at=now - 2e4)
        for number in range(30):
            add_run(
                store, f"20250101-00{number:04}-bbbbbb", name=f"run-{number}", num_rounds=10, at=now - 8e5 + number
            )
    with fleet:
        fleet.wait_for_devices(int(0.9 * num_devices))
        yield fleet


def measure_load(root: Path, num_devices: int, num_rounds: int, turns: int) -> dict[str, list[float]]:
    """Returns, by view, the milliseconds from the request until it is drawn; `paint` is the first paint of any text,
    `cpu` the time of the page's main thread until then.
    """
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 the other figure needs no browser

    found: dict[str, list[float]] = {f"{name}{part}": [] for name in VIEWS for part in ("", " paint", " cpu")}
    program = shutil.which("chromium") or "/usr/bin/chromium"
    with crowded(root, num_devices, num_rounds) as fleet, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(CHROMIUM_ARGUMENTS))
        for _ in range(turns):
            for name, (view, selector, place) in VIEWS.items():
                context = browser.new_context(ignore_https_errors=True, viewport={"width": 1280, "height": 900})
                page = context.new_page()
                tools = context.new_cdp_session(page)
                tools.send("Performance.enable", {"timeDomain": "threadTicks"})
                page.goto(f"https://127.0.0.1:{fleet.port}/{view}")
                page.wait_for_function(DRAWN, arg=[selector, place], polling="raf", timeout=30_000)
                found[name].append(round(page.evaluate("window.drawnMs"), 1))
                metrics = {row["name"]: row["value"] for row in tools.send("Performance.getMetrics")["metrics"]}
                found[f"{name} cpu"].append(round(1000 * metrics["TaskDuration"], 1))
                found[f"{name} paint"].append(round(page.evaluate(FIRST_PAINT), 1))
                context.close()
        browser.close()
    return found


def measure_scrapes(root: Path, num_devices: int) -> dict[str, list[float]]:
    """Returns, by path, the milliseconds of each request."""
    found: dict[str, list[float]] = {"/healthz": [], "/metrics": []}
    with crowded(root, num_devices, 10) as fleet:
        known = load_operator_file(fleet.root / "config" / "edgefl" / "operator.toml")
        context = ssl.create_default_context(cadata=known.ca_pem)
        connection = http.client.HTTPSConnection("127.0.0.1", fleet.port, timeout=60, context=context)
        for _ in range(SCRAPES):
            for path, times in found.items():
                begun_s = time.perf_counter()
                connection.request("GET", path, headers={"Authorization": f"Bearer {known.operator_token}"})
                body = connection.getresponse().read()
                times.append(round(1000 * (time.perf_counter() - begun_s), 2))
                if path == "/metrics" and body.count(b"edgefl_device_present{") != num_devices:
                    raise SystemExit(f"/metrics tells of {body.count(b'edgefl_device_present{')} devices")
        connection.close()
    return found


def measure_rounds(root: Path, num_pages: int, turns: int, num_rounds: int) -> dict[str, Any]:
    """Returns the median round time in seconds with and without open pages, by turn, and their ratios."""
    devices, _ = partition_devices("digits", "iid", 4, root / "shards", None, 7)
    open_pages: dict[int, list[float]] = {0: [], num_pages: []}
    cpu_s: dict[int, list[float]] = {0: [], num_pages: []}
    with LocalFleet(root=root, devices=devices) as fleet:
        for turn in range(turns + 1):
            for pages in (0, num_pages) if turn % 2 else (num_pages, 0):
                with reading(fleet, pages):
                    seconds, cpu = _run(fleet, num_rounds)
                if turn:  # the first warms everything up
                    open_pages[pages].append(seconds)
                    cpu_s[pages].append(cpu)
    time_ratio, cpu_ratio = (
        statistics.median(by[num_pages]) / statistics.median(by[0]) for by in (open_pages, cpu_s)
    )
    return {
        "pages": num_pages, "round_s": open_pages, "coordinator_cpu_s": cpu_s, "ratio": round(time_ratio, 3),
        "cpu_ratio": round(cpu_ratio, 3),
    }  # fmt: skip


def _run(fleet: LocalFleet, num_rounds: int) -> tuple[float, float]:
    config = {"run": {"task": "digits", "rounds": num_rounds, "evaluate_on": "none"}, "devices": {"min": 4}}
    before = _cpu_s(fleet.processes["coordinator"].pid)
    run_id = fleet.submit(parse_run(config))
    fleet.wait_for_run(run_id)
    cpu = (_cpu_s(fleet.processes["coordinator"].pid) - before) / num_rounds
    rows = fleet.list_history("rounds", run=run_id)
    closed = [row["closed_at"] for row in rows][10:]
    return statistics.median(b - a for a, b in itertools.pairwise(closed)), cpu


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def reading(fleet: LocalFleet, num_pages: int) -> Iterator[None]:
    """Has a process read so many feeds meanwhile."""
    if not num_pages:
        yield
        return
    ca = fleet.root / "ca.pem"
    ca.write_text(fleet.make_client().ca_pem)
    with feed_readers.reading(fleet.port, ca, num_pages):
        yield


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--pages", type=int, default=20)
    parser.add_argument("--run-rounds", type=int, default=150, help="rounds of a run [%(default)s]")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", choices=["load", "scrapes", "rounds"])
    parser.add_argument("--json", action="store_true")
    return options.parse(parser, devices=100, rounds=100, pages=2, run_rounds=40, turns=1)


def _text(found: dict[str, Any], arguments: argparse.Namespace) -> str:
    lines = []
    for name, values in found.get("load_ms", {}).items():
        lines.append(
            f"load of {name} with {arguments.devices} devices and {arguments.rounds} rounds: median "
            f"{statistics.median(values):.0f} ms, {min(values):.0f} to {max(values):.0f}"
        )
    for path, values in found.get("scrape_ms", {}).items():
        lines.append(
            f"{path} with {arguments.devices} devices: median {statistics.median(values):.1f} ms, 95th percentile "
            f"{statistics.quantiles(values, n=20)[-1]:.1f} ms"
        )
    if rounds := found.get("rounds"):
        for pages, values in rounds["round_s"].items():
            cpu = statistics.median(rounds["coordinator_cpu_s"][pages])
            lines.append(
                f"a round with {pages} open pages: median {1000 * statistics.median(values):.1f} ms, "
                f"{1000 * cpu:.1f} ms of the coordinator's CPU"
            )
        lines.append(f"ratio {rounds['ratio']}, of CPU {rounds['cpu_ratio']}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
