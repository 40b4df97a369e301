"""Fetching a model: whole or not at all, from where it broke off, and nothing else than what was offered."""

from __future__ import annotations

import errno
import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from model_source import ModelSource

from edgefl.device.file_fetch import SPARE_BYTES
from edgefl.device.inference.model_fetch import Offer, fetch_model, fetch_offer
from edgefl.errors import DataError, NetworkError, NotFoundError, StoreFullError
from edgefl.protocol import MAX_MODEL_BYTES

BODY = np.random.default_rng(7).bytes(200_000)
SHA256 = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[ModelSource]:
    made = ModelSource(tmp_path / "coordinator", BODY, SHA256)
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models"


def offered(source: ModelSource) -> Offer:
    return fetch_offer(source.source(), "d1")


def test_the_file_is_what_was_offered_and_who_asks_signs(source: ModelSource, folder: Path) -> None:
    path = fetch_model(source.source(), offered(source), folder)
    assert (path.name, path.read_bytes()) == (f"{SHA256}.onnx", BODY)
    assert [told["who"] for told in source.headers] == ["pi", "pi"]
    assert list(folder.iterdir()) == [path]


def test_a_file_that_is_there_already_is_not_fetched_again(source: ModelSource, folder: Path) -> None:
    offer = offered(source)
    fetch_model(source.source(), offer, folder)
    fetch_model(source.source(), offer, folder)
    assert len(source.ranges) == 1


def test_it_goes_on_where_the_connection_broke(source: ModelSource, folder: Path) -> None:
    source.cut_after, source.cuts = 64 * 1024, 1
    offer = offered(source)
    with pytest.raises(NetworkError, match="broke off at"):
        fetch_model(source.source(), offer, folder)
    (part,) = folder.iterdir()
    size = part.stat().st_size
    assert 0 < size < len(BODY)
    assert fetch_model(source.source(), offer, folder).read_bytes() == BODY
    assert source.ranges == ["bytes=0-", f"bytes={size}-"]


def test_it_goes_on_after_the_power_went(source: ModelSource, folder: Path) -> None:
    """A process of its own is killed in the middle: what lies on the disk is all that is left of it."""
    source.pause_s = 0.02
    program = (
        "import sys; from pathlib import Path; from edgefl.device.inference.model_fetch import *;"
        "from edgefl.device.trust import pinned_context;"
        f"source = Source(address={source.address!r}, trust=pinned_context(Path({str(source.ca)!r}).read_bytes()),"
        " headers={}); "
        f"fetch_model(source, fetch_offer(source, 'd1'), Path({str(folder)!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    part = folder / f"{SHA256}.part"
    deadline_s = time.monotonic() + 60
    while not (source.ranges and part.is_file()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [path.name for path in folder.iterdir()] == [part.name]
    # What the killed process had read may still be in its buffers; a page that was written is enough to go on from.
    part.write_bytes(BODY[:50_000])
    source.go_on.set()
    assert fetch_model(source.source(), offered(source), folder).read_bytes() == BODY
    assert source.ranges[-1] == "bytes=50000-"


def test_a_part_that_is_whole_needs_no_request(source: ModelSource, folder: Path) -> None:
    folder.mkdir()
    (folder / f"{SHA256}.part").write_bytes(BODY)
    assert fetch_model(source.source(), offered(source), folder).read_bytes() == BODY
    assert source.ranges == []


def test_another_content_than_offered_is_refused_and_nothing_of_it_stays(source: ModelSource, folder: Path) -> None:
    source.body = BODY[:-1] + bytes([BODY[-1] ^ 1])
    with pytest.raises(DataError, match=f"{SHA256[:12]}… was offered"):
        fetch_model(source.source(), offered(source), folder)
    assert list(folder.iterdir()) == []


def test_a_damaged_part_is_noticed_at_the_end_and_does_not_stay(source: ModelSource, folder: Path) -> None:
    folder.mkdir()
    (folder / f"{SHA256}.part").write_bytes(b"\0" * 1000)
    with pytest.raises(DataError, match="was offered"):
        fetch_model(source.source(), offered(source), folder)
    assert fetch_model(source.source(), offered(source), folder).read_bytes() == BODY


def test_more_than_was_offered_is_cut_off(source: ModelSource, folder: Path) -> None:
    offer = replace(offered(source), num_bytes=100_000)
    with pytest.raises(DataError, match="more than the 100000 bytes"):
        fetch_model(source.source(), offer, folder)
    assert list(folder.iterdir()) == []


def test_a_coordinator_that_begins_anew_does_not_double_the_beginning(source: ModelSource, folder: Path) -> None:
    folder.mkdir()
    (folder / f"{SHA256}.part").write_bytes(BODY[:1000])
    source.ignores_ranges = True
    with pytest.raises(DataError, match="from its beginning"):
        fetch_model(source.source(), offered(source), folder)
    assert fetch_model(source.source(), offered(source), folder).read_bytes() == BODY


def test_what_nobody_wants_any_more_is_left_where_it_is(source: ModelSource, folder: Path) -> None:
    with pytest.raises(NetworkError):
        fetch_model(source.source(), offered(source), folder, lambda: False)


def test_a_model_that_does_not_fit_on_the_disk_is_not_begun(source: ModelSource, folder: Path) -> None:
    offer = replace(offered(source), num_bytes=1 << 60)
    with pytest.raises(StoreFullError, match=f"{SPARE_BYTES} must stay free"):
        fetch_model(source.source(), offer, folder)
    assert source.ranges == []


def test_a_disk_that_fills_meanwhile_keeps_no_part(source: ModelSource, folder: Path, full_disk: None) -> None:
    with pytest.raises(StoreFullError, match="free some space"):
        fetch_model(source.source(), offered(source), folder)
    assert list(folder.iterdir()) == []


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond 100 kB; the kernel says EFBIG, which counts as a full disk."""
    import resource  # noqa: PLC0415 only here

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)
    assert errno.EFBIG


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"bytes": MAX_MODEL_BYTES + 1}, f"a device takes {MAX_MODEL_BYTES} at most"),
        ({"bytes": 0}, "makes no sense: 0 bytes"),
        ({"sha256": "../../x"}, "makes no sense"),
        ({"tolerance": None}, "makes no sense"),
        ({"options": 7}, "makes no sense"),
    ],
)
def test_an_offer_that_makes_no_sense_is_refused(
    source: ModelSource, changes: dict[str, object], expected: str
) -> None:
    source.offer |= changes
    with pytest.raises(DataError) as caught:
        offered(source)
    assert expected in str(caught.value)


def test_a_deployment_that_was_taken_back_is_told_from_a_coordinator_in_trouble(source: ModelSource) -> None:
    source.status = 404
    with pytest.raises(NotFoundError):
        offered(source)
    for status in (401, 503):
        source.status = status
        with pytest.raises(NetworkError):
            offered(source)


def test_nobody_there_is_a_network_error(source: ModelSource, folder: Path) -> None:
    offer, where = offered(source), source.source()
    nowhere = replace(where, address="127.0.0.1:1")
    with pytest.raises(NetworkError):
        fetch_offer(nowhere, "d1")
    with pytest.raises(NetworkError):
        fetch_model(nowhere, offer, folder)
