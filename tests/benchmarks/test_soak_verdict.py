from __future__ import annotations

import random
from pathlib import Path

import pytest

HARNESS = Path(__file__).parents[2] / "benchmarks" / "harness"
MIB = 1024 * 1024
HOUR_S = 3600
EVERY_S = 5


@pytest.fixture(scope="module")
def verdicts(harness):
    return harness("soak_verdict")


def looks(verdicts, memory, *, handles=lambda _: 12, threads=lambda _: 7):
    """An hour of a process of about 100 MiB; `memory`, `handles` and `threads` are of the part that has gone by."""
    return [
        verdicts.Look(
            at_s=float(at_s), rss_bytes=int(memory(at_s / HOUR_S)), anonymous_bytes=50 * MIB,
            num_handles=handles(at_s / HOUR_S), num_threads=threads(at_s / HOUR_S), cpu_s=0.1 * at_s,
        )
        for at_s in range(0, HOUR_S, EVERY_S)
    ]  # fmt: skip


def noisy(leak, seed=1):
    rng = random.Random(seed)
    return lambda part: (
        100 * MIB * (1 + leak * part) + rng.gauss(0, 2 * MIB) + (30 * MIB if rng.random() < 0.05 else 0)
    )


def test_a_noisy_line_that_is_flat_passes(verdicts):
    for seed in range(5):
        verdict = verdicts.judge("device-01", looks(verdicts, noisy(0.0, seed)))

        assert verdict.problems == []
        assert abs(verdict.memory.line) < 0.005


def test_a_leak_of_three_percent_is_found_in_the_noise(verdicts):
    for seed in range(5):
        verdict = verdicts.judge("device-01", looks(verdicts, noisy(0.03, seed)))

        assert verdict.memory.line == pytest.approx(0.03, abs=0.005)
        assert any("by its line" in problem for problem in verdict.problems)


def test_memory_that_is_freed_is_no_problem(verdicts):
    assert verdicts.judge("device-01", looks(verdicts, noisy(-0.1))).problems == []


def test_a_jump_that_stays_is_found_though_most_pairs_lie_on_one_side_of_it(verdicts):
    late = looks(verdicts, lambda part: (100 if part < 0.8 else 104) * MIB)

    assert any("last quarter" in problem for problem in verdicts.judge("device-01", late).problems)


def test_one_socket_left_behind_every_quarter_of_an_hour_is_found(verdicts):
    verdict = verdicts.judge("coordinator", looks(verdicts, noisy(0.0), handles=lambda part: 40 + int(4 * part)))

    assert verdict.problems == ["coordinator: open files grew by 3.6: median 40, then 43, most 41, then 43"]


def test_a_pool_of_connections_that_breathes_is_no_leak(verdicts):
    rng = random.Random(3)
    verdict = verdicts.judge("coordinator", looks(verdicts, noisy(0.0), handles=lambda _: 36 + rng.randrange(6)))

    assert verdict.problems == []


def test_many_threads_at_once_are_found_though_they_are_there_only_for_a_while(verdicts):
    verdict = verdicts.judge("broker", looks(verdicts, noisy(0.0), threads=lambda part: 30 if part > 0.95 else 7))

    assert len(verdict.problems) == 1
    assert "threads grew" in verdict.problems[0]


def test_too_few_looks_are_refused(verdicts):
    few = looks(verdicts, noisy(0.0))[:7]

    with pytest.raises(ValueError, match="7 times after the warm-up, 8 are needed"):
        verdicts.judge("device-01", few)


def test_the_table_tells_both_measures_and_both_maxima(verdicts):
    verdict = verdicts.judge("device-01", looks(verdicts, lambda part: 100 * MIB * (1 + 0.01 * part)))

    words = " ".join(verdicts.table([verdict]).splitlines()[1].split())

    assert words == "device-01 100.1 +1.00% +0.75% 50.0 +0.00% 12 (12, 12) 7 (7, 7) 0.100"
