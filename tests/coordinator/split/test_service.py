"""The coordinator's side of a split run: what it takes of boards, and what is left of a lost process."""

from dataclasses import replace

import numpy as np
import pytest
from split_networks import BATCH, DEVICE, PLAN, WIRE_ID, SplitSite

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.split_bodies import BatchCodec
from edgefl.coordinator.split.service import MAX_STARTS, RestProcess, SplitRequest, SplitRuns
from edgefl.core.errors import CodecError, DataError, NotFoundError, SplitSessionError, TaskError, UsageError

pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")

SHAPE = (32, 7, 7)


def batch_body(num_examples=BATCH, seed=0, shape=SHAPE):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, num_examples).astype("<i4").tobytes()
    batch = rng.standard_normal((num_examples, *shape)).astype(np.float32)
    return labels + BatchCodec("dense", shape).encode(batch, rng)


def send(site, number, *, session="s1", body=None, num_examples=BATCH):
    assignment = site.run.claim(DEVICE, WIRE_ID)
    try:
        request = SplitRequest(session=session, number=number, num_examples=num_examples)
        return site.run.exchange(assignment, request, batch_body(seed=number) if body is None else body)
    finally:
        site.run.release(assignment)


def front_body(site, value=1.0):
    front = site.components.split.front
    update = {spec.name: np.full(spec.shape, value, np.float32) for spec in front}
    return make_codec("dense", front).encode(update, np.random.default_rng(0))


@pytest.fixture
def site():
    return SplitSite()


def test_an_update_is_joined_of_the_device_s_part_and_the_rest_that_its_batches_moved(site):
    for number in range(3):
        send(site, number)
    body, up, down = site.run.join(WIRE_ID, {"split_session": "s1"}, 3, front_body(site))
    update = decode_body(body, site.components.shapes)
    assert set(update) == {spec.name for spec in site.components.shapes}
    assert (update["conv1.bias"] == 1).all()
    assert 0 < np.abs(update["fc1.weight"]).max() < 1
    assert up == sum(len(batch_body(seed=number)) for number in range(3))
    assert down == pytest.approx(3 * 4 * BATCH * 32 * 49, rel=0.02)


def test_a_batch_that_comes_again_is_answered_as_before_and_trained_once(site):
    first, again, next_one = send(site, 0), send(site, 0), send(site, 1)
    assert first == again != next_one
    assert site.processes[0].calls.count("step") == 2
    site.run.join(WIRE_ID, {"split_session": "s1"}, 2, front_body(site))


def test_another_session_begins_from_the_model_of_the_round(site):
    first = send(site, 0)
    send(site, 1)
    assert send(site, 0, session="s2") == first
    assert len(site.processes[0].server._sessions) == 1
    with pytest.raises(SplitSessionError):
        site.run.join(WIRE_ID, {"split_session": "s1"}, 2, front_body(site))
    site.run.join(WIRE_ID, {"split_session": "s2"}, 1, front_body(site))


def test_an_assignment_takes_no_more_batches_than_twice_its_device_s_examples_make(site):
    site.dispatch(num_examples=2 * BATCH, plan=replace(PLAN, epochs=1.0, iterations=None))
    for number in range(4):
        send(site, number)
    with pytest.raises(DataError, match="at most 4 batches"):
        send(site, 4)


@pytest.mark.parametrize(("session", "number"), [("s1", 2), ("s1", 5), ("other", 1)])
def test_a_batch_out_of_turn_makes_the_assignment_begin_again(site, session, number):
    send(site, 0)
    with pytest.raises(SplitSessionError, match="begins again"):
        send(site, number, session=session)


def test_what_a_lost_process_had_learnt_is_asked_for_again(site):
    first = send(site, 0)
    site.processes[0].lose()
    with pytest.raises(SplitSessionError):
        send(site, 1)
    assert send(site, 0, session="s2") == first
    assert len(site.processes) == 2
    site.processes[1].lose()
    with pytest.raises(SplitSessionError):
        site.run.join(WIRE_ID, {"split_session": "s2"}, 1, front_body(site))


def test_a_process_that_always_ends_fails_assignments_in_the_end(site):
    for number in range(MAX_STARTS):
        send(site, 0, session=f"s{number}")
        site.processes[-1].lose()
    with pytest.raises(TaskError, match=f"ended {MAX_STARTS} times"):
        send(site, 0, session="last")


@pytest.mark.parametrize("iterations", [0, 1, 3, None, "2"])
def test_an_update_of_other_iterations_than_its_batches_is_refused(site, iterations):
    send(site, 0)
    send(site, 1)
    with pytest.raises(ValueError, match="its batches were 2"):
        site.run.join(WIRE_ID, {"split_session": "s1"}, iterations, front_body(site))


def test_labels_on_the_device_take_two_requests_for_an_iteration():
    site = SplitSite(labels="device")
    activations, outputs = batch_body()[4 * BATCH :], BatchCodec("dense", (10,))
    answer = outputs.decode(send(site, 0, body=activations), BATCH)
    gradient = outputs.encode(answer / 10, np.random.default_rng(0))
    BatchCodec("dense", SHAPE).decode(send(site, 1, body=gradient), BATCH)
    send(site, 2, body=activations)
    with pytest.raises(ValueError, match=r"its batches were 1\.5"):
        site.run.join(WIRE_ID, {"split_session": "s1"}, 1, front_body(site))


@pytest.mark.parametrize(
    ("body", "num_examples", "error"),
    [
        (b"", BATCH, CodecError),
        (batch_body()[:-4], BATCH, CodecError),
        (batch_body(), BATCH - 1, CodecError),
        (batch_body(shape=(32, 7, 8)), BATCH, CodecError),
        (batch_body(BATCH + 1), BATCH + 1, DataError),
        (np.full(BATCH, 10, "<i4").tobytes() + batch_body()[4 * BATCH :], BATCH, TaskError),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused_and_trains_nothing(site, body, num_examples, error):
    with pytest.raises(error):
        send(site, 0, body=body, num_examples=num_examples)
    assert send(site, 0) == send(SplitSite(), 0)


def test_a_batch_has_a_size_and_comes_alone_from_whom_the_assignment_is_out_to(site):
    assignment = site.run.claim(DEVICE, WIRE_ID)
    assert len(batch_body()) < assignment.max_bytes < 2 * len(batch_body()) + 70_000
    with pytest.raises(UsageError, match="one after the other"):
        site.run.claim(DEVICE, WIRE_ID)
    for device_id, wire_id in (("other", WIRE_ID), (DEVICE, "r1/none")):
        with pytest.raises(NotFoundError):
            site.run.claim(device_id, wire_id)


def test_an_assignment_that_is_over_leaves_nothing_behind(site):
    send(site, 0)
    site.run.remove(WIRE_ID)
    assert site.processes[0].server._sessions == {}
    with pytest.raises(NotFoundError):
        site.run.claim(DEVICE, WIRE_ID)
    site.dispatch()
    claimed = site.run.claim(DEVICE, WIRE_ID)
    site.run.exchange(claimed, SplitRequest(session="s2", number=0, num_examples=BATCH), batch_body())
    site.run.remove(WIRE_ID)  # while its batch is in work
    assert site.run.release(claimed)
    site.run.end(claimed)
    assert site.processes[0].server._sessions == {}


def test_an_assignment_of_an_older_model_takes_no_batches(site):
    site.source.version = 3
    site.dispatch("r1/old")
    with pytest.raises(NotFoundError):
        site.run.claim(DEVICE, "r1/old")


def test_a_closed_run_takes_no_batches(site):
    runs = SplitRuns()
    runs.open("r1", site.run)
    assert runs.get(WIRE_ID) is site.run
    assert runs.get("r1/1/v0-a1-pi") is site.run
    claimed = site.run.claim(DEVICE, WIRE_ID)
    runs.close("r1")
    runs.close("r1")
    with pytest.raises(NotFoundError):
        runs.get(WIRE_ID)
    with pytest.raises(NotFoundError):
        site.run.exchange(claimed, SplitRequest(session="s", number=0, num_examples=1), batch_body(1))


@pytest.mark.timeout(120)
def test_the_real_process_answers_as_the_one_here_and_its_kill_is_noticed(site):
    expected = send(site, 0)
    site.run._start_process = start = RestProcess
    site.run._process = None
    assert send(site, 0, session="s2") == expected
    process = site.run._process
    assert isinstance(process, start)
    with pytest.raises(CodecError):
        send(site, 1, session="s2", body=b"damaged")
    process._process.kill()
    process._process.wait()
    with pytest.raises(SplitSessionError):
        send(site, 1, session="s2")
    assert send(site, 0, session="s3") == expected
    site.run.close()
