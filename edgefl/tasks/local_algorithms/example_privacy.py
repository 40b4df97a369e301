"""Differential privacy of examples (DP-SGD): private gradients of Poisson samples, and a board's account of them.

A step takes each example with the same probability, by itself, sums the clipped gradients of those that it took, adds
N(0, (zC)²) and divides by the batch size of the run file, whatever the sample's size. Samples, noise, dropout and the
changes of `augment` come from generators that the operating system seeds, and never from the run's seed, which the
coordinator knows: whoever knew the masks would see what one example less changes in those of the others. What
optimiser, codec and coordinator make of such gradients costs no more.

Source: Abadi et al., Deep Learning with Differential Privacy, CCS 2016, algorithm 1.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.random import Generator

from edgefl.core.errors import DataError, StoreError, TaskError
from edgefl.core.named_arrays import unwrap_inputs, wrap_inputs
from edgefl.core.renyi_accounting import BUDGET_TOLERANCE, ORDERS, compute_divergences, compute_epsilon, find_noise
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Array, Dataset, ExamplePrivacy, Learner, Tensors, TrainConfig, derive_rng
from edgefl.system.atomic_files import write_atomic
from edgefl.tasks.augmentation import AUGMENT, AugmentedDataset
from edgefl.tasks.local_algorithms.optimizers import copy_into, to_numpy

LIMIT_DELTA = 1e-5
"""δ of the limit that a board's owner sets."""
ACCOUNT_FILE = "example_privacy.json"
"""In a board's state directory."""
FORMAT_VERSION = 1
NUM_TRIED = 2
"""Examples of zeros that a learner is tried with."""
MAX_RUNS = 500
"""Runs of which a board keeps an account of their own, the newest; that of a task has them all."""
MAX_FILE_BYTES = 8 * 1024 * 1024


@runtime_checkable
class ExampleGradients(Protocol):
    """A `Learner` that clips the gradient of each example."""

    def sum_clipped_gradients(self, batch: Dataset, clip: float) -> float:
        """Fills `gradients` with the sum of the gradients of the examples, each shortened to the norm `clip`.

        An example without a finite gradient counts as 0; a batch may hold none. Returns the sum of their losses.
        """


@dataclass(slots=True)
class ExampleAccount:
    """What a board's examples have spent: Rényi divergences at `ORDERS`, by task over all runs, and by run.

    Attributes:
        path: of the file; None keeps the account in memory, for a simulation.
        max_epsilon: the owner's limit of a task over all runs, at `LIMIT_DELTA`; None for no limit.
    """

    path: Path | None = None
    max_epsilon: float | None = None
    tasks: dict[str, Array] = field(default_factory=dict)
    runs: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, *, max_epsilon: float | None = None) -> ExampleAccount:
        """Returns the account in a file, an empty one where there is none.

        Raises:
            DataError: it cannot be read, so that nobody knows what is spent.
        """
        try:
            with path.open("rb") as file:
                tasks, runs = parse_account(file.read(MAX_FILE_BYTES))
        except FileNotFoundError:
            tasks, runs = {}, {}
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read, so it is not known how much privacy its examples have spent: {error}; "
                "a backup knows less than was spent; delete it only where the data is new"
            ) from None
        return cls(path, max_epsilon, tasks, runs)

    def copy(self) -> ExampleAccount:
        """Returns an account in memory that is as this one now."""
        return ExampleAccount(None, self.max_epsilon, dict(self.tasks), dict(self.runs))

    def compute_epsilon(self, run: str, delta: float) -> float:
        """Returns ε that a run has spent."""
        return compute_epsilon(self.runs.get(run, np.zeros(len(ORDERS))), delta)

    def check_limit(self, task: str) -> None:
        """Checks that the owner's limit is not reached.

        Raises:
            DataError: it is.
        """
        if self.max_epsilon is not None and task in self.tasks:
            self._check_limit(task, self.tasks[task])

    def _check_limit(self, task: str, divergences: Array) -> None:
        if self.max_epsilon is None:
            return
        would_be = compute_epsilon(divergences, LIMIT_DELTA)
        if would_be > self.max_epsilon * (1.0 + BUDGET_TOLERANCE):
            raise DataError(
                f"the limit of this board's owner is reached: task {task} comes to epsilon = {would_be:.4g} over "
                f"all runs, --max-epsilon is {self.max_epsilon:g}"
            )

    def check_room(self, task: str, run: str, steps: PrivateSteps, number: int) -> None:
        """Checks that a run's budget and the owner's limit have room for some steps.

        Raises:
            DataError: one of them has not.
        """
        more = steps.compute_divergences(number)
        spent, budget = self.runs.get(run, 0.0) + more, steps.privacy.epsilon
        if (would_be := compute_epsilon(spent, steps.privacy.delta)) > budget * (1.0 + BUDGET_TOLERANCE):
            raise DataError(
                f"this board's budget of the run is spent: another {number} steps would come to epsilon = "
                f"{would_be:.4g}, privacy.epsilon is {budget:g}"
            )
        self._check_limit(task, self.tasks.get(task, 0.0) + more)

    def charge(self, task: str, run: str, steps: PrivateSteps, number: int) -> None:
        """Adds some steps; they are on disk when it returns.

        Raises:
            StoreError: it cannot be written, or would be too long to be read; then nothing may leave the board.
        """
        more = steps.compute_divergences(number)
        self.tasks[task] = self.tasks.get(task, 0.0) + more
        self.runs[run] = self.runs.pop(run, 0.0) + more
        for old in [*self.runs][:-MAX_RUNS]:
            del self.runs[old]
        if self.path is not None:
            content = json.dumps(self._to_json()).encode()
            if len(content) > MAX_FILE_BYTES:
                raise StoreError(f"{self.path} would have {len(content)} bytes, at most {MAX_FILE_BYTES} can be read")
            write_atomic(self.path, content)

    def _to_json(self) -> dict[str, Any]:
        tables = {"tasks": self.tasks, "runs": self.runs}
        return {
            "v": FORMAT_VERSION,
            "orders": ORDERS,
            **{name: {key: value.tolist() for key, value in table.items()} for name, table in tables.items()},
        }


def parse_account(content: bytes) -> tuple[dict[str, Array], dict[str, Array]]:
    """Returns what an account's file says, by task and by run.

    Raises:
        ValueError: it is malformed.
    """
    values = parse_json(content)
    if not isinstance(values, Mapping) or values.get("v") != FORMAT_VERSION or values.get("orders") != [*ORDERS]:
        raise ValueError("it is of another version")
    tables = []
    for name in ("tasks", "runs"):
        table = values.get(name)
        if not isinstance(table, Mapping):
            raise ValueError(f"{name} must be a table")  # noqa: TRY004 as all that is malformed
        tables.append({key: _parse_divergences(numbers) for key, numbers in table.items()})
    return tables[0], tables[1]


def _parse_divergences(numbers: object) -> Array:
    if not isinstance(numbers, list) or not all(type(item) in {int, float} for item in numbers):
        raise ValueError("divergences must be a list of numbers")
    try:
        found = np.array(numbers, float)
    except OverflowError:
        raise ValueError("a divergence is too large for a number") from None
    if found.shape != (len(ORDERS),) or not (np.isfinite(found).all() and (found >= 0.0).all()):
        raise ValueError(f"divergences must be {len(ORDERS)} finite numbers of at least 0")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateSteps:
    """The private steps of one plan on one board.

    Attributes:
        privacy: of the plan.
        sampling: probability with which an example is in a batch.
        noise: the noise multiplier.
        batch_size: by which sums are divided, whatever the sample's size.
    """

    privacy: ExamplePrivacy
    sampling: float
    noise: float
    batch_size: int

    def compute_divergences(self, number: int) -> Array:
        """Returns the Rényi divergences of some steps."""
        return compute_divergences(self.sampling, self.noise, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAccount:
    """A board's account as one run on one task sees it."""

    account: ExampleAccount
    task: str
    run: str

    def check_room(self, steps: PrivateSteps, number: int) -> None:
        """Checks that there is room for some steps; raises as `ExampleAccount.check_room`."""
        self.account.check_room(self.task, self.run, steps, number)

    def charge(self, steps: PrivateSteps, number: int) -> float:
        """Adds some steps and returns ε of the run; raises as `ExampleAccount.charge`."""
        self.account.charge(self.task, self.run, steps, number)
        return self.account.compute_epsilon(self.run, steps.privacy.delta)


def make_private_steps(plan: TrainConfig, num_examples: int, num_steps: int) -> PrivateSteps:
    """Returns the private steps of a plan on so many examples, `num_steps` of them in a round.

    Raises:
        ConfigError: no noise fits the budget.
        DataError: δ is so large that it would allow to publish an example outright.
    """
    privacy = plan.privacy
    assert privacy is not None
    if privacy.delta * num_examples >= 1.0:
        raise DataError(
            f"privacy.delta must be below 1 / {num_examples}, the number of this board's examples, got "
            f"{privacy.delta:g}: it would allow to publish one of them as it is"
        )
    sampling = min(1.0, plan.batch_size / num_examples)
    noise = privacy.noise or find_noise(privacy.epsilon, privacy.delta, sampling, num_steps * (privacy.rounds or 1))
    return PrivateSteps(privacy=privacy, sampling=sampling, noise=noise, batch_size=plan.batch_size)


def make_system_rng() -> Generator:
    """Returns a generator whose seed nobody knows, from the operating system."""
    return np.random.Generator(np.random.PCG64(secrets.randbits(256)))


def make_augment_rng(plan: TrainConfig, *seed_key: int | str) -> Generator:
    """Returns the generator of a plan's changes by `augment`; nobody knows that of a private plan."""
    return derive_rng(*seed_key, AUGMENT) if plan.privacy is None else make_system_rng()


def check_example_gradients(learner: object) -> ExampleGradients:
    """Returns a learner that clips the gradient of each example.

    Raises:
        TaskError: it does not, or its network or loss mixes examples.
    """
    # By its class: a learner of adapters passes on what it lacks itself, and the network's gradients are not theirs.
    if not hasattr(type(learner), "sum_clipped_gradients") or not isinstance(learner, ExampleGradients):
        raise TaskError(
            f'{type(learner).__name__} has no gradients by example, which privacy.unit = "example" needs; set '
            'run.backend = "torch", with torch on this board, or take a model in NumPy, without [adapt]'
        )
    check_apart = getattr(learner, "check_examples_apart", None)
    if check_apart is not None:
        check_apart()
    return learner


def try_example_gradients(learner: object, data: Dataset) -> None:
    """Clips the gradients of two examples of zeros, formed as those of some data; of that nothing else is used.

    Raises:
        TaskError: the learner cannot, as that of `torch.nn.GRU`, which torch does not differentiate by example.
    """
    by_example = check_example_gradients(learner)
    first = Dataset.take(data, slice(0, NUM_TRIED))
    inputs = unwrap_inputs(first.inputs)
    zeros = (
        {name: np.zeros_like(array) for name, array in inputs.items()}
        if isinstance(inputs, Mapping)
        else np.zeros_like(inputs)
    )
    if len(first):
        tried = Dataset(inputs=wrap_inputs(zeros), targets=np.zeros_like(first.targets))
        with np.errstate(all="ignore"):  # only whether it can be done counts
            by_example.sum_clipped_gradients(tried, 1.0)


class PrivateLearner:
    """A learner whose gradients are private, over one that clips those of each example."""

    def __init__(self, learner: Learner, steps: PrivateSteps, rng: Generator) -> None:
        """Takes its noise from `rng`.

        Raises:
            TaskError: the learner has no gradients by example.
        """
        self._learner, self._by_example = learner, check_example_gradients(learner)
        self._steps, self._rng = steps, rng

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self._learner.parameters

    @property
    def gradients(self) -> Mapping[str, Any]:
        return self._learner.gradients

    def load(self, tensors: Tensors) -> None:
        self._learner.load(tensors)

    def read(self) -> dict[str, Array]:
        return self._learner.read()

    def evaluate(self, data: Dataset) -> tuple[float, float]:
        return self._learner.evaluate(data)

    def gradient(self, batch: Dataset) -> float:
        """Fills `gradients` with the private gradient of a sample; returns its mean loss, which is not private."""
        steps = self._steps
        total = self._by_example.sum_clipped_gradients(batch, steps.privacy.clip)
        for gradient in self.gradients.values():
            noisy = self._rng.normal(0.0, steps.noise * steps.privacy.clip, tuple(gradient.shape))
            noisy += to_numpy(gradient)
            noisy /= steps.batch_size
            copy_into(gradient, noisy)
        return total / max(1, len(batch))


def iterate_samples(data: Dataset, rows: Array, sampling: float, rng: Generator) -> Iterator[Dataset]:
    """Yields Poisson samples of some rows endlessly: each row is in each of them with the same probability."""
    while True:
        # As many as would be in it, and each set of so many alike: the same as to ask each row, but for time.
        count = rng.binomial(len(rows), sampling)
        sample = rows[np.sort(rng.choice(len(rows), count, replace=False, shuffle=False))]
        if isinstance(data, AugmentedDataset) and len(sample):
            # One at a time: a hook of the user's own might mix them.
            yield Dataset.concatenate([data.take(sample[place : place + 1]) for place in range(len(sample))])
        else:
            yield Dataset.take(data, sample)
