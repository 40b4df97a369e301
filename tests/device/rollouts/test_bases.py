"""Bases on a card: fetched once, resumed where they broke off, no more of them than a card should hold."""

import hashlib
import math
import os
from dataclasses import replace

import numpy as np
import pytest
from model_source import ModelSource

from edgefl.core.conditions import ConditionsEndedError
from edgefl.core.config import AdaptSection
from edgefl.core.errors import NetworkError, NotFoundError, TaskError
from edgefl.device.rollouts import bases
from edgefl.device.rollouts.bases import MAX_BASES, BaseFiles, LocalFolder
from edgefl.tasks.adaptation.base_file import AdaptPlan

BODY = np.random.default_rng(7).bytes(100_000)
SHA256 = hashlib.sha256(BODY).hexdigest()
PLAN = AdaptPlan(AdaptSection(method="head"), SHA256, len(BODY))


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(bases, "INITIAL_BACKOFF_S", 0.01)
    made = ModelSource(tmp_path / "coordinator", BODY, SHA256)
    yield made
    made.close()


def test_it_is_fetched_once_by_its_name_and_counted(source, tmp_path):
    files = BaseFiles(tmp_path / "bases", source.source)
    path = files.fetch(PLAN)
    assert (path.name, path.read_bytes()) == (f"{SHA256}.safetensors", BODY)
    assert source.headers[0]["who"] == f"pi GET /edgefl/v1/bases/{SHA256}"
    assert (files.pop_received_bytes(), files.pop_received_bytes()) == (len(BODY), 0)
    assert files.fetch(PLAN) == BaseFiles(tmp_path / "bases", None).fetch(PLAN) == path
    assert source.ranges == ["bytes=0-"]


def test_it_goes_on_where_the_connection_broke_and_where_the_agent_was_killed(source, tmp_path):
    folder = tmp_path / "bases"
    folder.mkdir()
    (folder / f"{SHA256}.part").write_bytes(BODY[:30_000])  # what a killed agent leaves
    source.cut_after, source.cuts = 20_000, 1
    files = BaseFiles(folder, source.source)
    assert files.fetch(PLAN).read_bytes() == BODY
    assert files.pop_received_bytes() == len(BODY) - 30_000
    first, second = source.ranges
    assert first == "bytes=30000-"
    assert 30_000 < int(second.removeprefix("bytes=").removesuffix("-")) < len(BODY)


def test_other_content_than_its_name_says_is_never_used(source, tmp_path):
    folder = tmp_path / "bases"
    files = BaseFiles(folder, source.source)
    files.fetch(PLAN)
    (folder / f"{SHA256}.safetensors").write_bytes(b"\0" * len(BODY))  # a failing card
    assert BaseFiles(folder, source.source).fetch(PLAN).read_bytes() == BODY


def test_an_agent_that_stops_leaves_what_has_arrived(source, tmp_path):
    with pytest.raises(NetworkError, match="broke off at"):
        BaseFiles(tmp_path / "bases", source.source, should_continue=lambda: False).fetch(PLAN)
    assert (tmp_path / "bases" / f"{SHA256}.part").stat().st_size > 0


def test_a_link_that_became_metered_stops_a_base_between_two_chunks_and_it_goes_on_from_there(source, tmp_path):
    part, charged = tmp_path / "bases" / f"{SHA256}.part", []

    def refuse():
        raise ConditionsEndedError("its connection is metered")

    files = BaseFiles(tmp_path / "bases", source.source, charge_traffic=charged.append, check_link=refuse)
    with pytest.raises(ConditionsEndedError):
        files.fetch(PLAN)
    present = part.stat().st_size
    assert 0 < present < len(BODY)
    files._check_link = lambda: None
    assert files.fetch(PLAN).read_bytes() == BODY
    assert source.ranges == ["bytes=0-", f"bytes={present}-"]
    assert charged == [len(BODY), len(BODY) - present]
    assert files.pop_received_bytes() == len(BODY)


def test_a_base_that_nobody_has_and_a_process_without_a_connection_are_told(source, tmp_path):
    with pytest.raises(TaskError, match="this process has no connection"):
        BaseFiles(tmp_path / "bases", None).fetch(PLAN)
    source.status = 404
    with pytest.raises(NotFoundError):
        BaseFiles(tmp_path / "bases", source.source).fetch(PLAN)


def test_the_oldest_of_many_bases_makes_room(source, tmp_path):
    folder = tmp_path / "bases"
    folder.mkdir()
    for number in range(MAX_BASES + 1):
        path = folder / f"{number:064x}.safetensors"
        path.write_bytes(b"x")
        os.utime(path, (number, number))
    (folder / f"{'c' * 64}.part").write_bytes(b"x")
    BaseFiles(folder, source.source).fetch(replace(PLAN))
    kept = [f"{number:064x}.safetensors" for number in range(2, MAX_BASES + 1)]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*kept, f"{SHA256}.safetensors"])


def open_with(tmp_path, source, stick, **options):
    return BaseFiles(tmp_path / "bases", source.source, local=LocalFolder(get_path=lambda: str(stick), **options))


@pytest.mark.parametrize("name", [f"{SHA256}.safetensors", "mobilenet.safetensors"])
def test_it_is_copied_from_a_stick_by_its_name_or_content_and_nothing_is_sent(source, tmp_path, name):
    stick, copied, sent = tmp_path / "stick", [], []
    stick.mkdir()
    (stick / "another.safetensors").write_bytes(b"x" * len(BODY))
    (stick / name).write_bytes(BODY)
    folder = LocalFolder(get_path=lambda: str(stick), charge=copied.append)
    files = BaseFiles(tmp_path / "bases", source.source, local=folder, charge_traffic=sent.append)
    assert files.fetch(PLAN).read_bytes() == BODY
    assert (source.ranges, copied, sent, files.pop_received_bytes()) == ([], [len(BODY)], [], 0)


@pytest.mark.parametrize("content", [b"x" * len(BODY), BODY[:-1], b"", None])
def test_a_stick_that_has_it_not_or_damaged_leaves_it_to_the_coordinator(source, tmp_path, content):
    stick = tmp_path / "stick"
    if content is not None:
        stick.mkdir()
        (stick / f"{SHA256}.safetensors").write_bytes(content)
    files = open_with(tmp_path, source, stick)
    assert files.fetch(PLAN).read_bytes() == BODY
    assert (source.ranges, files.pop_received_bytes()) == (["bytes=0-"], len(BODY))


def test_a_damaged_stick_costs_nothing_of_what_has_arrived(source, tmp_path):
    stick, part = tmp_path / "stick", tmp_path / "bases" / f"{SHA256}.part"
    for folder in (stick, part.parent):
        folder.mkdir()
    (stick / f"{SHA256}.safetensors").write_bytes(bytes(len(BODY)))
    part.write_bytes(BODY[:60_000])
    assert open_with(tmp_path, source, stick).fetch(PLAN).read_bytes() == BODY
    assert source.ranges == ["bytes=60000-"]


def test_a_copy_goes_on_where_it_was_ended_and_a_pulled_stick_where_the_coordinator_does(
    source, tmp_path, monkeypatch
):
    monkeypatch.setattr(bases, "CHUNK_BYTES", 40_000)
    stick, part, copied = tmp_path / "stick", tmp_path / "bases" / f"{SHA256}.part", []
    stick.mkdir()
    (stick / f"{SHA256}.safetensors").write_bytes(BODY)
    reads = iter([True] * math.ceil(len(BODY) / 40_000))  # it is hashed first
    stopping = BaseFiles(
        tmp_path / "bases",
        source.source,
        should_continue=lambda: next(reads, False),
        local=LocalFolder(get_path=lambda: str(stick), charge=copied.append),
    )
    with pytest.raises(NetworkError, match="was not copied to its end: this is stopping"):
        stopping.fetch(PLAN)
    assert part.read_bytes() == BODY[:40_000]
    part.write_bytes(BODY[:50_000])
    assert open_with(tmp_path, source, stick, charge=copied.append).fetch(PLAN).read_bytes() == BODY
    assert (source.ranges, copied) == ([], [len(BODY), 40_000 - len(BODY), len(BODY) - 50_000])
    (tmp_path / "bases" / f"{SHA256}.safetensors").unlink()
    part.write_bytes(BODY[:60_000])
    (stick / f"{SHA256}.safetensors").unlink()
    assert open_with(tmp_path, source, stick).fetch(PLAN).read_bytes() == BODY
    assert source.ranges == ["bytes=60000-"]


def test_a_budget_for_writing_ends_a_copy_before_it_begins(source, tmp_path):
    def refuse(num_bytes):
        raise ConditionsEndedError(f"{num_bytes} bytes are too many")

    stick = tmp_path / "stick"
    stick.mkdir()
    (stick / f"{SHA256}.safetensors").write_bytes(BODY)
    with pytest.raises(ConditionsEndedError, match=f"{len(BODY)} bytes are too many"):
        open_with(tmp_path, source, stick, charge=refuse).fetch(PLAN)
    assert source.ranges == []
