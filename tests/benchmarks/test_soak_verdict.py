import random

import pytest

MIB = 1024 * 1024
HOUR_S = 3600


@pytest.fixture(scope="module")
def verdicts(harness):
    return harness("soak_verdict")


@pytest.fixture
def judge(verdicts):
    """Judges an hour of a process of about 100 MiB; what is given is of the part of it that has gone by."""

    def call(memory, *, handles=lambda _: 12, threads=lambda _: 7, number=None):
        looks = [
            verdicts.Look(
                at_s=float(at_s), rss_bytes=int(memory(at_s / HOUR_S)), anonymous_bytes=50 * MIB,
                num_handles=handles(at_s / HOUR_S), num_threads=threads(at_s / HOUR_S), cpu_s=0.1 * at_s,
            )
            for at_s in range(0, HOUR_S, 5)
        ]  # fmt: skip
        return verdicts.judge("device-01", looks[:number])

    return call


def noisy(leak, seed=1):
    rng = random.Random(seed)

    def memory(part):
        return 100 * MIB * (1 + leak * part) + rng.gauss(0, 2 * MIB) + (30 * MIB if rng.random() < 0.05 else 0)

    return memory


def breathing(part):
    return 36 + random.Random(part).randrange(6)


@pytest.mark.parametrize("seed", range(3))
def test_a_leak_of_three_percent_is_found_in_the_noise_and_a_flat_line_passes(judge, seed):
    flat, leak = judge(noisy(0.0, seed)), judge(noisy(0.03, seed))
    assert (flat.problems, abs(flat.memory.line) < 0.005) == ([], True)
    assert leak.memory.line == pytest.approx(0.03, abs=0.005)
    assert any("by its line" in problem for problem in leak.problems)


@pytest.mark.parametrize(
    ("memory", "others", "problem"),
    [
        (noisy(-0.1), {}, None),
        (lambda part: (100 if part < 0.8 else 104) * MIB, {}, "last quarter"),
        (noisy(0.0), {"handles": lambda part: 40 + int(4 * part)}, "open files grew by 3.6: median 40, then 43"),
        (noisy(0.0), {"handles": breathing}, None),
        (noisy(0.0), {"threads": lambda part: 30 if part > 0.95 else 7}, "threads grew"),
    ],
    ids=["freed", "a jump that stays", "a socket every quarter", "a pool that breathes", "many threads for a while"],
)
def test_what_grows_is_found_by_what_is_left(judge, memory, others, problem):
    found = judge(memory, **others).problems
    assert found == [] if problem is None else (len(found) == 1 and problem in found[0]), found


def test_too_few_looks_are_refused_and_the_table_tells_both_measures_and_both_maxima(judge, verdicts):
    with pytest.raises(ValueError, match="7 times after the warm-up, 8 are needed"):
        judge(noisy(0.0), number=7)
    verdict = judge(lambda part: 100 * MIB * (1 + 0.01 * part))
    words = " ".join(verdicts.table([verdict]).splitlines()[1].split())
    assert words == "device-01 100.1 +1.00% +0.75% 50.0 +0.00% 12 (12, 12) 7 (7, 7) 0.100"
