"""The coordinator's own evaluator is tried again until it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from edgefl.coordinator.central_evaluator import TOKEN_TTL_S, CentralEvaluator, EvaluatorSupervisor
from edgefl.coordinator.directory import init_directory
from edgefl.core.errors import StoreBusyError
from edgefl.core.protocol import EVALUATOR_NAME, JoinToken
from edgefl.storage.store import Store


class Child:
    """A command that ends at once, or lasts until it is terminated."""

    def __init__(self, code: int | None) -> None:
        self.code, self._ended = code, threading.Event()

    def poll(self) -> int | None:
        return self.code

    def wait(self) -> int:
        if self.code is None:
            assert self._ended.wait(30)
        return self.code or 0

    def terminate(self) -> None:
        self.code = 0
        self._ended.set()

    def kill(self) -> None:
        self.terminate()


class Site:
    """A process whose commands come to the ends that are given; the last of them lasts."""

    def __init__(
        self,
        root: Path,
        *codes: int,
        token: Callable[[], str | None],
        is_busy: int = 0,
        tasks: Sequence[str] = ("digits",),
    ) -> None:
        self.codes, self.commands, self.told = list(codes), list[list[str]](), list[str]()
        self.times_s, self.num_busy = list[float](), is_busy
        self.process = EvaluatorSupervisor(
            state_dir=root / "evaluator",
            shards=dict.fromkeys(tasks, root),
            address="127.0.0.1:1",
            get_token=token,
            log_file=root / "log",
            record_event=self.note,
            spawn=self.spawn,
            delay_s=0.05,
        )

    def spawn(self, arguments: list[str], _output: BinaryIO) -> Any:
        self.commands.append(arguments)
        self.times_s.append(time.monotonic())
        return Child(self.codes.pop(0) if self.codes else None)

    def note(self, message: str) -> None:
        if self.num_busy:
            self.num_busy -= 1
            raise StoreBusyError("another program holds the store")
        self.told.append(message)

    def until_it_runs(self) -> list[str]:
        """Returns the commands that there were until the evaluator ran."""
        self.process.start()
        deadline_s = time.monotonic() + 30
        while not any(command[:2] == ["device", "start"] for command in self.commands):
            assert time.monotonic() < deadline_s, self.commands
            time.sleep(0.01)
        self.process.stop()
        return [" ".join(command[:2]) for command in self.commands]


@pytest.mark.parametrize(("token", "command"), [("efl1.x", "device join"), (None, "device shard")])
def test_an_evaluator_that_cannot_start_is_tried_again_with_a_growing_pause_and_told_once(
    tmp_path: Path, token: str | None, command: str
) -> None:
    site = Site(tmp_path, 11, 1, 0, token=lambda: token)
    assert site.until_it_runs() == [command] * 3 + ["device start"]
    assert site.told == [
        f"the coordinator's own evaluator cannot start, and is tried again: `edgefl {command}` ended with code 11"
    ]
    first_s, second_s = site.times_s[1] - site.times_s[0], site.times_s[2] - site.times_s[1]
    assert first_s >= 0.05
    assert second_s >= 0.1


def test_an_evaluator_keeps_no_shard_of_an_earlier_start(tmp_path: Path) -> None:
    site = Site(tmp_path, 0, 0, token=lambda: None, tasks=("digits", "mnist"))
    site.until_it_runs()
    added = [command[3:] for command in site.commands if command[:3] == ["device", "shard", "add"]]
    assert [(command[0], "--only" in command) for command in added] == [("digits", True), ("mnist", False)]


def test_an_evaluator_whose_trouble_cannot_be_written_down_tells_it_at_the_next_try(tmp_path: Path) -> None:
    tokens = [StoreBusyError("in use"), "efl1.x"]

    def token() -> str:
        found = tokens.pop(0) if len(tokens) > 1 else tokens[0]
        if isinstance(found, Exception):
            raise found
        return str(found)

    site = Site(tmp_path, 1, 0, token=token, is_busy=1)
    assert site.until_it_runs() == ["device join"] * 2 + ["device start"]
    assert [message.rpartition(": ")[2] for message in site.told] == ["`edgefl device join` ended with code 1"]


class Members:
    def __init__(self, store: Store) -> None:
        self._store = store

    def remove(self, device_id: str) -> None:
        self._store.remove_device(device_id, at=3.0)


def test_a_token_is_good_for_its_time_and_one_join(tmp_path: Path) -> None:
    directory, now_s = init_directory(tmp_path / "c", hosts=["pi.local"], fleet="lab"), [0.0]
    with Store.open(directory.database) as store:
        members: Any = Members(store)
        own = CentralEvaluator(directory, store, members, monotonic=lambda: now_s[0])
        state_dir = tmp_path / "evaluator"

        def token() -> str:
            text = own.get_token(state_dir)
            assert text is not None
            assert JoinToken.parse(text).token_id == own.token_id
            return text

        first = token()
        assert token() == first
        now_s[0] = TOKEN_TTL_S
        second = token()
        assert second != first
        store.add_token(token_id="t", secret_sha256="0" * 64, expires_at=1e12, uses=2)
        joined(store)
        assert token() != second, "it was used, and the key that it gave a place is lost"
        joined(store)
        state_dir.mkdir()
        (state_dir / "device.json").touch()
        assert own.get_token(state_dir) is None


def joined(store: Store) -> None:
    store.enroll_device(
        token_id="t", secret_sha256="0" * 64, now=2.0, device_id=EVALUATOR_NAME, public_key=b"k", role="evaluator"
    )
