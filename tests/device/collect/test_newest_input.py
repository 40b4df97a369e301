"""Answers to files: of a folder and of recordings, by the model of their task, and what is noted of them."""

import io
import json
import os
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from collector_process import run_collector_process
from device.collect.test_answers import Board, Heard, _can_connect, _listener
from device.collect.test_collector import _mosquitto
from peer_boards import eventually
from requirements import needs

from edgefl.core.errors import DataError
from edgefl.device.collect.answers import Answerer, parse_model
from edgefl.device.collect.file_store import UNLABELLED, open_file_store
from edgefl.device.collect.folder_collector import REPORT_S, FolderCollector
from edgefl.device.collect.forgetting import ForgetRequest, write_forget_request
from edgefl.device.collect.label_guesses import NotedGuesser
from edgefl.device.collect.label_queue import LabelQueue, open_target
from edgefl.device.collect.newest_input import MAX_FILE_BYTES, NewestFile, NewFile
from edgefl.device.collect.row_store import StoreLimits
from edgefl.device.collect.settings import AnswerSection, FolderSection
from edgefl.device.collect.similar_pictures import SimilarPictures
from edgefl.device.collect.uncertain_times import UNCERTAIN_NAME, read_uncertain_times

image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install -e '.[pictures]'")
pytestmark = pytest.mark.timeout(60)
PICTURES = {"labels": "dark,bright", "size": 8, "channels": 1, "model": "linear", "scales": 10.0}
AUDIO = {"labels": "dark,bright", "sample_rate": 8000, "seconds": 0.5, "model": "linear"}
TABLE = {"columns": "a", "target": "label", "labels": "shut,open", "model": "linear"}


@pytest.fixture
def board(tmp_path):
    made = Board(tmp_path)
    yield made
    made.stop()


def _picture(levels):
    content = io.BytesIO()
    image.fromarray(np.asarray(levels, np.uint8)).save(content, "PNG")
    return content.getvalue()


def _luck(seed):
    return np.random.default_rng(seed).integers(0, 256, (8, 8))


class Site:
    """A folder that something fills, its collector and an answerer, whose thread is this one."""

    def __init__(self, root, store, client, *, similar=0.0, **settings):
        self.source, self.counts, self.heard, self.now_s = root / "in", Counter(), Heard(), time.time() + 10
        self.source.mkdir()
        section = AnswerSection(host="h", topic="edgefl/yard", **settings)
        self.answerer = Answerer(
            section, store.folder, NewestFile(), every_s=1.0, client=client, publisher=self.heard, counts=self.counts,
            clock=lambda: self.now_s,
        )  # fmt: skip
        self.collector = FolderCollector(
            {"camera": FolderSection(path=str(self.source))}, store, self.counts, flush_s=0,
            similar=SimilarPictures(store, similar) if similar else None, answerer=self.answerer,
            clock=lambda: self.now_s, monotonic=lambda: self.now_s,
        )  # fmt: skip
        self.store, self._num = store, 0

    def put(self, content, folder="", suffix=".png"):
        """Lets a file come, and answers."""
        self._num += 1
        path = self.source / folder / f"{self._num}{suffix}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        self.now_s += 1
        os.utime(path, (self.now_s - 3, self.now_s - 3))
        self.collector.step()
        self.answerer.step()


@contextmanager
def _site(root, client, **settings):
    with open_file_store(root / "shard", StoreLimits(max_bytes=10**8), "oldest") as store:
        yield Site(root, store, client, **settings)


def test_each_file_that_comes_is_answered_as_training_reads_it_also_one_that_is_not_kept(tmp_path, board):
    model = board.deploy("pictures", PICTURES)
    with _site(tmp_path, board.client, similar=8.0) as site:
        pictures = [_luck(seed) for seed in (1, 2, 3)]
        for levels in (*pictures, pictures[0], np.clip(pictures[1] + 1, 0, 255)):
            site.put(_picture(levels))
        site.put(_picture(_luck(4)), folder="bright")
    assert (site.counts["camera.duplicates"], site.counts["camera.similar"], site.store.num_files) == (1, 1, 4)
    asked = [*pictures, pictures[0], np.clip(pictures[1] + 1, 0, 255), _luck(4)]
    expected = model.predict(np.stack(asked)[:, None].astype(np.float32))
    assert [answer["probability"] for answer in site.heard.answers] == [one["probability"] for one in expected]
    assert [answer["class"] for answer in site.heard.answers] == [one["class"] for one in expected]
    assert len({answer["probability"] for answer in site.heard.answers}) == 5
    assert (site.heard.classes, site.counts["answer.errors"]) == (("dark", "bright"), 0)


def test_two_files_of_one_time_are_answered_each_and_one_that_comes_meanwhile_once(tmp_path, board):
    model = board.deploy("pictures", PICTURES)
    with _site(tmp_path, board.client) as site:
        answerer, pictures = site.answerer, [_luck(seed) for seed in (1, 2, 3)]
        first = NewFile(content=b"", suffix=".png", time_s=site.now_s, kept=None)
        files = [replace(first, content=_picture(levels)) for levels in pictures]
        for file in files[:2]:
            answerer.add(file)
            answerer.step()
        newer, ask = replace(files[2], time_s=site.now_s + 1), answerer._newest.make_question
        answerer._newest.make_question = lambda facts: (answerer.add(newer), ask(facts))[1]
        answerer.add(replace(files[0], time_s=site.now_s + 0.5))
        answerer.step()
        answerer._newest.make_question = ask
        answerer.step()
    expected = model.predict(np.stack(pictures)[:, None].astype(np.float32))
    assert [answer["probability"] for answer in site.heard.answers] == [one["probability"] for one in expected]


def test_sounds_are_answered_by_a_model_of_theirs_and_pictures_then_are_not(tmp_path, board):
    from device.collect.test_folder_collector import _wav  # noqa: PLC0415 its sounds alone

    model = board.deploy("audio", AUDIO)
    with _site(tmp_path, board.client) as site:
        site.put(_wav(7), suffix=".wav")
        site.put(_picture(_luck(1)))
        assert (len(site.heard.answers), site.counts["answer.errors"]) == (1, 1)
    task = model.configured_task
    inputs = task.input_reader(next((tmp_path / "shard" / UNLABELLED).glob("*.wav")))
    assert site.heard.answers[0]["probability"] == model.predict(inputs)[0]["probability"]


def test_a_model_that_reads_no_files_and_a_file_that_is_too_large_are_counted(tmp_path, board, caplog):
    board.deploy("table", TABLE)
    with _site(tmp_path, board.client) as site:
        site.put(_picture(_luck(1)))
        assert "deploy one of the task pictures or audio" in caplog.text
        board.deploy("pictures", PICTURES)
        site.put(_picture(_luck(2)) + b"\0" * MAX_FILE_BYTES)
        assert (site.counts["answer.errors"], site.heard.answers, site.store.num_files) == (2, [], 2)
        assert site.answerer._newest._newest.content == b""
        site.put(_picture(_luck(3)))
        assert len(site.heard.answers) == 1


def test_uncertain_files_without_a_class_are_asked_about_first_until_they_have_one_or_are_forgotten(tmp_path, board):
    board.deploy("pictures", PICTURES)
    folder = tmp_path / "shard"
    with _site(tmp_path, board.client, uncertain_below=1.0, max_uncertain=3) as site:
        site.put(_picture(np.full((8, 8), 128)), folder="bright")
        site.answerer.close()
        assert (len(site.heard.answers), read_uncertain_times(folder)) == (1, [])
        for seed in range(6):
            site.put(_picture(_luck(seed)))
        site.answerer.close()
        margins = sorted(answer["margin"] for answer in site.heard.answers[1:])
        times = read_uncertain_times(folder)
        assert sorted(one.margin for one in times) == margins[:3]
        queue = LabelQueue(open_target(folder, 1.0, times), (), NotedGuesser(times))
        assert (queue.num_left, queue.guess.margin) == (3, margins[0])
        assert len(open_target(folder, 1.0).list_examples()) == 6
        queue.label(queue.current.key, "dark")
        site.now_s += REPORT_S + 1
        site.collector.step()
        site.answerer.close()
        assert sorted(one.margin for one in read_uncertain_times(folder)) == margins[1:3]
        write_forget_request(folder, ForgetRequest(since_s=0, until_s=1e10, where={}))
        site.collector.step()
        assert not (folder / UNCERTAIN_NAME).exists()
        site.put(_picture(_luck(9)))
        site.answerer.close()
        assert [one.margin for one in read_uncertain_times(folder)] == [site.heard.answers[-1]["margin"]]


def test_what_a_model_says_of_its_files_is_bounded():
    assert parse_model(b'{"classes": ["a"], "rows": null, "files": [".png"]}').suffixes == (".png",)
    for files in ([], ["a\nb"], [7], [".png"] * 21, ".png"):
        with pytest.raises(ValueError, match="neither rows nor files"):
            parse_model(json.dumps({"classes": ["a"], "rows": None, "files": files}).encode())


def test_the_server_refuses_a_file_of_another_kind(tmp_path, board):
    board.deploy("table", TABLE)
    with pytest.raises(DataError, match=r"reads no \.png files"):
        _ask(board, _picture(_luck(1)))


def _ask(board, content):
    from edgefl.device.inference.server import _read_file  # noqa: PLC0415 its reader alone

    return _read_file(content, ".png", board._server.served_model.current[0])


@needs("mosquitto")
@pytest.mark.extended
@pytest.mark.timeout(120)
def test_a_collector_of_a_folder_publishes_what_the_model_says_of_each_picture(tmp_path, board):
    model, source = board.deploy("pictures", PICTURES), tmp_path / "in"
    source.mkdir()
    with _mosquitto(tmp_path) as port:
        path = tmp_path / "c.toml"
        path.write_text(
            f'[collect]\nfolder = "{tmp_path / "shard"}"\nflush_s = 0.1\n'
            f'[answer]\nhost = "127.0.0.1"\nport = {port}\ntopic = "edgefl/yard"\nevery_s = 0.1\n'
            f"server_port = {board.client._request.port}\nuncertain_below = 1.0\n"
            f'[sources.one]\nkind = "folder"\npath = "{source}"\nsettle_s = 0.2\n'
        )
        eventually(lambda: _can_connect(port), timeout_s=20)
        with _listener(port, "any", "any") as (newest, counts), run_collector_process(path) as process:
            eventually(lambda: newest.get("edgefl/yard/available") == "offline", timeout_s=30)
            for seed in (1, 2):
                (source / f"{seed}.png").write_bytes(_picture(_luck(seed)))
                eventually(lambda: counts["edgefl/yard/answer"] == seed, timeout_s=30)  # noqa: B023 it is called here
                (expected,) = model.predict(_luck(seed)[None, None].astype(np.float32))
                answer = json.loads(newest["edgefl/yard/answer"])
                assert (answer["class"], answer["probability"]) == (expected["class"], expected["probability"])
                assert answer["deployment"] == "d1"
            assert newest["edgefl/yard/available"] == "online"
            (config,) = [json.loads(text) for topic, text in newest.items() if topic.endswith("_class/config")]
            assert config["options"] == ["dark", "bright"]
            process.terminate()
            assert process.wait(20) == 0
    assert len(read_uncertain_times(tmp_path / "shard")) == 2
