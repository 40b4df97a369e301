"""Partition schemes, one shard per device: pure functions from labels or people to row numbers."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.random import Generator

from edgefl.core.errors import ConfigError, DataError
from edgefl.core.types import Array

SCHEMES = (
    "natural", "iid", "contiguous", "by-class", "sorted", "disorder:F", "dirichlet:A", "labels:K", "classes:K",
    "shards:K", "power:P", "redundant:R", "duplicate:R",
)  # fmt: skip
PARTITIONERS = {
    "IidPartitioner": "iid",
    "NaturalIdPartitioner": "natural",
    "DirichletPartitioner": "dirichlet",
    "PathologicalPartitioner": "labels",
    "ShardPartitioner": "shards",
    "LinearPartitioner": "power:1",
    "SquarePartitioner": "power:2",
}
"""Classes of `flwr-datasets`, and the schemes that do the same; a number after a colon is that of the scheme."""
ECL_CLASS_ORDER = (7, 8, 2, 6, 4, 5, 1, 3, 0, 9)
"""Order of the ten classes in the split of ECL-ISVR."""
NUM_STRATA = 10
"""Parts of equal number into which values are cut where a scheme goes by classes."""
MIN_EXAMPLES = 10
MAX_DIRICHLET_DRAWS = 200
MAX_BLOCKS = 10_000

_REDUNDANT = ("redundant", "duplicate")
_SCHEME_PATTERN = re.compile(
    r"(natural|iid|contiguous|by-class|sorted)|(dirichlet|disorder|power):([0-9.eE+-]+)|"
    r"(labels|classes|shards|redundant|duplicate):(\d+)"
)

BlockRows = Mapping[int, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionScheme:
    """A partition scheme; `parameter` is A, F, K or R where the scheme has one.

    Attributes:
        blocks: how the blocks of a redundant scheme are cut, as if each were a device; None: at random.
    """

    name: str
    parameter: float = 0.0
    blocks: PartitionScheme | None = None

    @property
    def uses_labels(self) -> bool:
        """Whether it goes by the classes of the rows."""
        if self.name in _REDUNDANT:
            return self.blocks is not None and self.blocks.uses_labels
        return self.name not in {"natural", "iid", "contiguous", "power"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Partitioning:
    """Row numbers per device, and for redundant schemes the range of each block in the device's rows."""

    rows: tuple[Array, ...]
    blocks: tuple[BlockRows, ...] = field(default=())


def parse_scheme(text: str) -> PartitionScheme:
    """Returns the scheme of a typed name, or of a chain such as `sorted|redundant:2`: blocks, then who holds them.

    Names of `PARTITIONERS` stand for the schemes that do the same: `DirichletPartitioner:0.5`.

    Raises:
        ConfigError: there is no such scheme, its number is out of range, or schemes do not go in this order.
    """
    first, bar, last = text.partition("|")
    if not bar:
        return _parse_one(text)
    blocks, scheme = _parse_one(first.strip()), _parse_one(last.strip())
    if scheme.name not in _REDUNDANT or blocks.name in _REDUNDANT:
        raise ConfigError(
            f"scheme {text!r} must cut blocks before the bar, and say behind it who holds them: "
            "SCHEME|redundant:R or SCHEME|duplicate:R"
        )
    return replace(scheme, blocks=blocks)


def _parse_one(text: str) -> PartitionScheme:
    name, colon, number = text.partition(":")
    match = _SCHEME_PATTERN.fullmatch(PARTITIONERS.get(name, name) + colon + number)
    if not match:
        known: tuple[str, ...] = SCHEMES
        if name.endswith("Partitioner"):
            needs_number = "dirichlet", "labels", "shards"
            known = tuple(f"{one}:NUMBER" if PARTITIONERS[one] in needs_number else one for one in PARTITIONERS)
        raise ConfigError(f"scheme must be one of {', '.join(known)}, got {text!r:.200}")
    plain_scheme, fraction_scheme, fraction, count_scheme, count = match.groups()
    if plain_scheme:
        return PartitionScheme(name=plain_scheme)
    try:
        scheme = PartitionScheme(name=fraction_scheme or count_scheme, parameter=float(fraction or count))
    except ValueError:
        raise ConfigError(f"scheme {text!r} needs a number after the colon") from None
    if scheme.name == "disorder":
        if not 0 <= scheme.parameter <= 1:
            raise ConfigError(f"the fraction of scheme {text!r} must lie in 0 to 1")
        return scheme
    if not (math.isfinite(scheme.parameter) and scheme.parameter > 0):
        raise ConfigError(f"the number of scheme {text!r} must be finite and above 0")
    return scheme


def partition_rows(
    scheme: PartitionScheme, *, labels: Array, num_devices: int, rng: Generator, groups: Array | None = None
) -> Partitioning:
    """Returns the rows of each device; in a redundant scheme each row is on r devices.

    Only `sorted` and `disorder` leave rows out, fewer than there are devices, or blocks in a chain with them.

    Args:
        scheme: the partition scheme.
        labels: [n] classes.
        num_devices: number of shards.
        rng: orders rows and samples proportions.
        groups: [n] person of each row, for the natural scheme.

    Raises:
        ConfigError: the scheme cannot serve that many devices, or a device would get nothing.
        DataError: the natural scheme, and the data set does not name the people of its rows.
    """
    if not 1 <= num_devices <= len(labels):
        raise ConfigError(f"devices must be 1 to {len(labels)} (the number of examples), got {num_devices}")
    k = int(scheme.parameter)
    if scheme.name in _REDUNDANT:
        list_holders = list_subset_holders if scheme.name == "redundant" else list_duplicate_holders
        holders = list_holders(num_devices, k)
        return assign_blocks(_cut_blocks(scheme, len(holders), labels, rng, groups), holders, num_devices)
    partitions: Mapping[str, Callable[[], list[Array]]] = {
        "iid": lambda: _split_shuffled(np.arange(len(labels)), num_devices, rng),
        "contiguous": lambda: np.array_split(np.arange(len(labels)), num_devices),
        "by-class": lambda: partition_by_class(labels, num_devices, rng),
        "sorted": lambda: partition_sorted(labels, num_devices),
        "disorder": lambda: partition_disordered(labels, num_devices, scheme.parameter, rng),
        "power": lambda: partition_by_power(len(labels), num_devices, scheme.parameter, rng),
        "shards": lambda: partition_sorted_shards(labels, num_devices, k, rng),
        "dirichlet": lambda: partition_dirichlet(labels, num_devices, scheme.parameter, rng),
        "labels": lambda: partition_by_label_count(labels, num_devices, k, rng),
        "classes": lambda: partition_by_holders(labels, list_consecutive_classes(labels, num_devices, k), rng),
        "natural": lambda: partition_by_group(groups, num_devices),
    }
    rows = partitions[scheme.name]()
    _require_non_empty(rows, scheme)
    return Partitioning(rows=tuple(rows))


def compute_strata(targets: Array) -> Array:
    """Returns [n] numbers of parts that stand for classes: about equally many examples each, by size of the target.

    Args:
        targets: [n, ...] values; of several values of an example their mean counts.
    """
    sizes = targets.reshape(len(targets), -1).astype(np.float64).mean(axis=1)
    edges = np.quantile(sizes, np.arange(1, NUM_STRATA) / NUM_STRATA)
    strata: Array = np.searchsorted(edges, sizes, side="right")
    return strata


def partition_by_power(num_rows: int, num_devices: int, power: float, rng: Generator) -> list[Array]:
    """Returns rows at random, for the device with number i from 1 a share in proportion to i to this power.

    Source: `LinearPartitioner` and `SquarePartitioner` of flwr-datasets, powers 1 and 2.
    """
    # Of the last device's share, so that a large power is finite.
    ends = np.cumsum((np.arange(1, num_devices + 1) / num_devices) ** power)
    cuts = np.rint(num_rows * ends[:-1] / ends[-1]).astype(np.int64)
    return np.split(rng.permutation(num_rows), cuts)


def partition_by_group(groups: Array | None, num_devices: int) -> list[Array]:
    """Returns the rows of whole people, spread so that devices get about equally many rows.

    The person with the most rows goes first, each to the device with the fewest rows so far.
    """
    if groups is None:
        raise DataError("this data set does not say who its examples come from; use another scheme than natural")
    people, counts = np.unique(groups, return_counts=True)
    if num_devices > len(people):
        raise ConfigError(f"natural shards are whole people: at most {len(people)} devices, got {num_devices}")
    assigned: list[list[int]] = [[] for _ in range(num_devices)]
    load = np.zeros(num_devices, np.int64)
    for person in np.argsort(-counts, kind="stable"):
        lightest = int(load.argmin())
        assigned[lightest].append(int(person))
        load[lightest] += counts[person]
    return [np.flatnonzero(np.isin(groups, people[indices])) for indices in sorted(assigned, key=min)]


def partition_by_class(labels: Array, num_devices: int, rng: Generator) -> list[Array]:
    """Returns rows with as few classes per device as possible: whole classes, or equal parts of one class."""
    classes = np.unique(labels)
    shares: list[list[Array]] = [[] for _ in range(num_devices)]
    for position, label in enumerate(classes):
        holders = [d for d in range(num_devices) if d % len(classes) == position] or [position % num_devices]
        _distribute_rows(np.flatnonzero(labels == label), holders, shares, rng)
    return [np.concatenate(share) if share else np.empty(0, np.int64) for share in shares]


def partition_sorted(labels: Array, num_devices: int) -> list[Array]:
    """Returns equal contiguous parts of the rows ordered by class; the remainder is omitted.

    Source: split_by_class of ESync. Differs from it: a device trains on its part in a fresh random order each epoch.
    """
    order, length = np.argsort(labels, kind="stable"), len(labels) // num_devices
    return [order[device * length : (device + 1) * length] for device in range(num_devices)]


def partition_disordered(labels: Array, num_devices: int, fraction: float, rng: Generator) -> list[Array]:
    """Returns parts as `partition_sorted` does, whose first rows are dealt anew: 0 is sorted, 1 is i.i.d.

    Source: True_Non_IID of Parallel-SGD, which sorts a batch's places by class and shuffles the first part of the
    data. Differs from it: one seed for all devices, so that no row is on two of them.
    """
    parts = partition_sorted(labels, num_devices)
    count = round(fraction * len(parts[0]))
    dealt = _split_shuffled(np.concatenate([part[:count] for part in parts]), num_devices, rng)
    return [np.concatenate([share, part[count:]]) for share, part in zip(dealt, parts, strict=True)]


def partition_sorted_shards(labels: Array, num_devices: int, k: int, rng: Generator) -> list[Array]:
    """Returns k random ones of k·devices equal parts of the class-sorted rows per device.

    Source: McMahan et al., AISTATS 2017, section 3, its pathological non-IID partition (there k = 2).
    """
    num_parts = k * num_devices
    if num_parts > len(labels):
        raise ConfigError(f"shards:{k} on {num_devices} devices makes {num_parts} parts of {len(labels)} examples")
    parts = np.array_split(np.argsort(labels, kind="stable"), num_parts)
    assignment = rng.permutation(num_parts).reshape(num_devices, k)
    return [np.concatenate([parts[part] for part in parts_of_device]) for parts_of_device in assignment]


def partition_by_label_count(labels: Array, num_devices: int, k: int, rng: Generator) -> list[Array]:
    """Returns rows of exactly k classes per device; the holders of a class share it equally."""
    classes = np.unique(labels)
    if not 1 <= k <= len(classes):
        raise ConfigError(f"labels:K needs 1 <= K <= {len(classes)} (the number of classes), got {k}")
    if num_devices * k < len(classes):
        raise ConfigError(
            f"{num_devices} devices with {k} of {len(classes)} classes each would leave classes to nobody"
        )
    # Dealing one shuffled pack in turn gives k different classes to each device, and every class to some device.
    pack = rng.permutation(classes)
    assigned = [{int(pack[(device * k + i) % len(pack)]) for i in range(k)} for device in range(num_devices)]
    return partition_by_holders(labels, assigned, rng)


def list_consecutive_classes(labels: Array, num_devices: int, k: int) -> list[set[int]]:
    """Returns the k classes of each device: consecutive ones of a fixed order, the next device's k/2 further on.

    Source: with ten classes, eight devices and k = 8 it is the split of Niwa et al., ICML 2021 (ECL-ISVR).
    """
    classes = [int(label) for label in np.unique(labels)]
    if not 1 <= k <= len(classes):
        raise ConfigError(f"classes:K needs 1 <= K <= {len(classes)} (the number of classes), got {k}")
    order = ECL_CLASS_ORDER if set(classes) == set(ECL_CLASS_ORDER) else classes
    step = max(1, k // 2)
    held = [{order[(device * step + i) % len(order)] for i in range(k)} for device in range(num_devices)]
    if missing := sorted(set(classes).difference(*held)):
        raise ConfigError(
            f"{num_devices} devices with {k} of {len(classes)} classes each, {step} apart, would leave class "
            f"{missing[0]} to nobody"
        )
    return held


def partition_by_holders(labels: Array, held: Sequence[Collection[int]], rng: Generator) -> list[Array]:
    """Returns the rows of devices that hold these classes; the holders of a class share it equally."""
    shares: list[list[Array]] = [[] for _ in held]
    for label in np.unique(labels):
        holders = [device for device, classes in enumerate(held) if int(label) in classes]
        _distribute_rows(np.flatnonzero(labels == label), holders, shares, rng)
    return [np.concatenate(share) for share in shares]


def partition_dirichlet(labels: Array, num_devices: int, alpha: float, rng: Generator) -> list[Array]:
    """Returns rows with class proportions per device sampled from a Dirichlet distribution.

    Samples again while a device has fewer than ten examples (or half an equal share, if that is less), and
    keeps the best sample.

    Source: Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution, 2019; the resampling
    as in Li et al., NIID-Bench, ICDE 2022.
    """
    min_examples = min(MIN_EXAMPLES, max(1, len(labels) // (2 * num_devices)))
    best: list[Array] = []
    for _ in range(MAX_DIRICHLET_DRAWS):
        rows = _sample_dirichlet(labels, num_devices, alpha, rng)
        if not best or min(map(len, rows)) > min(map(len, best)):
            best = rows
        if min(map(len, best)) >= min_examples:
            break
    return best


def list_subset_holders(num_devices: int, r: int) -> list[tuple[int, ...]]:
    """Returns the holders of each block: every r-subset of the devices holds one.

    Source: IIDBlockAssignment of Parallel-SGD.
    """
    if not 1 <= r <= num_devices:
        raise ConfigError(f"redundant:R needs 1 <= R <= {num_devices} (the number of devices), got {r}")
    if (count := math.comb(num_devices, r)) > MAX_BLOCKS:
        raise ConfigError(
            f"redundant:{r} on {num_devices} devices makes {count} blocks, at most {MAX_BLOCKS}; use duplicate:{r}"
        )
    return list(itertools.combinations(range(num_devices), r))


def list_duplicate_holders(num_devices: int, r: int) -> list[tuple[int, ...]]:
    """Returns the holders of each block: devices in groups of r, one block per group.

    Source: DuplicateAssignment of Parallel-SGD.
    """
    if not 1 <= r <= num_devices or num_devices % r:
        raise ConfigError(
            f"duplicate:R needs devices that divide into groups of R, got {num_devices} devices and R = {r}"
        )
    return [tuple(range(start, start + r)) for start in range(0, num_devices, r)]


def assign_blocks(parts: Sequence[Array], holders: Sequence[tuple[int, ...]], num_devices: int) -> Partitioning:
    """Returns the rows of each device: those of its blocks, every block whole and in one order on all its holders."""
    rows: list[list[Array]] = [[] for _ in range(num_devices)]
    blocks: list[dict[int, tuple[int, int]]] = [{} for _ in range(num_devices)]
    for block, (part, block_holders) in enumerate(zip(parts, holders, strict=True)):
        for device in block_holders:
            start = sum(map(len, rows[device]))
            rows[device].append(part)
            blocks[device][block] = (start, start + len(part))
    return Partitioning(rows=tuple(np.concatenate(part) for part in rows), blocks=tuple(blocks))


def _cut_blocks(
    scheme: PartitionScheme, num_blocks: int, labels: Array, rng: Generator, groups: Array | None
) -> Sequence[Array]:
    """Returns the rows of each block; a scheme before the bar cuts blocks as it cuts shards.

    Source: Parallel-SGD, whose transforms such as Make_Non_IID order the data before a block assignment cuts it.
    """
    if num_blocks > len(labels):
        raise ConfigError(f"{len(labels)} examples cannot fill {num_blocks} blocks; use fewer devices or duplicate:R")
    if scheme.blocks is None:
        return _split_shuffled(np.arange(len(labels)), num_blocks, rng)
    try:
        return partition_rows(scheme.blocks, labels=labels, num_devices=num_blocks, rng=rng, groups=groups).rows
    except ConfigError as error:
        raise ConfigError(
            f"the {num_blocks} blocks of {scheme.name} are cut as {num_blocks} devices' shards: {error}"
        ) from error


def _sample_dirichlet(labels: Array, num_devices: int, alpha: float, rng: Generator) -> list[Array]:
    shares: list[list[Array]] = [[] for _ in range(num_devices)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        ends = (np.cumsum(rng.dirichlet(np.full(num_devices, alpha))) * len(rows)).round().astype(np.int64)
        for share, part in zip(shares, np.split(rows, ends[:-1]), strict=True):
            share.append(part)
    return [np.concatenate(share) for share in shares]


def _distribute_rows(rows: Array, holders: Sequence[int], shares: list[list[Array]], rng: Generator) -> None:
    for device, part in zip(holders, _split_shuffled(rows, len(holders), rng), strict=True):
        shares[device].append(part)


def _split_shuffled(rows: Array, num_parts: int, rng: Generator) -> list[Array]:
    return np.array_split(rng.permutation(rows), num_parts)


def _require_non_empty(rows: Sequence[Array], scheme: PartitionScheme) -> None:
    empty = [device for device, part in enumerate(rows, 1) if not len(part)]
    if empty:
        raise ConfigError(
            f"scheme {scheme.name} leaves device {empty[0]} of {len(rows)} without examples; "
            "use fewer devices or another scheme"
        )
