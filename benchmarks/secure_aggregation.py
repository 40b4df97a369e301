"""What secure aggregation costs a board: bytes and CPU of a round, beside a plain one with the codec `dense`.

    python benchmarks/secure_aggregation.py [--boards 10] [--megabytes 1] [--lost 0] [--repeats 5]

Boards have certificates of a fleet's authority and run the protocol in this process, without a network. Bytes are of
messages, models and updates, without headers; CPU is the process time of one board's five steps, the median over the
repeats, less that of encoding the same update with `dense`. The model is the sum's largest difference to the mean.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping

import numpy as np
from harness import options

from edgefl.compression.codec import make_codec
from edgefl.coordinator.pki import create_authority, issue_client_certificate
from edgefl.core.secure_aggregation.aggregator import unmask_sum
from edgefl.core.secure_aggregation.keys import CertificateIdentity
from edgefl.core.secure_aggregation.messages import compute_threshold
from edgefl.core.secure_aggregation.participant import ConsentRecorder, Participant
from edgefl.core.secure_aggregation.ring import decode_mean, encode_vector
from edgefl.core.types import PeerMessage, SecureAggregationConfig, SecureStep, TensorSpec, derive_rng

MAX_BYTES_RATIO, MAX_CPU_S = 1.3, 0.05
THRESHOLD, MAX_EXAMPLES, EXAMPLES = 0.67, 1000, 100
OBSERVED = "board-00"


class Round:
    """One round of boards; counts the CPU and the bytes of one of them."""

    def __init__(self, boards: Mapping[str, Participant], version: int) -> None:
        self.boards, self.version = boards, version
        self.cpu_s, self.num_bytes, self.num_members = 0.0, 0, len(boards)

    def configure(self, step: SecureStep, survivors: tuple[str, ...] = ()) -> SecureAggregationConfig:
        return SecureAggregationConfig(
            step=step,
            group=f"v{self.version}",
            version=self.version,
            threshold=THRESHOLD,
            clip=1.0,
            max_examples=MAX_EXAMPLES,
            num_members=self.num_members,
            survivors=survivors,
        )

    def ask(self, name: str, config: SecureAggregationConfig, bodies: Mapping[str, bytes]) -> dict[str, bytes]:
        messages = [PeerMessage(edge=(sender, name), step=0, body=body) for sender, body in bodies.items()]
        started_s = time.process_time()
        answer = self.boards[name].answer("run", config, messages)
        self.count(name, time.process_time() - started_s, bodies, answer)
        return {message.edge[1]: message.body for message in answer}

    def send_update(self, name: str, update: Mapping[str, np.ndarray], bodies: Mapping[str, bytes]) -> bytes:
        config = self.configure(SecureStep.UPDATE)
        messages = [PeerMessage(edge=(sender, name), step=2, body=body) for sender, body in bodies.items()]
        started_s = time.process_time()
        self.boards[name].accept_shares("run", config, messages)
        words = encode_vector(
            update, weight=EXAMPLES, max_weight=MAX_EXAMPLES, clip=1.0, num_members=self.num_members
        )
        answer = self.boards[name].mask("run", config, words)
        self.count(name, time.process_time() - started_s, bodies, answer)
        return answer[0].body

    def count(self, name: str, cpu_s: float, bodies: Mapping[str, bytes], answer: tuple[PeerMessage, ...]) -> None:
        if name == OBSERVED:
            self.cpu_s += cpu_s
            self.num_bytes += sum(map(len, bodies.values())) + sum(len(message.body) for message in answer)


def run_round(round_: Round, updates: Mapping[str, Mapping[str, np.ndarray]], num_lost: int) -> float:
    """Plays a round whose last boards send no update; returns the largest difference of its mean to the exact one."""
    names = list(round_.boards)
    keys = round_.configure(SecureStep.KEYS)
    adverts = {name: round_.ask(name, keys, {})["coordinator"] for name in names}
    shares = {name: round_.ask(name, round_.configure(SecureStep.SHARES), adverts) for name in names}
    survivors = tuple(names[: len(names) - num_lost])
    total = np.zeros(0, np.uint32)
    for name in survivors:
        body = round_.send_update(name, updates[name], {sender: shares[sender][name] for sender in names})
        words = np.frombuffer(body, "<u4")
        total = words.copy() if not total.size else total + words
    consent = round_.configure(SecureStep.CONSENT, survivors)
    signatures = {name: round_.ask(name, consent, {})["coordinator"] for name in survivors}
    unmask = round_.configure(SecureStep.UNMASK, survivors)
    openings = {name: round_.ask(name, unmask, signatures)["coordinator"] for name in survivors}
    unmask_sum(
        total,
        adverts=adverts,
        sharers=names,
        survivors=survivors,
        openings=openings,
        threshold=compute_threshold(len(names), THRESHOLD),
    )
    settings = {"num_added": len(survivors), "max_weight": MAX_EXAMPLES, "num_members": len(names)}
    mean = decode_mean(total, updates[names[0]], clip=1.0, **settings)
    exact = np.mean([updates[name]["w"] for name in survivors], axis=0)
    return float(np.abs(mean["w"] - exact).max())


def measure_plain(update: Mapping[str, np.ndarray]) -> tuple[float, int]:
    """Returns the CPU seconds of encoding an update with `dense`, and its bytes."""
    codec = make_codec("dense", (TensorSpec(name="w", shape=update["w"].shape),))
    started_s = time.process_time()
    body = codec.encode(update, derive_rng(0))
    return time.process_time() - started_s, len(body)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boards", type=int, nargs="+", default=[10])
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--lost", type=int, default=0, help="boards that send no update")
    parser.add_argument("--repeats", type=int, default=5)
    args = options.parse(parser, boards=[3], megabytes=0.01, repeats=1)
    authority, is_within = create_authority("bench"), True
    print("| boards | lost | bytes of a board | beside plain | CPU of a board | beside plain | mean differs by |")
    print("|---|---|---|---|---|---|---|")
    for count in args.boards:
        names = [f"board-{number:02}" for number in range(count)]
        boards = {}
        for name in names:
            pair = issue_client_certificate(authority, name)
            identity = CertificateIdentity(
                name, key_pem=pair.key_pem, cert_pem=pair.cert_pem, ca_pem=authority.cert_pem
            )
            boards[name] = Participant(identity, ConsentRecorder())
        size = int(args.megabytes * 1e6 / 4)
        updates = {
            name: {"w": derive_rng(1, name).normal(0, 0.1, size).clip(-1, 1).astype(np.float32)} for name in names
        }
        plain = [measure_plain(updates[OBSERVED]) for _ in range(args.repeats)]
        plain_s, model_bytes = statistics.median(found[0] for found in plain), plain[0][1]
        rounds = [Round(boards, version) for version in range(args.repeats)]
        differences = [run_round(round_, updates, args.lost) for round_ in rounds]
        cpu_s, num_bytes = statistics.median(round_.cpu_s for round_ in rounds), rounds[0].num_bytes
        ratio, more_s = (num_bytes + model_bytes) / (2 * model_bytes), cpu_s - plain_s
        is_within &= ratio <= MAX_BYTES_RATIO and more_s <= MAX_CPU_S
        print(
            f"| {count} | {args.lost} | {(num_bytes + model_bytes) / 1000:.0f} kB | {ratio:.3f} times | "
            f"{1000 * cpu_s:.1f} ms | +{1000 * more_s:.1f} ms | {max(differences):.1e} |"
        )
    print(f"bars: bytes at most {MAX_BYTES_RATIO} times, CPU at most +{1000 * MAX_CPU_S:.0f} ms")
    return 0 if is_within or args.quick else 1


if __name__ == "__main__":
    raise SystemExit(main())
