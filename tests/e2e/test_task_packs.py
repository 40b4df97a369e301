"""A user's task and local step reach a board as a signed pack, train there to the end of a run, and leave again."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slot_fleet import SlotFleet, slot_fleet
from wheel_files import Signer, make_wheel

from edgefl.core.config import parse_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SOURCES = Path(__file__).parents[1] / "gull_pack"
POINTS = """
[edgefl.tasks]
gulls = gull_count.tasks:Gulls
[edgefl.local_steps]
clipped-sgd = gull_count.clipping:ClippedSgd
"""
RUN = {"run": {"task": "gulls", "rounds": 3, "evaluate_on": "devices"}, "strategy": {"optimizer": "clipped-sgd"}}


@dataclass
class Packed:
    """A fleet whose coordinator has the user's wheel; its board has the user's data, and no code for it yet."""

    site: SlotFleet
    wheel: Path
    shard: Path

    def packs(self) -> Any:
        return self.site.device()["capabilities"]["installs"].get("packs")

    def signed(self, name: str, *words: str) -> Path:
        """Returns a bundle that the operator signed on the command line."""
        out = self.site.folder / name
        status, output = self.site.run(
            "signing", "sign", *words, "--out", str(out), "--keys", str(self.site.signer.folder)
        )
        assert status == 0, output
        return out

    def install(self, bundle: Path, command: str = "install") -> tuple[int, str]:
        return self.site.run("devices", command, str(bundle), "board", "--wait")


def gull_wheel(folder: Path) -> Path:
    files = {path.relative_to(SOURCES).as_posix(): path.read_text() for path in SOURCES.rglob("*.py")}
    return make_wheel(folder, "gull-count", "0.1", files, points=POINTS)


def birds(path: Path) -> Path:
    """Writes measures of 200 gulls and 200 terns, which overlap a little."""
    rng = np.random.default_rng(3)
    is_gull = np.repeat([1, 0], 200)
    middle = np.where(is_gull[:, None] == 1, [430.0, 19.0], [270.0, 9.0])
    np.savez(path, measures=rng.normal(middle, [50.0, 3.0]), is_gull=is_gull)
    return path


@pytest.fixture(scope="module")
def packed(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Packed]:
    folder = tmp_path_factory.mktemp("packs")
    wheel = gull_wheel(folder / "dist")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder / "beside")
    with slot_fleet(folder, tools, folder / "beside") as site:
        yield Packed(site, wheel, birds(folder / "birds.npz"))


def test_what_is_not_signed_for_the_board_never_runs_there_and_the_event_says_why(packed: Packed) -> None:
    site, folder = packed.site, packed.site.folder
    trace = folder / "trace"
    code = f"open({str(trace)!r}, 'w')\n"
    wheel = make_wheel(folder / "evil", "evil", "1.0", {"evil/__init__.py": code},
                       points="[edgefl.tasks]\nevil = evil:evil\n")  # fmt: skip
    stranger = Signer(folder / "stranger")
    foreign = stranger.bundle(folder / "foreign.bundle", wheel, kind="pack", version="1.0")
    status, output = packed.install(foreign)
    assert (status, site.events()[-1]) == (41, "installation-rejected")
    assert f"signed by key {stranger.id}, which this board does not trust" in output

    # The key's name can be claimed by anybody; its signature cannot.
    claimed = folder / "claimed.bundle"
    claimed.write_bytes(foreign.read_bytes().replace(stranger.id.encode(), site.signer.id.encode()))
    status, output = packed.install(claimed)
    assert (status, site.events()[-1]) == (41, "installation-rejected")
    assert f"its signature by key {site.signer.id} is wrong" in output

    status, output = packed.install(wheel)
    assert status == 51, output
    assert "this is no bundle" in output
    assert not trace.exists()
    assert not list(site.root.rglob("evil*"))


def test_a_users_task_and_local_step_train_on_the_board_once_their_pack_is_installed(packed: Packed) -> None:
    site = packed.site
    status, output = packed.install(
        packed.signed("gulls.bundle", str(packed.wheel), "--kind", "pack", "--version", "0.1")
    )
    assert status == 0, output
    facts = site.tools.eventually(packed.packs, 30, "the packs of the board")
    assert facts == {"gull-count": {"version": "0.1", "tasks": ["gulls"], "local_steps": ["clipped-sgd"]}}
    assert "400 examples" in site.on_board("device", "shard", "add", "gulls", str(packed.shard))
    site.tools.eventually(lambda: site.device()["examples"].get("gulls") == 400, 60, "the data of the pack's task")

    run = site.fleet.submit(parse_run(RUN))
    ended = site.fleet.wait_for_run(run)
    assert (ended["status"], ended["rounds"]) == ("finished", 3)
    updates = site.fleet.list_history("updates", run=run)
    assert [(row["device_id"], row["outcome"], row["iterations"]) for row in updates] == [("board", "used", 10)] * 3
    losses = [row["loss"] for row in sorted(site.fleet.list_history("rounds", run=run), key=lambda row: row["round"])]
    assert losses[-1] < 0.5 * losses[0]
    accuracies = [row["accuracy"] for row in site.fleet.list_history("evaluations", run=run)]
    assert accuracies[-1] > 0.9


def test_a_pack_leaves_the_board_again_and_the_board_stays_with_its_data(packed: Packed) -> None:
    site = packed.site
    assert packed.packs(), "the test before has installed it"
    removal = packed.signed("no-gulls.bundle", "--kind", "removal", "--name", "gull-count", "--version", "0.1")
    status, output = packed.install(removal)
    assert status == 2
    assert "is removal gull-count 0.1; bring it with: edgefl devices uninstall" in output
    slot = site.device()["capabilities"]["installs"]["slot"]
    status, output = packed.install(removal, "uninstall")
    assert status == 0, output
    site.tools.eventually(lambda: packed.packs() == {}, 30, "the pack to be gone")
    site.tools.eventually(lambda: "gulls" not in site.device()["examples"], 60, "nobody to count birds any more")
    assert site.device()["examples"]["digits"] > 0
    assert site.device()["capabilities"]["installs"]["slot"] != slot
    assert not list((site.root / "current" / "lib").rglob("gull_count*"))
    assert list((site.root / slot / "lib").rglob("gull_count*")), "the slot before was changed"

    config = parse_run({"run": {"task": "digits", "rounds": 1, "evaluate_on": "none"}, "devices": {"min": 2}})
    run = site.fleet.submit(config)
    assert site.fleet.wait_for_run(run)["status"] == "finished"
    assert {row["device_id"] for row in site.fleet.list_history("updates", run=run)} == {"board", "manual"}
