"""What a model counts for on its way to a simulated board."""

from types import SimpleNamespace

import numpy as np

from edgefl.simulation.downlink import Downlink


class Source:
    """A model of two entries of which nobody knows what changed."""

    version = 0

    def model(self):
        return {"w": np.zeros(2)}

    def changed(self, since):
        return None


def test_a_board_that_holds_the_version_is_sent_no_entries_and_one_that_does_not_all():
    source = Source()
    downlink = Downlink(lambda model, version: bytes(1000), lambda model, changed, version: bytes(10 + len(changed)))
    board = SimpleNamespace(held_version=None)
    assert [downlink.num_bytes(board, source) for _ in range(2)] == [1000, 10]
    source.version = 1
    assert [downlink.num_bytes(board, source) for _ in range(2)] == [1000, 10]


def test_without_deltas_the_whole_model_is_sent_each_time():
    board = SimpleNamespace(held_version=None)
    downlink = Downlink(lambda model, version: bytes(1000))
    assert [downlink.num_bytes(board, Source()) for _ in range(2)] == [1000, 1000]
