"""Schemes that cut a data set into one shard per device: pure functions from labels or people to row numbers."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

from edgefl.errors import ConfigError, DataError
from edgefl.types import Array

SCHEMES = (
    "natural", "iid", "by-class", "sorted", "dirichlet:A", "labels:K", "shards:K", "redundant:R", "duplicate:R",
)  # fmt: skip
MIN_EXAMPLES = 10
DIRICHLET_DRAWS = 200
MAX_BLOCKS = 10_000

_SPEC = re.compile(
    r"(natural|iid|by-class|sorted)|(dirichlet):([0-9.eE+-]+)|(labels|shards|redundant|duplicate):(\d+)"
)

Blocks = Mapping[int, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How to cut; `parameter` is A, K or R where the scheme has one."""

    name: str
    parameter: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Row numbers per device, and for redundant schemes where each block lies in the device's rows."""

    rows: tuple[Array, ...]
    blocks: tuple[Blocks, ...] = field(default=())


def parse_scheme(text: str) -> Scheme:
    """Returns the scheme that a user typed.

    Raises:
        ConfigError: there is no such scheme, or its number is out of range.
    """
    match = _SPEC.fullmatch(text)
    if not match:
        raise ConfigError(f"scheme must be one of {', '.join(SCHEMES)}, got {text!r}")
    plain, dirichlet_, alpha, counted, count = match.groups()
    if plain:
        return Scheme(name=plain)
    try:
        scheme = Scheme(name=dirichlet_ or counted, parameter=float(alpha or count))
    except ValueError:
        raise ConfigError(f"scheme {text!r} needs a number after the colon") from None
    if not (math.isfinite(scheme.parameter) and scheme.parameter > 0):
        raise ConfigError(f"the number of scheme {text!r} must be finite and above 0")
    return scheme


def shard_rows(
    scheme: Scheme, *, labels: Array, devices: int, rng: Generator, groups: Array | None = None
) -> Sharding:
    """Returns which rows go to which device: each to one device, or to r of them in a redundant scheme.

    Only `sorted` leaves rows out, fewer than there are devices.

    Args:
        scheme: how to cut.
        labels: [n] classes.
        devices: number of shards.
        rng: orders rows and draws proportions.
        groups: [n] who each row comes from, for the natural scheme.

    Raises:
        ConfigError: the scheme cannot serve so many devices, or a device would get nothing.
        DataError: the natural scheme, and the data set does not say who its rows come from.
    """
    if not 1 <= devices <= len(labels):
        raise ConfigError(f"devices must be 1 to {len(labels)} (the number of examples), got {devices}")
    k = int(scheme.parameter)
    match scheme.name:
        case "iid":
            rows = _shuffled_parts(np.arange(len(labels)), devices, rng)
        case "by-class":
            rows = by_class(labels, devices, rng)
        case "sorted":
            rows = sorted_by_class(labels, devices)
        case "shards":
            rows = sorted_shards(labels, devices, k, rng)
        case "dirichlet":
            rows = dirichlet(labels, devices, scheme.parameter, rng)
        case "labels":
            rows = labels_per_device(labels, devices, k, rng)
        case "natural":
            rows = natural(groups, devices)
        case "redundant":
            return redundant(len(labels), subsets(devices, k), devices, rng)
        case _:
            return redundant(len(labels), duplicates(devices, k), devices, rng)
    _check_none_empty(rows, scheme)
    return Sharding(rows=tuple(rows))


def natural(groups: Array | None, devices: int) -> list[Array]:
    """Returns the rows of whole people, spread so that devices get about equally many rows.

    The largest person goes first, each to the device with the fewest rows so far.
    """
    if groups is None:
        raise DataError("this data set does not say who its examples come from; use another scheme than natural")
    people, counts = np.unique(groups, return_counts=True)
    if devices > len(people):
        raise ConfigError(f"natural shards are whole people: at most {len(people)} devices, got {devices}")
    held: list[list[int]] = [[] for _ in range(devices)]
    load = np.zeros(devices, np.int64)
    for person in np.argsort(-counts, kind="stable"):
        lightest = int(load.argmin())
        held[lightest].append(int(people[person]))
        load[lightest] += counts[person]
    return [np.flatnonzero(np.isin(groups, held_here)) for held_here in sorted(held, key=min)]


def by_class(labels: Array, devices: int, rng: Generator) -> list[Array]:
    """Returns rows with as few classes on a device as can be: whole classes, or equal parts of one class."""
    classes = np.unique(labels)
    shares: list[list[Array]] = [[] for _ in range(devices)]
    for position, label in enumerate(classes):
        holders = [d for d in range(devices) if d % len(classes) == position] or [position % devices]
        _deal(np.flatnonzero(labels == label), holders, shares, rng)
    return [np.concatenate(share) if share else np.empty(0, np.int64) for share in shares]


def sorted_by_class(labels: Array, devices: int) -> list[Array]:
    """Returns contiguous parts of the rows ordered by class, all equally long; what remains is left out.

    Source: split_by_class of ESync. Differs from it: a device trains on its part in a fresh random order each epoch.
    """
    order, length = np.argsort(labels, kind="stable"), len(labels) // devices
    return [order[device * length : (device + 1) * length] for device in range(devices)]


def sorted_shards(labels: Array, devices: int, k: int, rng: Generator) -> list[Array]:
    """Returns for each device k random ones of the k·devices equal parts that the rows ordered by class are cut into.

    Source: McMahan et al., AISTATS 2017, section 3, its pathological non-IID partition (there k = 2).
    """
    num_parts = k * devices
    if num_parts > len(labels):
        raise ConfigError(f"shards:{k} on {devices} devices makes {num_parts} parts of {len(labels)} examples")
    parts = np.array_split(np.argsort(labels, kind="stable"), num_parts)
    dealt = rng.permutation(num_parts).reshape(devices, k)
    return [np.concatenate([parts[part] for part in hand]) for hand in dealt]


def labels_per_device(labels: Array, devices: int, k: int, rng: Generator) -> list[Array]:
    """Returns rows of exactly k classes on each device; the devices that hold a class share it equally."""
    classes = np.unique(labels)
    if not 1 <= k <= len(classes):
        raise ConfigError(f"labels:K needs 1 <= K <= {len(classes)} (the number of classes), got {k}")
    if devices * k < len(classes):
        raise ConfigError(f"{devices} devices with {k} of {len(classes)} classes each would leave classes to nobody")
    # Dealing one shuffled pack round and round gives k different classes to each and every class to somebody.
    pack = rng.permutation(classes)
    held = [{int(pack[(device * k + i) % len(pack)]) for i in range(k)} for device in range(devices)]
    shares: list[list[Array]] = [[] for _ in range(devices)]
    for label in classes:
        holders = [device for device in range(devices) if int(label) in held[device]]
        _deal(np.flatnonzero(labels == label), holders, shares, rng)
    return [np.concatenate(share) for share in shares]


def dirichlet(labels: Array, devices: int, alpha: float, rng: Generator) -> list[Array]:
    """Returns rows whose class proportions per device are drawn from a Dirichlet distribution.

    Draws again while a device has fewer than ten examples (or half an equal share, if that is less), and
    keeps the best draw.

    Source: Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution, 2019; the drawing again
    as in Li et al., NIID-Bench, ICDE 2022.
    """
    enough = min(MIN_EXAMPLES, max(1, len(labels) // (2 * devices)))
    best: list[Array] = []
    for _ in range(DIRICHLET_DRAWS):
        rows = _dirichlet_draw(labels, devices, alpha, rng)
        if not best or min(map(len, rows)) > min(map(len, best)):
            best = rows
        if min(map(len, best)) >= enough:
            break
    return best


def subsets(devices: int, r: int) -> list[tuple[int, ...]]:
    """Returns the holders of each block: every r-subset of the devices holds one.

    Source: IIDBlockAssignment of Parallel-SGD.
    """
    if not 1 <= r <= devices:
        raise ConfigError(f"redundant:R needs 1 <= R <= {devices} (the number of devices), got {r}")
    if (count := math.comb(devices, r)) > MAX_BLOCKS:
        raise ConfigError(
            f"redundant:{r} on {devices} devices makes {count} blocks, at most {MAX_BLOCKS}; use duplicate:{r}"
        )
    return list(itertools.combinations(range(devices), r))


def duplicates(devices: int, r: int) -> list[tuple[int, ...]]:
    """Returns the holders of each block: devices in groups of r, one block per group.

    Source: DuplicateAssignment of Parallel-SGD.
    """
    if not 1 <= r <= devices or devices % r:
        raise ConfigError(
            f"duplicate:R needs devices that divide into groups of R, got {devices} devices and R = {r}"
        )
    return [tuple(range(start, start + r)) for start in range(0, devices, r)]


def redundant(n: int, holders: Sequence[tuple[int, ...]], devices: int, rng: Generator) -> Sharding:
    """Returns rows cut into equal shuffled blocks, every block whole and in one order on each of its holders."""
    if len(holders) > n:
        raise ConfigError(f"{n} examples cannot fill {len(holders)} blocks; use fewer devices or duplicate:R")
    parts = _shuffled_parts(np.arange(n), len(holders), rng)
    rows: list[list[Array]] = [[] for _ in range(devices)]
    blocks: list[dict[int, tuple[int, int]]] = [{} for _ in range(devices)]
    for block, (part, on) in enumerate(zip(parts, holders, strict=True)):
        for device in on:
            start = sum(map(len, rows[device]))
            rows[device].append(part)
            blocks[device][block] = (start, start + len(part))
    return Sharding(rows=tuple(np.concatenate(part) for part in rows), blocks=tuple(blocks))


def _dirichlet_draw(labels: Array, devices: int, alpha: float, rng: Generator) -> list[Array]:
    shares: list[list[Array]] = [[] for _ in range(devices)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        cuts = (np.cumsum(rng.dirichlet(np.full(devices, alpha))) * len(rows)).round().astype(np.int64)
        for share, part in zip(shares, np.split(rows, cuts[:-1]), strict=True):
            share.append(part)
    return [np.concatenate(share) for share in shares]


def _deal(rows: Array, holders: Sequence[int], shares: list[list[Array]], rng: Generator) -> None:
    for device, part in zip(holders, _shuffled_parts(rows, len(holders), rng), strict=True):
        shares[device].append(part)


def _shuffled_parts(rows: Array, num_parts: int, rng: Generator) -> list[Array]:
    return np.array_split(rng.permutation(rows), num_parts)


def _check_none_empty(rows: Sequence[Array], scheme: Scheme) -> None:
    empty = [device for device, part in enumerate(rows, 1) if not len(part)]
    if empty:
        raise ConfigError(
            f"scheme {scheme.name} leaves device {empty[0]} of {len(rows)} without examples; "
            "use fewer devices or another scheme"
        )
