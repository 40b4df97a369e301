"""What a model counts for on its way to a simulated board."""

from types import SimpleNamespace

import numpy as np

from edgefl.simulation.downlink import SimulatedDownlink


class Source:
    """A model of two entries of which nobody knows what changed."""

    version = 0

    def model(self):
        return {"w": np.zeros(2)}

    def device_model(self, subject):
        return {"w": np.full(2, float(subject))} if subject else self.model()

    def changed(self, since):
        return None


def test_a_board_that_holds_the_version_is_sent_no_entries_and_one_that_does_not_all():
    source = Source()
    downlink = SimulatedDownlink(
        lambda model, version: bytes(1000), lambda model, changed, version: bytes(10 + len(changed))
    )
    board = SimpleNamespace(model_version=None)
    assert [downlink.start_download(board, source) for _ in range(2)] == [1000, 10]
    source.version = 1
    assert [downlink.start_download(board, source) for _ in range(2)] == [1000, 10]


def test_without_deltas_the_whole_model_is_sent_each_time():
    board = SimpleNamespace(model_version=None)
    downlink = SimulatedDownlink(lambda model, version: bytes(1000))
    assert [downlink.start_download(board, Source()) for _ in range(2)] == [1000, 1000]


def test_a_board_s_own_model_is_never_the_newest_one_nor_another_board_s():
    source, encoded = Source(), []

    def encode(model, version):
        encoded.append((version, float(model["w"][0])))
        return model["w"].tobytes()

    downlink = SimulatedDownlink(encode)
    found = [downlink.get_model(subject, source) for subject in ("", "3", "3", "4", "")]
    assert [np.frombuffer(sent.body)[0] for sent in found] == [0.0, 3.0, 3.0, 4.0, 0.0]
    assert [sent.key for sent in found] == [(0, ""), (0, "3"), (0, "3"), (0, "4"), (0, "")]
    assert downlink.get_global_model(source) is found[0]
    source.version = 1
    assert downlink.get_model("4", source).key == (1, "4")
    assert encoded == [(0, 0.0), (0, 3.0), (0, 4.0), (1, 4.0)]
