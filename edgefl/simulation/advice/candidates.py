"""Candidates of an advice: strategies, codecs and amounts of local work that are worth comparing for a run file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from edgefl.compression.codec_selection import CANDIDATES as LIGHTER_CODECS
from edgefl.compression.registry import AUTO
from edgefl.core.config import RunConfig, StrategySection
from edgefl.core.types import Scalar
from edgefl.engine.assembly.build import make_run_task
from edgefl.engine.assembly.strategy import list_recommended
from edgefl.strategies.registry import BUILT_IN_STRATEGIES, find_strategy, get_settings

SYNCHRONOUS = ("fedavg", "fednova", "scaffold")
"""Every round waits for its slowest board."""
ADAPTIVE = ("esync",)
"""Faster boards train more until the slowest is done."""
ASYNCHRONOUS = ("fedasync", "fedbuff", "asgd")
"""No board waits for another."""
COMPARED = (*SYNCHRONOUS, *ADAPTIVE, *ASYNCHRONOUS)
CODECS = ("dense", *LIGHTER_CODECS, AUTO)
EPOCHS = (1.0, 3.0)
ITERATIONS = (5, 20)
_OF_WORK = frozenset({"epochs", "iterations", "seconds"})
LEFT_OUT = (
    "robust rules (krum, trimmed-mean and others): they answer boards that lie, not costs",
    "graphs of boards (dsgd, ad-psgd and others): what links between boards carry is not measured",
    "fedprox, dc-asgd, bounded, ssgd and adacomp: variants of those tried, for a later comparison with edgefl sweep",
    "ifca, fltrust, redundant, local, signsgd: other models, other data or one's own choice",
)
"""Strategies that are not compared unless the run file names one, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy with its settings, and the codec of updates.

    Attributes:
        strategy: its name.
        options: all other keys of `[strategy]`.
        codec: of `[compression] up`.
        defaults: settings that are not in `options`, as the task recommends them.
        is_written: it is the run file as it is.
    """

    strategy: str
    options: Mapping[str, Scalar]
    codec: str
    defaults: Mapping[str, Scalar] = field(default_factory=dict)
    is_written: bool = False

    @property
    def work(self) -> str:
        """Local work of a round, such as `3 epochs`; empty where the strategy sets it."""
        if self.strategy in ADAPTIVE:
            return ""
        for name, noun in (("seconds", "s"), ("iterations", "iterations"), ("epochs", "epochs")):
            value = {**get_settings(self.strategy), **self.defaults, **self.options}.get(name)
            if value is not None:
                return f"{value:g} {noun.removesuffix('s') if value == 1 and len(noun) > 1 else noun}"
        return ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.strategy, self.codec, self.work

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.strategy, self.work, self.codec)))

    def apply(self, config: RunConfig) -> RunConfig:
        """Returns the run file with this strategy and codec."""
        return replace(
            config,
            strategy=StrategySection(name=self.strategy, options=dict(self.options)),
            compression=replace(config.compression, up=self.codec),
        )


def make_written(config: RunConfig) -> Candidate:
    """Returns the run file as it is."""
    return Candidate(
        strategy=config.strategy.name,
        options=config.strategy.options,
        codec=config.compression.up,
        defaults=_recommend(config, config.strategy.name),
        is_written=True,
    )


def list_candidates(config: RunConfig) -> list[Candidate]:
    """Returns the candidates for a run file, itself first, each once.

    A strategy that is not compared with others, such as a robust rule, stays: only codec and work vary.
    """
    own = config.strategy.name
    names = dict.fromkeys([own, *(COMPARED if own in COMPARED else ())])
    codecs = dict.fromkeys([config.compression.up, *CODECS])
    found = {(written := make_written(config)).key: written}
    for name in names:
        defaults = _recommend(config, name)
        for options in _vary_work(config, name):
            for codec in codecs:
                candidate = Candidate(strategy=name, options=options, codec=codec, defaults=defaults)
                found.setdefault(candidate.key, candidate)
    return [*found.values()]


def _recommend(config: RunConfig, name: str) -> dict[str, Scalar]:
    """Returns the settings that the run's task recommends for a strategy."""
    known = get_settings(name)
    return {key: value for key, value in list_recommended(make_run_task(config), name).items() if key in known}


def _vary_work(config: RunConfig, name: str) -> Iterator[dict[str, Scalar]]:
    """Yields settings of a strategy: those of the run file that it knows too, with each amount of local work."""
    known, written = get_settings(name), config.strategy.options
    is_own = name == config.strategy.name
    kept = {key: value for key, value in written.items() if key in known and (is_own or key not in _OF_WORK)}
    if is_own:
        yield kept
    elif "learning_rate" in kept and config.strategy.name in BUILT_IN_STRATEGIES:
        share = find_strategy(name).rate_share / find_strategy(config.strategy.name).rate_share
        kept["learning_rate"] = float(kept["learning_rate"]) * share
    if name in ADAPTIVE or "iterations" not in known:
        if not is_own:
            yield kept
        return
    rest = {key: value for key, value in kept.items() if key not in _OF_WORK}
    if known["iterations"] is not None:
        yield from ({**rest, "iterations": number} for number in ITERATIONS)
    else:
        yield from ({**rest, "epochs": number} for number in EPOCHS)
        yield {**rest, "iterations": ITERATIONS[-1]}
