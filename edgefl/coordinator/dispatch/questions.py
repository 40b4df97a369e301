"""Asks single devices something over MQTT and waits for what they say; a device answers also while it trains."""

from __future__ import annotations

import json
import queue
import threading
import uuid
from collections.abc import Mapping
from typing import Any

from edgefl.coordinator.dispatch.outstanding import Bell
from edgefl.coordinator.fleet.presence import DeviceState
from edgefl.coordinator.fleet.roster import Roster
from edgefl.errors import NetworkError, NotFoundError
from edgefl.protocol import Command, CommandAnswer, CommandKind
from edgefl.types import Json

ANSWER_WITHIN_S = 10.0
_THERE = frozenset({DeviceState.ONLINE, DeviceState.LATE})


class Questions:
    """`ask` is called by threads that may wait, `answered` by the bus."""

    def __init__(self, bell: Bell, roster: Roster, *, within_s: float = ANSWER_WITHIN_S) -> None:
        self._bell, self._roster, self._within_s = bell, roster, within_s
        self._waiting: dict[str, tuple[str, queue.SimpleQueue[CommandAnswer]]] = {}
        self._lock = threading.Lock()

    def ask(self, device_id: str, kind: CommandKind, argument: Mapping[str, Any]) -> Json:
        """Returns what a device says.

        Raises:
            NotFoundError: there is no such device.
            NetworkError: it is away, did not answer in time, or says that it cannot.
        """
        if self._roster.info(device_id) is None:
            raise NotFoundError(f"no device {device_id!r}; `edgefl devices list` shows them")
        state = self._roster.state(device_id)
        if state not in {*_THERE, DeviceState.DRAINING}:
            raise NetworkError(f"{device_id} is {state or 'away'}: it can be asked when it is back")
        command = Command(id=uuid.uuid4().hex, kind=kind, argument=json.dumps(argument))
        said: queue.SimpleQueue[CommandAnswer] = queue.SimpleQueue()
        with self._lock:
            self._waiting[command.id] = device_id, said
        try:
            self._bell.command(device_id, command)
            answer = said.get(timeout=self._within_s)
        except queue.Empty:
            raise NetworkError(
                f"{device_id} did not answer within {self._within_s:g} s; it may be of an older edgefl, or your "
                "broker may not let it write its topic answer"
            ) from None
        finally:
            with self._lock:
                del self._waiting[command.id]
        if answer.error is not None:
            raise NetworkError(f"{device_id}: {answer.error}")
        return dict(answer.content)

    def answered(self, device_id: str, payload: bytes) -> None:
        """Takes one message of a device; what nobody waits for is dropped.

        Raises:
            NetworkError: it is malformed.
        """
        answer = CommandAnswer.load(payload)
        with self._lock:
            asked, said = self._waiting.get(answer.id, ("", None))
        if said is not None and asked == device_id:
            said.put(answer)
