"""One board of ten claims what it likes, in every strategy that ships; simulated, where all of them run alike."""

import pytest
from rogue_claims import CLAIMS, play

from edgefl.strategies.registry import BUILT_IN_STRATEGIES

pytestmark = [pytest.mark.attack, pytest.mark.slow, pytest.mark.timeout(900)]

# Those that learn slowly or waver get more rounds; those that add every update as it comes, smaller and more steps.
ROUNDS = {"adacomp": 150, "signsgd": 150, "ssgd": 150, "esync": 60, "fltrust": 100}
ROUNDS |= dict.fromkeys(("asgd", "dc-asgd", "bounded"), 100)
OPTIONS = {name: {"iterations": 10, "learning_rate": 0.01} for name in ("asgd", "dc-asgd", "bounded")}
# Its control variates need true iteration counts, which follow from the examples that a board joined with.
JOINS_HONESTLY = {"scaffold"}


@pytest.mark.parametrize("strategy", sorted(BUILT_IN_STRATEGIES))
def test_a_rogue_of_ten_weighs_two_tenths_at_most_and_costs_two_points(strategy, monkeypatch, tmp_path, attack_table):
    rounds, options = ROUNDS.get(strategy, 20), OPTIONS.get(strategy, {})
    honest = play(monkeypatch, tmp_path / "honest", strategy, rounds=rounds, **options)
    joins = "honestly" if strategy in JOINS_HONESTLY else "with 2^40 examples"
    worst, share = 1.0, 0.0
    for number, claim in enumerate(CLAIMS.values()):
        found = play(
            monkeypatch,
            tmp_path / str(number),
            strategy,
            rounds=rounds,
            claim=claim,
            lies_at_join=strategy not in JOINS_HONESTLY,
            **options,
        )
        worst, share = min(worst, found.accuracy), max(share, found.share)
    attack_table.add(
        f"{strategy}: 1 rogue of 10 claims 2^53, joins {joins}",
        "weighs <= 0.2; within 2 points",
        f"weighs {share:.3f}; {honest.accuracy:.3f} -> {worst:.3f}",
    )
    assert share <= 0.2
    assert worst >= honest.accuracy - 0.02
