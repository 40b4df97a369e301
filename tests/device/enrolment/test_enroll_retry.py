from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from edgefl.core.errors import JoinError, TokenExpiredError, TokenInvalidError, TokenUsedError, UsageError
from edgefl.device.enrolment.enroll import (
    EnrolmentOptions,
    RetryPolicy,
    delete_secret_file,
    enroll_with_retry,
    wait_for_clock,
)
from edgefl.device.state_dir import DeviceStateDir

PI = EnrolmentOptions(name="pi-1")


class StuckError(AssertionError):
    """A join that should have ended went on."""


@dataclass
class Clock:
    """Time that passes only while somebody sleeps; `then` happens after so many sleeps."""

    now_s: float = 0.0
    slept: list[float] = field(default_factory=list)
    then: dict[int, Callable[[], Any]] = field(default_factory=dict)

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now_s += seconds
        self.then.get(len(self.slept), lambda: None)()
        if len(self.slept) > 200:
            raise StuckError

    def patience(self):
        return RetryPolicy(clock=lambda: self.now_s, sleep=self.sleep, rng=None)


@pytest.fixture
def clock():
    return Clock()


def test_a_lost_answer_uses_the_token_up_once(front_door, tmp_path, clock):
    front_door.lose_answers = 2
    state = enroll_with_retry(front_door.token(uses=1), PI, root=tmp_path / "d", policy=clock.patience())
    assert state.device_id == "pi-1"
    assert len(clock.slept) == 2
    assert [name for name, _ in front_door.enrolled] == ["pi-1"] * 3
    assert len({key for _, key in front_door.enrolled}) == 1


def test_a_token_that_lets_nobody_in_ends_it_at_once(front_door, tmp_path, clock):
    used = front_door.token()
    enroll_with_retry(used, replace(PI, name="pi-2"), root=tmp_path / "other", policy=clock.patience())
    unknown = replace(front_door.token(), secret="x")
    for token, kind in (
        (front_door.token(ttl_s=-5.0), TokenExpiredError), (used, TokenUsedError), (unknown, TokenInvalidError),
    ):  # fmt: skip
        with pytest.raises(kind):
            enroll_with_retry(token, PI, root=tmp_path / "d", policy=clock.patience())
    assert clock.slept == []


def test_a_name_that_is_taken_is_waited_for_until_it_is_free(front_door, tmp_path, clock):
    enroll_with_retry(front_door.token(), PI, root=tmp_path / "old", policy=clock.patience())
    clock.then[2] = lambda: front_door.store.remove_device("pi-1", at=0.0)
    state = enroll_with_retry(front_door.token(), PI, root=tmp_path / "new", policy=clock.patience())
    assert state.device_id == "pi-1"
    assert len(clock.slept) == 2


def test_a_stranger_at_one_address_does_not_keep_the_board_from_the_next(make_front_door, tmp_path, clock):
    stranger, door = make_front_door(), make_front_door()
    token = replace(door.token(), addresses=(stranger.address, door.address))
    assert enroll_with_retry(token, PI, root=tmp_path / "d", policy=clock.patience()).device_id == "pi-1"
    assert not any("enroll" in request for request in stranger.requests)


def test_a_state_of_another_device_or_a_token_without_an_address_ends_it(front_door, tmp_path, clock):
    state = enroll_with_retry(front_door.token(), PI, root=tmp_path / "d", policy=clock.patience())
    before = state.key.read_bytes()
    with pytest.raises(JoinError, match="belongs to device 'pi-1'"):
        enroll_with_retry(front_door.token(), replace(PI, name="pi-2"), root=tmp_path / "d", policy=clock.patience())
    assert DeviceStateDir.load(tmp_path / "d").key.read_bytes() == before
    with pytest.raises(UsageError, match="no address"):
        enroll_with_retry(replace(front_door.token(), addresses=()), PI, root=tmp_path / "d", policy=clock.patience())


def test_waits_double_to_a_minute_and_jitter_takes_half_of_them_at_most(front_door, tmp_path, clock):
    front_door.lose_answers = 8
    enroll_with_retry(front_door.token(), PI, root=tmp_path / "d", policy=clock.patience())
    assert clock.slept == [1, 2, 4, 8, 16, 32, 60, 60]
    front_door.lose_answers, longest = 8, clock.slept.copy()
    clock.slept.clear()
    policy = replace(clock.patience(), rng=RetryPolicy().rng)
    enroll_with_retry(front_door.token(), replace(PI, name="pi-2"), root=tmp_path / "e", policy=policy)
    assert all(wait_s / 2 <= slept_s <= wait_s for wait_s, slept_s in zip(longest, clock.slept, strict=True))


def test_the_clock_is_waited_for_where_somebody_sets_it_and_not_for_ever(tmp_path, clock):
    assert not wait_for_clock(clock.patience(), timesync_dir=tmp_path / "none")
    assert clock.slept == []
    assert not wait_for_clock(clock.patience(), timesync_dir=tmp_path)
    assert clock.now_s == 30.0
    clock.then[len(clock.slept) + 3] = (tmp_path / "synchronized").touch
    assert wait_for_clock(clock.patience(), timesync_dir=tmp_path)
    assert clock.now_s == 33.0


def test_a_file_is_overwritten_before_it_goes(tmp_path):
    (tmp_path / "join.json").write_bytes(b"secret")
    (tmp_path / "link").hardlink_to(tmp_path / "join.json")
    delete_secret_file(tmp_path / "join.json")
    assert not (tmp_path / "join.json").exists()
    assert (tmp_path / "link").read_bytes() == bytes(6)
    delete_secret_file(tmp_path / "join.json")
