"""An uplink that is away: the site goes on, and what it makes goes upstream once, later."""

from dataclasses import replace

import numpy as np
import pytest
from site_boards import RUN, SPEC, TASK, SomeBoards, make_header, mean_of

from edgefl.compression.codec import decode_body, make_codec
from edgefl.coordinator.execution.live_fleet import InterruptedRunError
from edgefl.coordinator.execution.site_outage import OutageLimits, OutageWork
from edgefl.coordinator.execution.site_records import RoundRecord, load_content, save_content
from edgefl.core.errors import DataError
from edgefl.core.types import TrainConfig, derive_rng

NAMES = ("pi-1", "pi-2")
BASE = {spec.name: np.ones(spec.shape, spec.dtype) for spec in SPEC}
STEP = mean_of(NAMES)


def encode(steps):
    """The model of which the site's own is so many steps of its boards away."""
    model = {name: (tensor + steps * STEP[name]).astype(tensor.dtype) for name, tensor in BASE.items()}
    return make_codec("dense", SPEC).encode(model, derive_rng(0))


def work(boards, header, steps=0):
    return boards.rounds.run_round(header, encode(steps), TASK, lambda: None)


def go_on(boards):
    return boards.rounds.run_offline_round(lambda: None)


def next_header(version, **more):
    return make_header(f"{RUN}/v{version}-a9-site", version=version, **more)


def list_outages(boards):
    return [message for kind, _, message in boards.events if kind == "site-outage"]


@pytest.fixture
def boards(tmp_path):
    """A site that has answered, and then has lost its uplink."""
    some = SomeBoards(tmp_path, *NAMES, outage=OutageLimits(max_rounds=3, max_staleness=6))
    work(some, make_header())
    return some


def check(answer, times):
    """The answer is so many times the mean of the boards, who send the same update each time."""
    found = decode_body(answer[1], SPEC)
    for name in ("w", "b"):
        np.testing.assert_allclose(found[name], times * STEP[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("version", "upstream", "ahead"), [(4, 1, 2), (9, 5, -2), (3, 0, 3)])
def test_the_next_answer_is_the_site_s_own_model_against_that_which_came(boards, version, upstream, ahead):
    """The mean of upstream is then the average of both models, whatever upstream did meanwhile."""
    assert [go_on(boards), go_on(boards)] == [True, True]
    boards.restart()
    answer = work(boards, next_header(version), upstream)
    check(answer, ahead + 1)
    assert answer[0]["metrics"]["num_examples"] == 71
    check(work(boards, make_header(f"{RUN}/v10", version=10)), 1)
    told = f"what 2 rounds of the site made while the uplink was away goes upstream, {version - 3} versions late"
    assert boards.events == [("site-outage", "", told)]


def test_the_boards_go_on_from_the_model_of_their_site_with_other_seeds(boards):
    for _ in range(2):
        go_on(boards)
    asked = [
        (header["version"], header["assignment"], decode_body(body, SPEC)) for _, _, header, body in boards.asked
    ]
    assert [version for version, _, _ in asked] == [3, 3, 4, 4, 5, 5]
    assert len({assignment for _, assignment, _ in asked}) == 6
    for rounds, (_, _, model) in enumerate(asked[::2]):
        np.testing.assert_allclose(model["w"], BASE["w"] + rounds * STEP["w"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("point", ["Path.rename", "sync_directory", "save_content", "OutageWork.complete"])
def test_a_gateway_that_is_killed_takes_the_work_along_once(boards, monkeypatch, point):
    go_on(boards)
    header, killed = next_header(4), RuntimeError("killed")

    def kill(*_, **__):
        raise killed

    with monkeypatch.context() as patch:
        patch.setattr(f"edgefl.coordinator.execution.site_outage.{point}", kill)
        patch.setattr(OutageWork, "restore", lambda *_: None)  # nothing runs after a kill
        with pytest.raises(RuntimeError, match="killed"):
            work(boards, header)
    boards.restart()
    if point != "OutageWork.complete":
        boards.silent.add("pi-2")
        boards.on_asked = lambda _name: boards.rounds.stop()
        with pytest.raises(InterruptedRunError):
            work(boards, header)
        boards.silent.clear()
        boards.on_asked = lambda _name: None
        boards.restart()
    answer = work(boards, header)
    check(answer, 1 + 2)  # the first answer is in the site's model, and not in that which came
    assert work(boards, header) == answer
    check(work(boards, make_header(f"{RUN}/v5", version=5)), 1)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_round_without_an_answer_leaves_the_work_to_the_next(boards, monkeypatch, is_killed):
    go_on(boards)
    for name in NAMES:
        boards.say(name, "offline")
    boards.jumped_s += 60.0  # it waits for boards after a start
    with monkeypatch.context() as patch:
        if is_killed:
            patch.setattr(OutageWork, "restore", lambda *_: None)
        with pytest.raises(DataError, match="no board of this site is there"):
            work(boards, next_header(4))
    assert not list_outages(boards)
    boards.restart()
    check(work(boards, make_header(f"{RUN}/v5", version=5)), 1 + 2)
    assert [message.partition("away ")[2] for message in list_outages(boards)] == ["goes upstream, 2 versions late"]
    check(work(boards, next_header(4)), 1)


def test_a_site_goes_on_for_so_many_rounds_and_keeps_no_more_of_them(boards):
    folders = sorted(path.name for path in boards.rounds._folder.iterdir() if path.is_dir())
    assert [go_on(boards) for _ in range(5)] == [True, True, True, False, False]
    assert sorted(path.name for path in boards.rounds._folder.iterdir() if path.is_dir()) == folders
    check(work(boards, next_header(4), 1), 1 + 3)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (next_header(10), "upstream is 7 versions on, of which 6 are allowed"),
        (next_header(2), "upstream is -1 versions on"),
        (next_header(4, run="run-8"), "another run"),
        (next_header(4, lineage="line-2"), "another state of the coordinator's store"),
    ],
)
def test_work_that_is_too_late_or_of_something_else_is_dropped_and_that_is_said(boards, header, reason):
    go_on(boards)
    check(work(boards, header), 1)
    assert reason in boards.events[-1][2]
    assert not OutageWork(folder=boards.rounds._folder).path.exists()


def test_a_site_does_not_go_on_where_that_is_off_or_would_do_harm_or_the_run_is_over(tmp_path):
    off = SomeBoards(tmp_path / "off", *NAMES)
    work(off, make_header())
    assert not go_on(off)
    on = SomeBoards(tmp_path / "on", *NAMES, outage=OutageLimits(max_rounds=3))
    assert not go_on(on)
    work(on, make_header(codec="ef|int8"))
    assert not go_on(on)
    work(on, make_header(f"{RUN}/v4", plan=TrainConfig(iterations=4, keeps_state=True).to_json()))
    assert not go_on(on)
    work(on, make_header(f"{RUN}/v5", site_limits={"has_plain_step": False}))
    assert not go_on(on)
    has_local = replace(TASK, has_local_tensors=True)
    on.rounds.run_round(make_header(f"{RUN}/v6"), encode(0), has_local, lambda: None)
    assert not go_on(on)
    work(on, make_header(f"{RUN}/v7"))
    assert go_on(on)
    on.rounds.complete_run("another")
    assert go_on(on)
    on.rounds.complete_run(RUN)
    assert not go_on(on)
    assert not OutageWork(folder=on.rounds._folder).path.exists()


def test_a_round_that_fails_leaves_what_was_made_before(boards):
    go_on(boards)
    boards.say("pi-1", "offline")
    boards.say("pi-2", "offline")
    boards.jumped_s += 60.0
    with pytest.raises(DataError, match="no board of this site is there"):
        go_on(boards)
    boards.say("pi-1", "online")
    boards.say("pi-2", "online")
    assert go_on(boards)
    check(work(boards, next_header(4), 1), 1 + 2)


def test_boards_that_all_failed_are_asked_again_under_another_name(boards):
    moves = boards.moves
    boards.moves = {name: {**move, "w": move["w"] * np.nan} for name, move in moves.items()}
    with pytest.raises(DataError, match="no board of this site has sent an update"):
        go_on(boards)
    boards.moves = moves
    folders = [path for path in boards.rounds._folder.iterdir() if path.is_dir()]
    assert len(folders) == 1  # that of the answer
    assert go_on(boards)
    assert go_on(boards)
    names = [header["assignment"] for _, _, header, _ in boards.asked]
    assert len(set(names)) == len(names) == 8
    check(work(boards, next_header(4)), 1 + 3)


@pytest.mark.parametrize(
    ("line", "body"),
    [
        ({"version": None}, None),
        ({"version": "3"}, None),
        ({"rounds": [2]}, None),
        ({"rounds": 10**400}, None),
        ({}, b"no model"),
    ],
)
def test_work_on_disk_that_makes_no_sense_is_dropped(boards, line, body):
    go_on(boards)
    path = OutageWork(folder=boards.rounds._folder).path
    content, model = load_content(path)
    save_content(path, {**content, **line}, model if body is None else body)
    check(work(boards, next_header(4)), 1)
    assert not path.exists()
    check(work(boards, make_header(f"{RUN}/v5", version=5)), 1)


def test_rounds_of_the_site_do_not_crowd_out_the_order_of_those_with_upstream(boards):
    order = [*boards.rounds._index.rounds]
    go_on(boards)
    go_on(boards)
    assert boards.rounds._index.rounds == order
    assert len(order) == 1


def test_damaged_work_is_dropped_and_the_round_goes_on(boards):
    go_on(boards)
    path = OutageWork(folder=boards.rounds._folder).path
    path.write_bytes(path.read_bytes()[:-1])
    check(work(boards, next_header(4)), 1)
    header = make_header(f"{RUN}/v5", version=5)
    go_on(boards)
    record = RoundRecord.open(boards.rounds._folder, header)
    (record.path / "outage").write_bytes(b"{}")
    check(work(boards, header, 1), 1 + 1)
