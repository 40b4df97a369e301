"""Site gateways as processes: two sites give the flat fleet's model, whatever is killed or lost meanwhile."""

from dataclasses import replace

import numpy as np
import pytest
from site_fleet import SiteFleet

from edgefl.coordinator.execution.site_outage import OutageWork
from edgefl.coordinator.execution.site_records import load_content
from edgefl.coordinator.execution.site_rounds import OUTAGE_EVENT_KIND
from edgefl.core.config import parse_run
from edgefl.core.errors import RunFailedError, UsageError
from edgefl.device.training.trainer import DeviceTrainer
from edgefl.engine.assembly.build import build_run
from edgefl.storage.checkpoints import load_model_file

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]
ROUNDS = 4
SITES = ("site-1", "site-2")
SEED, STRATEGY = 5, {"iterations": 3, "learning_rate": 0.5, "batch_size": 8}


def load_result(tools, fleet, run_id):
    fleet.wait_for_run(run_id)
    return load_model_file(fleet.get_model_path(tools.run(fleet, run_id)["model"]))


def list_boards(tools, fleet, run_id):
    """The boards behind the used updates, by round and gateway."""
    return {
        (row["round"], row["device_id"]): [share["board"] for share in row["metrics"]["boards"]]
        for row in tools.used(fleet, run_id)
    }


def make_run(tools, gate, **more):
    run = tools.gated_run(gate, rounds=ROUNDS, seed=SEED, strategy=STRATEGY, **more)
    return replace(run, guard=replace(run.guard, enabled=False, max_weight_ratio=0.0))


def in_the_middle(tools, fleet, gate, *names):
    pids = {fleet.processes[name].pid for name in names}
    tools.eventually(lambda: pids <= gate.entered(), 180.0, what="all boards are in an iteration")


def test_two_sites_equal_the_flat_fleet_through_kills_and_a_lost_uplink(tools, tmp_path):
    boards = tools.devices(4, tools.gated)
    names = [board.name for board in boards]
    gate, sites = tools.gate(tmp_path / "gate"), {SITES[0]: boards[:2], SITES[1]: boards[2:]}
    with tools.fleet(tmp_path / "sites", [], kind=SiteFleet, sites=sites) as fleet:
        run_id = fleet.submit(make_run(tools, gate))
        in_the_middle(tools, fleet, gate, *names)
        # The uplink is gone, and one gateway dies and comes back, while the boards work on. The answers wait on disk.
        fleet.kill("coordinator")
        fleet.kill(SITES[0])
        fleet.gateways[SITES[0]].start()
        gate.open()
        rounds = [gateway.root / "site" / "site-rounds" for gateway in fleet.gateways.values()]
        tools.eventually(lambda: [*rounds[1].rglob("reply")], 180.0, what="the answer of the other site is on disk")
        fleet.kill(SITES[1])
        fleet.gateways[SITES[1]].start()
        tools.eventually(fleet.gateways[SITES[1]].is_answering, 300.0, what="the gateway is back")
        fleet.start_coordinator()
        model = load_result(tools, fleet, run_id)
        rows = tools.used(fleet, run_id)
        assert len({row["assignment_id"] for row in rows}) == len(rows)
        shown = list_boards(tools, fleet, run_id)
        # What waited on disk has counted. A gateway that is not back in time misses rounds, as any device does.
        assert shown[1, SITES[1]] == names[2:]
        assert {number for number, _ in shown} == set(range(1, ROUNDS + 1))
        fleet.wait_for_sites()
        check_killed_board(tools, fleet, names)
        check_refusal(tools, fleet)
    expected = train_flat(boards, tmp_path / "flat", shown)
    for name, tensor in expected.items():
        np.testing.assert_allclose(model[name], tensor, rtol=0, atol=1e-6)


def test_a_site_goes_on_while_its_uplink_is_away_and_its_model_goes_upstream_later(tools, tmp_path):
    boards = tools.devices(2)
    options, sites = ("--outage-rounds", "2"), {SITES[0]: boards}
    with tools.fleet(tmp_path / "fleet", [], kind=SiteFleet, sites=sites, options=options) as fleet:
        config = {"run": {"task": "digits", "rounds": 10_000, "seed": SEED}, "strategy": STRATEGY}
        run_id = fleet.submit(parse_run(config))
        tools.eventually(lambda: tools.used(fleet, run_id), 180.0, what="the site has answered")
        fleet.kill("coordinator")
        gateway = fleet.gateways[SITES[0]]
        work = OutageWork(folder=gateway.root / "site" / "site-rounds")
        tools.eventually(lambda: (load_content(work.path) or ({},))[0].get("rounds") == 2, 300.0, what="two rounds")
        fleet.start_coordinator()
        count = len(tools.used(fleet, run_id))
        tools.eventually(lambda: len(tools.used(fleet, run_id)) > count + 3, 300.0, what="the run goes on")
        events = gateway.client().get("/edgefl/v1/history/events")["rows"]
        (told,) = [row["message"] for row in events if row["kind"] == OUTAGE_EVENT_KIND]
        assert "what 2 rounds of the site made while the uplink was away goes upstream" in told
        assert not work.path.exists()
        rows = tools.used(fleet, run_id)
        assert len({row["assignment_id"] for row in rows}) == len(rows)


def train_flat(boards, folder, shown):
    """What the boards of each round make of the same run in one fleet: the mean of all, weighted by examples."""
    run = build_run(parse_run({"run": {"task": "digits", "rounds": ROUNDS, "seed": SEED}, "strategy": STRATEGY}), "r")
    trainers = {}
    for board in boards:
        (path,) = board.shards.values()
        trainers[board.name] = DeviceTrainer(
            device_id=board.name, role="trainer", shards={"digits": path}.copy, accelerator="cpu", threads=1,
            state_dir=folder / board.name, on_progress=lambda *_: True,
        )  # fmt: skip
    model = {name: tensor.copy() for name, tensor in run.model.items()}
    for version in range(ROUNDS):
        total, weight, body = {}, 0, run.encode(model, version)
        for name in sorted(board for (number, _), each in shown.items() if number == version + 1 for board in each):
            trainer = trainers[name]
            plan = run.strategy.plan.to_json()
            reply, update = trainer.train(
                {**run.header, "assignment": f"r/{version}-{name}", "version": version, "plan": plan}, body
            )
            count = reply["metrics"]["num_examples"]
            for key, tensor in run.decode(update).items():
                total[key] = total.get(key, 0.0) + count * tensor.astype(np.float64)
            weight += count
        for key, tensor in total.items():
            model[key] += (tensor / weight).astype(model[key].dtype)
    return model


def check_killed_board(tools, fleet, names):
    """A board that is killed in the middle is back in a later round; the run goes on."""
    gate = tools.gate(fleet.root / "second-gate")
    run_id = fleet.submit(make_run(tools, gate))
    in_the_middle(tools, fleet, gate, *names)
    fleet.kill(names[0])
    gateway = fleet.gateways[SITES[0]]
    tools.eventually(lambda: not gateway.has_boards(), 180.0, what="the gateway misses the board")
    fleet.start_device(names[0])
    tools.eventually(gateway.has_boards, 180.0, what="the board is back")
    gate.open()
    fleet.wait_for_run(run_id)
    shown = list_boards(tools, fleet, run_id)
    assert all(names[1] in shown[number, SITES[0]] for number in range(1, ROUNDS + 1))
    assert any(names[0] in shown[number, SITES[0]] for number in range(2, ROUNDS + 1)), shown


def check_refusal(tools, fleet):
    """A run that needs the update of each board does not begin, and says why."""
    run = tools.gated_run(rounds=1, strategy={"name": "coordinate-median"})
    with pytest.raises(RunFailedError, match="it is a site gateway, which answers with the mean of its boards"):
        fleet.wait_for_run(fleet.submit(run))
    with pytest.raises(UsageError, match="this is a site gateway, whose boards work for the coordinator upstream"):
        fleet.gateways[SITES[0]].client().post("/edgefl/v1/runs", {"config": run.to_json()})
