"""One board of ten that claims 2^53 of everything does not take a simulated run over."""

import pytest
from rogue_claims import CLAIMS, play

pytestmark = pytest.mark.extended


@pytest.mark.parametrize("strategy", ["fedavg", "fednova", "fedbuff"])
def test_a_rogue_of_ten_weighs_two_tenths_at_most_and_costs_two_points(strategy, monkeypatch, tmp_path):
    honest = play(monkeypatch, tmp_path / "honest", strategy, rounds=12)
    found = play(monkeypatch, tmp_path / "rogue", strategy, rounds=12, claim=CLAIMS["everything 2^53"])
    assert found.share <= 0.2
    assert found.accuracy >= honest.accuracy - 0.02
