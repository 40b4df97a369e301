import pytest

from edgefl.device.collect.file_store import UNLABELLED, list_files, move_example, open_file_store
from edgefl.device.collect.row_store import StoreLimits


def _fill(store, count):
    for number in range(count):
        store.add(b"%04d" % number, UNLABELLED, ".png", 1000.0 + number)
    return sorted(list_files(store.folder))


@pytest.fixture
def store(tmp_path):
    with open_file_store(tmp_path, StoreLimits(max_bytes=12), "oldest") as opened:
        yield opened


def _count_bytes(folder):
    return sum(file.num_bytes for file in list_files(folder))


def test_files_that_go_while_a_folder_is_read_are_left_out(store):
    files = _fill(store, 3)
    found = list_files(store.folder)
    first = next(found)
    for file in files:
        (store.folder / file.label / file.name).unlink()
    assert (first in files, list(found)) == (True, [])


def test_what_somebody_else_moves_is_seen_by_the_next_look(store):
    first, second, _ = _fill(store, 3)
    move_example(store.folder, first, "robin")
    assert len(store.list_class(UNLABELLED)) == 2
    move_example(store.folder, second, "robin")
    assert not store.has_excess(0.0)
    assert store.count_classes() == {UNLABELLED: 1, "robin": 2}


def test_a_file_that_was_moved_counts_and_goes_where_it_is_now(store):
    first, *_ = _fill(store, 3)
    move_example(store.folder, first, "robin")
    store.add(b"more", "wren", ".png", 2000.0)
    assert _count_bytes(store.folder) == store.num_bytes == 12
    assert not (store.folder / "robin" / first.name).exists()


def test_the_folder_is_read_anew_for_changes_of_others_alone(store, monkeypatch):
    times = []
    refresh = store.refresh
    monkeypatch.setattr(store, "refresh", lambda: (times.append(1), refresh()))
    first, *_ = _fill(store, 4)  # of which one goes again
    store.move(first, "robin")
    store.commit(store.state, 0.0)
    assert not store.has_excess(0.0)
    assert times == []
    gone = store.list_class(UNLABELLED)[0]
    (store.folder / UNLABELLED / gone.name).unlink()
    store.add(b"", UNLABELLED, ".png", 2000.0)  # an own change in the same folder does not hide it
    assert not store.has_excess(0.0)
    assert (times, store.num_bytes, store.count_classes()) == ([1], 8, {UNLABELLED: 2, "robin": 1})
