from __future__ import annotations

import pytest

from edgefl.coordinator.degraded_mode import LOG_INTERVAL_S, StoreOutageGuard
from edgefl.core.errors import EdgeflError, StoreBusyError, StoreError, StoreFullError


class Disk:
    """Raises what it is told to, and notes what was written."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.told: list[tuple[str, str, float]] = []
        self.error: EdgeflError | None = None
        self.hindrance = StoreOutageGuard(
            record=self._record, clock=lambda: 1000 + self.now_s, monotonic=lambda: self.now_s
        )

    def write(self) -> None:
        if self.error is not None:
            raise self.error

    def _record(self, kind: str, message: str, at: float) -> None:
        self.write()
        self.told.append((kind, message, at))


@pytest.mark.parametrize("error", [StoreFullError("no room"), StoreBusyError("in use")])
def test_what_passes_is_said_once_a_minute_and_told_to_the_store_when_it_has_passed(
    error: EdgeflError, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk()
    disk.error = error
    for disk.now_s in range(10, 10 + int(LOG_INTERVAL_S) + 1):
        disk.hindrance.run(disk.write)
    assert caplog.text.count(str(error)) == 2
    assert disk.told == []
    disk.error = None
    disk.hindrance.run(disk.write)
    disk.hindrance.run(disk.write)
    assert disk.told == [("store-hindered", f"{error}; for 60 s", 1010.0)]


def test_it_is_told_later_when_even_that_cannot_be_written() -> None:
    disk = Disk()
    disk.error = StoreFullError("no room")
    disk.hindrance.run(disk.write)
    disk.hindrance.run(lambda: None)
    assert disk.told == []
    disk.error = None
    disk.hindrance.run(disk.write)
    assert [kind for kind, _, _ in disk.told] == ["store-hindered"]


def test_a_store_that_is_damaged_does_not_pass() -> None:
    disk = Disk()
    disk.error = StoreError("damaged")
    with pytest.raises(StoreError, match="damaged"):
        disk.hindrance.run(disk.write)
