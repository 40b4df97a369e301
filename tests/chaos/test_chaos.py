"""The short form, `make chaos-short`: faults of every kind on a fleet of real processes, while runs go on.

Most of what happens to processes, disks and wires must cost nothing at all: the model of a synchronous run is, bit
for bit, that of one that nobody has disturbed. Devices that are killed or cut off may miss a round; an asynchronous
run then ends as good as any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from chaos.ledger import Audit
from chaos.play import Play, table
from chaos.processes import Site
from chaos.runs import NAMES, NUM_DEVICES, PYTHON_PATH, TASK, accuracy, config
from chaos.schedule import GRAVE, HARMLESS, each_once

from edgefl.core.config import RunConfig
from edgefl.core.types import Json
from edgefl.simulation.faults import FaultKind
from edgefl.tasks.datasets.central import create_shards

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

SEED = 11
TOLERANCE = 0.03
PACE_S = 0.1
ROUNDS = {"ssgd": 250, "asgd": 150}
"""More than there is time for while things happen."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    out = tmp_path_factory.mktemp("digits")
    paths = create_shards("digits", "dirichlet:0.5", NUM_DEVICES, out)
    return [path.resolve() for path in (*paths, out / "test.npz")]


@pytest.fixture(scope="module")
def site(shards: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("site")
    with Site(root=root, shards=shards[:-1], task=TASK, python_path=PYTHON_PATH) as running:
        yield running
    tracebacks = [path.name for path in root.glob("*.log") if "Traceback" in path.read_text(errors="replace")]
    assert tracebacks == []


def _disturbed(
    play: Play, run_file: RunConfig, pace: Path, kinds: Sequence[tuple[str, FaultKind]]
) -> tuple[Json, Audit]:
    pace.write_text(str(PACE_S))
    play.submit(run_file)
    play.disturb(each_once(SEED, kinds, NAMES))
    pace.write_text("0")
    run = play.finish(300)
    print(f"\n{table(play.recoveries)}")
    return run, play.audit()


def test_what_drops_no_device_leaves_a_synchronous_run_the_same_bit_for_bit(site: Site, tmp_path: Path) -> None:
    play, run_file = Play(site, SEED, print), config("ssgd", ROUNDS["ssgd"], pace=tmp_path / "pace")
    run, found = _disturbed(play, run_file, tmp_path / "pace", HARMLESS)
    assert (run["status"], run["version"]) == ("finished", ROUNDS["ssgd"])
    assert (play.problems, found.problems) == ([], [])
    assert (play.num_interventions, found.num_dropped) == (0, 0)
    assert found.num_aggregated == ROUNDS["ssgd"] * NUM_DEVICES
    assert all(path.name in site.log("coordinator") for path in site.damaged), "damage is named"
    undisturbed = site.fleet.wait_for_run(site.fleet.submit(run_file))
    assert run["model"] == undisturbed["model"]


def test_an_asynchronous_run_ends_as_good_as_an_undisturbed_one(
    site: Site, shards: list[Path], tmp_path: Path
) -> None:
    play, run_file = Play(site, SEED, print), config("asgd", ROUNDS["asgd"], pace=tmp_path / "pace")
    run, found = _disturbed(play, run_file, tmp_path / "pace", GRAVE)
    assert run["status"] == "finished"
    assert (play.problems, found.problems, play.num_interventions) == ([], [], 0)
    undisturbed = site.fleet.wait_for_run(site.fleet.submit(run_file))
    reached, without = (accuracy(site.fleet.get_model_path(each["model"]), shards[-1]) for each in (run, undisturbed))
    assert reached > without - TOLERANCE
