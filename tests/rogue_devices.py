"""A simulated fleet in which some devices are rogue: they train as they should, and send something else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from edgefl.core.config import parse_run
from edgefl.core.protocol import EVALUATOR_NAME
from edgefl.core.types import Array, DeviceInfo, InstructionFailed, Role, derive_rng
from edgefl.engine.assembly.build import build_run
from edgefl.engine.round_loop import RunLog, RunSubscriber, run_rounds
from edgefl.simulation.backends.in_process import InProcessBackend
from edgefl.simulation.backends.partitioned_data import FleetData, partition_in_memory, reserve_root
from edgefl.simulation.backends.trainer import SimulatedTrainer, TaskSpec
from edgefl.simulation.fleet import SimulatedFleet
from edgefl.simulation.network import SimulatedDownlink
from edgefl.simulation.simulated_run import make_device_names, make_devices, make_root_device, make_settings
from edgefl.strategies.participation import EvaluationSchedule
from edgefl.tasks.registry import make_task

Attack = Callable[[dict[str, Array], int], Mapping[str, Array]]
"""(honest displacement, version) -> what the rogue sends."""


def scaled(factor: float) -> Attack:
    return lambda tensors, _version: {name: tensor * np.float32(factor) for name, tensor in tensors.items()}


def noise(tensors: dict[str, Array], version: int) -> Mapping[str, Array]:
    """Gaussian noise, ten times as long as the honest update."""
    norm = np.sqrt(sum(float(np.vdot(tensor, tensor)) for tensor in tensors.values()))
    size = sum(tensor.size for tensor in tensors.values())
    rng = derive_rng("noise", version)
    scale = 10 * norm / np.sqrt(size)
    return {
        name: (scale * rng.standard_normal(tensor.shape)).astype(tensor.dtype) for name, tensor in tensors.items()
    }


def one_coordinate(tensors: dict[str, Array], _version: int) -> Mapping[str, Array]:
    """The honest update, but for one entry of each tensor."""
    changed = {name: np.array(tensor) for name, tensor in tensors.items()}
    for tensor in changed.values():
        tensor.reshape(-1)[0] = 100.0
    return changed


def slow_creep(tensors: dict[str, Array], version: int) -> Mapping[str, Array]:
    """The honest update and a push in a fixed direction, longer by 5 % of the honest norm each round."""
    norm = np.sqrt(sum(float(np.vdot(tensor, tensor)) for tensor in tensors.values()))
    rng = derive_rng("creep")
    push = {name: rng.standard_normal(tensor.shape).astype(tensor.dtype) for name, tensor in tensors.items()}
    length = np.sqrt(sum(float(np.vdot(tensor, tensor)) for tensor in push.values()))
    factor = np.float32(0.05 * (version + 1) * norm / length)
    return {name: tensor + factor * push[name] for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Collusion:
    """An attack of rogues that know what all honest devices send: their [n, ...] tensors -> what each rogue sends."""

    attack: Callable[[Array], Array]


def a_little_is_enough(num_devices: int, num_rogues: int) -> Collusion:
    """The honest mean, less so many deviations that half of all updates lie on its other side.

    Baruch et al., A Little Is Enough: Circumventing Defenses for Distributed Learning, NeurIPS 2019, algorithm 3.
    """
    num_supporters = num_devices // 2 + 1 - num_rogues
    deviations = NormalDist().inv_cdf((num_devices - num_rogues - num_supporters) / (num_devices - num_rogues))
    return Collusion(lambda honest: honest.mean(axis=0) - np.float32(deviations) * honest.std(axis=0))


def against_the_mean(factor: float) -> Collusion:
    """The honest mean times -factor: Xie et al., Fall of Empires: Inner Product Manipulation, UAI 2020."""
    return Collusion(lambda honest: -np.float32(factor) * honest.mean(axis=0))


class RogueBackend(InProcessBackend):
    """Trains in this process; the updates of some devices are replaced."""

    def __init__(
        self, trainer, model_spec, names: Sequence[str], rogues: Sequence[str], attack: Attack | Collusion | None
    ) -> None:
        super().__init__(trainer, model_spec)
        self._honest = [name for name in names if name not in rogues]
        self._rogues, self._attack = rogues, attack
        self._colluded: tuple[int, Mapping[str, Array]] = -1, {}

    def get_result(self, job):
        result = super().get_result(job)
        if self._attack is None or job.instruction.device_id not in self._rogues or not result.tensors:
            return result
        version = job.instruction.base_version
        with np.errstate(over="ignore", invalid="ignore"):
            if isinstance(self._attack, Collusion):
                if self._colluded[0] != version:
                    self._colluded = version, self._collude(job, self._attack)
                return replace(result, tensors=self._colluded[1])
            return replace(result, tensors=self._attack(to_dense(result.tensors), version))

    def _collude(self, job, collusion: Collusion) -> Mapping[str, Array]:
        updates = []
        for name in self._honest:
            copy = replace(job, instruction=replace(job.instruction, device_id=name))
            updates.append(to_dense(super().get_result(copy).tensors))
        return {
            name: collusion.attack(np.stack([update[name] for update in updates])).astype(tensor.dtype)
            for name, tensor in updates[0].items()
        }


def to_dense(tensors) -> dict[str, Array]:
    return {
        name: tensor.dense() if hasattr(tensor, "dense") else np.array(tensor) for name, tensor in tensors.items()
    }


@dataclass
class Outcome(RunSubscriber):
    """What came of a run: accuracies by version, refused and clipped updates, quarantined devices."""

    accuracies: list[float] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    clipped: list[tuple[str, str]] = field(default_factory=list)
    quarantined: set[str] = field(default_factory=set)
    policy: object = None
    state: object = None

    def on_events(self, events) -> None:
        self.refused += [
            (event.device_id, event.reason)
            for event in events
            if isinstance(event, InstructionFailed) and event.is_strike
        ]

    def on_clipped(self, clipped) -> None:
        self.clipped.append((clipped.device_id, clipped.reason))

    @property
    def accuracy(self) -> float:
        """Mean over the last tenth of the evaluations, which differ by chance."""
        return float(np.mean(self.accuracies[-max(3, len(self.accuracies) // 10) :]))


def load_fleet(
    task: str, scheme: str, num_devices: int, *, data: Path | None = None, seed: int = 1, examples: int | None = None
) -> FleetData:
    """Returns shards of a data set, of `examples` in all."""
    fleet = partition_in_memory(task, scheme, num_devices, data=data, seed=seed, test_fraction=0.0)
    if examples is None:
        return fleet
    share = examples / sum(len(shard.train) for shard in fleet.shards)
    rng, test = derive_rng("part", seed), fleet.test
    kept = [
        np.sort(rng.permutation(shard.train)[: max(8, round(share * len(shard.train)))]) for shard in fleet.shards
    ]
    shards = tuple(replace(shard, rows=rows, train=rows) for shard, rows in zip(fleet.shards, kept, strict=True))
    return replace(fleet, shards=shards, test=test.take(np.arange(min(len(test), 2000))))


def flip_labels(fleet: FleetData, rogues: Sequence[int], num_labels: int = 10) -> FleetData:
    """Returns the same fleet, but the rogues' examples of label k say k + 1."""
    labels = np.array(fleet.pool.targets)
    for index in rogues:
        rows = fleet.shards[index].train
        labels[rows] = (labels[rows] + 1) % num_labels
    return replace(fleet, pool=replace(fleet.pool, targets=labels))


def play(
    tables: Mapping[str, Mapping[str, object]],
    data: FleetData,
    *,
    attack: Attack | Collusion | None = None,
    num_rogues: int = 1,
    without_rogues: bool = False,
) -> Outcome:
    """Returns the outcome of a run whose last devices are rogue, or absent."""
    names = make_device_names(len(data.shards))
    rogues = names[len(names) - num_rogues :] if num_rogues else []
    present = [name for name in names if not (without_rogues and name in rogues)]
    config = parse_run(
        {**tables, "simulation": {"devices": len(names)}, "devices": {"names": present, "min": len(present)}}
    )
    made = build_run(config, "attacked")
    shapes = made.shapes
    devices, places = make_devices(config, names, (), data.shards, shapes), [*names]
    if num_root := made.strategy.root_examples:
        data = reserve_root(data, num_root)
        devices.append(make_root_device(config, num_root, shapes))
        places.append(EVALUATOR_NAME)
    trainer = SimulatedTrainer(
        TaskSpec(task=config.run.task, options=config.task, seed=config.run.seed),
        data,
        {name: index for index, name in enumerate(places)},
    )
    fleet = SimulatedFleet(
        devices,
        backend=RogueBackend(trainer, shapes, names, rogues, attack),
        downlink=SimulatedDownlink(made.encode, made.encode_changes),
        settings=make_settings(config),
        evaluators=[
            DeviceInfo(device_id=EVALUATOR_NAME, role=Role.EVALUATOR, tasks=(config.run.task,), source="coordinator")
        ],
    )
    outcome = Outcome(policy=made.policy)
    log = RunLog(None, [outcome])
    outcome.state, _ = run_rounds(
        made.strategy,
        made.strategy.init(made.model),
        fleet=fleet,
        journal=log,
        goal=made.goal,
        evaluate=made.evaluate,
        rounds=made.rounds,
        policy=made.policy,
        on_score=lambda score: outcome.accuracies.append(score.accuracy),
        on_clipped=log.record_clipped,
    )
    outcome.quarantined = set(made.policy.blocked_devices)
    return outcome


class RogueNodeTrainer(SimulatedTrainer):
    """Trains nodes of a graph as they should; some send their neighbours something else."""

    def __init__(self, *arguments, rogues: Sequence[str] = (), attack: Attack | None = None) -> None:
        super().__init__(*arguments)
        self._rogues, self._attack = rogues, attack

    def _create_engine(self, device_id, config, model):
        engine = super()._create_engine(device_id, config, model)
        if device_id in self._rogues and self._attack is not None:
            honest, attack = engine.algorithm.make_messages, self._attack
            engine.algorithm.make_messages = lambda neighbours: [
                replace(message, parts={part: attack(to_dense(arrays), message.step) for part, arrays in
                                        message.parts.items()})
                for message in honest(neighbours)
            ]  # fmt: skip
        return engine


def play_nodes(
    tables: Mapping[str, Mapping[str, object]], data: FleetData, *, attack: Attack | None = None, num_rogues: int = 0
) -> list[float]:
    """Returns the accuracies of the honest nodes' last models, 0 of a diverged one; the first devices are rogue."""
    names = make_device_names(len(data.shards))
    config = parse_run({**tables, "simulation": {"devices": len(names)}, "devices": {"min": len(names)}})
    made = build_run(config, "attacked")
    trainer = RogueNodeTrainer(
        TaskSpec(task=config.run.task, options=config.task, seed=config.run.seed),
        data,
        {name: index for index, name in enumerate(names)},
        rogues=names[:num_rogues],
        attack=attack,
    )
    fleet = SimulatedFleet(
        make_devices(config, names, (), data.shards, made.shapes),
        backend=InProcessBackend(trainer, made.shapes),
        downlink=SimulatedDownlink(made.encode, made.encode_changes),
        settings=make_settings(config),
    )
    state, _ = run_rounds(
        made.strategy,
        made.strategy.init(made.model),
        fleet=fleet,
        journal=RunLog(None, []),
        goal=made.goal,
        evaluate=EvaluationSchedule(evaluate_on="none"),
        rounds=made.rounds,
        policy=made.policy,
    )
    learner, accuracies = make_task(config.run.task, config.task).learner(), []
    models = made.strategy.node_models(state)
    for name in names[num_rogues:]:
        if name in models:
            learner.load(models[name])
        accuracies.append(float(learner.evaluate(data.test)[1]) if name in models else 0.0)
    return accuracies
