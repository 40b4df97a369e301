"""A real fleet is updated: releases and packs travel through a real coordinator into a real board's slots."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from wheel_files import Signer, edgefl_wheel, make_slots, make_wheel

from edgefl import __version__
from edgefl.config import parse_run
from edgefl.local_fleet import LocalDevice, LocalFleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MAJOR, MINOR, PATCH = (int(part) for part in __version__.split("."))
NEXT, BROKEN = f"{MAJOR}.{MINOR}.{PATCH + 1}", f"{MAJOR}.{MINOR}.{PATCH + 2}"
BREAKS = {
    "edgefl/device/agent.py": ('"""Works until `stop`;', 'raise RuntimeError("broken on purpose")\n        """')
}


@dataclass
class Updated:
    """`board` runs in slots and trusts the signer, `manual` is an edgefl that somebody installed by hand."""

    fleet: LocalFleet
    tools: Any
    signer: Signer
    root: Path
    folder: Path

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.fleet.popen(arguments)
        output = process.communicate(timeout=300)[0].decode()
        return process.returncode, output

    def device(self, name: str = "board") -> Any:
        return self.fleet.operator().get(f"/edgefl/v1/devices/{name}")

    def release(self, version: str, changes: Any = None) -> str:
        wheel = edgefl_wheel(self.folder / version, version, changes)
        return str(self.signer.bundle(self.folder / f"{version}.bundle", wheel, version=version))

    def events(self) -> list[str]:
        return [
            row["kind"] for row in self.fleet.history("events", device="board") if row["kind"].startswith("update")
        ]


@pytest.fixture(scope="module")
def updated(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Updated]:
    folder = tmp_path_factory.mktemp("updates")
    signer = Signer(folder / "operator")
    root = make_slots(folder / "opt", edgefl_wheel(folder / "first", __version__), borrow=True)
    supervisor = str(Path(__file__).with_name("slot_supervisor.py"))
    board, manual = tools.devices(2)
    program = (sys.executable, supervisor, str(root), str(signer.trusted))
    devices = [
        LocalDevice(name="board", shards=board.shards, program=program),
        LocalDevice(name="manual", shards=manual.shards),
    ]
    with tools.fleet(folder / "fleet", devices) as fleet:
        made = Updated(fleet, tools, signer, root, folder)
        for name in ("board", "manual"):
            tools.eventually(lambda name=name: "installs" in made.device(name)["capabilities"], 30, name)
        yield made


def test_a_board_is_updated_trains_on_and_rolls_a_broken_release_back_by_itself(updated: Updated) -> None:
    assert updated.device()["capabilities"]["installs"]["slot"] == "a"
    code, output = updated.run("devices", "update", "--to", NEXT, "--bundle", updated.release(NEXT), "--wait")
    assert code == 0, output
    assert "manual is left out: this edgefl is not installed in slots" in output
    updated.tools.eventually(lambda: updated.device()["version"] == NEXT, 20)
    assert updated.device()["capabilities"]["installs"]["slot"] == "b"
    assert updated.events() == ["update-requested", "updated"]

    config = parse_run({"run": {"task": "digits", "rounds": 2, "evaluate_on": "none"}, "devices": {"min": 2}})
    run = updated.fleet.submit(config)
    assert updated.fleet.wait_run(run)["rounds"] == 2
    assert {row["device_id"] for row in updated.fleet.history("updates", run=run)} == {"board", "manual"}

    broken = updated.release(BROKEN, BREAKS)
    code, output = updated.run("devices", "update", "--to", BROKEN, "--bundle", broken, "board", "--wait")
    assert code == 41, output
    assert f"edgefl {BROKEN} is not everywhere: board rolled-back: its agent did not come up within 40 s" in output
    updated.tools.eventually(lambda: updated.fleet.presence()["board"] == "online", 30)
    updated.tools.eventually(lambda: updated.device()["version"] == NEXT, 20)
    assert (updated.root / "current").readlink() == Path("b")
    assert updated.events()[-2:] == ["update-requested", "update-rolled-back"]
    table = updated.fleet.command("devices", "updates")
    assert "done" in table
    assert "failed" in table


def test_a_task_pack_reaches_the_board_and_its_capabilities_tell_so(updated: Updated) -> None:
    code = "from edgefl.tasks.digits import digits\n\n\ndef gulls():\n    return digits()\n"
    points = "[edgefl.tasks]\ngulls = gulls:gulls\n"
    wheel = make_wheel(updated.folder / "pack", "gulls", "0.1", {"gulls/__init__.py": code}, points=points)
    pack = updated.signer.bundle(updated.folder / "gulls.bundle", wheel, kind="pack", version="0.1")
    status, output = updated.run("devices", "install", str(pack), "board", "--wait", "--format", "json")
    assert status == 0, output
    facts = updated.tools.eventually(
        lambda: updated.device()["capabilities"]["installs"].get("packs"), 30, "the packs of the board"
    )
    assert facts == {"gulls": {"version": "0.1", "tasks": ["gulls"]}}
    shard = updated.device()["examples"]["digits"]
    path = json.loads((updated.fleet.root / "board" / "device.json").read_text())["shards"]["digits"]
    board = next(device for device in updated.fleet.devices if device.name == "board")
    added = updated.fleet.popen(
        ["device", "shard", "add", "gulls", path, "--state", str(updated.fleet.root / "board")], board.program
    )
    assert f"{shard} examples" in added.communicate(timeout=60)[0].decode()
    updated.tools.eventually(lambda: updated.device()["examples"].get("gulls") == shard, 60, "the pack's task")


def test_what_is_not_signed_for_the_board_is_refused_by_it_and_the_event_says_why(updated: Updated) -> None:
    stranger = Signer(updated.folder / "stranger")
    trace = updated.folder / "trace"
    code = f"open({str(trace)!r}, 'w')\n"
    wheel = make_wheel(updated.folder / "evil", "evil", "1.0", {"evil/__init__.py": code},
                       points="[edgefl.tasks]\nevil = evil:evil\n")  # fmt: skip
    bundle = stranger.bundle(updated.folder / "evil.bundle", wheel, kind="pack", version="1.0")
    status, output = updated.run("devices", "install", str(bundle), "board", "--wait")
    assert status == 41
    assert f"signed by key {stranger.id}, which this board does not trust" in output
    assert updated.events()[-1] == "update-refused"
    assert not trace.exists()
    assert not list(updated.root.rglob("evil*"))


def test_a_board_that_was_installed_by_hand_is_refused_with_the_reason(updated: Updated) -> None:
    status, output = updated.run("devices", "update", "--to", NEXT, "manual")
    assert status == 2
    assert "manual cannot be updated from here: this edgefl is not installed in slots" in output


def test_a_version_that_this_coordinator_cannot_talk_to_is_refused(updated: Updated) -> None:
    far = f"{MAJOR}.{MINOR + 3}.0"
    status, output = updated.run("devices", "update", "--to", far, "--bundle", updated.release(far), "board")
    assert status == 38, output


def test_only_an_operator_may_bring_a_bundle(updated: Updated) -> None:
    from edgefl.client import Operator  # noqa: PLC0415 only here
    from edgefl.errors import NotAllowedError  # noqa: PLC0415 likewise

    known = updated.fleet.operator()
    stranger = Operator(url=known.url, ca_pem=known.ca_pem, token="wrong")
    with (updated.folder / f"{NEXT}.bundle").open("rb") as file, pytest.raises(NotAllowedError):
        stranger.upload("/edgefl/v1/bundles", file)
