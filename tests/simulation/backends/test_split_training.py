"""Split learning in virtual time: the same model as fedavg's, other bytes, and what does not go with it."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import edgefl
from edgefl.compression.split_bodies import ExchangeSizes
from edgefl.core.config import SplitSection, parse_run
from edgefl.core.errors import CodecError, ConfigError, TaskError
from edgefl.core.types import DeviceInfo
from edgefl.engine.assembly.build import build_run
from edgefl.engine.fleet_state import FleetState
from edgefl.simulation.profiles import DeviceProfile
from edgefl.simulation.simulated_run import add_exchange, make_reference
from edgefl.storage.checkpoints import load_model_file
from edgefl.tasks import network_cut

torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")

BATCH, EXAMPLES = 8, 30
POOL2_VALUES, REST_VALUES = 32 * 7 * 7, 1568 * 64 + 64 + 64 * 10 + 10
FRONT_VALUES = 114_314 - REST_VALUES


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Two boards' images of 28x28, whose class is where they are bright."""
    folder = tmp_path_factory.mktemp("shards")
    paths = []
    for number in range(2):
        rng = np.random.default_rng(number)
        labels = rng.integers(0, 10, EXAMPLES)
        inputs = rng.integers(0, 60, (EXAMPLES, 28, 28)).astype(np.uint8)
        for image, label in zip(inputs, labels, strict=True):
            image[2 * label : 2 * label + 6] += 150
        paths.append(folder / f"device-{number}")
        paths[-1].mkdir()
        np.savez(paths[-1] / "data.npz", inputs=inputs, labels=labels)
    return paths


@pytest.fixture
def simulate(tmp_path, shards):
    def run(*, folder="run", strategy=None, **tables):
        config = {
            "run": {"task": "mnist", "rounds": 2, "local_test_fraction": 0.0, "evaluate_on": "none"},
            "task": {"model": "cnn-small"},
            "strategy": {"epochs": 1, "batch_size": BATCH, "learning_rate": 0.05, **(strategy or {})},
            "simulation": {"workers": 0, "iteration_s": 0.01, "jitter": 0.0},
            **tables,
        }
        return edgefl.simulate(config, devices=shards, root=tmp_path / folder)

    return run


def weights(result):
    return load_model_file(result.model)


@pytest.mark.parametrize("labels", ["coordinator", "device"])
@pytest.mark.parametrize("strategy", [{"momentum": 0.9}, {"name": "fedprox"}, {"optimizer": "adam"}])
def test_a_run_ends_with_the_model_of_whole_training(simulate, labels, strategy):
    whole = weights(simulate(folder="whole", strategy=strategy))
    split = weights(simulate(strategy=strategy, split={"after": "pool2", "labels": labels}))
    assert split.keys() == whole.keys()
    for name, tensor in whole.items():
        np.testing.assert_allclose(split[name], tensor, atol=2e-5)


def test_worker_processes_give_the_same_model(simulate):
    split = {"after": "pool1", "up": "qsgd:8", "down": "fp16"}
    alone = simulate(split=split)
    many = simulate(folder="many", split=split, simulation={"workers": 2, "iteration_s": 0.01, "jitter": 0.0})
    for name, tensor in weights(alone).items():
        np.testing.assert_array_equal(weights(many)[name], tensor)
    assert [row["bytes_up"] for row in alone.updates] == [row["bytes_up"] for row in many.updates]


@pytest.mark.parametrize("labels", ["coordinator", "device"])
def test_counted_are_the_front_and_the_batches_up_and_their_gradients_down(simulate, labels):
    row = simulate(split={"after": "pool2", "labels": labels}).updates[0]
    num_batches = -(-EXAMPLES // BATCH)
    batches, outputs = 4 * EXAMPLES * POOL2_VALUES, 4 * EXAMPLES * 10
    front = 4 * FRONT_VALUES
    extra = {"coordinator": (4 * EXAMPLES, 8 * num_batches), "device": (outputs, outputs)}[labels]
    headers = 100 * (2 * num_batches + 1)
    assert 0 <= row["bytes_up"] - (front + batches + extra[0]) < headers
    assert 0 <= row["bytes_down"] - (front + batches + extra[1]) < headers


def test_codecs_make_batches_smaller_and_the_network_still_learns(simulate):
    run = {"task": "mnist", "rounds": 6, "local_test_fraction": 0.0, "evaluate_on": "none"}
    dense = simulate(run=run, split={"after": "pool2"})
    small = simulate(folder="small", run=run, split={"after": "pool2", "up": "int8", "down": "int8"})
    assert small.updates[-1]["bytes_up"] < 0.45 * dense.updates[-1]["bytes_up"]
    assert small.updates[-1]["loss"] < 0.7 * small.updates[0]["loss"]
    assert small.updates[-1]["loss"] == pytest.approx(dense.updates[-1]["loss"], rel=0.2)


def test_an_update_codec_with_error_feedback_is_of_the_front_alone(simulate):
    result = simulate(split={"after": "pool2"}, compression={"up": "ef|topk:0.01", "layers": {"conv1.*": "dense"}})
    plain = simulate(folder="plain", split={"after": "pool2"})
    assert plain.updates[0]["bytes_up"] - result.updates[0]["bytes_up"] > 0.8 * 4 * (FRONT_VALUES - 16 * 26)


def test_an_iteration_takes_as_long_as_its_batches_travel():
    profile = DeviceProfile(name="slow", up_bytes_per_s=1000.0, down_bytes_per_s=500.0, latency_s=0.5)
    section = SplitSection(after="pool2", down="fp16")
    cost = ExchangeSizes(section, (100,), 10)
    up, down = cost.count_bytes(4)
    assert up == pytest.approx(4 * 400 + 16, abs=40)
    assert down == pytest.approx(2 * 400 + 8, abs=40)
    assert add_exchange(lambda _: 3.0, cost, profile)(4) == pytest.approx(3.0 + 1.0 + up / 1000 + down / 500)
    twice = ExchangeSizes(SplitSection(after="pool2", labels="device"), (100,), 10)
    assert add_exchange(lambda _: 3.0, twice, profile)(4) > 3.0 + 2.0 + 1600 / 1000 + 1600 / 500
    assert add_exchange(abs, None, profile) is abs


def test_the_reference_trains_the_whole_network():
    config = parse_run({"run": {"task": "mnist"}, "split": {"after": "pool2"}})
    assert make_reference(config).split == SplitSection()


def build(**tables):
    return build_run(parse_run({"run": {"task": "mnist"}, "task": {"model": "cnn-small"}, **tables}), "r")


SPLIT = {"after": "pool2"}


@pytest.mark.parametrize(
    ("tables", "error", "message"),
    [
        ({"split": {"after": "pool9"}}, ConfigError, r"split\.after must be .*conv1, relu1, pool1.*'pool9'"),
        ({"split": SPLIT, "task": {"model": "2nn"}}, ConfigError, r"split\.after = 'pool2' needs a network of torch"),
        ({"split": {**SPLIT, "labels": "both"}}, ConfigError, r"split\.labels"),
        ({"split": {**SPLIT, "up": "ef|topk:0.1"}}, CodecError, r"split\.up: codec 'ef\|topk:0.1'"),
        ({"split": {**SPLIT, "down": "nonsense"}}, CodecError, r"split\.down: .*nonsense"),
        ({"split": SPLIT, "compression": {"down": "fp16"}}, ConfigError, r"compression\.down must be 'dense'"),
        ({"split": SPLIT, "compression": {"up": "auto"}}, ConfigError, r"compression\.up = 'auto'"),
        (
            {
                "split": SPLIT,
                "aggregation": {"collective": "ring"},
                "guard": {"enabled": False, "max_weight_ratio": 0},
            },
            ConfigError,
            r"aggregation\.collective must be 'coordinator' with split\.after",
        ),
        ({"split": SPLIT, "strategy": {"name": "scaffold"}}, ConfigError, r"got strategy\.name = 'scaffold'"),
        ({"split": SPLIT, "strategy": {"name": "asgd"}}, ConfigError, r"got strategy\.name = 'asgd'"),
        ({"split": SPLIT, "strategy": {"name": "d2"}}, ConfigError, r"got strategy\.name = 'd2'"),
        ({"split": SPLIT, "strategy": {"keep_optimizer": True}}, ConfigError, r"strategy\.keep_optimizer"),
        *(
            (
                {"split": SPLIT, "strategy": {name: value}},
                ConfigError,
                rf"strategy\.{name} does not go with split\.after",
            )
            for name, value in (("micro_batch_size", 8), ("max_gradient_norm", 1.0), ("precision", "bfloat16"))
        ),
        ({"split": SPLIT, "strategy": {"double_buffering": True}}, ConfigError, r"strategy\.double_buffering"),
        ({"split": SPLIT, "run": {"task": "mnist", "evaluate_on": "devices"}}, ConfigError, r"run\.evaluate_on"),
    ],
)
def test_what_does_not_go_with_a_cut_is_said_in_one_line(tables, error, message):
    with pytest.raises(error, match=message) as raised:
        build(**tables)
    assert "\n" not in str(raised.value)


def test_boards_get_the_front_alone_and_never_evaluate(fleet_of_trainers):
    run = build(split=SPLIT)
    assert [spec.name for spec in run.split.front] == ["conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"]
    assert len(run.split.encode_front(run.model, 0)) < len(run.encode(run.model, 0)) / 5
    assert run.header["split"] == {
        "after": "pool2",
        "labels": "coordinator",
        "up": "dense",
        "down": "dense",
        "num_outputs": 10,
    }
    assert run.layout != build().layout
    assert run.evaluate(1, 1, fleet_of_trainers, True) == ()
    assert build().evaluate(1, 1, fleet_of_trainers, True) != ()


@pytest.fixture
def fleet_of_trainers():
    state = FleetState({})
    state.update_device("board", DeviceInfo(device_id="board", tasks=("mnist",)))
    return state


def test_a_run_without_training_is_refused(tmp_path):
    config = {"run": {"task": "mnist", "rounds": 1}, "split": SPLIT}
    with pytest.raises(ConfigError, match=r"split\.after needs training"):
        edgefl.simulate(config, devices=2, root=tmp_path, bookkeeping_only=True)


CHECK = """
import json, sys
from edgefl.core.config import parse_run
from edgefl.engine.assembly.build import build_run
run = build_run(parse_run({"run": {"task": "mnist"}, "split": {"after": sys.argv[1]}}), "r")
print(json.dumps([run.split.cut.activation_shape, run.split.cut.num_outputs, "torch" in sys.modules]))
"""


def check_in_process(after):
    process = subprocess.run(
        [sys.executable, "-c", CHECK, after],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    return process.stdout, process.stderr


def test_a_coordinator_finds_the_cut_without_loading_torch():
    output, errors = check_in_process("relu3")
    assert json.loads(output) == [[128], 10, False], errors


def test_a_wrong_name_is_the_same_error_from_a_process_of_its_own():
    _, errors = check_in_process("pool9")
    assert "edgefl.core.errors.ConfigError: split.after must be" in errors


def test_a_task_that_does_not_say_its_shape_is_refused():
    class Bare:
        name = "bare"

    with pytest.raises(ConfigError, match="task bare must say the shape of one example"):
        network_cut.get_input_shape(Bare())


def test_torch_that_is_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    network_cut._describe_cut.cache_clear()
    with pytest.raises(TaskError, match="torch"):
        network_cut._describe_cut("mnist", (), "fc1")
