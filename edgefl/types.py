"""Nouns that cross rooms, and the seams between the rooms as Protocols.

Values are frozen, slotted and keyword-only; units stand in the names. *Frozen* means that no field is
reassigned and that a caller's tensor is never written to.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Array = NDArray[Any]
Json = dict[str, Any]
Scalar = str | int | float | bool


class TensorKind(StrEnum):
    """How a tensor is treated: parameters are trained, buffers (running means, counters) only tracked."""

    PARAMETER = "parameter"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, shape and kind of one tensor of a model.

    `shared=False` keeps the tensor on the board: it is trained there and never sent.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: TensorKind = TensorKind.PARAMETER
    shared: bool = True

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize


Shapes = tuple[TensorSpec, ...]
"""The task's fixed tensor order: what stands on the wire is in this order and without names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseTensor:
    """Some entries of a tensor: `values[i]` belongs at flat index `indices[i]`; the rest is zero.

    `indices` are sorted, unique, [k] int64 in 0..size-1; `values` is [k].
    """

    indices: Array
    values: Array
    shape: tuple[int, ...]

    def dense(self) -> Array:
        flat = np.zeros(math.prod(self.shape), dtype=self.values.dtype)
        flat[self.indices] = self.values
        return flat.reshape(self.shape)


Tensor = Array | SparseTensor
Tensors = Mapping[str, Tensor]
Indices = Mapping[str, Array]


def bytes_of(tensors: Tensors) -> int:
    """Returns how many bytes tensors take in memory."""
    return sum(
        tensor.indices.nbytes + tensor.values.nbytes if isinstance(tensor, SparseTensor) else tensor.nbytes
        for tensor in tensors.values()
    )


class LazyTensors(Mapping[str, Tensor]):
    """Tensors that stay encoded until they are asked for.

    An update that waits for its turn holds only a way to its body (in the journal, on disk), so a round of
    many devices keeps one decoded model in memory. The first access decodes; `release` forgets the result.
    `loaded` is what `load` would return, where somebody has decoded it already.
    """

    __slots__ = ("_load", "_loaded")

    def __init__(self, load: Callable[[], Tensors], loaded: Tensors | None = None) -> None:
        self._load = load
        self._loaded = loaded

    def _tensors(self) -> Tensors:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors())

    def __len__(self) -> int:
        return len(self._tensors())

    def release(self) -> None:
        self._loaded = None


class Algorithm(StrEnum):
    """The local algorithms that ship with edgefl; packages add more by the entry point `edgefl.local_steps`."""

    SGD = "sgd"
    GRADIENT = "gradient"
    DECAY = "decay"
    PROX = "prox"
    ADAM = "adam"
    RMSPROP = "rmsprop"
    ADAGRAD = "adagrad"
    ADADELTA = "adadelta"
    SCAFFOLD = "scaffold"


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeMessage:
    """One edge variable of decentralised training, forwarded unopened.

    `edge` is (sender, receiver); `step` numbers what the sender sends on this edge and only grows, over reboots too;
    of the message that carries SCAFFOLD's c it is the version at which all variates were zero.
    With `is_reply` it answers the receiver's own message of that step.
    """

    edge: tuple[str, str]
    step: int
    body: bytes
    is_reply: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSide:
    """What one end of an edge knows of it.

    Attributes:
        neighbour: the device at the other end.
        sign: s of the constraint s_ij w_i + s_ji w_j = 0, 1 or -1; the other end has the opposite.
        degree: how many edges its ends have, the larger of the two numbers.
        weight: W_ij of the mixing matrix, above 0 and below 1; both ends have the same.
        period: local iterations between two of its exchanges, the larger of its ends' two numbers.
        slot: local iteration, modulo the period, after which this end fires in the schedule `slots`.
        address: HOST:PORT at which the neighbour listens, for the carrier `direct`; empty where nobody said.
        epoch: how often the edge began; both ends start it anew when it grows.
    """

    neighbour: str
    sign: float
    degree: int
    weight: float
    period: int
    slot: int = 0
    epoch: int = 0
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """What makes a device a node of a graph; see `edgefl.decentralised`.

    Attributes:
        method: one of `decentralised.methods.METHODS`.
        edges: the node's own; their number is its degree.
        learning_rate: that of the run's first iteration, which step sizes of edges follow from.
        period: K, local iterations between two exchanges of an edge.
        codec: of what travels along edges; empty for none.
        carrier: who brings messages to neighbours: `relay` (inbox and update), `peer` (MQTT) or `direct` (TLS).
        schedule: when edges fire, where the device itself decides it (`peer` and `direct`).
        fires: neighbours whose edges fire after this assignment's iterations, where it does not (`relay`).
        listen: HOST:PORT at which the node listens, for the carrier `direct`.
        until: local iterations of the run after which the update is due, where the device goes on by itself.
        limit: local iterations of the run after which such a device rests.
        reports: the update holds the node's model; else it holds none.
    """

    method: str
    edges: tuple[EdgeSide, ...]
    learning_rate: float
    period: int
    codec: str = ""
    carrier: str = "relay"
    schedule: str = "sync"
    fires: tuple[str, ...] = ()
    listen: str = ""
    until: int = 0
    limit: int = 0
    reports: bool = False

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Returns the plan in JSON values, as `dataclasses.asdict` gives them; unknown fields are ignored."""
        known = _known(cls, value)
        edges = tuple(EdgeSide(**_known(EdgeSide, edge)) for edge in known.get("edges", ()))
        return cls(**{**known, "edges": edges, "fires": tuple(known.get("fires", ()))})


def _known(cls: type[Any], value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"a {cls.__name__} must be a table, got {value!r:.40}")
    names = {item.name for item in fields(cls)}
    return {name: item for name, item in value.items() if name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """What a device does with its shard for one assignment; data, not code.

    Exactly one of `iterations`, `epochs` and `seconds` is set: the budget. `algorithm` names a built-in
    (`Algorithm`) or a local step that is installed on the board; `options` are its own settings, such as `mu` of
    `prox`. With `keeps_state` its moments live on from one assignment of the run to the next. With `node` the device
    is a node of a graph, which takes the messages of its neighbours (`inbox`) before it trains; its `iterations` may
    then be 0, for an exchange alone. A device that is no node finds in its inbox what travels beside the model.
    """

    algorithm: str = Algorithm.SGD
    iterations: int | None = None
    epochs: float | None = None
    seconds: float | None = None
    batch_size: int = 32
    learning_rate: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    options: Mapping[str, Scalar] = field(default_factory=dict)
    keeps_state: bool = False
    report_progress: bool = False
    inbox: tuple[EdgeMessage, ...] = ()
    node: NodePlan | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any], inbox: tuple[EdgeMessage, ...] = ()) -> Self:
        """Returns the plan in JSON values, which have no inbox; unknown fields are ignored."""
        known = _known(cls, value)
        node = known.get("node")
        return cls(**{**known, "inbox": inbox, "node": node and NodePlan.from_json(node)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One piece of work for one device. `assignment_id` is unique in the run and survives restarts.

    `block`, where set, is the part of a redundant shard to train on; its random streams then follow from the block,
    so that every holder's copy of the result is the same. Without `sends_model` no model travels with it: the device
    has its own, and asks for one when it has not.
    """

    assignment_id: str
    device_id: str
    base_version: int
    plan: LocalPlan
    codec: str | None = None
    deadline_s: float | None = None
    block: int | None = None
    settled: tuple[str, ...] = ()
    sends_model: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Asks one device to evaluate the model of `version` on its test split (or, as an evaluator, its shard).

    `subject` is empty for the global model, and the device whose own model is meant where each has one.
    """

    assignment_id: str
    device_id: str
    version: int
    round: int
    subject: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Asks a device to finish an assignment now and to send what it has."""

    assignment_id: str
    device_id: str


Order = Assignment | Evaluation | Recall


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a strategy wants now. It is asked again after every wake-up, at the latest after `next_wake_s`."""

    orders: tuple[Order, ...] = ()
    next_wake_s: float = 60.0


class Outcome(StrEnum):
    """What became of an update."""

    USED = "used"
    LATE = "late"
    REFUSED = "refused"
    FAILED = "failed"
    LOST = "lost"


AHEAD = ("bytes_up_ahead", "bytes_down_ahead")
BLANK_VARIATE = "blank_variate"
"""In the `extra` of an update for `scaffold`: the device's control variate was zero, since no move of it counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMetrics:
    """What a device measured about one assignment; bytes are counted on the wire, never estimated.

    The last six say how its board was meanwhile, each None where it cannot tell: the highest temperature, all that
    held it back (the words of a heartbeat), the weakest signal, the rate of the link, the energy that it took, and
    how long of `compute_s` it rested to stay below its temperature limit.

    Those that were spent before the run are part of the first update's, and stand in `extra` under the names of
    `AHEAD`: `send_s` was not spent on them.
    """

    iterations: int = 0
    num_examples: int = 0
    loss: float | None = None
    compute_s: float = 0.0
    send_s: float = 0.0
    wait_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    extra: Mapping[str, float] = field(default_factory=dict)
    max_temperature_c: float | None = None
    throttled: str | None = None
    signal_dbm: float | None = None
    link_bits_per_s: float | None = None
    energy_j: float | None = None
    paced_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What a device sends back for one assignment: the displacement w_end - w_start, not the new weights.

    A node of a graph sends its model itself when it is asked to report, and no tensors otherwise; `outbox` is what
    it has for its neighbours.
    """

    assignment_id: str
    device_id: str
    base_version: int
    tensors: Tensors
    metrics: UpdateMetrics
    body: bytes | None = None
    received_s: float = 0.0
    outbox: tuple[EdgeMessage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One evaluation. `source` is coordinator, device or evaluator (DESIGN: all three land in the history).

    `subject` is that of the `Evaluation`.
    """

    assignment_id: str
    device_id: str
    version: int
    round: int
    source: str
    num_examples: int
    loss: float
    accuracy: float
    bytes_up: int = 0
    bytes_down: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    subject: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a device is, at most ten times a second and only when the plan asks."""

    device_id: str
    assignment_id: str
    iteration: int
    seconds_per_iteration: float
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A device became available."""

    device_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """An outstanding assignment will bring no update: its device is gone, it failed, or its deadline passed.

    With `is_strike` an update came and the gate has refused it, which counts against its device.
    """

    device_id: str
    assignment_id: str
    outcome: Outcome
    reason: str
    is_strike: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Somebody asks the run to end after what is in flight."""

    reason: str


Event = Update | Evaluated | Progress | Joined | Lost | Stop


class Role(StrEnum):
    TRAINER = "trainer"
    EVALUATOR = "evaluator"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What the fleet knows of one device.

    `capabilities` is the newest report, `examples` counts by task, `blocks` are those of redundant shards by task.
    """

    device_id: str
    role: Role = Role.TRAINER
    groups: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    examples: Mapping[str, int] = field(default_factory=dict)
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    source: str = "device"
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Measured speed of one device; None until it has been measured."""

    seconds_per_iteration: float | None = None
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """How a board is, by its last heartbeat; None for what it cannot tell. `is_throttled` is about now."""

    temperature_c: float | None = None
    is_throttled: bool | None = None
    battery_fraction: float | None = None
    power_w: float | None = None


class FleetView(Protocol):
    """The fleet now; read-only and live, valid until the next wait.

    `devices` are those present that may work in this run; `idle` are trainers without outstanding work, in
    a fixed order; `busy` maps a device to its outstanding assignment ids, oldest first. A device that failed
    or vanished is simply in neither. `speeds`, `progress` and `vitals` know only devices that reported.
    """

    @property
    def now_s(self) -> float: ...
    @property
    def devices(self) -> Mapping[str, DeviceInfo]: ...
    @property
    def idle(self) -> Sequence[str]: ...
    @property
    def busy(self) -> Mapping[str, Sequence[str]]: ...
    @property
    def speeds(self) -> Mapping[str, Speed]: ...
    @property
    def progress(self) -> Mapping[str, Progress]: ...
    @property
    def vitals(self) -> Mapping[str, Vitals]: ...


S = TypeVar("S")


class Strategy(Protocol[S]):
    """Who trains, on how much, and how updates become the next model. Pure: no clock, no network, no Flower.

    S is a dataclass whose fields are tensors (or mappings of them), numbers, strings and containers of
    those, so that any strategy can be checkpointed. Buffers that a state owns may be updated in place; the
    loop never uses an old state again. `used` names the updates that went into the newest version; whatever
    else arrived was late. A strategy whose result may not depend on who answered first folds in assignment
    order: an update's tensors stay in the journal until they are read.

    Nine attributes are optional. `versions_per_round` (1 when absent) says how many versions the history groups to a
    round; None leaves it to the run file, and else to the number of devices that are asked first. `bytes_per_device`
    (0 when absent) is a method that tells, for the bytes of one model, how many the state keeps for each device.
    `finish(state) -> state` is told once that nothing more will be assigned: what is still in flight may be closed
    without waiting for what would have come after it. `node_models(state)` are the devices' own models by device,
    where each has one: they are evaluated beside the global model. `facts(state)` are figures of the newest version
    for the history, such as how far the devices' models lie apart. With `has_nodes` plans
    make devices nodes of a graph, which send models, not displacements. With `goes_on_alone` they train on while the
    coordinator is away, and its run is taken up again by itself. A run that is taken up again goes on from
    `resumed(state)`, which forgets what was out; where there is none, from the state as it is.
    """

    def init(self, model: Tensors) -> S: ...
    def assign(self, state: S, view: FleetView) -> tuple[S, Decision]: ...
    def receive(self, state: S, update: Update) -> S: ...
    def ready(self, state: S, view: FleetView) -> bool: ...
    def aggregate(self, state: S) -> S: ...
    def model(self, state: S) -> Tensors: ...
    def version(self, state: S) -> int: ...
    def used(self, state: S) -> Sequence[str]: ...
    def changed(self, state: S, since: int) -> Indices | None: ...


class Gate(Protocol):
    """Stands between fleet and strategy: who may be asked, for how much, and which updates are let in.

    `barred` are the devices that are not asked again in this run.
    """

    @property
    def barred(self) -> Collection[str]: ...
    def view(self, view: FleetView) -> FleetView:
        """Returns the fleet as the strategy may see it: `idle` without devices that rest."""

    def adjust(self, order: Assignment, view: FleetView) -> Assignment:
        """Returns the assignment as its board is to get it: smaller when it is not well, in a codec that suits it."""

    def refusal(self, update: Update) -> str | None:
        """Returns why an update must not reach the strategy, or None; a refusal counts against its device."""

    def strike(self, device_id: str) -> None:
        """Counts, as it was counted then, a refusal that a journal tells of: the update itself is gone."""

    def note(self, event: Event, accuracy: float | None) -> None:
        """Takes note of what happened; `accuracy` is that of a version whose evaluation the event completed."""


class ModelSource(Protocol):
    """Where a fleet reads the model that it sends out."""

    @property
    def version(self) -> int: ...
    def model(self) -> Tensors: ...
    def model_of(self, subject: str) -> Tensors:
        """Returns the model of one device where each has its own; the global one for an empty subject."""

    def changed(self, since: int) -> Indices | None: ...


class Fleet(Protocol):
    """Devices that can be given work: the live fleet (Flower and MQTT) or the virtual one (an event heap)."""

    def view(self) -> FleetView: ...
    def dispatch(self, orders: Sequence[Order], source: ModelSource) -> None: ...
    def wait(self, until_s: float) -> Sequence[Event]: ...


class Journal(Protocol):
    """What happened in a run, on disk before anybody acts on it.

    `received` appends events and returns them with their bodies readable from the journal; nothing that
    was appended is acknowledged or dispatched before `commit` returns. `aggregated` is given the new state,
    so that a journal may checkpoint it whenever it likes.
    """

    def received(self, events: Sequence[Event]) -> Sequence[Event]: ...
    def decided(self, decision: Decision) -> None: ...
    def aggregated(self, version: int, assignment_ids: Sequence[str], state: object) -> None: ...
    def commit(self) -> None: ...


class Compressor(Protocol):
    """Turns tensors into bytes and back; stateless. Decoding needs only the body and the task's shapes."""

    def encode(self, tensors: Tensors, rng: Generator) -> bytes: ...
    def decode(self, body: memoryview, shapes: Shapes) -> Tensors: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Examples in memory: `inputs` [n, ...] and integer `labels` [n], row for row."""

    inputs: Array
    labels: Array

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Array) -> Dataset:
        return Dataset(inputs=self.inputs[rows], labels=self.labels[rows])


class Learner(Protocol):
    """A model in memory, ready to train: NumPy arrays or torch tensors behind the same few calls.

    `parameters` and `gradients` are the backend's own arrays by tensor name; local algorithms work on them
    in place with `+=`, `-=`, `*=` and scalars only, so one text serves both backends.
    """

    @property
    def parameters(self) -> Mapping[str, Any]: ...
    @property
    def gradients(self) -> Mapping[str, Any]: ...
    def load(self, tensors: Tensors) -> None:
        """Takes over the named tensors; those that are not named (kept on the board) stay."""

    def read(self) -> dict[str, Array]:
        """Returns a copy of every tensor, in the order of the task's shapes."""

    def gradient(self, batch: Dataset) -> float:
        """Fills `gradients` with the mean gradient over the batch and returns the mean loss."""

    def evaluate(self, data: Dataset) -> tuple[float, float]:
        """Returns mean loss and accuracy."""


class Task(Protocol):
    """A model, a loss, and how to read a shard. Users write these; see the README."""

    @property
    def name(self) -> str: ...
    def shapes(self) -> Shapes: ...
    def init(self, seed: int) -> dict[str, Array]:
        """Returns the first model, the same for the same seed on every machine."""

    def read(self, path: str) -> Dataset:
        """Reads what the board has: a shard file, or a folder that may have grown since."""

    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> Learner:
        """Returns a warm learner; `accelerator` is cpu or cuda, `threads` None leaves the backend's choice."""


def derived_seed(*parts: int | str) -> int:
    """Returns a 128-bit seed that depends on every part, the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def derived_rng(*parts: int | str) -> Generator:
    """Returns the generator for (seed, run, version, device, ...); see `derived_seed`."""
    return np.random.default_rng(derived_seed(*parts))
