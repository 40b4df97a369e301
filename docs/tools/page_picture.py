"""Takes the pictures of the page for the docs, which its visual test also compares with.

    python docs/tools/page_picture.py record     keeps what the page is answered in the middle of a run, by real
                                                 coordinators and devices here, in tests/e2e/page_answers.json.gz
    python docs/tools/page_picture.py            draws every view from these answers, with the clock of that moment

Needs Chromium, and Pillow, which matplotlib brings. From the same answers the same browser draws the same pictures.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, Route, sync_playwright

from edgefl.coordinator.api.dashboard import HEADERS, MEDIA_TYPES, PAGE_FOLDER
from edgefl.core.config import RunConfig, parse_run
from edgefl.simulation.local_fleet import LocalFleet, partition_devices

ROOT = Path(__file__).parents[2]
ANSWERS = ROOT / "tests/e2e/page_answers.json.gz"
PICTURES = ROOT / "docs/images/page"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
VIEWS = {
    "now": "", "fleet": "fleet", "device": "devices/device-01", "runs": "runs", "run": "runs/RUN", "models": "models",
    "compare": "compare/fedavg/fedbuff", "start": "start", "join": "join", "audit": "audit", "first-steps": "",
}  # fmt: skip
EMPTY_FLEET = frozenset({"first-steps"})
LAST = ("now", "run")
SIZES = {1400: 900, 360: 740}
SCHEMES = ("light", "dark")
NUM_DEVICES, NUM_ROUNDS, RUN_NAME = 6, 60, "digits on 6 devices"
API = "/edgefl/v1/"
READ_SNAPSHOT = """async () => {
  const reader = (await fetch('/edgefl/v1/feed')).body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  while (!text.includes('\\n\\n')) text += (await reader.read()).value;
  await reader.cancel();
  return text.split('\\n\\n')[0].split('\\n').find((line) => line.startsWith('data: ')).slice(6);
}"""
SIGN_IN = "token => fetch('/edgefl/v1/session', {method: 'POST', headers: {Authorization: 'Bearer ' + token}})"
SETTLED = """() => !/Loading|Checking/.test(document.body.innerText) && document.fonts.status === 'loaded'"""
MEASURE = """() => ['system-ui', 'monospace'].map((font) => {
  const drawing = document.createElement('canvas').getContext('2d');
  drawing.font = `100px ${font}`;
  return drawing.measureText('edgefl 0123456789 Mim').width;
})"""
LIVE = """() => {
  const link = document.getElementById('link');
  const still = link.cloneNode();
  still.className = 'link live';
  still.textContent = 'live';
  link.replaceWith(still);
}"""
"""Says that the feed is there, for good: what was recorded is told once."""

Answers = Mapping[str, Any]
"""`now` of the feed, and by method and path the body of each answer; a fleet without boards apart, under `empty`."""


def main() -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or "/usr/bin/chromium", args=list(ARGUMENTS)
        )
        if sys.argv[1:] == ["record"]:
            ANSWERS.write_bytes(gzip.compress(json.dumps(record(browser)).encode(), 9, mtime=0))
        PICTURES.mkdir(exist_ok=True)
        for width, scheme in itertools.product(SIZES, SCHEMES):
            for name, picture in draw(browser, load_answers(), width, scheme):
                picture.save(PICTURES / f"{name}.webp", lossless=True)
        browser.close()


def load_answers() -> Answers:
    """Returns what was recorded."""
    answers: Answers = json.loads(gzip.decompress(ANSWERS.read_bytes()))
    return answers


def draw(browser: Browser, answers: Answers, width: int, scheme: str) -> Iterator[tuple[str, Image.Image]]:
    """Yields the picture of each view in one size and theme, with its name."""
    options: Any = {"color_scheme": scheme, "viewport": {"width": width, "height": SIZES[width]}}
    context = browser.new_context(
        timezone_id="UTC", locale="en-GB", reduced_motion="reduce", service_workers="block", **options
    )
    for name, view in VIEWS.items():
        told = answers["empty"] if name in EMPTY_FLEET else answers
        page = context.new_page()
        page.clock.set_fixed_time(told["now"])
        replay(page, told)
        page.goto(f"https://edgefl.example/#/{view.replace('RUN', told.get('run', ''))}")
        page.wait_for_selector("main h1, main h2", state="attached")
        page.wait_for_timeout(700)  # the form asks half a second after its last change
        page.wait_for_function(SETTLED)
        page.evaluate(LIVE)
        image = Image.open(io.BytesIO(page.screenshot(caret="hide", animations="disabled"))).convert("RGB")
        yield f"{name}-{width}-{scheme}", image
        page.close()
    context.close()


def replay(page: Page, answers: Answers) -> None:
    """Answers the page with what was recorded; its own files come from the package."""
    feeds = iter([f"id: 1\nevent: snapshot\ndata: {answers['feed']}\n\n"])

    def respond(route: Route) -> None:
        path = route.request.url.split("/", 3)[3]
        if path == API[1:] + "feed":
            if (feed := next(feeds, None)) is None:
                route.abort()  # asked again, it has no news
            else:
                route.fulfill(body=feed, content_type="text/event-stream")
            return
        if path.startswith(API[1:]):
            body = answers["answers"].get(f"{route.request.method} {path.removeprefix(API[1:])}")
            route.fulfill(status=200 if body else 404, body=body or "{}", content_type="application/json")
            return
        file = PAGE_FOLDER / (path.rpartition("/")[2] or "index.html")
        route.fulfill(body=file.read_bytes(), headers={**HEADERS, "Content-Type": MEDIA_TYPES[file.suffix]})

    page.route("**/*", respond)


def record(browser: Browser) -> Answers:
    """Returns what the page is answered by a fleet in the middle of a run, and by one without boards."""
    with tempfile.TemporaryDirectory(prefix="edgefl-picture-") as folder:
        root = Path(folder)
        with LocalFleet(root=root / "new", devices=()) as fleet:
            empty = record_views(browser, fleet, EMPTY_FLEET)
        devices, test_shards = partition_devices("digits", "dirichlet:0.5", NUM_DEVICES, root / "shards", None, 7)
        with LocalFleet(root=root / "fleet", devices=devices, test_shards=test_shards) as fleet:
            for strategy in ("fedavg", "fedbuff"):
                fleet.wait_for_run(fleet.submit(make_config(strategy, strategy, NUM_ROUNDS // 2)))
            client = fleet.make_client()
            for strategy in ("fedavg", "fedbuff"):
                made = client.post("/edgefl/v1/deployments", {"model": f"{strategy}:latest", "tolerance": 1.0})
                path = f"/edgefl/v1/deployments/{made['deployment_id']}"
                while client.get(path)["status"] not in {"done", "failed"}:
                    time.sleep(0.2)
            run_id = fleet.submit(make_config(RUN_NAME, "fedavg", 10 * NUM_ROUNDS))
            while client.get(f"/edgefl/v1/runs/{run_id}")["rounds"] < NUM_ROUNDS // 3:
                time.sleep(0.2)
            answers = record_views(browser, fleet, VIEWS.keys() - EMPTY_FLEET, run_id)
            client.post(f"/edgefl/v1/runs/{run_id}/stop")
        return {**answers, "empty": empty, "fonts": measure_fonts(browser)}


def measure_fonts(browser: Browser) -> list[float]:
    """Returns the widths of a text in the page's fonts, which say whether another machine has the same."""
    page = browser.new_page()
    widths: list[float] = page.evaluate(MEASURE)
    page.close()
    return widths


def make_config(name: str, strategy: str, num_rounds: int) -> RunConfig:
    """Returns the settings of one run."""
    return parse_run(
        {
            "run": {"task": "digits", "name": name, "rounds": num_rounds},
            "strategy": {"name": strategy},
            "compression": {"up": "ef|topk:0.05|int8", "down": "dense|fp16"},
            "devices": {"min": NUM_DEVICES},
        }
    )


def record_views(browser: Browser, fleet: LocalFleet, names: Any, run_id: str = "") -> dict[str, Any]:
    """Returns what the page is answered in these views."""
    context = browser.new_context(ignore_https_errors=True, viewport={"width": 1400, "height": 900})
    page = context.new_page()
    page.goto(f"https://127.0.0.1:{fleet.port}/")
    page.evaluate(SIGN_IN, str(fleet.make_client().token))
    answers: dict[str, str] = {}
    asked: list[Any] = []
    page.on("request", lambda request: asked.append(request) if API in request.url else None)
    # What goes on comes last, with the feed that it belongs to.
    for name in sorted(names, key=lambda one: (one in LAST, one)):
        page.goto("about:blank")
        page.goto(f"https://127.0.0.1:{fleet.port}/#/{VIEWS[name].replace('RUN', run_id)}")
        page.wait_for_selector(".link.live")
        page.wait_for_function(SETTLED)
        page.wait_for_timeout(700)  # the form asks half a second after its last change
        page.wait_for_function(SETTLED)
        for request in asked:
            path = request.url.partition(API)[2]
            if path not in {"feed", "session"} and request.response().ok:
                answers[f"{request.method} {path}"] = request.response().text()
        asked.clear()
    feed = page.evaluate(READ_SNAPSHOT)
    context.close()
    access = {**json.loads(answers["GET access"]), "csrf_token": "", "user": "ada", "role": "admin"}
    answers["GET access"] = json.dumps(access)
    return {"now": json.loads(feed)["now"], "feed": feed, "run": run_id, "answers": answers}


if __name__ == "__main__":
    main()
