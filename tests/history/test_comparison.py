import numpy as np
import plotted_store as made
import pytest

from edgefl.core.errors import NotFoundError
from edgefl.history import AXES, comparison, plot_style
from edgefl.history.series import read_rounds
from edgefl.storage.store import Store


@pytest.fixture
def series(tmp_path):
    """Writes a synchronous run, with models of the devices' own if told to, and reads its rounds."""
    with Store.open(tmp_path / "edgefl.db") as store:

        def write(name, nodes=(), **options):
            run = made.add_synchronous(store, name, **options)
            made.add_nodes(store, run, nodes)
            return read_rounds(made.StoreReader(store), made.head(run))

        yield write


def words(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts() if text.get_text()]


def test_a_sheet_has_a_row_for_each_quantity_and_a_column_for_each_axis_in_the_units_of_its_labels(series):
    figure = comparison.render_curves([series("a", accuracies={1: 0.25, 3: 0.5})], ("accuracy", "loss"), AXES)
    assert len(figure.axes) == 6
    assert [panel.get_ylabel() for panel in figure.axes if panel.get_ylabel()] == ["accuracy (%)", "loss"]
    labels = [panel.get_xlabel() for panel in figure.axes if panel.get_xlabel()]
    assert labels == ["round", "time since the start (s)", "sent, up and down (kB)"]
    by_axis = [panel.lines[0].get_xydata().tolist() for panel in figure.axes[:3]]
    assert by_axis == [[[1, 25], [3, 50]], [[5, 25], [17, 50]], [[0.8, 25], [2.4, 50]]]


def test_several_runs_differ_in_colour_and_in_mark(series):
    figure = comparison.render_curves([series(name) for name in "abcdefgh"], ("accuracy",), ("rounds",))
    lines = figure.axes[0].lines
    assert len({line.get_color() for line in lines}) == len({line.get_marker() for line in lines}) == len(lines) == 8
    assert words(figure) == list("abcdefgh")


def test_models_of_the_devices_own_have_lines_of_their_own_style(series):
    figure = comparison.render_curves([series("a", [0.4, 0.2, 0.1])], ("accuracy",), ("rounds",))
    shown = {line.get_linestyle(): line.get_ydata().round(6).tolist() for line in figure.axes[0].lines}
    assert shown == {"-": [10, 20, 30], "--": [9, 19, 29], ":": [0, 10, 20]}
    assert set(words(figure)) == {"a", "global model", "mean of the devices", "worst device"}


def test_a_reference_is_a_dotted_line_at_its_newest_value_and_in_the_legend(series):
    alone = series("alone", accuracies={1: 0.25, 3: 0.75}, rounds=4)
    figure = comparison.render_curves([series("a")], ("accuracy", "loss"), AXES, references=[alone])
    for panel in figure.axes[:3]:
        *_, line = panel.lines
        assert {float(value) for value in line.get_ydata()} == {75.0}
        assert (line.get_linestyle(), line.get_marker()) == ("--", "None")  # a pattern of dots reads as dashed
    assert {"a", "alone, at its end"} <= {*words(figure)}
    with pytest.raises(NotFoundError, match="run blind has no accuracy"):
        comparison.render_curves([alone], ("accuracy",), AXES, references=[series("blind", accuracies={})])


def test_a_reference_far_from_the_curves_makes_the_scale_logarithmic(series):
    run, near, far = series("a"), series("near", accuracies={1: 0.5}), series("far", accuracies={1: 1.9999})
    scales = [
        comparison.render_curves([run], ("loss",), ("rounds",), references=[alone]).axes[0].get_yscale()
        for alone in (near, far)
    ]
    assert scales == ["linear", "log"]


def test_consensus_errors_are_logarithmic_and_equal_models_leave_a_gap(series):
    figure = comparison.render_curves([series("a", [0.4, 0.0, 0.1])], ("disagreement",), ("rounds", "time"))
    assert [panel.get_yscale() for panel in figure.axes] == ["log", "log"]
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[1, 0.4], [3, 0.1]]


def test_a_run_without_the_quantity_is_named_and_nothing_is_drawn(series):
    runs = [series("has", [0.4]), series("lacks", accuracies={})]
    for quantity, reason in (("accuracy", "nobody has evaluated it"), ("disagreement", "share one model")):
        with pytest.raises(NotFoundError, match=f"run lacks has no {quantity}: .*{reason}"):
            comparison.render_curves(runs, (quantity,), AXES)
    with pytest.raises(NotFoundError, match="no disagreement"):
        comparison.render_curves([series("equal", [0.0, 0.0, 0.0])], ("disagreement",), AXES)


def test_a_run_of_one_round_shows_a_point(series):
    figure = comparison.render_curves([series("a", rounds=1)], ("accuracy",), ("rounds",))
    assert all(line.get_marker() != "None" for panel in figure.axes for line in panel.lines)
    assert plot_style.encode_figure(figure, ".png")


def test_a_run_that_is_over_long_before_the_others_is_still_seen(series):
    short, long = (series(name, rounds=count) for name, count in (("short", 2), ("long", 40)))
    figure = comparison.render_curves([short, long], ("accuracy",), AXES)
    assert [panel.get_xscale() for panel in figure.axes] == ["linear", "log", "log"]
    assert {panel.get_xscale() for panel in comparison.render_curves([long], ("accuracy",), AXES).axes} == {"linear"}


def test_a_legend_covers_no_panel(series):
    with plot_style.apply_style():
        figure = comparison.render_curves(
            [series(f"a run with quite a long name {n}") for n in range(9)], ("loss",), AXES, "title"
        )
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert all(panel.get_tightbbox().y0 >= legend.y1 - 1 for panel in figure.axes)
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.x1


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
    assert plot_style.encode_figure(figure, ".png")


def test_bars_are_shares_of_each_run_s_updates_by_version():
    figure = comparison.render_staleness({"a": np.array([0.0, 0, 1, 3]), "b": np.array([2.0])})
    upper, lower = figure.axes
    assert [bar.get_height() for bar in upper.patches] == [50, 25, 0, 25]
    assert [bar.get_x() + bar.get_width() / 2 for bar in upper.patches] == pytest.approx([0, 1, 2, 3])
    assert [bar.get_height() for bar in lower.patches] == [0, 0, 100, 0]
    assert upper.get_title("left") == "a\n4 updates, mean 1 (dashed), 95 % within 3, most 3"
    assert lower.get_xlabel() == "staleness (versions between a model and its update)"
    assert figure.get_supylabel() == "share of the applied updates (%)"


def test_a_run_that_is_never_stale_has_one_narrow_bar_and_a_wide_range_has_bars_of_several_versions():
    panel = comparison.render_staleness({"a": np.zeros(9)}).axes[0]
    assert [(bar.get_height(), bar.get_width() < 1) for bar in panel.patches] == [(100, True)]
    assert panel.get_xlim() == (-0.8, 5.8)
    panel = comparison.render_staleness({"a": np.arange(100.0)}).axes[0]
    assert len(panel.patches) == 34
    assert sum(bar.get_height() for bar in panel.patches) == pytest.approx(100)
    assert panel.get_xlabel().endswith(", 3 to a bar)")
