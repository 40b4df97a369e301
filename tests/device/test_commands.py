"""Every command reaches whom it concerns, and no other."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from peer_boards import eventually

from edgefl.core.protocol import Command, CommandKind
from edgefl.device.commands import CommandDispatcher


class Board:
    """Notes what is called, as part.method and its arguments."""

    def __init__(self, root):
        self.calls = []
        parts: Any = {
            "state": SimpleNamespace(root=root),
            "trainer": self._part("trainer", "finish_early", "complete_run", "pause"),
            "models": self._part("models", "deploy", "roll_back"),
            "installations": self._part("installations", "install"),
            "renewal": self._part("renewal", "request"),
            "capability_reporter": self._part("capability_reporter", "invalidate"),
            "heartbeat": self._part("heartbeat", "publish_now"),
            "wake_up": self._part("wake_up", "notify"),
            "connection": self._part("connection", "set_draining", "publish_reply"),
            "on_lockout": lambda told: self.calls.append(("refused", told)),
        }
        self.commands = CommandDispatcher(**parts)

    def obey(self, kind, argument=None):
        self.calls.clear()
        self.commands.dispatch(Command(id="1", kind=kind, argument=argument))
        return list(self.calls)

    def _part(self, name, *methods):
        def noting(method):
            return lambda *args, **named: self.calls.append((f"{name}.{method}", *args, *named.values()))

        return SimpleNamespace(**{method: noting(method) for method in methods})


@pytest.fixture
def board(tmp_path):
    return Board(tmp_path)


DONE = [
    (CommandKind.RECALL, "a-1", [("trainer.finish_early", "a-1")]),
    (CommandKind.END, "r-1", [("trainer.complete_run", "r-1")]),
    (CommandKind.DEPLOY, "d-1", [("models.deploy", "d-1")]),
    (CommandKind.ROLLBACK, "d-1", [("models.roll_back", "d-1")]),
    (CommandKind.INSTALL, "i-1", [("installations.install", "i-1")]),
    (CommandKind.REFUSED, "{}", [("refused", "{}")]),
    (CommandKind.DRAIN, None, [("connection.set_draining", True), ("trainer.pause",)]),
    (CommandKind.RESUME, None, [("connection.set_draining", False)]),
    (CommandKind.RENEW, None, [("renewal.request",), ("wake_up.notify",)]),
    (CommandKind.BEAT, None, [("heartbeat.publish_now",)]),
    (CommandKind.RELOAD, None, [("capability_reporter.invalidate",), ("wake_up.notify",)]),
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
    eventually(lambda: [name for name, *_ in board.calls] == ["connection.publish_reply"])
    assert "unknown" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "argument"),
    [("dance", "a-1"), (CommandKind.RECALL, None), (CommandKind.DEPLOY, ""), (CommandKind.LOG_LEVEL, "CHATTY")],
)
def test_what_makes_no_sense_is_ignored_and_said(board, caplog, kind, argument):
    assert board.obey(kind, argument) == []
    assert f"ignored an unknown command {kind!r}" in caplog.text
