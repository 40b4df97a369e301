"""Shared value types, and the Protocols between the packages.

Values are frozen, slotted and keyword-only; units are suffixes. *Frozen* means that no field is reassigned and
that a caller's tensor is never written to.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, Protocol, Self, TypeVar, cast

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from edgefl.core.allowance import Allowance
from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.heads import describe_loss, wrap_targets
from edgefl.core.named_arrays import concatenate_inputs, wrap_inputs
from edgefl.core.settings import check_settings

Array = NDArray[Any]
Inputs = Array | Any
"""One array [n, ...], or arrays by name: a dict where a `Dataset` is made, and `NamedArrays` in it."""
Json = dict[str, Any]
Scalar = str | int | float | bool
Precision = Literal["float32", "bfloat16", "float16"]
"""Of what a network computes while it trains; its weights are float32."""

Indices = Mapping[str, Array]

V = TypeVar("V")

ACCELERATOR_PATTERN = re.compile(r"cpu|cuda(:[0-9]{1,3})?")
BASE_SUFFIX = ".safetensors"
"""Suffix of the file of a pretrained base."""

PREFETCH_BYTE_KEYS = ("bytes_up_ahead", "bytes_down_ahead")
BASE_BYTE_KEY = "bytes_down_base"
"""Keys in the `extra` of an update of bytes that no later one has: of admission, and of a base and compiled task."""
NOT_FINITE = "the update holds a NaN or an infinity"
"""How the reason of a refused update begins whose training has diverged."""
ZERO_CONTROL_VARIATE = "blank_variate"
"""Key in the `extra` of an update for `scaffold`: the device's control variate was zero."""

MAX_PARTS = 256
"""Most parts that an update is cut into."""
NUM_REDUCTIONS = "reductions"
"""Key in the `extra` of an update of a collective: the all-reduces that its displacement is the result of."""
EPSILON = "epsilon"
"""Key in the `extra` of an update with private examples: ε that its run has spent on the device."""
PEER_BYTES = "peer_bytes_up"
"""Key in the `extra` of an update of a collective: bytes that the device sent to other members."""

S = TypeVar("S")


class TensorKind(StrEnum):
    """Kind of a tensor: parameters are trained, buffers (running means, counters) only tracked."""

    PARAMETER = "parameter"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, shape and kind of one tensor of a model.

    `shared=False` makes it a local tensor: it is trained on the device and never sent.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: TensorKind = TensorKind.PARAMETER
    shared: bool = True

    @property
    def size(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in memory, in bytes."""
        return self.size * np.dtype(self.dtype).itemsize


ModelSpec = tuple[TensorSpec, ...]
"""The task's fixed tensor order: the wire format is in this order and without names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseTensor:
    """Entries of a sparse tensor: `values[i]` belongs at flat index `indices[i]`, all others are zero.

    `indices` are sorted, unique, [k] int64 in 0..size-1; `values` is [k].
    """

    indices: Array
    values: Array
    shape: tuple[int, ...]

    def dense(self) -> Array:
        """Returns the whole tensor, 0 where it has no value."""
        flat = np.zeros(math.prod(self.shape), dtype=self.values.dtype)
        flat[self.indices] = self.values
        return flat.reshape(self.shape)


Tensor = Array | SparseTensor
Tensors = Mapping[str, Tensor]


def size_of_tensors(tensors: Tensors) -> int:
    """Returns the memory size of tensors in bytes."""
    return sum(
        tensor.indices.nbytes + tensor.values.nbytes if isinstance(tensor, SparseTensor) else tensor.nbytes
        for tensor in tensors.values()
    )


class LazyTensors(Mapping[str, Tensor]):
    """Tensors that are decoded at their first access.

    A queued update holds only a reference to its body (in the journal, on disk), so a round of many devices keeps
    one decoded model in memory. `unload` drops the decoded tensors; `loaded` is the result of `load`, where it is
    decoded already.
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

    def unload(self) -> None:
        self._loaded = None


class ComputedMapping(Mapping[str, V]):
    """Mapping with the names of another one, whose values are computed at every access."""

    __slots__ = ("_compute", "_names")

    def __init__(self, names: Mapping[str, object], compute: Callable[[str], V]) -> None:
        self._names, self._compute = names, compute

    def __getitem__(self, name: str) -> V:
        return self._compute(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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
    DP_SGD = "dp-sgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMessage:
    """One edge message of decentralised training, relayed without being decoded.

    `edge` is (sender, receiver); `step` numbers the sender's messages on this edge and only grows, over reboots too;
    for SCAFFOLD's c it is the version at which all variates were zero.
    With `is_reply` it answers the receiver's own message of that step.
    """

    edge: tuple[str, str]
    step: int
    body: bytes
    is_reply: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLinkConfig:
    """One end of an edge, as its node needs it.

    Attributes:
        neighbour: device at the other end.
        sign: s of the constraint s_ij w_i + s_ji w_j = 0, 1 or -1; the other end has the opposite.
        degree: larger of its ends' two numbers of edges.
        weight: W_ij of the mixing matrix, above 0 and below 1; both ends have the same.
        period: local iterations between two of its exchanges, the larger of its ends' two numbers.
        slot: local iteration, modulo the period, after which this end fires in the schedule `slots`.
        address: HOST:PORT at which the neighbour listens, for the carrier `direct`; empty when unknown.
        epoch: number of starts of the edge; both ends restart it when it grows.
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
class GossipConfig:
    """Configuration of a device as a node of a graph; see `edgefl.strategies.peer_algorithms`.

    Attributes:
        method: one of `peer_algorithms.gossip_node.ALGORITHMS`.
        edges: the node's edges; their number is its degree.
        learning_rate: that of the run's first iteration, which step sizes of edges follow from.
        period: K, local iterations between two exchanges of an edge.
        codec: of what travels along edges; empty for none.
        carrier: transport of messages to neighbours: `relay` (assignment, update), `peer` (MQTT) or `direct` (TLS).
        schedule: when edges fire, where the device itself decides (`peer` and `direct`).
        fires: neighbours whose edges fire after this assignment's iterations, where it does not (`relay`).
        listen: HOST:PORT at which the node listens, for the carrier `direct`.
        until: local iterations of the run after which the update is due, where the device continues autonomously.
        limit: local iterations of the run after which such a device pauses.
        reports: whether the update holds the node's model.
        num_rogues: neighbours whose messages may be anything, for methods with a bound on them.
        step_size, k_eta: of an edge in the ISVR methods; see `peer_algorithms.isvr`.
    """

    method: str
    edges: tuple[PeerLinkConfig, ...]
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
    num_rogues: int = 0
    step_size: str = "edge"
    k_eta: float | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Returns the config from JSON values, as `dataclasses.asdict` gives them; unknown fields are ignored."""
        values = _known(cls, value)
        edges = tuple(PeerLinkConfig(**_known(PeerLinkConfig, edge)) for edge in values.get("edges", ()))
        return cls(**{**values, "edges": edges, "fires": tuple(values.get("fires", ()))})


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveConfig:
    """A device's part in the all-reduces of a round; see `edgefl.strategies.peer_algorithms.collectives`.

    In each the device trains from the model of the one before, and all members move by the mean of their updates.

    Attributes:
        collective: `ring`, `butterfly` or `binary-blocks`.
        members: devices, in the order in which their updates are added.
        group: id of these members' work, unique in the run.
        weighting: of an update in the mean: by `examples`, or `uniform`.
        reductions: number of all-reduces.
        uploader: member that sends the coordinator the displacement by all of them; the others send its hash.
        addresses: HOST:PORT at which each member listens, in the same order; empty in a simulation.
        resend: assignment whose displacement is to be sent, in place of any work; empty for none.
    """

    collective: str
    members: tuple[str, ...]
    group: str
    weighting: str = "examples"
    reductions: int = 1
    uploader: str = ""
    addresses: tuple[str, ...] = ()
    resend: str = ""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Returns the config from JSON values, as `dataclasses.asdict` gives them; unknown fields are ignored."""
        values = _known(cls, value)
        names = {name: tuple(map(str, values.get(name, ()))) for name in ("members", "addresses")}
        return cls(**{**values, **names})


class SecureStep(StrEnum):
    """Steps of a round with secure aggregation, each an instruction to every board that is left."""

    KEYS = "keys"
    SHARES = "shares"
    UPDATE = "update"
    CONSENT = "consent"
    UNMASK = "unmask"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureAggregationConfig:
    """A board's next step in a round with secure aggregation; see `edgefl.core.secure_aggregation`.

    Attributes:
        step: one of `SecureStep`.
        group: id of this attempt at the round, unique in the run; its keys are used in no other.
        version: that the update is made from.
        threshold: share of the members that must be left at every step, above 0.5.
        clip: largest magnitude of an entry of an update.
        max_examples: most examples that a board weighs as; 1 where all weigh the same.
        num_members: boards whose keys are known, from `update` on.
        survivors: boards whose updates are in the sum, from `consent` on.
        corrupted: share of the members that may work with the coordinator; each board draws as few others as protect
            it then, to share its secrets and masks with. None for all members.
        dropped: share of the members that may drop out at random then, so that the sum can still be opened.
        sharers: members whose shares went to the others, with `update`, where boards draw others.
    """

    step: str
    group: str
    version: int
    threshold: float
    clip: float
    max_examples: int
    num_members: int = 0
    survivors: tuple[str, ...] = ()
    corrupted: float | None = None
    dropped: float = 0.0
    sharers: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Returns the config from JSON values, as `dataclasses.asdict` gives them; unknown fields are ignored."""
        values = _known(cls, value)
        names = {name: tuple(map(str, values.get(name, ()))) for name in ("survivors", "sharers")}
        return cls(**{**values, **names})


def _known(cls: type[Any], value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"a {cls.__name__} must be a table, got {value!r:.40}")
    names = {item.name for item in fields(cls)}
    return {name: item for name, item in value.items() if name in names}


MIN_NOISE = 0.1
"""Least noise multiplier of private examples; below it a budget says nothing."""
PRIVATE_OPTIMIZERS = frozenset(
    {
        Algorithm.SGD, Algorithm.DECAY, Algorithm.PROX, Algorithm.ADAM, Algorithm.RMSPROP, Algorithm.ADAGRAD,
        Algorithm.ADADELTA,
    }
)  # fmt: skip
"""Local algorithms that use nothing of the data but the gradient of each batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamplePrivacy:
    """Differential privacy of each example of a board, by DP-SGD.

    Attributes:
        optimizer: that gets the private gradients.
        clip: most Euclidean norm of the gradient of an example.
        epsilon: the budget ε of the run, on each board.
        delta: δ.
        noise: the noise multiplier, standard deviation over clip; None for the least with which `rounds` rounds of
            this board fit into the budget.
        rounds: that the budget is for; not needed with `noise`.
    """

    optimizer: str
    clip: float = field(metadata={"above": 0, "at_most": 1e9})
    epsilon: float = field(metadata={"above": 0, "at_most": 1000})
    delta: float = field(metadata={"above": 0, "below": 1})
    noise: float | None = field(default=None, metadata={"at_least": MIN_NOISE, "at_most": 1e6})
    rounds: int | None = field(default=None, metadata={"at_least": 1, "at_most": 10_000_000})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Returns the settings from JSON values; unknown fields are ignored."""
        return cls(**_known(cls, value))

    def check(self, table: str) -> None:
        """Checks that a board can follow this.

        Raises:
            ConfigError: a number is out of range, or the optimiser uses more than the gradient.
        """
        check_settings(self, table)
        if self.optimizer not in PRIVATE_OPTIMIZERS:
            raise ConfigError(
                f"{table}: a private gradient goes to one of {', '.join(sorted(PRIVATE_OPTIMIZERS))}, got "
                f"{self.optimizer!r:.60}; set strategy.optimizer to one of these"
            )
        if self.noise is None and self.rounds is None:
            raise ConfigError(f"{table} needs noise, or rounds, from which it is found")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Local training for one assignment; data, not code. Its fields are the only defaults and bounds of them.

    Exactly one of `iterations`, `epochs` and `seconds` is set: the budget. `algorithm` names a built-in
    (`Algorithm`) or a local step that is installed on the board; `options` are its own settings, such as `mu` of
    `prox`. With `micro_batch_size` a batch's gradient adds up from parts of at most so many examples; with
    `max_gradient_norm` it is clipped to that norm; `precision` is that of activations in torch, None for float32.
    With `keeps_state` its moments persist from one assignment of the run to the next. With `node` the device is a
    node of a graph, which applies the messages of its neighbours (`messages`) before it trains; its `iterations`
    may then be 0, for an exchange alone. Otherwise `messages` are those sent beside the model. With `collective` the
    budget is that of each of its all-reduces. With `head_epochs` the tensors that stay on the device are trained
    alone for so many passes, and then the budget trains the others alone (FedRep). With `personal_lambda` the budget
    is given twice: for the model that is sent, and for a personal copy that stays on the device (Ditto). So it is
    with `personal_mixture`, the first share of a copy that is trained in a mixture with the model (APFL). With
    `consistency_weight` examples without a label are trained on, too, with what the model says of them with at least
    the probability `consistency_threshold` (FixMatch), which is None without them. With `privacy` gradients are
    private, and the algorithm is `dp-sgd`, a name that a board of an older release refuses. With
    `fallback_iterations` a progress report is a query, whose answer the device waits for: to go on, or to finish
    early. Where none comes, it finishes after so many iterations. With `secure` it is one step of secure aggregation,
    which trains in one of its steps alone; `messages` are the other boards'.
    """

    algorithm: str = Algorithm.SGD
    iterations: int | None = field(default=None, metadata={"at_least": 1})
    epochs: float | None = field(default=None, metadata={"above": 0})
    seconds: float | None = field(default=None, metadata={"above": 0})
    batch_size: int = field(default=32, metadata={"at_least": 1})
    learning_rate: float = field(default=0.05, metadata={"at_least": 0})
    momentum: float = field(default=0.0, metadata={"at_least": 0})
    weight_decay: float = field(default=0.0, metadata={"at_least": 0})
    micro_batch_size: int | None = field(default=None, metadata={"at_least": 1, "at_most": 65_536})
    max_gradient_norm: float | None = field(default=None, metadata={"above": 0})
    precision: Precision | None = None
    head_epochs: float | None = field(default=None, metadata={"above": 0, "at_most": 1000})
    personal_lambda: float | None = field(default=None, metadata={"at_least": 0, "at_most": 1000})
    personal_mixture: float | None = field(default=None, metadata={"above": 0, "at_most": 1})
    consistency_weight: float | None = field(default=None, metadata={"above": 0, "at_most": 1000})
    consistency_threshold: float | None = field(default=None, metadata={"at_least": 0, "at_most": 1})
    privacy: ExamplePrivacy | None = None
    options: Mapping[str, Scalar] = field(default_factory=dict)
    keeps_state: bool = False
    report_progress: bool = False
    fallback_iterations: int | None = field(default=None, metadata={"at_least": 1})
    messages: tuple[PeerMessage, ...] = ()
    node: GossipConfig | None = None
    collective: CollectiveConfig | None = None
    secure: SecureAggregationConfig | None = None

    @property
    def has_training(self) -> bool:
        """Whether the device trains: not in the other steps of secure aggregation."""
        return self.secure is None or self.secure.step == SecureStep.UPDATE

    @property
    def has_personal(self) -> bool:
        """Whether a personal copy of the model is trained beside it."""
        return self.personal_lambda is not None or self.personal_mixture is not None

    def count_iterations(self, num_examples: int) -> int | None:
        """Returns the iterations on so many examples unless finished early; None where seconds decide."""
        if not self.has_training:
            return 0
        head, num_models = self.count_head_iterations(num_examples), 2 if self.has_personal else 1
        if self.epochs is not None:
            return head + num_models * self._count_in_passes(self.epochs, num_examples)
        return None if self.iterations is None else head + num_models * self.iterations

    def count_head_iterations(self, num_examples: int) -> int:
        """Returns how many of the first iterations train only the tensors that stay on the device."""
        return 0 if self.head_epochs is None else self._count_in_passes(self.head_epochs, num_examples)

    def _count_in_passes(self, passes: float, num_examples: int) -> int:
        return max(1, round(passes * math.ceil(num_examples / self.batch_size)))

    def check(self, table: str = "plan") -> None:
        """Checks that a device can follow this; `table` is in front of a name in messages.

        Raises:
            ConfigError: no budget, two of them, or a number out of range.
        """
        budgets = {"iterations": self.iterations, "epochs": self.epochs, "seconds": self.seconds}
        chosen = {name: value for name, value in budgets.items() if value is not None}
        if len(chosen) != 1:
            raise ConfigError(f"{table} needs exactly one of iterations, epochs and seconds, got {chosen or 'none'}")
        check_settings(self, table)
        self._check_personal(table)
        self._check_consistency(table)
        self._check_privacy(table)

    def _check_privacy(self, table: str) -> None:
        if (self.privacy is None) != (self.algorithm != Algorithm.DP_SGD):
            raise ConfigError(
                f"{table}: algorithm {Algorithm.DP_SGD} goes with privacy and with nothing else, got "
                f"{self.algorithm!r:.60}"
            )
        if self.privacy is None:
            return
        self.privacy.check(f"{table}.privacy")
        unfit = {
            "seconds": self.seconds is not None,
            "head_epochs": self.head_epochs is not None,
            "micro_batch_size": self.micro_batch_size is not None,
            "max_gradient_norm": self.max_gradient_norm is not None,
            "precision": self.precision is not None,
            "personal copies": self.has_personal,
            "consistency_weight": self.consistency_weight is not None,
            "collectives": self.collective is not None,
            "nodes of a graph": self.node is not None,
            "messages": bool(self.messages),
        }
        if found := [name for name, is_set in unfit.items() if is_set]:
            raise ConfigError(f'{table}: privacy.unit = "example" does not go with {found[0]}; leave one of them out')

    def _check_consistency(self, table: str) -> None:
        if self.consistency_weight is None:
            return
        unfit = {
            "scaffold": self.algorithm == Algorithm.SCAFFOLD,
            "gradient": self.algorithm == Algorithm.GRADIENT,
            "keep_optimizer": self.keeps_state,
            "head_epochs": self.head_epochs is not None,
            "personal copies": self.has_personal,
            "collectives": self.collective is not None,
            "nodes of a graph": self.node is not None,
        }
        if found := [name for name, is_set in unfit.items() if is_set]:
            raise ConfigError(f"{table}.consistency_weight does not go with {found[0]}; leave one of them out")

    def _check_personal(self, table: str) -> None:
        settings = "head_epochs", "personal_lambda", "personal_mixture"
        names = [name for name in settings if getattr(self, name) is not None]
        unfit = {
            "scaffold": self.algorithm == Algorithm.SCAFFOLD,
            "seconds": self.seconds is not None,
            "keep_optimizer": self.keeps_state,
            "collectives": self.collective is not None and self.has_personal,
            **dict.fromkeys(names[:-1], True),
        }
        if names and (found := [name for name, is_set in unfit.items() if is_set]):
            raise ConfigError(
                f"{table}.{names[-1]} = {getattr(self, names[-1]):g} goes with epochs or iterations and an optimiser "
                f"that begins anew, not with {found[0]}; leave one of them out"
            )

    def to_json(self) -> Json:
        """Returns the config as JSON values: without messages, whose bodies travel apart, and what is None."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        del values["messages"]
        return values

    @classmethod
    def from_json(cls, value: Mapping[str, Any], messages: tuple[PeerMessage, ...] = ()) -> Self:
        """Returns the config from JSON values, which have no messages; unknown fields are ignored."""
        values = _known(cls, value)
        node, collective, privacy = values.get("node"), values.get("collective"), values.get("privacy")
        secure = values.get("secure")
        return cls(
            **{
                **values,
                "messages": messages,
                "node": node and GossipConfig.from_json(node),
                "collective": collective and CollectiveConfig.from_json(collective),
                "secure": None if secure is None else SecureAggregationConfig.from_json(secure),
                "privacy": None if privacy is None else ExamplePrivacy.from_json(privacy),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainInstruction:
    """Training instruction for one device; `assignment_id` is unique in the run and survives restarts.

    `block`, where set, is the part of a redundant shard to train on; its random streams then follow from the block,
    so that every holder's copy of the result is the same. Without `sends_model` no model travels with it: the
    device has its own, and asks for one when it has not.
    """

    assignment_id: str
    device_id: str
    base_version: int
    plan: TrainConfig
    codec: str | None = None
    deadline_s: float | None = None
    block: int | None = None
    used_assignments: tuple[str, ...] = ()
    sends_model: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateInstruction:
    """Instruction to evaluate the model of `version` on the test split (or, as an evaluator, the shard).

    `subject` is empty for the global model, else the device whose own model it is.
    """

    assignment_id: str
    device_id: str
    version: int
    round: int
    subject: str = ""

    def make_result(self, **values: Any) -> EvaluateResult:
        """Returns the result of this evaluation; `values` are its other fields, by name."""
        return EvaluateResult(**asdict(self), **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishEarlyInstruction:
    """Instruction to finish an assignment now and to send the result so far."""

    assignment_id: str
    device_id: str


Instruction = TrainInstruction | EvaluateInstruction | FinishEarlyInstruction


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A strategy's decision; the next is due after every wake-up, at the latest after `next_wake_s`."""

    instructions: tuple[Instruction, ...] = ()
    next_wake_s: float = 60.0


class UpdateStatus(StrEnum):
    """Outcome of an update."""

    USED = "used"
    LATE = "late"
    REJECTED = "rejected"
    FAILED = "failed"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMetrics:
    """Metrics of one assignment, measured by the device; bytes are counted on the wire, never estimated.

    The last two name the version of its whole shard, as `compute_shard_version`, and its number of examples. The six
    before describe its hardware meanwhile: the highest temperature, all throttling (the words of a heartbeat), the
    weakest signal, the rate of the link, the energy used, and the part of `compute_s` spent in thermal pacing to stay
    below its temperature limit. Each of these is None when unknown.

    `boards` are, of a site gateway's update, the boards that it is of: each `sites.BoardShare` as JSON.

    Costs before the run are part of the first update's, and in `extra` under the names of `PREFETCH_BYTE_KEYS`:
    `send_s` was not spent on them. Under `BASE_BYTE_KEY` are those of a base and compiled task that came with it.
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
    shard_version: str | None = None
    shard_examples: int | None = None
    boards: Sequence[Json] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Update of one assignment: the displacement w_end - w_start, not the new weights.

    A node of a graph sends its model itself when it is to report, and no tensors otherwise; `messages` holds its
    messages to neighbours. `is_clipped`: the guard let in less than was sent. `share`: as what part of an update it
    counts in the divisor of a mean, above 0 and at most 1: the other devices' step is no shorter beside one that was
    clipped to less than theirs.
    """

    assignment_id: str
    device_id: str
    base_version: int
    tensors: Tensors
    metrics: UpdateMetrics
    body: bytes | None = None
    received_s: float = 0.0
    messages: tuple[PeerMessage, ...] = ()
    is_clipped: bool = False
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateResult:
    """One evaluation; `source` is coordinator, device or evaluator, and all three enter the history.

    `subject` is that of the `EvaluateInstruction`. `sums` are those of the metrics that the task declares, encoded by
    `MetricSet`, and `metrics` their values. `accuracy` is None where targets are no classes.
    """

    assignment_id: str
    device_id: str
    version: int
    round: int
    source: str
    num_examples: int
    loss: float
    accuracy: float | None
    bytes_up: int = 0
    bytes_down: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    subject: str = ""
    sums: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a device, at most ten times a second and only when the plan asks."""

    device_id: str
    assignment_id: str
    iteration: int
    seconds_per_iteration: float
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAvailable:
    """A device became available."""

    device_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionFailed:
    """An assignment that brings no update: its device is gone, it failed, or its deadline passed.

    With `is_strike` an update arrived and was rejected, which counts against its device.
    """

    device_id: str
    assignment_id: str
    outcome: UpdateStatus
    reason: str
    is_strike: bool = False

    @classmethod
    def from_rejected(cls, update: Update, reason: str) -> Self:
        """Returns what takes the place of an update that is refused."""
        return cls(
            device_id=update.device_id,
            assignment_id=update.assignment_id,
            outcome=UpdateStatus.REJECTED,
            reason=reason,
            is_strike=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedUpdate:
    """An update that is used with a smaller norm than it came with, and why; follows from the events before it."""

    assignment_id: str
    device_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """A request to end the run after the work in flight."""

    reason: str


Event = Update | EvaluateResult | Progress | DeviceAvailable | InstructionFailed | StopRequested


class Role(StrEnum):
    TRAINER = "trainer"
    EVALUATOR = "evaluator"


SUPERNODE = "supernode"
"""In the store, role of a stock SuperNode of Flower, which trains, and has no agent of edgefl."""
DEMO_MARKER = ".edgefl-demo"
"""File by which the folder of a demo is known: a later one may empty it, and no Flower app has files in it."""
APP_JOB_PREFIX = "flower-"
"""Of the names of Flower apps' jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """Fleet record of one device.

    `capabilities` is the newest report, `examples` counts by task, `blocks` are those of redundant shards by task,
    `allowance` is what its hours and budgets allow, on the clock of the view; None where it reports none.
    """

    device_id: str
    role: Role = Role.TRAINER
    groups: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    examples: Mapping[str, int] = field(default_factory=dict)
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    source: str = "device"
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    allowance: Allowance | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceThroughput:
    """Measured speed of one device; None before the first measurement.

    `exchange_s` is what an update takes beside its computing, `bytes_up` the size of the last, `bytes_down` the least
    that came with an instruction: the first may have had a base with it.
    """

    seconds_per_iteration: float | None = None
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    exchange_s: float | None = None
    bytes_up: float | None = None
    bytes_down: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthMetrics:
    """Health of board and connection by the last heartbeat; None where unknown, `is_throttled` is about now."""

    temperature_c: float | None = None
    is_throttled: bool | None = None
    battery_fraction: float | None = None
    power_w: float | None = None
    is_metered: bool | None = None


class FleetView(Protocol):
    """Current state of the fleet; read-only and live, valid until the next wait.

    `now_s` is the run's clock. `devices` are those present that may work in this run; `idle` are trainers without
    outstanding work, in a fixed order; `busy` maps a device to its outstanding assignment ids, oldest first. A device
    that failed or vanished is simply in neither. `speeds`, `progress` and `health` hold only devices that reported.
    `limited` are those of `devices` with an `allowance`.
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
    def speeds(self) -> Mapping[str, DeviceThroughput]: ...
    @property
    def progress(self) -> Mapping[str, Progress]: ...
    @property
    def health(self) -> Mapping[str, HealthMetrics]: ...
    @property
    def limited(self) -> Collection[str]: ...


class Strategy(Protocol[S]):
    """A federated algorithm: who trains, how much, and how updates become the next model. Pure: no clock, no I/O.

    S is a dataclass whose fields are tensors (or mappings of them), numbers, strings and containers of those, so that
    any strategy can be checkpointed. Buffers that a state owns may be updated in place; the loop never uses an old
    state again. A strategy whose result may not depend on the order of arrival folds in assignment order: an update's
    tensors stay in the journal until they are read.

    A class that inherits from this one writes the first five methods, and gives its state the fields `model`,
    `version` and `used`. All else is optional; a run file
    names only classes that inherit from this one, from `StrategyConfig` or from `RoundStrategy`.
    """

    def init(self, model: Tensors) -> S:
        """Returns the state of a new run, version 0."""

    def assign(self, state: S, view: FleetView) -> tuple[S, Decision]:
        """Returns instructions for devices; called after every event."""

    def preview(self, state: S, view: FleetView) -> Decision:
        """Returns the first instructions of a run that is only planned; without effects."""
        return self.assign(state, view)[1]

    def receive(self, state: S, update: Update) -> S:
        """Folds one update into the state."""

    def ready(self, state: S, view: FleetView) -> bool:
        """Returns whether the next version can be aggregated; called after every event."""

    def aggregate(self, state: S) -> S:
        """Returns the state of the next version."""

    def model(self, state: S) -> Tensors:
        """Returns the newest version's tensors."""
        return cast("Any", state).model  # type: ignore[no-any-return]

    def version(self, state: S) -> int:
        """Returns the number of the newest version, 0 for the initial model."""
        return cast("Any", state).version  # type: ignore[no-any-return]

    def used(self, state: S) -> Sequence[str]:
        """Returns the updates that went into the newest version; all other arrivals were late."""
        return cast("Any", state).used  # type: ignore[no-any-return]

    def changed(self, state: S, since: int) -> Indices | None:  # noqa: ARG002 everything moves
        """Returns the entries that moved since a version, by tensor; None for all."""
        return None

    @property
    def versions_per_round(self) -> int | None:
        """Versions that the history groups to a round.

        None leaves it to the run file, and else to the number of devices in the first dispatch.
        """
        return 1

    @property
    def has_nodes(self) -> bool:
        """Whether plans make devices nodes of a graph, which send models, not displacements."""
        return False

    @property
    def is_autonomous(self) -> bool:
        """Whether devices train on while the coordinator is away, so that the run resumes by itself."""
        return False

    @property
    def root_examples(self) -> int:
        """Examples of the coordinator's own data on which its evaluator trains; 0 where it only evaluates."""
        return 0

    @property
    def needed_updates(self) -> int:
        """Updates of a version below which what the strategy promises of rogues does not hold; 0 for none."""
        return 0

    def bytes_per_device(self, model_bytes: int) -> int:  # noqa: ARG002 for subclasses
        """Returns the bytes that the state keeps for each device; `model_bytes` are those of one model."""
        return 0

    def bytes_per_message(self, model_bytes: int) -> int:  # noqa: ARG002 likewise
        """Returns the bytes of the largest message between devices; 0 where they send each other none."""
        return 0

    def finish(self, state: S) -> S:
        """Called once when nothing more will be assigned: work in flight may be closed without its successors."""
        return state

    def halve_learning_rate(self, state: S) -> S | None:  # noqa: ARG002 for subclasses
        """Returns the state in which later instructions have half of the learning rate; None where it cannot be."""
        return None

    def restore_model(self, state: S, model: Mapping[str, Array]) -> S | None:  # noqa: ARG002 likewise
        """Returns the state with an earlier model, without what followed from later ones; None where it cannot be."""
        return None

    def resumed(self, state: S) -> S:
        """Returns the state with which a resumed run continues, without the assignments in flight."""
        return state

    def node_models(self, state: S) -> Mapping[str, Tensors]:  # noqa: ARG002 likewise
        """Returns the devices' own models by device, where each has one: evaluated beside the global model."""
        return {}

    def facts(self, state: S) -> Mapping[str, float]:  # noqa: ARG002 likewise
        """Returns figures of the newest version for the history, such as the disagreement of devices' models."""
        return {}


class ParticipationPolicy(Protocol):
    """Participation policy between fleet and strategy: eligible devices, budgets, accepted updates.

    `blocked_devices` get no more work in this run.
    """

    @property
    def blocked_devices(self) -> Collection[str]: ...
    def eligible_view(self, view: FleetView) -> FleetView:
        """Returns the strategy's view of the fleet: `idle` without devices in back-off."""

    def adapt_instruction(self, instruction: TrainInstruction, view: FleetView) -> TrainInstruction:
        """Returns the instruction adapted to its device: smaller when unhealthy, in a suitable codec."""

    def rejection_reason(self, update: Update) -> str | None:
        """Returns why an update is rejected, or None; a rejection counts against its device."""

    def is_strike(self, failure: InstructionFailed) -> bool:
        """Returns whether a failure counts against its device."""

    def record_rejection(self, device_id: str) -> None:
        """Counts a failure, or a rejection found in the journal, where the update itself is gone."""

    def observe(self, event: Event, accuracy: float | None) -> None:
        """Records an event; `accuracy` is that of a version whose evaluation the event completed."""

    def admit(self, update: Update) -> Sequence[Update]:
        """Returns what the strategy receives of a journaled update: itself, clipped, or nothing while it is held."""

    def release(self, view: FleetView) -> Sequence[Update]:
        """Returns held updates that the strategy may receive now."""

    def hold_view(self, view: FleetView) -> FleetView:
        """Returns the view in which devices whose updates are held are busy with them."""

    def observe_decision(self, decision: Decision) -> Decision:
        """Returns the strategy's decision without what concerns held updates, which it then receives at once."""

    def record_version(self, version: int) -> None:
        """Records that a version was aggregated; later updates are judged against the ones before it."""

    def pop_clipped(self) -> Sequence[ClippedUpdate]:
        """Returns the updates that were clipped since the last call."""


class ModelProvider(Protocol):
    """Source of the model that a fleet sends out."""

    @property
    def version(self) -> int: ...
    def model(self) -> Tensors: ...
    def device_model(self, subject: str) -> Tensors:
        """Returns the model of one device where each has its own; the global one for an empty subject."""

    def changed(self, since: int) -> Indices | None: ...


class Fleet(Protocol):
    """Devices that execute instructions: the live fleet (Flower and MQTT) or the simulated one (an event heap)."""

    def view(self) -> FleetView: ...
    def dispatch(self, instructions: Sequence[Instruction], source: ModelProvider) -> None: ...
    def wait(self, until_s: float) -> Sequence[Event]: ...


class Journal(Protocol):
    """Write-ahead journal of a run: events are on disk before they take effect.

    `record_events` appends events and returns them with their bodies readable from the journal; nothing appended
    is acknowledged or dispatched before `commit` returns. `record_aggregation` receives the new state, so that a
    journal may checkpoint it at any time.
    """

    def record_events(self, events: Sequence[Event]) -> Sequence[Event]: ...
    def record_decision(self, decision: Decision) -> None: ...
    def record_aggregation(self, version: int, assignment_ids: Sequence[str], state: object) -> None: ...
    def commit(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Examples, row by row.

    Attributes:
        inputs: [n, ...] numbers; those of a large shard stay in its files, and are read by row numbers or ranges.
            A dict of such arrays becomes `NamedArrays`, which are indexed likewise.
        targets: [n, ...] what the model is to say: classes, values or labels, as the task's loss takes them. A dict
            of such arrays, one for each of several losses, becomes one structured array [n] with these names.
        weights: [n] factor of an example's loss and gradient, finite and at least 0; None for 1 each.
        groups: [n] whom or what an example comes from, for natural shards; None where that is not known.
        weak: [n] whether a target is a guess: such an example is trained on, and never tested on; None for none.
        times: [n] seconds since 1970 at which examples were taken, or [n, 2] from when to when what is in one lasts,
            its target too; for a task whose data is split by time (`split_period`). None where that is not known.
    """

    inputs: Inputs
    targets: Array
    weights: Array | None = None
    groups: Array | None = None
    weak: Array | None = None
    times: Array | None = None

    def __post_init__(self) -> None:
        """Raises a `DataError` where inputs or targets are a dict of what are no arrays of the same length."""
        object.__setattr__(self, "inputs", wrap_inputs(self.inputs))
        object.__setattr__(self, "targets", wrap_targets(self.targets))

    def __len__(self) -> int:
        return len(self.targets)

    def find_unlabelled(self) -> Array | None:
        """Returns [n] whether an example has no label: it is weak and weighs nothing; None where all have one."""
        if self.weak is None or self.weights is None:
            return None
        found: Array = self.weak & (self.weights == 0)
        return found if found.any() else None

    def take(self, rows: Array | slice) -> Dataset:
        """Returns the examples of these row numbers, of a mask, or of a range."""
        return Dataset(
            inputs=self.inputs[rows],
            targets=self.targets[rows],
            weights=None if self.weights is None else self.weights[rows],
            groups=None if self.groups is None else self.groups[rows],
            weak=None if self.weak is None else self.weak[rows],
            times=None if self.times is None else self.times[rows],
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Dataset]) -> Dataset:
        """Returns the examples of all parts in order; groups and times only where every part has them.

        Where any part has weights, or weak examples, the others' are filled up: 1 each, and none weak.
        """
        lengths = list(map(len, parts))
        groups = [part.groups for part in parts if part.groups is not None]
        times = [part.times for part in parts if part.times is not None]
        return cls(
            inputs=concatenate_inputs([part.inputs for part in parts]),
            targets=np.concatenate([part.targets for part in parts]),
            weights=_concatenate_filled([part.weights for part in parts], lengths, 1.0),
            groups=np.concatenate(groups) if len(groups) == len(parts) else None,
            weak=concatenate_masks([part.weak for part in parts], lengths),
            times=np.concatenate(times) if len(times) == len(parts) else None,
        )


def concatenate_masks(masks: Sequence[Array | None], lengths: Sequence[int]) -> Array | None:
    """Returns [n] bool, none in a part without a mask; None where no part has one."""
    return _concatenate_filled(masks, lengths, False)


def _concatenate_filled(arrays: Sequence[Array | None], lengths: Sequence[int], value: float) -> Array | None:
    dtypes = [array.dtype for array in arrays if array is not None]
    if not dtypes:
        return None
    return np.concatenate(
        [
            np.full(length, value, dtypes[0]) if array is None else array
            for array, length in zip(arrays, lengths, strict=True)
        ]
    )


class Learner(Protocol):
    """A model in memory, ready to train: NumPy arrays or torch tensors behind the same few calls.

    `parameters` and `gradients` are the backend's own arrays by tensor name; local algorithms work on them
    in place with `+=`, `-=`, `*=` and scalars only, so one implementation serves both backends.
    """

    @property
    def parameters(self) -> Mapping[str, Any]: ...
    @property
    def gradients(self) -> Mapping[str, Any]: ...
    def load(self, tensors: Tensors) -> None:
        """Loads the named tensors; all others (local tensors) stay."""

    def read(self) -> dict[str, Array]:
        """Returns a copy of every tensor, in the order of the task's shapes."""

    def gradient(self, batch: Dataset) -> float:
        """Fills `gradients` with the mean gradient over the batch and returns the mean loss."""

    def evaluate(self, data: Dataset) -> tuple[float, float]:
        """Returns mean loss and accuracy, which is NaN where targets are no classes."""


class Task(Protocol):
    """A model, a loss, and a reader of shards, written by users; see the README.

    A class that inherits from this one writes `name` and `read`, and has a `model` (`DenseModel`, `TorchModel`) that
    brings the other three methods; or it writes those itself. Its `loss` is the model's: a name, a `Loss`, or a
    function of torch tensors (outputs, targets) that returns one number for each example; or a dict of such, one for
    each of several targets, of which `loss_weights` and `num_outputs` are dicts as well. A method
    `augment(inputs, targets, rng)`, where it has one, changes each batch that is trained on. With `split_period`, a
    time such as `"1d"`, whole periods of that length are kept for testing; `read` returns `times` then.
    """

    @property
    def name(self) -> str:
        """The name of the task in run files and shards."""

    def shapes(self) -> ModelSpec:
        """Returns name, shape and type of every tensor of the model, in the order in which they travel."""
        return _get_model(self).shapes()  # type: ignore[no-any-return]

    def init(self, seed: int) -> dict[str, Array]:
        """Returns the initial model, the same for the same seed on every machine."""
        return _get_model(self).init(seed)  # type: ignore[no-any-return]

    def read(self, path: str) -> Dataset:
        """Reads the device's data: a shard file, or a folder that may have grown since."""

    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> Learner:
        """Returns a warm learner; `accelerator` is cpu or cuda, `threads` None leaves the backend's choice."""
        loss = describe_loss(self)
        options = {} if loss is None else {"loss": loss}
        return _get_model(self).learner(accelerator=accelerator, threads=threads, **options)  # type: ignore[no-any-return]


def _get_model(task: Task) -> Any:
    model = getattr(task, "model", None)
    if model is None:
        raise TaskError(
            f"task {type(task).__name__} has no model; give it one (model = DenseModel(...)), or write shapes, init "
            "and learner"
        )
    return model


def derive_seed(*parts: int | str) -> int:
    """Returns a 128-bit seed that depends on every part, the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def derive_rng(*parts: int | str) -> Generator:
    """Returns the generator for (seed, run, version, device, ...); see `derive_seed`."""
    return np.random.default_rng(derive_seed(*parts))
