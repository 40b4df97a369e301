"""Takes the README's picture of the page: a real coordinator and devices on this machine, in the middle of a run.

    python docs/tools/page_picture.py --task fashion-mnist --data DIR --model mlp --rounds 40 --epochs 0.3

Needs Chromium. The picture is of whatever the run was like: it is taken when most rounds are closed.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from edgefl.core.config import parse_run
from edgefl.simulation.local_fleet import LocalFleet, partition_devices

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZE = {"width": 1180, "height": 800}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--scheme", default="dirichlet:0.5")
    parser.add_argument("--devices", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--model")
    parser.add_argument("--view", default="")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("docs/images/page.png"))
    take(parser.parse_args())


def take(asked: argparse.Namespace) -> None:
    """Runs the fleet in a folder of its own and writes the picture."""
    config = parse_run(
        {
            "run": {"task": asked.task, "name": f"{asked.task} on {asked.devices} devices", "rounds": asked.rounds},
            "task": {"model": asked.model} if asked.model else {},
            "strategy": {"name": "fedavg", "epochs": asked.epochs},
            "compression": {"up": "ef|topk:0.05|int8", "down": "dense|fp16"},
            "devices": {"min": asked.devices},
        }
    )
    program = shutil.which("chromium") or "/usr/bin/chromium"
    with tempfile.TemporaryDirectory(prefix="edgefl-picture-") as folder, sync_playwright() as playwright:
        root = Path(folder)
        devices, test_shards = partition_devices(
            asked.task, asked.scheme, asked.devices, root / "shards", asked.data, 7
        )
        with LocalFleet(root=root, devices=devices, test_shards=test_shards) as fleet:
            browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
            page = browser.new_context(
                viewport=SIZE,
                device_scale_factor=1.5,
                ignore_https_errors=True,
                color_scheme="dark" if asked.dark else "light",
            ).new_page()
            page.goto(f"https://127.0.0.1:{fleet.port}/")
            run_id = fleet.submit(config)
            while fleet.make_client().get(f"/edgefl/v1/runs/{run_id}")["rounds"] < asked.rounds * 3 // 5:
                time.sleep(0.2)
            page.goto(f"https://127.0.0.1:{fleet.port}/#/{asked.view.replace('RUN', run_id)}")
            page.wait_for_timeout(3000)
            page.screenshot(path=asked.out, full_page=False)
            browser.close()
    print(f"{asked.out}: {asked.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
