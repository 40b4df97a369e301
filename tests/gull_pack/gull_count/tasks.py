"""The task: a logistic regression of wing length and bill depth, learned by hand."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from edgefl.core.types import Dataset, Task, TensorSpec


class Gulls(Task):
    """Shards are npz files with `measures` [n, 2] in millimetres and `is_gull` [n]."""

    name = "gulls"
    defaults: ClassVar = {"learning_rate": 0.5, "batch_size": 20, "iterations": 10}

    def shapes(self):
        return (TensorSpec(name="weight", shape=(2,)), TensorSpec(name="bias", shape=(1,)))

    def init(self, seed):  # the same for every seed: the loss is convex
        return {"weight": np.zeros(2, np.float32), "bias": np.zeros(1, np.float32)}

    def read(self, path):
        with np.load(path) as shard:
            return Dataset(inputs=shard["measures"].astype(np.float32), targets=shard["is_gull"].astype(np.int64))

    def learner(self, *, accelerator="cpu", threads=None):
        return GullLearner(self.init(0))


class GullLearner:
    def __init__(self, parameters):
        self.parameters = parameters
        self.gradients = {name: np.zeros_like(value) for name, value in parameters.items()}

    def load(self, tensors):
        for name, value in tensors.items():
            self.parameters[name][...] = value

    def read(self):
        return {name: value.copy() for name, value in self.parameters.items()}

    def gradient(self, batch):
        features, chance = self._answer(batch)
        error = (chance - batch.targets) / len(batch)
        self.gradients["weight"][...] = features.T @ error
        self.gradients["bias"][...] = error.sum()
        return self._loss(chance, batch.targets)

    def evaluate(self, data):
        _, chance = self._answer(data)
        return self._loss(chance, data.targets), float(((chance > 0.5) == data.targets).mean())

    def _answer(self, data):
        features = (data.inputs - np.float32([350.0, 15.0])) / np.float32([80.0, 5.0])
        return features, 1.0 / (1.0 + np.exp(-(features @ self.parameters["weight"] + self.parameters["bias"])))

    @staticmethod
    def _loss(chance, labels):
        return float(-np.log(np.where(labels == 1, chance, 1.0 - chance) + 1e-9).mean())
