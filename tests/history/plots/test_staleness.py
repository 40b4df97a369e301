import numpy as np
import pytest

from edgefl.history.plots import staleness


def test_bars_are_shares_of_each_run_s_updates_by_version():
    figure = staleness.render_staleness({"a": np.array([0.0, 0, 1, 3]), "b": np.array([2.0])})
    upper, lower = figure.axes
    assert [bar.get_height() for bar in upper.patches] == [50, 25, 0, 25]
    assert [bar.get_x() + bar.get_width() / 2 for bar in upper.patches] == pytest.approx([0, 1, 2, 3])
    assert [bar.get_height() for bar in lower.patches] == [0, 0, 100, 0]
    assert upper.get_title("left") == "a\n4 updates, mean 1 (dashed), 95 % within 3, most 3"
    assert lower.get_xlabel() == "staleness (versions between a model and its update)"
    assert figure.get_supylabel() == "share of the applied updates (%)"


def test_a_run_that_is_never_stale_has_one_narrow_bar_and_a_wide_range_has_bars_of_several_versions():
    panel = staleness.render_staleness({"a": np.zeros(9)}).axes[0]
    assert [(bar.get_height(), bar.get_width() < 1) for bar in panel.patches] == [(100, True)]
    assert panel.get_xlim() == (-0.8, 5.8)
    panel = staleness.render_staleness({"a": np.arange(100.0)}).axes[0]
    assert len(panel.patches) == 34
    assert sum(bar.get_height() for bar in panel.patches) == pytest.approx(100)
    assert panel.get_xlabel().endswith(", 3 to a bar)")
