"""Takes the pictures of the page for the docs: real coordinators and devices on this machine, in the middle of a run.

    python docs/tools/page_picture.py --task fashion-mnist --data DIR --model mlp --rounds 40 --epochs 0.3

Needs Chromium, and Pillow, which matplotlib brings. Two short runs come first, so that there are runs to compare. The
pictures are of whatever the runs were like: they are taken when most rounds of the last are closed. `--terminal`
takes only those of `edgefl top`, as Textual draws them, and needs neither of the two.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from edgefl.cli.fleet.top_app import TopApp
from edgefl.core.config import RunConfig, parse_run
from edgefl.simulation.local_fleet import LocalFleet, partition_devices

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZES = {"": (1180, 800), "-phone": (360, 740)}
NEW_FLEET = {"first-steps": ""}
"""Pictures of a fleet without boards, by name, with their views."""
VIEWS = {
    "now": "", "fleet": "fleet", "device": "devices/device-01", "runs": "runs", "run": "runs/RUN",
    "compare": "compare/fedavg/fedbuff", "join": "join",
}  # fmt: skip
ALSO_DARK = frozenset({"now"})
ALSO_ON_A_PHONE = frozenset({"now"})
QUALITY = 82


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--scheme", default="dirichlet:0.5")
    parser.add_argument("--devices", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path, default=Path("docs/images/page"))
    parser.add_argument("--terminal", action="store_true", help="only the pictures of edgefl top")
    asked = parser.parse_args()
    if asked.terminal:
        with tempfile.TemporaryDirectory(prefix="edgefl-picture-") as folder:
            take_fleet(asked, Path(folder), take_terminal)
    else:
        take(asked)


def take(asked: argparse.Namespace) -> None:
    """Runs the fleets in a folder of their own and writes the pictures."""
    program = shutil.which("chromium") or "/usr/bin/chromium"
    asked.out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="edgefl-picture-") as folder, sync_playwright() as playwright:
        root = Path(folder)
        browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        with LocalFleet(root=root / "new", devices=()) as fleet:
            take_views(browser, fleet, NEW_FLEET, asked.out)

        def take_page(fleet: LocalFleet, run_id: str, folder: Path) -> None:
            take_views(browser, fleet, {key: view.replace("RUN", run_id) for key, view in VIEWS.items()}, folder)

        take_fleet(asked, root, take_page)
        browser.close()


def take_fleet(asked: argparse.Namespace, root: Path, take_pictures: Callable[[LocalFleet, str, Path], None]) -> None:
    """Runs a fleet, and has its pictures taken in the middle of its last run."""
    devices, test_shards = partition_devices(asked.task, asked.scheme, asked.devices, root / "shards", asked.data, 7)
    with LocalFleet(root=root / "fleet", devices=devices, test_shards=test_shards) as fleet:
        for strategy in ("fedavg", "fedbuff"):
            fleet.wait_for_run(fleet.submit(make_config(asked, strategy, strategy, asked.rounds // 2)))
        name = f"{asked.task} on {asked.devices} devices"
        run_id = fleet.submit(make_config(asked, name, "fedavg", asked.rounds))
        while fleet.make_client().get(f"/edgefl/v1/runs/{run_id}")["rounds"] < asked.rounds // 3:
            time.sleep(0.2)
        take_pictures(fleet, run_id, asked.out)


def take_terminal(fleet: LocalFleet, _run_id: str, folder: Path) -> None:
    """Writes what `edgefl top` shows of the fleet and of its run, in a terminal of 80 by 24."""

    async def use() -> None:
        app = TopApp(fleet.make_client(), fleet.make_client().url, interval_s=0.5)
        async with app.run_test(size=(80, 24)) as pilot:
            for name, key in (("top-fleet", "1"), ("top", "2")):
                await pilot.press(key)
                while app.snapshot is None:
                    await pilot.pause(0.1)
                await pilot.pause(2.0)
                path = folder.parent / f"{name}.svg"
                # Without the fonts of another host: the reader's own are as good.
                path.write_text(re.sub(r"@font-face \{.*?\}", "", app.export_screenshot(), flags=re.DOTALL))
                print(f"{path}: {path.stat().st_size / 1000:.0f} kB")

    asyncio.run(use())


def make_config(asked: argparse.Namespace, name: str, strategy: str, num_rounds: int) -> RunConfig:
    """Returns the settings of one run."""
    return parse_run(
        {
            "run": {"task": asked.task, "name": name, "rounds": num_rounds},
            "task": {"model": asked.model} if asked.model else {},
            "strategy": {"name": strategy, "epochs": asked.epochs},
            "compression": {"up": "ef|topk:0.05|int8", "down": "dense|fp16"},
            "devices": {"min": asked.devices},
        }
    )


def take_views(browser: Browser, fleet: LocalFleet, views: dict[str, str], folder: Path) -> None:
    """Writes the pictures of these views, each with its themes and sizes."""
    for suffix, (width, height) in SIZES.items():
        for scheme in ("light", "dark"):
            options: dict[str, Any] = {"color_scheme": scheme, "viewport": {"width": width, "height": height}}
            context = browser.new_context(ignore_https_errors=True, device_scale_factor=1.5, **options)
            page = context.new_page()
            for name, view in views.items():
                if (scheme == "dark" and name not in ALSO_DARK) or (suffix and name not in ALSO_ON_A_PHONE):
                    continue
                page.goto("about:blank")
                page.goto(f"https://127.0.0.1:{fleet.port}/#/{view}")
                page.wait_for_selector(".link.live")
                page.wait_for_function("() => !document.querySelector('main').innerText.includes('Loading')")
                page.wait_for_timeout(1500)
                path = folder / f"{name}{suffix}{'-dark' if scheme == 'dark' else ''}.webp"
                Image.open(io.BytesIO(page.screenshot())).save(path, quality=QUALITY, method=6)
                print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
            context.close()


if __name__ == "__main__":
    main()
