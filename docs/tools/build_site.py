"""Builds the documentation site: stages the pages, fills in what comes from the code, runs Zensical.

A page asks for a generated part with a line `<!-- generated: NAME -->`; `PARTS` has the names. Zensical itself checks
links and anchors, and in strict mode each of its warnings ends the build. Nothing here needs a network.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import api_pages
import command_pages
import error_pages
import setting_pages

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
STAGED = ROOT / "build" / "docs"
REPOSITORY = "https://github.com/edgefl/edgefl/blob/main/"
FROM_ROOT = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
}
PARTS: dict[str, Callable[[], str]] = {
    "commands": command_pages.commands,
    "run file": setting_pages.run_file,
    "coordinator settings": setting_pages.coordinator_settings,
    "strategy settings": setting_pages.strategy_settings,
    "codec stages": setting_pages.codec_stages,
    "errors": error_pages.errors,
    "python api": api_pages.python_api,
}
_MARK = re.compile(r"^<!-- generated: (.+?) -->$", re.MULTILINE)
_LINK = re.compile(r"(\]\()((?!https?:|#|mailto:)[^)\s#]+)")


def main() -> int:
    """Returns the exit status: 0 when the site stands in build/site."""
    stage()
    if problems := [*nav_problems()]:
        print(*problems, sep="\n", file=sys.stderr)
        return 1
    zensical = Path(sys.executable).with_name("zensical")
    return subprocess.run([zensical, "build", "--strict", "--clean", *sys.argv[1:]], cwd=ROOT, check=False).returncode


def stage() -> None:
    """Writes every page into build/docs, with generated parts filled in and links that leave docs/ made absolute."""
    shutil.rmtree(STAGED, ignore_errors=True)
    shutil.copytree(DOCS, STAGED, ignore=shutil.ignore_patterns("tools", "__pycache__"))
    for page in STAGED.rglob("*.md"):
        text = relinked(page.read_text(encoding="utf-8"), DOCS / page.relative_to(STAGED))
        page.write_text(_MARK.sub(lambda found: PARTS[found[1]](), text), encoding="utf-8")
    for name, staged in FROM_ROOT.items():
        text = relinked((ROOT / name).read_text(encoding="utf-8"), ROOT / name)
        (STAGED / staged).write_text(text, encoding="utf-8")


def relinked(text: str, page: Path) -> str:
    """Returns the text with links as the site has them; `page` is where it lies in the repository."""

    def target(found: re.Match[str]) -> str:
        path = (page.parent / found[2]).resolve()
        if path.parent == ROOT and path.name in FROM_ROOT:
            staged = DOCS / FROM_ROOT[path.name]
        elif path.is_relative_to(DOCS):
            staged = path
        else:
            return f"{found[1]}{REPOSITORY}{path.relative_to(ROOT)}"
        here = DOCS if page.parent == ROOT else page.parent
        return f"{found[1]}{os.path.relpath(staged, here)}"

    return _LINK.sub(target, text)


def nav_problems() -> Iterator[str]:
    """Yields the pages that the navigation lacks, and those that it names and that are not there."""
    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    named = {*_pages(nav)}
    there = {str(page.relative_to(STAGED)) for page in STAGED.rglob("*.md")}
    yield from (f"zensical.toml: nav lacks {page}" for page in sorted(there - named))
    yield from (f"zensical.toml: nav names {page}, which is not there" for page in sorted(named - there))


def _pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for item in entry.values() if isinstance(entry, dict) else entry:
            yield from _pages(item)


if __name__ == "__main__":
    sys.exit(main())
