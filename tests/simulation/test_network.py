"""The coordinator's link, shared fairly."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from edgefl.simulation.network import SharedLink, SimulatedDownlink


def drained(link: SharedLink[str]) -> list[tuple[float, str]]:
    ends = []
    while (end_s := link.compute_next_end_s()) is not None:
        ends += [(end_s, name) for name in link.complete_next(end_s)]
    return ends


def test_one_transfer_has_the_link_to_itself() -> None:
    link = SharedLink[str](100.0)
    link.start(2.0, 300, "a")
    assert drained(link) == [(5.0, "a")]


def test_two_that_begin_together_take_twice_as_long() -> None:
    link = SharedLink[str](100.0)
    link.start(0.0, 100, "a")
    link.start(0.0, 100, "b")
    assert drained(link) == [(2.0, "a"), (2.0, "b")]


def test_one_that_comes_later_slows_the_first_down_from_then_on() -> None:
    link = SharedLink[str](100.0)
    link.start(0.0, 200, "a")
    link.start(1.0, 50, "b")
    # At 1 s a has 100 left; at 50 B/s each b is through at 2 s, a has 50 left and the link alone.
    assert drained(link) == [(2.0, "b"), (2.5, "a")]


def test_an_idle_link_begins_anew() -> None:
    link = SharedLink[str](100.0)
    link.start(0.0, 100, "a")
    assert drained(link) == [(1.0, "a")]
    link.start(10.0, 100, "b")
    assert drained(link) == [(11.0, "b")]


def test_all_of_many_transfers_end_and_the_link_is_never_idle_meanwhile() -> None:
    link = SharedLink[str](1000.0)
    sizes = [(7 * place) % 91 + 1 for place in range(200)]
    for place, size in enumerate(sizes):
        link.start(0.0, size, str(place))
    ends = drained(link)
    assert len(ends) == 200
    assert ends[-1][0] == pytest.approx(sum(sizes) / 1000.0)
    assert [end_s for end_s, _ in ends] == sorted(end_s for end_s, _ in ends)


def test_nothing_under_way_ends_never() -> None:
    assert SharedLink[str](5.0).compute_next_end_s() is None


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
