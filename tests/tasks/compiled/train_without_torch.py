"""Trains tasks for two rounds of two boards, in a process without torch: `train_without_torch.py REQUESTS`.

The file has a JSON list of requests, each with `key`, `name`, `options` and, where there is a network, `weights`: the
path of its first ones. `compiled` is the path of its file, `adapt` the table of its run file. For each request a line
of JSON has the key, and how far the tensors that travel moved; None where there was nothing to train.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np

from edgefl.core.config import parse_run
from edgefl.core.errors import TaskError
from edgefl.core.heads import join_targets
from edgefl.core.types import Dataset, TrainConfig, derive_rng
from edgefl.tasks.adaptation.adapted_task import AdaptedTask
from edgefl.tasks.compiled.board.graph_task import load_graph_task
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.losses.class_losses import CrossEntropy
from edgefl.tasks.losses.multi_task import MultiTask
from edgefl.tasks.losses.registry import find_loss
from edgefl.tasks.metrics.evaluation import evaluate, make_task_metrics
from edgefl.tasks.registry import make_task

NUM_EXAMPLES, NUM_ROUNDS = 12, 2
PLAN = TrainConfig(batch_size=5, epochs=1.0, learning_rate=0.01)


def main() -> None:
    assert importlib.util.find_spec("torch") is None
    for request in json.loads(Path(sys.argv[1]).read_text()):
        task = make_task(request["name"], request["options"])
        moved = run_rounds(task, request) if "weights" in request else None
        sys.stdout.write(json.dumps({"key": request["key"], "moved": moved}) + "\n")
    assert "torch" not in sys.modules


def run_rounds(task, request):
    """Returns the largest change of a tensor over two rounds of federated averaging."""
    if request.get("compiled"):
        path = Path(request["compiled"])
        task = load_graph_task(task, path, name=request["name"], options=request["options"])
    with np.load(request["weights"]) as weights:
        whole = dict(weights)
    data = [make_examples(task, rng) for rng in map(np.random.default_rng, (1, 2))]
    first = whole
    if section := request.get("adapt"):
        task = AdaptedTask(task, parse_run({"run": {"task": request["name"]}, "adapt": section}).adapt, whole)
        first = task.start_from(whole, 1)
    learner, model = task.learner(threads=1), first
    for number in range(NUM_ROUNDS):
        found = []
        for board, examples in enumerate(data):
            learner.load(model)
            rng = derive_rng(number, board)
            train(learner, examples, PLAN, rng, clock=lambda: 0.0, on_iteration=lambda *_: False)
            found.append({name: tensor for name, tensor in learner.read().items() if name in model})
        model = {name: np.mean([one[name] for one in found], axis=0).astype(model[name].dtype) for name in model}
    learner.load(model)
    losses = [evaluate(learner, examples, make_task_metrics(task)).loss for examples in data]
    assert np.isfinite(losses).all(), losses
    return max(float(np.abs(model[name] - first[name]).max()) for name in model)


def make_targets(loss, shape, rng):
    """Returns random targets that a loss takes for outputs of a shape."""
    if isinstance(loss, CrossEntropy):
        return rng.integers(shape[-1], size=NUM_EXAMPLES)
    targets = rng.integers(0, 2, shape).astype(np.float32)
    try:
        loss.convert_targets(targets, shape)
    except TaskError:  # of quantiles, each target has several outputs
        return targets[..., 0]
    return targets


def make_examples(task, rng):
    """Returns random inputs, and targets as the task's loss takes them."""
    shape = getattr(task, "input_shape", (4,))  # greenhouse, in NumPy, says nothing of it
    inputs = rng.integers(0, 3, (NUM_EXAMPLES, *shape)).astype(np.uint8)
    labels, loss = getattr(task, "labels", ()), find_loss(task) or CrossEntropy()
    if isinstance(loss, MultiTask):
        targets = {head.name: make_targets(head.loss, (NUM_EXAMPLES, head.num_outputs), rng) for head in loss.heads}
        return Dataset(inputs=inputs, targets=join_targets(targets))
    if labels and isinstance(loss, CrossEntropy):
        return Dataset(inputs=inputs, targets=rng.integers(len(labels), size=NUM_EXAMPLES))
    learner = task.learner(threads=1)
    outputs = learner.logits(inputs).shape
    if isinstance(loss, CrossEntropy):
        return Dataset(inputs=inputs, targets=rng.integers(0, 2, outputs).astype(np.float32))
    return Dataset(inputs=inputs, targets=make_targets(loss, outputs, rng))


if __name__ == "__main__":
    main()
