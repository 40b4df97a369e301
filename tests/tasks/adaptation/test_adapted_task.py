"""A task of which a part is trained: gradients by hand and by differences, whole models, frozen statistics."""

from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
from digit_shards import digit_shard

from edgefl.core.config import AdaptSection
from edgefl.core.errors import ConfigError, DataError, TaskError
from edgefl.core.metrics import NO_METRICS
from edgefl.core.types import Dataset, Task, TrainConfig, derive_rng
from edgefl.device.training.task_cache import CachedTask, TaskCache
from edgefl.tasks.adaptation import adapted_learner
from edgefl.tasks.adaptation.adapted_learner import FeatureDataset
from edgefl.tasks.adaptation.adapted_task import AdaptedTask
from edgefl.tasks.adaptation.base_file import AdaptPlan, encode_base, load_base
from edgefl.tasks.learners.numpy_learner import NumpyLearner
from edgefl.tasks.learners.torch_learner import TorchModel
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.preparation import to_features
from edgefl.tasks.registry import list_backends, make_task

needs_torch = pytest.mark.skipif("torch" not in list_backends(), reason="needs torch: pip install '.[train]'")
RNG = np.random.default_rng(3)
DATA = Dataset(inputs=RNG.uniform(0, 16, (12, 8, 8)).astype(np.float32), targets=RNG.integers(0, 10, 12))
IMAGES = Dataset(inputs=RNG.integers(0, 256, (6, 28, 28)).astype(np.uint8), targets=RNG.integers(0, 10, 6))


def adapt(section, task="digits", **options):
    inner = make_task(task, options)
    return AdaptedTask(inner, AdaptSection(**section), inner.init(7)), inner


def with_trained_factors(task):
    rng = np.random.default_rng(5)
    model = task.init(7)
    return {
        name: (0.1 * rng.standard_normal(value.shape)).astype(np.float32) if name.endswith("lora_b") else value
        for name, value in model.items()
    }


def test_an_adapter_at_first_changes_nothing():
    task, inner = adapt({"method": "lora", "rank": 4})
    whole, merged = inner.init(7), task.merge(task.init(7))
    assert list(merged) == [spec.name for spec in inner.shapes()]
    assert all(np.array_equal(merged[name], whole[name]) for name in whole)
    assert any(value.any() for name, value in task.init(7).items() if name.endswith("lora_a"))
    assert task.init(7).keys() == {spec.name for spec in task.shapes()}


@pytest.mark.parametrize(
    "section", [{"method": "lora", "rank": 3, "alpha": 6.0}, {"method": "head"}, {"method": "bitfit"}]
)
def test_the_gradient_is_that_of_the_loss(section):
    task, _ = adapt(section, activation="tanh")
    learner, model = task.learner(), with_trained_factors(task)
    learner.load(model)
    learner.gradient(DATA)
    assert learner.gradients.keys() == learner.parameters.keys() == model.keys()
    gradients = {name: value.copy() for name, value in learner.gradients.items()}
    for name, gradient in gradients.items():
        direction = np.sign(gradient)
        losses = []
        for sign in (1, -1):
            learner.load({**model, name: (model[name] + sign * 1e-3 * direction).astype(np.float32)})
            losses.append(learner.evaluate(DATA)[0])
        assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(np.abs(gradient).sum(), rel=0.02), name


def test_the_merged_model_computes_what_the_adapted_one_does_and_so_does_a_layer_beside_the_frozen_one():
    task, inner = adapt({"method": "lora", "rank": 4, "alpha": 8.0, "targets": ["fc1.*"]})
    model, plain, adapted = with_trained_factors(task), inner.learner(), task.learner()
    adapted.load(model)
    plain.load(task.merge(model))
    assert np.allclose(adapted.logits(DATA.inputs), plain.logits(DATA.inputs), atol=1e-5)
    base, x = inner.init(7), DATA.inputs.reshape(12, -1) / 16
    beside = (x @ model["fc1.weight.lora_a"].T) @ model["fc1.weight.lora_b"].T
    hidden = np.maximum(x @ base["fc1.weight"].T + base["fc1.bias"] + 8.0 / 4 * beside, 0)
    assert np.allclose(hidden @ base["fc2.weight"].T + base["fc2.bias"], plain.logits(DATA.inputs), atol=1e-5)


@pytest.mark.parametrize("algorithm", ["sgd", "adam", "prox"])
def test_training_moves_what_is_trained_and_nothing_else(algorithm):
    task, inner = adapt({"method": "lora", "rank": 2})
    learner = task.learner()
    learner.load(task.init(7))
    before = learner.evaluate(DATA)[0]
    plan = TrainConfig(algorithm=algorithm, iterations=30, batch_size=6, learning_rate=0.02, momentum=0.0)
    result = train(learner, DATA, plan, derive_rng(1), clock=lambda: 0.0, on_iteration=lambda *_: False)
    assert list(result.displacement) == [spec.name for spec in task.shapes()]
    assert learner.evaluate(DATA)[0] < before
    merged, whole = task.merge(learner.read()), inner.init(7)
    assert all(np.array_equal(merged[name], whole[name]) for name in ("fc1.bias", "fc2.bias"))
    assert not np.allclose(merged["fc1.weight"], whole["fc1.weight"])


def test_a_frozen_start_costs_no_gradients():
    task, inner = adapt({"frozen": ("fc1.*",)})
    learner = task.learner()
    assert learner._inner.gradients.keys() == {"fc2.weight", "fc2.bias"}
    learner.load(task.init(7))
    learner.gradient(DATA)
    whole = inner.learner()
    whole.load(inner.init(7))
    whole.gradient(DATA)
    assert np.array_equal(learner.gradients["fc2.weight"], whole.gradients["fc2.weight"])


def test_what_stays_on_the_device_begins_as_in_the_base_and_is_absent_from_the_whole():
    inner = make_task("digits", {})
    base = {**inner.init(7), "fc2.bias": np.full(10, 0.5, np.float32)}
    task = AdaptedTask(inner, AdaptSection(local=("fc2.bias",)), base)
    assert (task.init(9)["fc2.bias"] == 0.5).all()
    shared = {name: value for name, value in task.init(9).items() if name != "fc2.bias"}
    assert task.merge(shared).keys() == shared.keys()
    assert task.merge({**shared, "fc2.bias": base["fc2.bias"]}).keys() == inner.init(7).keys()


def test_a_task_says_the_same_of_itself_as_before():
    task, inner = adapt({"method": "head"})
    assert (task.name, task.labels, task.defaults) == (inner.name, inner.labels, inner.defaults)
    with pytest.raises(AttributeError):
        _ = task.nothing_of_the_kind


def test_without_a_base_it_has_names_and_no_learner_and_a_base_must_fit():
    inner = make_task("digits", {})
    section = AdaptSection(frozen=("fc1.*",))
    task = AdaptedTask(inner, section)
    assert [spec.name for spec in task.shapes()] == ["fc2.weight", "fc2.bias"]
    with pytest.raises(TaskError, match="their values are not here"):
        task.learner()
    with pytest.raises(ConfigError, match=r"tensor 'fc1.bias' of shape \(64,\), got \(3,\)"):
        AdaptedTask(inner, section, {**inner.init(7), "fc1.bias": np.zeros(3, np.float32)})


@needs_torch
@pytest.mark.parametrize("section", [{"method": "lora", "rank": 4}, {"method": "head"}, {"method": "bitfit"}])
def test_a_network_of_torch_is_adapted_likewise(section):
    task, inner = adapt(section, "mnist", model="cnn-small")
    learner, plain, model = task.learner(threads=1), inner.learner(threads=1), with_trained_factors(task)
    learner.load(model)
    plain.load(task.merge(model))
    assert np.allclose(learner.logits(IMAGES.inputs), plain.logits(IMAGES.inputs), atol=1e-5)
    learner.gradient(IMAGES)
    plain.gradient(IMAGES)
    for spec in task.parts.trained:
        assert np.allclose(learner.gradients[spec.name], plain.gradients[spec.name], atol=1e-5), spec.name
    for adapter in task.parts.adapters:
        whole = plain.gradients[adapter.target.name].numpy().reshape(adapter.b.shape[0], -1)
        expected = adapter.scale * whole @ model[adapter.a.name].T
        assert np.allclose(learner.gradients[adapter.b.name], expected, atol=1e-5)
    before = learner.evaluate(IMAGES)[0]
    plan = TrainConfig(iterations=20, batch_size=6, learning_rate=0.05)
    result = train(learner, IMAGES, plan, derive_rng(1), clock=lambda: 0.0, on_iteration=lambda *_: False)
    assert list(result.displacement) == [spec.name for spec in task.shapes()]
    assert learner.evaluate(IMAGES)[0] < before


@needs_torch
@pytest.mark.parametrize("section", [{"method": "head"}, {"method": "bitfit"}, {"method": "lora", "rank": 2}])
def test_running_statistics_of_what_is_frozen_stay_and_are_those_that_it_trains_with(section):
    task, _ = adapt(section, "mnist", model="resnet32", norm="batch")
    learner = task.learner(threads=1)
    learner.load(task.init(7))
    inner = learner._inner
    before = inner.read()
    loss = learner.gradient(IMAGES)
    after = inner.read()
    statistics = [name for name in before if "running" in name or "num_batches" in name]
    assert statistics
    assert all(np.array_equal(before[name], after[name]) for name in statistics)
    assert loss == pytest.approx(learner.evaluate(IMAGES)[0], rel=1e-4), "as in an evaluation"


@needs_torch
def test_statistics_that_are_shared_move_and_travel():
    statistics = ("*running_mean", "*running_var", "*num_batches_tracked")
    task, _ = adapt({"method": "head", "shared": statistics}, "mnist", model="resnet32", norm="batch")
    learner = task.learner(threads=1)
    learner.load(task.init(7))
    before = learner.read()
    learner.gradient(IMAGES)
    moved = [name for name, value in learner.read().items() if not np.array_equal(value, before[name])]
    assert {name.rpartition(".")[2] for name in moved} == {pattern[1:] for pattern in statistics}


def test_a_base_is_named_by_its_bytes_which_are_the_same_for_equal_tensors(tmp_path):
    tensors = make_task("digits", {}).init(7)
    content = encode_base(tensors)
    assert encode_base(dict(reversed(tensors.items()))) == content
    path = tmp_path / "base.safetensors"
    path.write_bytes(content)
    assert load_base(path, ["fc1.bias", "more"]).keys() == {"fc1.bias"}
    assert all(np.array_equal(value, tensors[name]) for name, value in load_base(path).items())
    path.write_bytes(content[:100])
    with pytest.raises(DataError, match="is no safetensors file"):
        load_base(path)
    with pytest.raises(DataError, match="is no safetensors file"):
        load_base(tmp_path / "absent")


def test_a_plan_survives_its_header_and_another_is_refused():
    plan = AdaptPlan(AdaptSection(method="lora", rank=2, targets=("fc1.*",)), "ab" * 32, 100)
    assert AdaptPlan.parse(plan.to_json()) == plan
    assert AdaptPlan.parse(None) is None
    for changes, told in (
        ({"base": "../../x"}, "SHA-256"), ({"base_bytes": 0}, "must have 1 to"), ({"base_bytes": True}, "must"),
        ({"base_bytes": 1 << 60}, "must have 1 to"), ({"more": 1}, "unknown setting adapt.more"),
        ({"frozen": 7}, "adapt.frozen must be"),
    ):  # fmt: skip
        with pytest.raises((DataError, ConfigError), match=told):
            AdaptPlan.parse({**plan.to_json(), **changes})
    with pytest.raises(DataError, match="must be a table"):
        AdaptPlan.parse(7)


def test_a_learner_of_one_s_own_that_cannot_freeze_trains_all_the_same(monkeypatch):
    inner = make_task("digits", {})
    monkeypatch.setattr(NumpyLearner, "freeze", None)
    task = AdaptedTask(inner, AdaptSection(frozen=("fc1.*",)), inner.init(7))
    learner = task.learner()
    learner.load(task.init(7))
    learner.gradient(DATA)
    assert learner.gradients.keys() == {"fc2.weight", "fc2.bias"}


def check_features(task, data, **options):
    """Returns the features of a data set, which must give the gradients of the way through the base."""
    learner = task.learner(**options)
    learner.load(with_trained_factors(task))
    features = learner.make_features(data)
    assert isinstance(features, FeatureDataset)
    for rows in (slice(0, 4), np.array([5, 1, 1])):
        losses, gradients = [], []
        for source in (data, features, data):  # and the base still works after them
            losses.append(learner.gradient(source.take(rows)))
            gradients.append({name: np.array(value.tolist()) for name, value in learner.gradients.items()})
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        assert losses[2] == losses[0]
        for name, value in gradients[0].items():
            assert np.allclose(gradients[1][name], value, atol=1e-6), name
            assert np.array_equal(gradients[2][name], value), name
    return features


@pytest.mark.parametrize(("section", "size"), [({"method": "head"}, 64), ({"frozen": ("fc1.*",)}, 64)])
def test_features_of_a_frozen_start_train_the_rest_just_so(section, size):
    task, _ = adapt(section)
    assert check_features(task, DATA).inputs.shape == (12, size)


@pytest.mark.parametrize(
    "section", [{"method": "lora", "rank": 2}, {"method": "bitfit"}, {"frozen": ("fc2.*",)}, {"local": ("fc2.*",)}]
)
def test_there_are_no_features_where_something_before_them_is_trained(section):
    learner = adapt(section)[0].learner()
    assert learner.make_features(DATA) is DATA


def test_a_board_keeps_no_features_of_examples_that_are_augmented(tmp_path, monkeypatch):
    task, _ = adapt({"method": "head"})
    learner, path = task.learner(), digit_shard(tmp_path / "digits.npz", 40)
    cache = TaskCache(lambda: {"digits": str(path)}, accelerator="cpu", threads=1)
    make = partial(
        CachedTask, name="digits", task=task, model_spec=task.shapes(), learner=learner, metrics=NO_METRICS
    )
    assert isinstance(cache.load_training(make(), 0.2), FeatureDataset)
    monkeypatch.setattr(type(task), "augment", lambda self, inputs, targets, rng: (inputs, targets), raising=False)
    assert cache.load_training(make(), 0.2).inputs.shape[1:] == (8, 8)


def test_features_that_are_too_large_are_not_kept(monkeypatch):
    learner = adapt({"method": "head"})[0].learner()
    monkeypatch.setattr(adapted_learner, "MAX_FEATURE_BYTES", 12 * 64 * 4 - 1)
    assert learner.make_features(DATA) is DATA
    assert learner.make_features(DATA.take(slice(0, 0))).inputs.shape == (0, 8, 8)
    monkeypatch.setattr(adapted_learner, "MAX_FEATURE_BYTES", 12 * 64 * 4)
    assert learner.make_features(DATA).inputs.nbytes == 12 * 64 * 4


@needs_torch
@pytest.mark.parametrize(
    ("model", "section", "shape"),
    [
        ("cnn-small", {"method": "head"}, (64,)),
        ("cnn-small", {"frozen": ("conv*",)}, (32 * 7 * 7,)),
        ("resnet32", {"method": "head"}, (64,)),
    ],
)
def test_features_of_a_network_of_torch_train_the_rest_just_so(model, section, shape):
    norm = {"norm": "batch"} if model == "resnet32" else {}
    task, _ = adapt(section, "mnist", model=model, **norm)
    features = check_features(task, IMAGES, threads=1)
    assert features.inputs.shape[0] == len(IMAGES)
    assert features.inputs.size // len(IMAGES) == np.prod(shape)


def adapt_network(build, prepare=to_features, **section):
    """Returns the learner of a network of one's own, adapted, with its first weights."""

    class Own(Task):
        name = "own"
        model = TorchModel(build=build, prepare=prepare)

        def read(self, path):
            raise NotImplementedError

    task = AdaptedTask(Own(), AdaptSection(**section), Own().init(7))
    learner = task.learner(threads=1)
    learner.load(task.init(7))
    return learner


@needs_torch
def test_a_part_is_trained_of_a_module_whose_prepare_makes_inputs_by_name_of_one_array():
    import torch  # noqa: PLC0415 only where it is installed

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.head = torch.nn.Linear(64, 8), torch.nn.Linear(8, 10)

        def forward(self, pixels):
            return self.head(torch.relu(self.base(pixels)))

    def flatten(images):
        return {"pixels": images.reshape(len(images), -1)}

    learner = adapt_network(Network, prepare=flatten, method="head")
    learner.check_inputs(DATA.inputs)
    assert learner.make_features(DATA) is DATA, "a front has one input"
    assert learner.parameters.keys() == {"head.weight", "head.bias"}
    before = learner.evaluate(DATA)[0]
    for _ in range(20):
        learner.gradient(DATA)
        for name in learner.parameters:
            learner.parameters[name].sub_(0.01 * learner.gradients[name])
    assert learner.evaluate(DATA)[0] < before


@needs_torch
def test_a_layer_with_an_adapter_trains_and_one_without_does_not():
    import torch  # noqa: PLC0415 only where it is installed

    def block():
        return torch.nn.MultiheadAttention(8, 2, dropout=0.5)

    learner = adapt_network(
        lambda: torch.nn.ModuleDict({"one": block(), "two": block()}),
        method="lora", rank=2, targets=["one.out_proj.weight"],
    )  # fmt: skip
    learner._inner.start_training(4)
    assert learner._inner.module["one"].training, "else its dropout would be gone"
    assert not learner._inner.module["two"].training


@needs_torch
def test_features_are_cut_before_what_is_random():
    import torch  # noqa: PLC0415 only where it is installed

    def build():
        layers = {"first": torch.nn.Linear(64, 8), "drop": torch.nn.Dropout(0.5), "head": torch.nn.Linear(8, 10)}
        return torch.nn.Sequential(OrderedDict(flat=torch.nn.Flatten(), **layers))

    learner = adapt_network(build, method="head")
    features = learner.make_features(DATA)
    assert features.inputs.shape == (12, 8)
    assert len({learner.gradient(features) for _ in range(4)}) > 1, "the dropout is not in the features"


@needs_torch
@pytest.mark.parametrize("trained", ["token", "late.*"])
def test_a_trained_tensor_that_is_used_early_is_trained_and_not_in_the_features(trained):
    import torch  # noqa: PLC0415 only where it is installed

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.token = torch.nn.Parameter(torch.zeros(64))
            self.first, self.head = torch.nn.Linear(64, 8), torch.nn.Linear(8, 10)
            self.late = torch.nn.Linear(64, 64)

        def forward(self, x):
            return self.head(self.first(self.late(x.flatten(1) / 16 + self.token)))

    frozen = tuple(pattern for pattern in ("first.*", "late.*", "token") if pattern != trained)
    learner = adapt_network(Network, frozen=frozen)
    learner.gradient(learner.make_features(DATA))
    assert len(learner.gradients) > 2
    assert all(value.abs().max() > 0 for value in learner.gradients.values()), "none is forgotten"
