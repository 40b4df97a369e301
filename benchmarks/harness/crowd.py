"""A large fleet that is only told of: devices in the store, and what they would say over MQTT."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from edgefl.core.protocol import Heartbeat, StatusMessage, Topic
from edgefl.storage.repositories.records import EvaluationRow, RunStatus
from edgefl.storage.store import Store

BEAT_S = 5.0
PREFIX = "pi-"
GROUPS = (("greenhouse",), ("barn",), ("field", "north"), ("field", "south"))
BOARDS = ("Raspberry Pi 4 Model B Rev 1.5", "Raspberry Pi 5 Model B Rev 1.0", "Raspberry Pi Zero 2 W Rev 1.0")


def names_of(num_devices: int) -> list[str]:
    return [f"{PREFIX}{number:04}" for number in range(1, num_devices + 1)]


def add_devices(store: Store, names: Sequence[str], *, at: float) -> None:
    """Lets the devices join, as far as the store is concerned."""
    with store.batch():
        store.add_token(
            token_id="crowd", secret_sha256="0" * 64, expires_at=9e9, uses=len(names), groups=(), role=None,
            created_at=at,
        )  # fmt: skip
        for number, name in enumerate(names):
            key = ec.generate_private_key(ec.SECP256R1()).public_key()
            store.enroll_device(
                token_id="crowd", secret_sha256="0" * 64, now=at, device_id=name, role="trainer", version="0.1.0",
                public_key=key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
                groups=GROUPS[number % len(GROUPS)],
            )  # fmt: skip
            store.set_node_id(name, 10**15 + number)
            store.update_device(name, examples={"digits": 200 + number % 97})
            facts = {"model": BOARDS[number % len(BOARDS)], "cores": 4, "memory_bytes": 4_000_000_000}
            store.record_capabilities(name, facts, {"digits": 200 + number % 97}, at)


def add_run(store: Store, run_id: str, *, name: str, num_rounds: int, at: float, seed: int = 7) -> None:
    """Writes a run that is over, with a round a second and an accuracy for every round."""
    rng = np.random.default_rng(seed)
    config = {"run": {"task": "digits", "rounds": num_rounds, "seed": seed}, "strategy": {"name": "fedavg"}}
    with store.batch():
        store.add_run(
            run_id=run_id, name=name, task="digits", strategy="fedavg", config=config, seed=seed, submitted_at=at
        )
        store.set_run_status(run_id, RunStatus.RUNNING, at=at)
        evaluations = []
        for number in range(1, num_rounds + 1):
            store.open_round(run_id, number, started_at=at + number, num_devices=100)
            store.close_round(run_id, number, version=number, closed_at=at + number + 0.9 + rng.uniform(0, 0.3))
            accuracy = float(0.96 - 0.85 * math.exp(-number / (num_rounds / 12)) + rng.normal(0, 0.006))
            evaluations.append(
                EvaluationRow(
                    assignment_id=f"e-{number}", round=number, version=number, device_id="coordinator-evaluator",
                    source="coordinator", loss=1.2 - accuracy, accuracy=accuracy, num_examples=348,
                    at=at + number + 1,
                )
            )  # fmt: skip
        store.record_evaluations(run_id, evaluations)
        store.set_run_accuracy(run_id, evaluations[-1].accuracy)
        store.set_run_status(
            run_id, RunStatus.FINISHED, at=at + num_rounds + 2, reason=f"rounds reached {num_rounds}"
        )


class Crowd:
    """Says what devices would say that do not exist, one after the other; a context manager.

    Some were never seen, some leave, some fall silent after a while.
    """

    def __init__(self, names: Sequence[str], say: Callable[[str, Topic, bytes], None]) -> None:
        self._names, self._say = names, say
        self._rng = np.random.default_rng(7)
        self._warmth = self._rng.normal(56, 7, size=len(names))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        for number, name in enumerate(self._names):
            if number % 50 != 17:
                self._say(name, Topic.STATUS, StatusMessage(state="online", boot_id="b", session_no=1).dump())
            if number % 83 == 5:
                self._say(name, Topic.STATUS, StatusMessage(state="offline", boot_id="b", session_no=1).dump())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _beat(self) -> None:
        began_s, sent = time.monotonic(), 0
        while not self._stopping.wait(0.05):
            due = int((time.monotonic() - began_s) / BEAT_S * len(self._names))
            for turn in range(sent, due):
                seq, number = divmod(turn, len(self._names))
                if number % 50 != 17 and number % 83 != 5 and (number % 41 != 9 or seq == 0):
                    self._warmth[number] += self._rng.normal(0, 0.6)
                    self._say(self._names[number], Topic.HEARTBEAT, self._heartbeat(number, seq + 1).dump())
            sent = due

    def _heartbeat(self, number: int, seq: int) -> Heartbeat:
        warm = float(self._warmth[number])
        return Heartbeat(
            seq=seq, session_no=1, uptime_s=time.monotonic(), temperature_c=round(warm, 1),
            throttled="throttled" if warm > 74 else "ok", cpu_fraction=float(self._rng.uniform(0.1, 0.9)),
            memory_fraction=0.4 + number % 7 / 20, power_w=3.1 + number % 5 / 3,
        )  # fmt: skip
