"""Packages of another Debian, unpacked and not installed: their checks are stricter than this machine's own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def cache() -> Path:
    root = os.environ.get("EDGEFL_TEST_CACHE") or Path.home() / ".cache" / "edgefl-tests"
    Path(root).mkdir(parents=True, exist_ok=True)
    return Path(root)


def unpacked(suite: str | None, *names: str) -> Path:
    """The tree of packages of a suite, None being this machine's own; fetched once, from where this machine fetches.

    Skips with the reason where that cannot be done.
    """
    tree = cache() / f"{suite or 'own'}-{names[0]}"
    if tree.is_dir():
        return tree
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip("no apt-get and dpkg-deb here to fetch packages with: run it on Debian")
    work = cache() / f"{tree.name}.part-{os.getpid()}"
    (work / "debs").mkdir(parents=True)
    try:
        told = apt(work, suite, "download", *names)
        debs = sorted((work / "debs").glob("*.deb"))
        if len(debs) != len(names):
            what = f"{', '.join(names)} of {suite or 'this system'}"
            pytest.skip(f"{what} cannot be fetched, {told[-200:]}: sudo apt-get update")
        for deb in debs:
            subprocess.run(["dpkg-deb", "-x", deb, work / "tree"], check=True)
        if not tree.is_dir():
            (work / "tree").rename(tree)
    finally:
        shutil.rmtree(work)
    return tree


def python_packages(*names: str) -> list[str]:
    """Returns the names with those of all Python packages of this system that they need."""
    if shutil.which("apt-cache") is None:
        pytest.skip("no apt-cache here to look packages up in: run it on Debian")
    kinds = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
    words = ["apt-cache", "depends", "--recurse", *(f"--no-{kind}" for kind in kinds), *names]
    told = subprocess.run(words, capture_output=True, text=True, check=False, timeout=90).stdout
    needed = {line for line in told.splitlines() if line.startswith("python3-") and line != "python3-minimal"}
    return [*names, *sorted(needed - set(names))]


def apt(work: Path, suite: str | None, *arguments: str) -> str:
    options = []
    if suite is not None:
        uris = subprocess.run(
            ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.split()
        mirror = next((uri for uri in uris if uri.rstrip("/").endswith("/debian")), None)
        if mirror is None or not KEYRING.exists():
            pytest.skip("apt knows no Debian here: add its mirror to /etc/apt/sources.list")
        (work / "sources.list").write_text(f"deb [signed-by={KEYRING}] {mirror} {suite} main\n")
        for folder in ("lists/partial", "cache/archives/partial"):
            (work / folder).mkdir(parents=True)
        places = {"Dir::Etc::SourceList": "sources.list", "Dir::State::Lists": "lists", "Dir::Cache": "cache"}
        options = [f"-o{name}={work / place}" for name, place in places.items()]
        options += ["-oDir::Etc::SourceParts=/dev/null", "-oAcquire::http::Timeout=15", "-oAcquire::Retries=0"]
        subprocess.run(["apt-get", *options, "update"], capture_output=True, check=False, timeout=90)
    done = subprocess.run(
        ["apt-get", *options, *arguments],
        cwd=work / "debs",
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    return done.stdout + done.stderr
