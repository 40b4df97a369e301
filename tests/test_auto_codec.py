"""`[compression] up = "auto"` over whole runs: simulated here, over real processes in tests/e2e/test_auto.py."""

from __future__ import annotations

from statistics import median

import pytest

import edgefl
from edgefl.assembly import assemble
from edgefl.compression.auto import CANDIDATES
from edgefl.config import parse_run
from edgefl.errors import CodecError, ConfigError

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


def simulated(folder, strategy, *, bookkeeping_only=False, **tables):
    (folder / "profiles.toml").write_text(PROFILES)
    config = {
        "run": {"task": "digits", "rounds": 8, "seed": 7},
        "strategy": {"name": strategy, "learning_rate": 0.2},
        "compression": {"up": "auto"},
        "simulation": {
            "profiles": ["fast", "slow"],
            "profile_file": str(folder / "profiles.toml"),
            "jitter": 0.0,
            "workers": 0,
        },
        **tables,
    }
    return edgefl.simulate(config, devices=2, scheme="iid", root=folder, bookkeeping_only=bookkeeping_only)


def codecs_of(run, device_id):
    return [row["codec"] for row in run.updates if row["device_id"] == device_id]


@pytest.mark.parametrize("strategy", ["fedavg", "fedbuff", "fedasync"])
def test_a_board_with_a_slow_uplink_gets_a_harder_codec_than_a_fast_one(tmp_path, strategy):
    run = simulated(tmp_path, strategy)
    fast, slow = ([CANDIDATES.index(codec) for codec in codecs_of(run, name)] for name in ("device-01", "device-02"))
    assert fast[0] == slow[0] == (len(CANDIDATES) - 1) // 2
    assert median(fast[-4:]) == 0
    assert min(slow[1:]) >= (len(CANDIDATES) - 1) // 2


def test_the_same_seed_makes_the_same_choices(tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    for folder in (first, second):
        folder.mkdir()
    rows = [[(row["assignment_id"], row["codec"]) for row in simulated(f, "fedavg").updates] for f in (first, second)]
    assert rows[0] == rows[1]


def test_schedules_without_training_choose_too(tmp_path):
    run = simulated(tmp_path, "fedavg", bookkeeping_only=True)
    assert codecs_of(run, "device-01")[-1] == "ef|fp16"
    assert CANDIDATES.index(codecs_of(run, "device-02")[-1]) > CANDIDATES.index("ef|int8")


def test_it_chooses_among_the_codecs_that_are_named(tmp_path):
    compression = {"up": "auto:topk:0.02|int8,dense", "layers": {"*bias": "fp16"}}
    run = simulated(tmp_path, "fedavg", compression=compression)
    assert codecs_of(run, "device-01")[-1] == "dense; *bias = fp16"
    assert codecs_of(run, "device-02")[-1] == "topk:0.02|int8; *bias = fp16"


def test_without_auto_the_codec_of_the_run_file_is_recorded(tmp_path):
    run = simulated(tmp_path, "fedavg", compression={"up": "topk:0.1|fp16"})
    assert {row["codec"] for row in run.updates} == {"topk:0.1|fp16"}


@pytest.mark.parametrize(
    ("compression", "strategy", "error", "text"),
    [
        ({"down": "auto"}, "fedavg", ConfigError, "all devices get the same bytes; auto is for compression.up"),
        ({"up": "auto:dense"}, "fedavg", CodecError, "two or more codecs"),
        ({"up": "auto:dense,nonsense"}, "fedavg", CodecError, "unknown stage 'nonsense'"),
        ({"up": "auto:dense,ef|int8"}, "fedavg", CodecError, "begin with ef"),
        ({"up": "auto:fp16,delta|fp16"}, "fedavg", CodecError, "delta"),
        ({"up": "auto"}, "redundant", ConfigError, "leave ef out"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_run(compression, strategy, error, text):
    config = {"run": {"task": "digits"}, "strategy": {"name": strategy}, "compression": dict(compression)}
    with pytest.raises(error, match=text):
        assemble(parse_run(config), "check")
