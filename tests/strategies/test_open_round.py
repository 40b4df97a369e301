from types import SimpleNamespace

from edgefl.strategies.open_round import OpenRound
from edgefl.types import Update, UpdateMetrics


def view(**busy):
    return SimpleNamespace(busy=busy)


def asked(*names):
    opened = OpenRound()
    for name in names:
        opened.ask(f"a1-{name}", name)
    return opened


def answer(opened, assignment_id):
    device_id, slot = opened.asked[assignment_id]
    update = Update(
        assignment_id=assignment_id, device_id=device_id, base_version=0, tensors={}, metrics=UpdateMetrics()
    )
    opened.fold.keep(slot, update)


def test_an_assignment_that_is_neither_in_nor_at_work_is_lost_for_good():
    opened = asked("a", "b")
    assert opened.pending(view(a=["a1-a"], b=["a1-b"])) == ["a1-a", "a1-b"]
    assert opened.is_pending(view(b=["a1-b"]))
    assert not opened.is_pending(view(a=["other work"]))
    assert not opened.is_pending(view(a=["a1-a"]))  # it was lost before, and ids are never given twice


def test_what_has_come_is_not_waited_for_though_the_device_is_at_work_again():
    opened = asked("a")
    answer(opened, "a1-a")
    assert not opened.is_pending(view(a=["a1-a"]))
    assert opened.delivered() == {"a"}


def test_a_slot_with_two_copies_is_waited_for_until_one_of_them_is_in():
    opened = asked("a")
    opened.ask("a2-b", "b", slot="a1-a")
    assert opened.fold.expected == ["a1-a"]
    assert opened.is_pending(view(b=["a2-b"]))
    answer(opened, "a2-b")
    assert not opened.is_pending(view(a=["a1-a"]))
    assert opened.num_received == 1


def test_work_that_is_given_later_is_waited_for_too():
    opened = asked("a")
    assert not opened.is_pending(view())
    opened.ask("a2-b", "b")
    assert opened.is_pending(view(b=["a2-b"]))
