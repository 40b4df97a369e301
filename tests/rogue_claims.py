"""A simulated fleet in which one board of ten claims what it likes of its work."""

from dataclasses import dataclass, replace

import edgefl
from edgefl.core.claims import MAX_EXAMPLES, TOTAL_ITERATIONS
from edgefl.simulation import simulated_run
from edgefl.simulation.instruction_lifecycle import InstructionLifecycle

ROGUE, HUGE = "device-01", 2**53
CLAIMS = {
    "everything 2^53": {"num_examples": HUGE, "iterations": HUGE, "compute_s": float(HUGE), "paced_s": float(HUGE),
                        "extra": {TOTAL_ITERATIONS: float(HUGE), "messages": float(HUGE)}},
    "2^53 examples, no work": {"num_examples": HUGE, "iterations": 0, "compute_s": 0.0},
    "one iteration of 2^53 s": {"num_examples": HUGE, "iterations": 1, "compute_s": float(HUGE)},
}  # fmt: skip


@dataclass
class Outcome:
    """What a run came to: accuracy of its model, and the rogue's greatest part of the examples in a round."""

    accuracy: float
    share: float


def play(monkeypatch, root, strategy, *, rounds, claim=None, lies_at_join=True, **options):
    """Runs a strategy on ten devices of uneven parts of digits; with a claim, device-01 makes it.

    With `lies_at_join` it also joined with the most examples that a report may have.
    """
    with monkeypatch.context() as patch:
        if claim is not None:
            build, make = InstructionLifecycle._build_metrics, simulated_run.make_devices

            def build_metrics(work, result, now_s):
                metrics = build(work, result, now_s)
                return replace(metrics, **claim) if work.instruction.device_id == ROGUE else metrics

            def make_devices(*arguments, **options):
                boards = make(*arguments, **options)
                for board in boards:
                    if board.device_id == ROGUE and lies_at_join:
                        board.info = replace(board.info, examples=dict.fromkeys(board.info.examples, MAX_EXAMPLES))
                return boards

            patch.setattr(InstructionLifecycle, "_build_metrics", staticmethod(build_metrics))
            patch.setattr(simulated_run, "make_devices", make_devices)
        config = {
            "run": {"task": "digits", "rounds": rounds, "seed": 7},
            "strategy": {"name": strategy, **options},
            "simulation": {"workers": 0},
        }
        result = edgefl.simulate(config, devices=10, scheme="dirichlet:0.5", root=root)
    accuracy = result.metrics.get("node_accuracy") or result.metrics["accuracy"] or 0.0
    return Outcome(accuracy=accuracy, share=_compute_share(result.updates))


def _compute_share(updates):
    by_round = {}
    for row in updates:
        if row["outcome"] == "used":
            by_round.setdefault(row["round"], []).append(row)
    shares = []
    for rows in by_round.values():
        if len({row["device_id"] for row in rows}) == 10:
            total = sum(row["num_examples"] for row in rows)
            shares.append(sum(row["num_examples"] for row in rows if row["device_id"] == ROGUE) / max(1, total))
    return max(shares, default=0.0)
