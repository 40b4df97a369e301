"""Every command reaches whom it concerns, and no other."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from peer_boards import eventually

from edgefl.device.commands import Commands
from edgefl.protocol import Command, CommandKind


class Board:
    """Notes what is called, as part.method and its arguments."""

    def __init__(self, root):
        self.calls = []
        parts: Any = {
            "state": SimpleNamespace(root=root),
            "trainer": self._part("trainer", "recall", "end_run", "rest"),
            "models": self._part("models", "deploy", "roll_back"),
            "installations": self._part("installations", "install"),
            "renewal": self._part("renewal", "ask"),
            "report": self._part("report", "forget"),
            "heart": self._part("heart", "beat_now"),
            "bell": self._part("bell", "ring"),
            "link": self._part("link", "set_draining", "publish_answer"),
            "on_refused": lambda told: self.calls.append(("refused", told)),
        }
        self.commands = Commands(**parts)

    def obey(self, kind, argument=None):
        self.calls.clear()
        self.commands.obey(Command(id="1", kind=kind, argument=argument))
        return list(self.calls)

    def _part(self, name, *methods):
        def noting(method):
            return lambda *args, **named: self.calls.append((f"{name}.{method}", *args, *named.values()))

        return SimpleNamespace(**{method: noting(method) for method in methods})


@pytest.fixture
def board(tmp_path):
    return Board(tmp_path)


DONE = [
    (CommandKind.RECALL, "a-1", [("trainer.recall", "a-1")]),
    (CommandKind.END, "r-1", [("trainer.end_run", "r-1")]),
    (CommandKind.DEPLOY, "d-1", [("models.deploy", "d-1")]),
    (CommandKind.ROLLBACK, "d-1", [("models.roll_back", "d-1")]),
    (CommandKind.INSTALL, "i-1", [("installations.install", "i-1")]),
    (CommandKind.REFUSED, "{}", [("refused", "{}")]),
    (CommandKind.DRAIN, None, [("link.set_draining", True), ("trainer.rest",)]),
    (CommandKind.RESUME, None, [("link.set_draining", False)]),
    (CommandKind.RENEW, None, [("renewal.ask",), ("bell.ring",)]),
    (CommandKind.BEAT, None, [("heart.beat_now",)]),
    (CommandKind.RELOAD, None, [("report.forget",), ("bell.ring",)]),
    (CommandKind.LOG_LEVEL, "ERROR", []),
]


def test_a_command_is_done_by_whom_it_concerns(board, caplog):
    before = logging.getLogger().level
    try:
        for kind, argument, calls in DONE:
            assert board.obey(kind, argument) == calls, kind
        assert logging.getLogger().level == logging.ERROR
    finally:
        logging.getLogger().setLevel(before)
    assert {kind for kind, *_ in DONE} == {*CommandKind} - {CommandKind.LOGS}
    board.obey(CommandKind.LOGS, "{}")  # a thread reads them
    eventually(lambda: [name for name, *_ in board.calls] == ["link.publish_answer"])
    assert "unknown" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "argument"),
    [("dance", "a-1"), (CommandKind.RECALL, None), (CommandKind.DEPLOY, ""), (CommandKind.LOG_LEVEL, "CHATTY")],
)
def test_what_makes_no_sense_is_ignored_and_said(board, caplog, kind, argument):
    assert board.obey(kind, argument) == []
    assert f"ignored an unknown command {kind!r}" in caplog.text
