"""A process full of stand-ins for devices (`stand_in`), told by lines on stdin what to do next.

    python -m harness.stand_ins --root DIR --process 1 --model-bytes 1000000 --workers 50 < ORDERS

`join TOKEN 500` lets so many more join, and says `{"joined": …}`. `go` connects those that are not yet, and says
`{"connected": …}` when every one of them has a broker's and the coordinator's ear. From then on they beat and work.
`every 2.5` lets each beat so often, in seconds; `tell` says what was done, and writes when the heartbeats left.
`end` says goodbye for all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from edgefl.core.errors import EdgeflError, NetworkError
from edgefl.core.protocol import HEARTBEAT_S, POLL_S, JoinToken
from edgefl.core.types import Json, derive_rng
from edgefl.device.enrolment.enroll import EnrolmentOptions, enroll
from edgefl.device.flower.supernode import ReplyRejectedError
from edgefl.device.hardware.capabilities import probe
from edgefl.device.mqtt.connection import MAX_BACKOFF_S
from edgefl.device.state_dir import DeviceStateDir
from edgefl.system.https_client import create_pinned_context
from edgefl.system.processes import raise_file_limit
from edgefl.tasks.noop import NUM_EXAMPLES, NoopTask
from harness.ears import Ears
from harness.stand_in import StandIn, Tally

CONNECT_WITHIN_S = JOIN_WITHIN_S = 600.0
DIALLERS = 8
"""How many join or connect at a time: what they cost is mostly cryptography, on both ends."""
AGAIN_S = 1.0
STACK_BYTES = 256 * 1024


class StandIns:
    """All of process number `process`; `workers` is how many may talk to the Fleet API at the same time."""

    def __init__(self, root: Path, process: int, model_bytes: int, workers: int) -> None:
        self._root, self._process, self._beat_s = root, process, HEARTBEAT_S
        self._tally = Tally(shapes=NoopTask(size_bytes=model_bytes).shapes())
        self._ears = Ears()
        self._ears.start()
        threading.stack_size(STACK_BYTES)
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="work")
        self._diallers = ThreadPoolExecutor(DIALLERS, thread_name_prefix="dial")
        self._all: list[StandIn] = []
        self._num_entered = 0
        self._is_beating = True
        self._facts = probe()

    def join(self, token: JoinToken, number: int) -> Json:
        """Lets so many more join; returns how long that took."""
        begun_s, first = time.monotonic(), len(self._all) + 1
        names = [f"pi-{self._process:02}-{each:05}" for each in range(first, first + number)]

        def one(name: str) -> DeviceStateDir:
            shards, examples = {"noop": str(self._root)}, {"noop": NUM_EXAMPLES}
            wishes = EnrolmentOptions(name=name, shards=shards, examples=examples, facts=self._facts)
            while True:
                try:
                    return enroll(token, wishes, root=self._root / name)
                except NetworkError as error:  # its key is kept, and the same command gets the same place
                    if time.monotonic() > begun_s + JOIN_WITHIN_S:
                        raise
                    self._tally.note_try(f"{name} joins again: {error}")

        states = list(self._diallers.map(one, names))
        seconds = time.monotonic() - begun_s
        if states:
            trust = create_pinned_context(states[0].ca.read_bytes())
            self._all += [StandIn(state, trust, self._facts, self._tally, self._rung) for state in states]
        return {"joined": len(self._all), "seconds": seconds}

    def connect(self) -> Json:
        """Connects those that are not yet; returns how long that took."""
        begun_s = time.monotonic()
        new, self._num_entered = self._all[self._num_entered :], len(self._all)
        for stand_in in new:
            self._diallers.submit(self._guarded, lambda each=stand_in: self._enter(each), stand_in.name)
        until_s = begun_s + CONNECT_WITHIN_S
        while not all(stand_in.is_up for stand_in in self._all) and time.monotonic() < until_s:
            time.sleep(0.05)
        return {"connected": sum(stand_in.is_up for stand_in in self._all), "seconds": time.monotonic() - begun_s}

    def beat_every(self, beat_s: float) -> Json:
        """Lets each beat so often from its next heartbeat on."""
        self._beat_s = beat_s
        return {"every": beat_s}

    def tell(self) -> Json:
        """Returns what was done; those that are beating go on."""
        told: dict[str, list[float]] = {}
        done = threading.Event()
        self._ears.call(lambda: (told.update({each.name: list(each.beats_at) for each in self._all}), done.set()))
        done.wait()
        path, tally = self._root / f"beats-{self._process}.json", self._tally
        path.write_text(json.dumps(told))
        with tally.lock:
            late_s, tally.late_s = tally.late_s, []
            for (run, version), total in tally.sums.items():
                np.save(self._root / f"sum-{run}-{version}-{self._process}.npy", total)
        return {
            "told": len(self._all),
            "beats": str(path),
            "late_s": float(np.quantile(late_s, 0.99)) if late_s else 0.0,
            "updates": tally.num_updates,
            "versions": sorted({version for _, version in tally.sums}),
            "lost_sessions": tally.num_lost_sessions,
            "tries": tally.tries[:20],
            "num_tries": len(tally.tries),
            "errors": tally.errors[:20],
            "num_errors": len(tally.errors),
            "cpu_s": time.process_time(),
        }

    def end(self) -> None:
        self._is_beating = False
        for stand_in in self._all:
            self._ears.call(stand_in.say_goodbye)
        self._workers.shutdown(cancel_futures=True)
        time.sleep(0.5)
        self._ears.stop()
        for stand_in in self._all:
            stand_in.close()

    def _enter(self, stand_in: StandIn) -> None:
        try:
            stand_in.activate()
        except NetworkError as error:
            self._tally.note_try(f"{stand_in.name}: {error}")
            self._diallers.submit(self._guarded, lambda: self._enter(stand_in), stand_in.name)
            return
        self._dial(stand_in)
        poll_s = POLL_S * derive_rng("poll", stand_in.name).uniform(0, 1)
        self._ears.call(lambda: self._ears.later(poll_s, lambda: self._poll(stand_in)))
        self._ears.call(lambda: self._beat_later(stand_in))

    def _dial(self, stand_in: StandIn) -> None:
        try:
            session = stand_in.dial()
        except OSError as error:
            self._tally.failed(f"{stand_in.name} cannot reach the broker: {error}")
            self._lost(stand_in)
            return
        self._ears.call(lambda: self._ears.take(session.client, lambda: self._lost(stand_in)))

    def _lost(self, stand_in: StandIn) -> None:
        """Connects once more, some seconds later."""
        stand_in.session, stand_in.is_up = None, False
        if not self._is_beating:
            return
        with self._tally.lock:
            self._tally.num_lost_sessions += 1
        pause_s = MAX_BACKOFF_S * derive_rng("again", stand_in.name, time.time_ns()).uniform(0.1, 1)
        again = lambda: self._diallers.submit(self._guarded, lambda: self._dial(stand_in), stand_in.name)  # noqa: E731
        self._ears.call(lambda: self._ears.later(pause_s, again))

    def _beat_later(self, stand_in: StandIn) -> None:
        wait_s = stand_in.next_beat_s(self._beat_s)
        due_s = time.monotonic() + wait_s
        self._ears.later(wait_s, lambda: self._beat(stand_in, due_s))

    def _beat(self, stand_in: StandIn, due_s: float) -> None:
        if self._is_beating:
            self._tally.late_s.append(time.monotonic() - due_s)
            stand_in.beat()
            self._beat_later(stand_in)

    def _poll(self, stand_in: StandIn) -> None:
        """Has one ask for work where no bell rang for long, as every device does."""
        if not self._is_beating:
            return
        silent_s = time.monotonic() - stand_in.asked_s
        if silent_s >= POLL_S:
            silent_s = 0.0
            self._rung(stand_in)
        self._ears.later(POLL_S - silent_s, lambda: self._poll(stand_in))

    def _rung(self, stand_in: StandIn) -> None:
        self._workers.submit(self._guarded, lambda: self._work(stand_in), stand_in.name)

    def _work(self, stand_in: StandIn) -> None:
        """Has one ask for work; what the network did not let through is tried again, as an agent does."""
        try:
            stand_in.work()
        except ReplyRejectedError:
            raise
        except NetworkError as error:
            self._tally.note_try(f"{stand_in.name}: {error}")
            self._ears.call(lambda: self._ears.later(AGAIN_S, lambda: self._rung(stand_in)))

    def _guarded(self, action: Callable[[], None], name: str) -> None:
        """One that fails must not end the others; what went wrong is in the report."""
        try:
            action()
        except EdgeflError as error:
            self._tally.failed(f"{name}: {error}")
        except Exception as error:  # noqa: BLE001 the boundary of a thread
            self._tally.failed(f"{name}: {type(error).__name__}: {error}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--process", type=int, required=True, help="which one of several this is")
    parser.add_argument("--model-bytes", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True, help="at the Fleet API at the same time")
    arguments = parser.parse_args()
    raise_file_limit()
    crowd = StandIns(arguments.root, arguments.process, arguments.model_bytes, arguments.workers)
    for line in sys.stdin:
        match line.split():
            case ["join", token, number]:
                told = crowd.join(JoinToken.parse(token), int(number))
            case ["go"]:
                told = crowd.connect()
            case ["every", beat_s]:
                told = crowd.beat_every(float(beat_s))
            case ["tell"]:
                told = crowd.tell()
            case _:
                break
        print(json.dumps(told), flush=True)
    crowd.end()
    return os.EX_OK


if __name__ == "__main__":
    raise SystemExit(main())
