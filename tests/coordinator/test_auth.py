from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from edgefl.coordinator.auth import (
    FAILURE_DECAY_S,
    MAX_ADDRESSES,
    MAX_DETAIL_CHARS,
    MAX_FAILURES,
    MAX_SOURCES,
    MAX_TOTAL_FAILURES,
    ROW_INTERVAL_S,
    TOTAL_FAILURE_DECAY_S,
    RateLimiter,
    RejectedRequestLog,
    error_response,
    get_client_network,
    is_loopback,
)
from edgefl.core.errors import (
    ConfigError,
    EdgeflError,
    NameTakenError,
    NotAllowedError,
    NotFoundError,
    RoleError,
    StoreFullError,
    TokenUsedError,
    TooManyTriesError,
    VersionError,
)
from edgefl.storage.store import Store
from edgefl.storage.tables import EventTable


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False), ("pi.local", False)],
)
def test_only_loopback_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotAllowedError("x"), 401),
        (RoleError("x"), 403),
        (TokenUsedError("x"), 403),
        (NotFoundError("x"), 404),
        (NameTakenError("x"), 409),
        (VersionError("x"), 426),
        (StoreFullError("x"), 503),
        (ConfigError("x"), 400),
    ],
)
def test_every_error_has_its_status(error: EdgeflError, status: int) -> None:
    assert error_response(error).status_code == status


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def throttle(clock: Clock) -> RateLimiter:
    return RateLimiter(monotonic=clock)


def is_let_try(throttle: RateLimiter, address: str) -> bool:
    try:
        throttle.check(address)
    except TooManyTriesError:
        return False
    return True


def test_an_address_has_ten_wrong_tries_and_gets_them_back_one_by_one(throttle: RateLimiter, clock: Clock) -> None:
    for _ in range(MAX_FAILURES):
        throttle.check("10.0.0.1")
        throttle.record_failure("10.0.0.1")
    with pytest.raises(TooManyTriesError, match=r"from 10\.0\.0\.1; nothing from there is looked at for 6 s"):
        throttle.check("10.0.0.1")
    clock.now_s += FAILURE_DECAY_S
    throttle.check("10.0.0.1")
    throttle.record_failure("10.0.0.1")
    assert not is_let_try(throttle, "10.0.0.1")


def test_another_address_is_not_slowed_down(throttle: RateLimiter) -> None:
    for _ in range(3 * MAX_FAILURES):
        throttle.record_failure("10.0.0.1")
    assert is_let_try(throttle, "10.0.0.2")
    assert not is_let_try(throttle, "10.0.0.1")


def test_checks_alone_cost_nothing(throttle: RateLimiter) -> None:
    assert all(is_let_try(throttle, "10.0.0.1") for _ in range(3 * MAX_FAILURES))


def test_when_all_tries_are_used_up_each_new_address_still_has_one(throttle: RateLimiter, clock: Clock) -> None:
    for number in range(MAX_TOTAL_FAILURES):
        throttle.record_failure(f"10.0.{number // 250}.{number % 250}")
    assert not is_let_try(throttle, "10.0.0.7"), "it was wrong once"
    assert is_let_try(throttle, "10.9.9.9"), "it has come for the first time"
    throttle.record_failure("10.9.9.9")
    assert not is_let_try(throttle, "10.9.9.9")
    clock.now_s += 20 * TOTAL_FAILURE_DECAY_S
    assert is_let_try(throttle, "10.9.9.9"), "the flood is over, and one of ten is used"


def test_a_flood_from_ever_new_addresses_takes_bounded_memory_and_no_hour_afterwards(
    throttle: RateLimiter, clock: Clock
) -> None:
    for number in range(3 * MAX_ADDRESSES):
        throttle.record_failure(str(number))
    assert throttle.count_addresses() == MAX_ADDRESSES
    clock.now_s += 2 * TOTAL_FAILURE_DECAY_S
    throttle.record_failure("10.0.0.1")
    clock.now_s += 2 * TOTAL_FAILURE_DECAY_S
    assert is_let_try(throttle, "10.0.0.1")


class Book:
    def __init__(self, store: Store) -> None:
        self.store, self.now_s = store, 100.0
        self.attempts = RejectedRequestLog(
            store=store, clock=lambda: 5000.0, monotonic=lambda: self.now_s, is_device=lambda name: name == "pi-1"
        )

    def rows(self) -> list[Any]:
        with self.store.database.read() as connection:
            return list(connection.execute(select(EventTable.__table__).order_by(EventTable.id)))


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Book]:
    with Store.open(tmp_path / "edgefl.db") as store:
        yield Book(store)


def test_the_first_of_a_kind_is_written_at_once_and_the_rest_of_a_minute_as_one_row(book: Book) -> None:
    book.attempts.record("join", "10.0.0.1", "no such token")
    book.attempts.flush()
    assert [(row.kind, row.message) for row in book.rows()] == [
        ("request-rejected", "join from 10.0.0.1: no such token")
    ]
    for number in range(500):
        book.attempts.record("join", "10.0.0.1", f"line {number}")
        book.now_s += 0.1
        book.attempts.flush()
    assert len(book.rows()) == 1
    book.now_s += ROW_INTERVAL_S
    book.attempts.flush()
    assert book.rows()[1].message == "join from 10.0.0.1, 500 times: line 499"
    assert book.rows()[1].data == {"what": "join", "from": "10.0.0.1", "count": 500}


def test_an_attack_of_an_hour_is_a_row_a_minute(book: Book) -> None:
    for _ in range(3600):
        book.attempts.record("join", "10.0.0.1", "no")
        book.attempts.flush()
        book.now_s += 1.0
    assert 58 <= len(book.rows()) <= 62
    assert sum(row.data["count"] for row in book.rows()) >= 3600 - 60


def test_kinds_and_addresses_are_told_apart_and_a_device_is_named(book: Book) -> None:
    for what, who in (("join", "10.0.0.1"), ("join", "10.0.0.2"), ("mqtt", "pi-1"), ("mqtt", "pi-9")):
        book.attempts.record(what, who, "no")
    book.attempts.flush()
    assert [row.device_id for row in book.rows()] == [None, None, "pi-1", None]


def test_more_addresses_than_can_be_told_apart_share_a_row(book: Book) -> None:
    for number in range(5000):
        book.attempts.record("join", f"10.0.{number // 250}.{number % 250}", "no")
    book.attempts.flush()
    rows = book.rows()
    assert len(rows) == MAX_SOURCES + 1
    assert rows[-1].message == f"join from others, {5000 - MAX_SOURCES} times: no"


def test_who_is_quiet_for_a_minute_is_forgotten(book: Book) -> None:
    for number in range(MAX_SOURCES):
        book.attempts.record("join", str(number), "no")
    book.attempts.flush()
    book.now_s += ROW_INTERVAL_S
    book.attempts.flush()
    book.attempts.record("join", "10.0.0.1", "no")
    book.attempts.flush()
    assert book.rows()[-1].message == "join from 10.0.0.1: no"


def test_what_somebody_sent_cannot_write_lines_or_volumes(book: Book) -> None:
    book.attempts.record("join", "10.0.0.1", "a\nb\x1b[31m\x00" + "x" * 9999)
    book.attempts.flush(is_last=True)
    (row,) = book.rows()
    assert row.message.startswith(r"join from 10.0.0.1: a b\x1b[31m\x00xxx")
    assert len(row.message) < MAX_DETAIL_CHARS + 40


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::1"),
        ("testclient", "?"),
        (None, "?"),
    ],
)
def test_of_ipv6_it_is_the_network_that_counts(host: str | None, told: str) -> None:
    assert get_client_network(host) == told


def test_what_cannot_be_written_is_counted_and_written_later(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **_named: Any) -> None:
        raise StoreFullError("no room")

    book.attempts.record("join", "10.0.0.1", "no")
    with monkeypatch.context() as patched:
        patched.setattr(book.store, "record_event", full)
        for _ in range(2):
            with pytest.raises(StoreFullError):
                book.attempts.flush()
            book.attempts.record("join", "10.0.0.1", "no")
    book.attempts.flush()
    assert [row.message for row in book.rows()] == ["join from 10.0.0.1, 3 times: no"]
