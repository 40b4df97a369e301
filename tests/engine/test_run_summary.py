"""What is said of a run with models of single devices, and of one without."""

import pytest

from edgefl.engine.run_summary import format_accuracy, format_run_outcome, select_device_metrics


def test_the_average_the_nodes_and_the_worst_are_said_together():
    figures = {"accuracy": 0.93456, "node_accuracy": 0.5, "worst_node_accuracy": 0.1}
    words = "accuracy of the average model 0.9346, of the nodes 0.5000 (worst 0.1000)"
    assert format_accuracy(figures) == words
    assert (
        format_run_outcome("r", "finished", "rounds reached 3", figures)
        == f"run r finished: rounds reached 3; {words}"
    )
    assert format_accuracy({**figures, "accuracy": None}).startswith("accuracy of the average model unknown, of")


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({"accuracy": 0.5, "loss": 1.5}, "run r stopped: enough; accuracy 0.5000"),
        ({"accuracy": None}, "run r stopped: enough"),
        (
            {"rmse": 46.08, "r2": None, "accuracy": None, "loss": 0.25, "bytes_up": 7, "seconds": 2.0},
            "run r stopped: enough; loss 0.2500, rmse 46.0800",
        ),
    ],
)
def test_a_run_without_nodes_says_nothing_of_them(metrics, line):
    assert format_accuracy(metrics) is None
    assert format_run_outcome("r", "stopped", "enough", metrics) == line


def test_only_what_a_round_knows_is_a_figure():
    row = {"accuracy": 0.9, "node_accuracy": 0.0, "worst_node_accuracy": 0.0, "facts": {"disagreement": 2.0, "x": 1}}
    assert select_device_metrics(row) == {"node_accuracy": 0.0, "worst_node_accuracy": 0.0, "disagreement": 2.0}
    assert select_device_metrics({"node_accuracy": None, "worst_node_accuracy": None, "facts": None}) == {}
    assert select_device_metrics({"accuracy": 0.9}) == {}
