"""Every view of the page beside its picture in the docs: the same answers, a clock that stands still, both themes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image
from requirements import PARTS, needs

from edgefl.coordinator.api.dashboard import PAGE_FOLDER

TOOL = Path(__file__).parents[2] / "docs/tools/page_picture.py"
MAX_DIFFERENCE = 32
"""Levels of 256 by which a pixel may differ: edges of letters do, from one machine to the next."""
MAX_SHARE = 5e-4
"""Share of the pixels that may differ by more."""
MAX_BYTES = 2_000_000

pytestmark = needs("chromium")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("page_picture", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def browser(tool: ModuleType) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 only where there is a browser

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PARTS["chromium"].path(), args=list(tool.ARGUMENTS))
        if tool.measure_fonts(browser) != tool.load_answers()["fonts"]:
            pytest.skip("other fonts than those of the pictures: apt-get install fonts-dejavu-core")
        yield browser
        browser.close()


def differ(tool: ModuleType, name: str, picture: Image.Image) -> float:
    """Returns the share of the pixels that differ from the docs' picture."""
    known = Image.open(tool.PICTURES / f"{name}.webp").convert("RGB")
    if known.size != picture.size:
        return 1.0
    return float(np.mean(np.abs(np.asarray(known, int) - np.asarray(picture, int)).max(axis=2) > MAX_DIFFERENCE))


@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_looks_as_in_the_docs(tool: ModuleType, browser: Any, width: int, scheme: str) -> None:
    drawn = tool.draw(browser, tool.load_answers(), width, scheme)
    shares = {name: differ(tool, name, picture) for name, picture in drawn}
    assert len(shares) == len(tool.VIEWS)
    assert {name: share for name, share in shares.items() if share > MAX_SHARE} == {}, (
        "if it is meant: python docs/tools/page_picture.py, and look at the pictures"
    )


@pytest.mark.extended
def test_a_changed_style_is_seen(
    tool: ModuleType, browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in PAGE_FOLDER.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    style = (PAGE_FOLDER / "style.css").read_text(encoding="utf-8")
    assert "--space-3: 12px" in style
    (tmp_path / "style.css").write_text(style.replace("--space-3: 12px", "--space-3: 14px"), encoding="utf-8")
    monkeypatch.setattr(tool, "PAGE_FOLDER", tmp_path)
    name, picture = next(tool.draw(browser, tool.load_answers(), 360, "light"))
    assert differ(tool, name, picture) > MAX_SHARE


def test_the_pictures_are_few_and_each_is_of_a_view(tool: ModuleType) -> None:
    names = {f"{view}-{width}-{scheme}" for view in tool.VIEWS for width in tool.SIZES for scheme in tool.SCHEMES}
    files = [*tool.PICTURES.iterdir(), tool.ANSWERS]
    assert {file.name for file in files[:-1]} == {f"{name}.webp" for name in names}
    assert sum(file.stat().st_size for file in files) < MAX_BYTES
