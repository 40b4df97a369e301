"""`[compression] up = "auto"` over whole runs: simulated here, over real processes in tests/e2e/test_auto.py."""

from statistics import median

import pytest

import edgefl
from edgefl.compression.codec_selection import CANDIDATES
from edgefl.core.config import parse_run
from edgefl.core.errors import CodecError, ConfigError
from edgefl.engine.assembly.build import build_run

PROFILES = """
[profile.fast]
speed = 0.05
up_bytes_per_s = 50_000_000
down_bytes_per_s = 50_000_000
[profile.slow]
speed = 0.05
up_bytes_per_s = 20_000
down_bytes_per_s = 2_000_000
"""
FIRST = (len(CANDIDATES) - 1) // 2


@pytest.fixture
def simulated(tmp_path):
    """The codecs that a fast and a slow board had, assignment by assignment."""

    def run(strategy="fedavg", *, bookkeeping_only=False, up="auto", profiles=PROFILES, **compression):
        (tmp_path / "profiles.toml").write_text(profiles)
        boards = {"profiles": ["fast", "slow"], "profile_file": str(tmp_path / "profiles.toml"), "jitter": 0.0}
        config = {
            "run": {"task": "digits", "rounds": 6, "seed": 7},
            "strategy": {"name": strategy, "learning_rate": 0.2},
            "compression": {"up": up, **compression},
            "simulation": {**boards, "workers": 0},
        }
        found = edgefl.simulate(config, devices=2, scheme="iid", root=tmp_path, bookkeeping_only=bookkeeping_only)
        boards = ("device-01", "device-02")
        return tuple([row["codec"] for row in found.updates if row["device_id"] == board] for board in boards)

    return run


@pytest.mark.parametrize("strategy", ["fedavg", "fedasync", pytest.param("fedbuff", marks=pytest.mark.extended)])
def test_a_board_with_a_slow_uplink_gets_a_harder_codec_than_a_fast_one_and_the_same_one_again(simulated, strategy):
    chosen = simulated(strategy)
    fast, slow = ([CANDIDATES.index(codec) for codec in codecs] for codecs in chosen)
    assert fast[0] == slow[0] == FIRST
    assert (median(fast[-3:]), min(slow[1:]) >= FIRST) == (0, True)
    if strategy == "fedavg":
        assert simulated(strategy) == chosen


def test_schedules_without_training_choose_too_and_a_codec_that_is_named_is_recorded(simulated):
    fast, slow = simulated(bookkeeping_only=True)
    assert (fast[-1], CANDIDATES.index(slow[-1]) > CANDIDATES.index("ef|int8")) == ("ef|fp16", True)
    fast, slow = simulated(bookkeeping_only=True, up="topk:0.1|fp16")
    assert {*fast, *slow} == {"topk:0.1|fp16"}


def test_it_chooses_among_the_codecs_that_are_named(simulated):
    fast, slow = simulated(up="auto:topk:0.02|int8,dense", layers={"*bias": "fp16"})
    assert (fast[-1], slow[-1]) == ("dense; *bias = fp16", "topk:0.02|int8; *bias = fp16")


@pytest.mark.parametrize("strategy", ["fedavg", "scaffold", "fedasync", "signsgd"])
@pytest.mark.parametrize(
    ("up", "metered", "codecs"),
    [("auto", None, ("ef|fp16", CANDIDATES[-1])), ("fp16", "topk:0.1|int8", ("fp16", "topk:0.1|int8"))],
)
def test_a_board_gets_fewer_bytes_while_its_connection_is_metered(simulated, strategy, up, metered, codecs):
    """Both are as fast; what is metered begins within the run."""
    fast = PROFILES.partition("[profile.slow]")[0]
    profiles = f"{fast}{fast.replace('fast', 'slow')}metered = [[0, 0], [0.02, 1]]\n"
    bookkeeping = {"bookkeeping_only": strategy == "signsgd"}
    free, metered_board = simulated(
        strategy, up=up, profiles=profiles, **bookkeeping, **({"metered": metered} if metered else {})
    )
    assert (free[-1], metered_board[-1]) == codecs
    assert codecs[1] not in free
    assert metered_board[0] == free[0]


@pytest.mark.parametrize(
    ("compression", "strategy", "error", "text"),
    [
        ({"down": "auto"}, "fedavg", ConfigError, "all devices get the same bytes; auto is for compression.up"),
        ({"up": "auto:dense"}, "fedavg", CodecError, "two or more codecs"),
        ({"up": "auto:dense,nonsense"}, "fedavg", CodecError, "unknown stage 'nonsense'"),
        ({"up": "auto:dense,ef|int8"}, "fedavg", CodecError, "begin with ef"),
        ({"up": "auto:fp16,delta|fp16"}, "fedavg", CodecError, "delta"),
        ({"up": "auto"}, "redundant", ConfigError, "leave ef out"),
        (
            {"up": "fp16", "metered": "auto"},
            "fedavg",
            CodecError,
            "compression.metered: it must be one codec, got 'auto'",
        ),
        ({"up": "fp16", "metered": "nonsense"}, "fedavg", CodecError, "compression.metered: unknown stage"),
        ({"up": "fp16", "metered": "ef|int8"}, "fedavg", CodecError, "it and up both begin with ef"),
        (
            {"up": "auto", "metered": "fp16"},
            "fedavg",
            CodecError,
            "^compression.metered: it and up both begin with ef",
        ),
        ({"up": "fp16", "metered": "int8"}, "redundant", ConfigError, "got 'int8': all copies of a block"),
        ({"metered": "int8"}, "adacomp", ConfigError, "left out with strategy adacomp, .* a codec of its own"),
        ({"metered": "int8"}, "dsgd", ConfigError, "nodes of a graph need one codec"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_run(compression, strategy, error, text):
    config = {"run": {"task": "digits"}, "strategy": {"name": strategy}, "compression": compression}
    with pytest.raises(error, match=text):
        build_run(parse_run(config), "check")
