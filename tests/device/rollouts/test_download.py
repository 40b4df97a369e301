"""Fetching a model: whole or not at all, from where it broke off, and nothing else than what was offered."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from model_source import ModelSource
from peer_boards import eventually

from edgefl.core.errors import DataError, NetworkError, NotFoundError, StoreFullError
from edgefl.core.protocol import MAX_MODEL_BYTES
from edgefl.device.inference.deployments import DeployedModels, ModelOffer
from edgefl.device.rollouts.download import MIN_FREE_BYTES, download_file, fetch_offer

BODY = np.random.default_rng(7).bytes(200_000)
SHA256 = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def source(tmp_path):
    made = ModelSource(tmp_path / "coordinator", BODY, SHA256)
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "models"


def offered(source):
    value, remote = fetch_offer(source.source(), DeployedModels.artefact, "d1")
    assert ModelOffer.from_json(value).task == value["task"]
    return remote


def test_the_file_is_what_was_offered_who_asks_signs_and_it_is_fetched_once(source, folder):
    offer = offered(source)
    path = download_file(source.source(), offer, folder)
    assert (path.name, path.read_bytes()) == (f"{SHA256}.onnx", BODY)
    below = "pi GET /edgefl/v1/deployments/d1"
    assert [told["who"] for told in source.headers] == [f"{below}/offer", f"{below}/model"]
    assert list(folder.iterdir()) == [path]
    download_file(source.source(), offer, folder)
    path.rename(folder / f"{SHA256}.part")  # the power went before it had its name
    download_file(source.source(), offer, folder)
    assert len(source.ranges) == 1


def test_it_lies_on_the_disk_while_it_comes_and_goes_on_where_the_connection_broke(source, folder):
    offer, source.pause_s = offered(source), 60.0
    with ThreadPoolExecutor() as pool:
        fetching = pool.submit(download_file, source.source(), offer, folder)
        eventually((folder / f"{SHA256}.part").is_file)  # all that a power cut would leave
        source.cut_after, source.cuts = 64 * 1024, 1
        source.go_on.set()
        with pytest.raises(NetworkError, match="broke off at"):
            fetching.result(60)
    (part,) = folder.iterdir()
    size = part.stat().st_size
    assert 0 < size < len(BODY)
    assert download_file(source.source(), offer, folder).read_bytes() == BODY
    assert source.ranges == ["bytes=0-", f"bytes={size}-"]


def test_other_content_than_offered_or_more_of_it_is_refused_and_nothing_of_it_stays(source, folder):
    with pytest.raises(DataError, match="more than the 100000 bytes"):
        download_file(source.source(), replace(offered(source), num_bytes=100_000), folder)
    assert list(folder.iterdir()) == []
    (folder / f"{SHA256}.part").write_bytes(b"\0" * 1000)
    with pytest.raises(DataError, match=f"{SHA256[:12]}… was offered"):
        download_file(source.source(), offered(source), folder)
    assert list(folder.iterdir()) == []
    assert download_file(source.source(), offered(source), folder).read_bytes() == BODY


def test_a_coordinator_that_begins_anew_does_not_double_the_beginning(source, folder):
    folder.mkdir()
    (folder / f"{SHA256}.part").write_bytes(BODY[:1000])
    source.ignores_ranges = True
    with pytest.raises(DataError, match="from its beginning"):
        download_file(source.source(), offered(source), folder)
    assert download_file(source.source(), offered(source), folder).read_bytes() == BODY


def test_a_model_that_does_not_fit_on_the_disk_is_not_begun_and_one_that_fills_it_leaves_no_part(
    source, folder, full_card
):
    offer = offered(source)
    with pytest.raises(NetworkError):
        download_file(source.source(), offer, folder, lambda: False)  # nobody wants it any more
    with pytest.raises(StoreFullError, match=f"{MIN_FREE_BYTES} must stay free"):
        download_file(source.source(), replace(offer, num_bytes=1 << 60), folder)
    with full_card(100_000), pytest.raises(StoreFullError, match="free some space"):
        download_file(source.source(), offer, folder)
    assert not list(folder.glob("*.part"))


def test_an_offer_that_makes_no_sense_is_refused(source):
    sound = dict(source.offer)
    for changes, told in (
        ({"bytes": MAX_MODEL_BYTES + 1}, f"a device takes {MAX_MODEL_BYTES} at most"),
        ({"bytes": 0}, "makes no sense: 0 bytes"),
        ({"sha256": "../../x"}, "makes no sense"),
        ({"tolerance": None}, "makes no sense"),
        ({"options": 7}, "makes no sense"),
    ):
        source.offer = sound | changes
        with pytest.raises(DataError, match=told):
            offered(source)


def test_a_deployment_that_was_taken_back_is_told_from_a_coordinator_in_trouble_or_away(source, folder):
    offer, nowhere = offered(source), replace(source.source(), address="127.0.0.1:1")
    source.status = 404
    with pytest.raises(NotFoundError):
        offered(source)
    for status in (401, 503):
        source.status = status
        with pytest.raises(NetworkError):
            offered(source)
    with pytest.raises(NetworkError):
        download_file(nowhere, offer, folder)
