import pytest

from edgefl.history.plots import comparison, style


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_bar_s_parts_stand_behind_each_other_and_their_sum_beside_them():
    figure = comparison.render_bars(["a", "b"], {"up": [1.0, 20.0], "down": [2.0, 300.0]}, "traffic (MB/s)")
    panel = figure.axes[0]
    assert [(bar.get_x(), bar.get_width()) for bar in panel.patches] == [(0, 1), (0, 20), (1, 2), (20, 300)]
    assert [text.get_text() for text in panel.texts] == ["3", "320"]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["a", "b"]
    assert (legend(figure), panel.get_xlabel()) == (["up", "down"], "traffic (MB/s)")
    assert len({patch.get_hatch() for patch in panel.patches}) == 2
    assert comparison.render_bars(["a"], {"samples": [5.0]}, "samples (1/s)").legends == [], "one part needs none"


def test_every_device_has_a_bar_in_every_run_in_percent():
    figure = comparison.render_shares(["a", "b"], [{"pi-1": 0.25, "pi-2": 1.0}, {"pi-1": 0.5}], "computing")
    panel = figure.axes[0]
    assert [bar.get_width() for bar in panel.patches] == [25, 50, 100, 0]
    assert (panel.get_xlabel(), panel.get_xlim()) == ("computing (%)", (0, 102))
    assert legend(figure) == ["pi-1", "pi-2"]


def test_many_devices_become_a_box_that_says_what_it_is():
    shares = {f"pi-{n}": n / 100 for n in range(101)}
    figure = comparison.render_shares(["a", "b"], [shares, {"pi-1": 0.5}], "computing")
    panel = figure.axes[0]
    assert [(bar.get_x(), bar.get_width()) for bar in panel.patches] == [(25, pytest.approx(50)), (50, 0)]
    assert panel.get_xlabel().startswith("computing (%)\n1 to 101 devices: median")
    assert style.encode_figure(figure, ".png")
