"""What each order carries of the model: all of it, or what changed."""

import hashlib

import numpy as np
import pytest

from edgefl.coordinator.execution.fleet_view import RunSpec
from edgefl.coordinator.execution.model_distribution import ModelDistributor
from edgefl.core.types import EvaluateInstruction, TrainConfig, TrainInstruction

SIZE = 100


class Source:
    """A model that changes in place, entry by entry, and remembers for a while what moved."""

    def __init__(self):
        self.version, self.values, self.moved, self.oldest = 0, np.zeros(SIZE), [], 0

    def step(self, *entries):
        self.values[list(entries)] += 1.0
        self.moved.append(set(entries))
        self.version += 1

    def model(self):
        return {"w": self.values}

    def device_model(self, subject):
        return {"w": self.values + 1000.0 * (1 + "ab".index(subject))} if subject else self.model()

    def changed(self, since):
        if since < self.oldest:
            return None
        return {"w": np.array(sorted(set().union(*self.moved[since:])), np.int64)}


class Mails:
    """A downlink whose bodies can be read, and what was encoded."""

    def __init__(self, *, has_deltas=True, **options):
        self.encoded = []
        run = RunSpec(
            run_id="r", task="t", header={}, groups=(), names=(), join_at_start=False,
            encode=self.whole, decode=None, encode_changes=self.changes if has_deltas else None,
        )  # fmt: skip
        self.source, self.downlink = Source(), ModelDistributor(run, **options)

    def whole(self, model, version):
        self.encoded.append(("whole", version))
        return b"W" + model["w"].tobytes()

    def changes(self, model, changed, version):
        self.encoded.append(("changes", version))
        indices = changed.get("w", np.zeros(0, np.int64))
        return None if len(indices) > SIZE / 2 else b"C" + indices.tobytes() + model["w"][indices].tobytes()

    def evaluate(self, device, subject=""):
        key, version = f"e{device}{subject}", self.source.version
        order = EvaluateInstruction(assignment_id=key, device_id=device, version=version, round=1, subject=subject)
        return self.downlink.create_payload(order, self.source)

    def send(self, device):
        order = TrainInstruction(
            assignment_id=f"{device}-{self.source.version}", device_id=device, base_version=self.source.version,
            plan=TrainConfig(iterations=1),
        )  # fmt: skip
        return order, self.downlink.create_payload(order, self.source)


class Device:
    """Keeps its model as a board does, and refuses what it cannot use."""

    def __init__(self):
        self.model, self.version = None, None

    def receive(self, order, mail):
        body = mail.body.inline
        if body[:1] == b"W":
            self.model = np.frombuffer(body, offset=1).copy()
        elif mail.header["base_version"] != self.version:
            return False
        else:
            count = (len(body) - 1) // 16
            indices = np.frombuffer(body, np.int64, count, offset=1)
            self.model[indices] = np.frombuffer(body, np.float64, count, offset=1 + 8 * count)
        self.version = order.base_version
        return True


@pytest.fixture
def mails():
    return Mails()


def test_a_device_gets_the_whole_model_first_and_then_what_changed_since_its_own(mails):
    device = Device()
    order, mail = mails.send("pi")
    assert (mail.body.inline[:1], mail.header) == (b"W", {"keeps_model": True})
    assert device.receive(order, mail)
    for entries in ((3,), (5, 7), ()):
        if entries:
            mails.source.step(*entries)
        order, mail = mails.send("pi")
        assert mail.header == {"keeps_model": True, "base_version": device.version}
        assert mail.body.inline[:1] == b"C"
        assert device.receive(order, mail)
        assert device.model.tolist() == mails.source.values.tolist()


def test_two_orders_to_one_device_build_on_each_other(mails):
    device, sent = Device(), []
    for entry in range(4):
        sent.append(mails.send("pi"))
        mails.source.step(entry)
    assert all(device.receive(*pair) for pair in sent)
    assert device.version == 3


def test_a_delta_is_encoded_once_for_all_who_hold_the_same_version(mails):
    for device in "abc":
        mails.send(device)
    mails.source.step(1)
    mails.source.step(2)
    assert len({mails.send(device)[1].body.inline for device in "abc"}) == 1
    assert mails.encoded.count(("whole", 0)) == 1
    assert mails.encoded.count(("changes", 2)) == 1


def test_where_much_or_nobody_knows_what_changed_the_whole_model_is_sent(mails):
    mails.send("pi")
    mails.source.step(*range(SIZE))
    _, mail = mails.send("pi")
    assert (mail.body.inline[:1], mail.header) == (b"W", {"keeps_model": True})
    mails.source.step(1)
    mails.source.oldest = 2
    _, mail = mails.send("pi")
    assert mail.body.inline[:1] == b"W"


def test_a_device_that_holds_the_version_is_sent_no_entries_whatever_the_strategy_knows(mails):
    device = Device()
    assert device.receive(*mails.send("pi"))
    mails.source.oldest = 10**9
    order, mail = mails.send("pi")
    assert mail.body.inline == b"C"
    assert device.receive(order, mail)
    assert device.model.tolist() == mails.source.values.tolist()


def test_a_device_that_cannot_use_a_delta_gets_the_whole_model_of_the_same_version(mails):
    mails.send("pi")
    mails.source.step(1)
    order, mail = mails.send("pi")
    new = Device()
    assert not new.receive(order, mail)
    mails.source.step(2)  # the model has moved on in place
    whole = mails.downlink.create_full_payload(order)
    assert new.receive(order, whole)
    assert new.model[:3].tolist() == [0.0, 1.0, 0.0]
    order, mail = mails.send("pi")
    assert mail.header == {"keeps_model": True, "base_version": 1}
    assert new.receive(order, mail)
    assert new.model.tolist() == mails.source.values.tolist()


def test_whole_models_are_kept_only_so_long(mails):
    mails = Mails(max_cache_bytes=2 * (SIZE * 8 + 1))
    mails.send("pi")
    orders = []
    for entry in range(4):
        mails.source.step(entry)
        orders.append(mails.send("pi")[0])
    assert [mails.downlink.create_full_payload(order) is not None for order in orders] == [False, False, True, True]


def first_value(mail):
    return np.frombuffer(mail.body.inline, offset=1)[0]


@pytest.mark.parametrize("has_deltas", [True, False])
def test_a_device_s_own_model_goes_out_whole_and_is_taken_for_no_other(has_deltas):
    mails = Mails(has_deltas=has_deltas)
    sent = [mails.evaluate("x", subject) for subject in ("", "a", "b", "a", "")]
    assert [first_value(mail) for mail in sent] == [0.0, 1000.0, 2000.0, 1000.0, 0.0]
    assert [mail.header for mail in sent] == [{}] * 5
    _, training = mails.send("x")
    assert training.header == ({"keeps_model": True} if has_deltas else {})
    assert first_value(training) == 0.0, "the newest model is the global one all the same"
    mails.source.step(0)
    mails.encoded.clear()
    for subject, value in (("a", 1001.0), ("b", 2001.0), ("", 1.0)):
        assert [first_value(mails.evaluate(judge, subject)) for judge in "xyz"] == [value] * 3
    assert mails.encoded == [("whole", 1)] * 3, "each is encoded once for all who evaluate it"


def test_what_a_device_holds_does_not_follow_from_what_it_evaluates(mails):
    device = Device()
    assert device.receive(*mails.send("a"))
    mails.source.step(3)
    for subject in ("", "a"):
        mails.evaluate("a", subject)
    order, mail = mails.send("a")
    assert mail.header == {"keeps_model": True, "base_version": 0}
    assert device.receive(order, mail)
    assert device.model.tolist() == mails.source.values.tolist()


def test_a_member_of_a_collective_that_has_the_next_model_already_is_sent_no_entry_of_it(mails):
    mails.send("pi")
    mails.source.step(*range(SIZE))
    right = hashlib.sha256(mails.whole(mails.source.model(), 1)).hexdigest()
    for sha256, version, first in ((right, 1, b"C"), ("another", 1, b"W"), (right, 2, b"W")):
        mails.downlink.remove_device("pi")
        mails.downlink.record_next_model("pi", version, sha256)
        assert mails.send("pi")[1].body.inline[:1] == first
