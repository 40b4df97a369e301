"""Settings of published experiments, by name and strategy: what `[strategy] preset` stands for.

Sources: Niwa et al., Asynchronous Decentralized Optimization With Implicit Stochastic Variance Reduction, ICML 2021
(logistic regression on its graph N1); Hardy, Le Merrer, Sericola, Distributed Deep Learning on Edge-Devices:
Feasibility via Adaptive Compression, NCA 2017, with the defaults of its program; Li, Zhou, Yu, Xu, ESync, IEEE TSC
2020, whose rate of 5e-4 is for the sum over a batch of 64; Wang et al., ATOMO, NeurIPS 2018, with the batches and the
rank of its programs for 16 workers, and without their shrinking rate, which never reaches their optimiser; the
defaults of Parallel-SGD's `parallel()` with the optimiser of its example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from edgefl.core.errors import ConfigError

Tables = Mapping[str, Mapping[str, Any]]
PresetName = Literal["paper", "atomo", "parallel-sgd"]

_BUDGETS = ("rounds", "epochs", "updates", "seconds", "bytes", "accuracy", "until")
_DECENTRALISED: Tables = {
    "run": {"task": "fashion-mnist", "rounds": 88, "local_test_fraction": 0.0},
    "task": {"model": "logistic"},
    "strategy": {
        "graph": "multiplex:2",
        "exchange": "pair",
        "iterations": 8,
        "exchanges_per_round": 100,
        "batch_size": 100,
        "learning_rate": 0.002,
        "weight_decay": 0.01,
    },
    "devices": {"min": 8},
    "simulation": {"devices": 8, "scheme": "classes:8"},
}
_ISVR: Tables = {**_DECENTRALISED, "strategy": {**_DECENTRALISED["strategy"], "step_size": "node"}}

PRESETS: Mapping[PresetName, Mapping[str, Tables]] = {
    "paper": {
        "adacomp": {
            "run": {"task": "mnist", "updates": 100_000, "local_test_fraction": 0.0},
            "task": {"model": "cnn", "init": "adacomp"},
            "strategy": {
                "compression": 0.01,
                "improved": False,
                "step_scale": 1.0,
                "batch_size": 10,
                "learning_rate": 0.1,
            },
            "simulation": {"devices": 100, "scheme": "contiguous"},
        },
        "admm-isvr": _ISVR,
        "dsgd": _DECENTRALISED,
        "esync": {
            "run": {"task": "fashion-mnist", "rounds": 100, "local_test_fraction": 0.0},
            "task": {"model": "resnet18"},
            "strategy": {"mode": "query", "epsilon_s": 0.5, "batch_size": 64, "learning_rate": 0.032},
            "simulation": {"devices": 6, "scheme": "iid"},
        },
        "pdmm-isvr": _ISVR,
    },
    "atomo": {
        "ssgd": {
            "run": {"task": "cifar-10", "rounds": 10_000, "local_test_fraction": 0.0},
            "task": {"model": "resnet18"},
            "strategy": {"batch_size": 8, "learning_rate": 0.01},
            "compression": {"up": "atomo-svd:3"},
            "simulation": {"devices": 16, "scheme": "iid"},
        },
    },
    "parallel-sgd": {
        "ssgd": {
            "run": {"task": "mnist", "epochs": 2, "local_test_fraction": 0.0},
            "task": {"model": "mlp-tanh"},
            "strategy": {"batch_size": 64, "learning_rate": 1.0},
            "server": {"optimizer": "adam", "learning_rate": 0.001, "beta2": 0.999, "epsilon": 1e-8},
            "simulation": {"devices": 4, "scheme": "iid"},
        },
    },
}
"""By name and strategy, the tables of a run file with published settings."""


def expand_preset(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a run file's tables with the settings that its preset stands for; its own take precedence.

    A budget of the run file's own replaces that of the preset.

    Raises:
        ConfigError: there is no such preset, or the strategy has none.
    """
    strategy = tables.get("strategy") if isinstance(tables, Mapping) else None
    if not isinstance(strategy, Mapping) or "preset" not in strategy:
        return tables
    name, preset = strategy.get("name", "fedavg"), strategy["preset"]
    if preset not in PRESETS:
        raise ConfigError(f"strategy.preset must be one of {', '.join(PRESETS)}, got {preset!r:.40}")
    if not isinstance(name, str) or name not in PRESETS[preset]:
        raise ConfigError(
            f"strategy.preset: {name!r:.40} has no preset {preset!r}; {', '.join(PRESETS[preset])} have it"
        )
    expanded = {**tables, "strategy": {key: value for key, value in strategy.items() if key != "preset"}}
    for section, settings in PRESETS[preset][name].items():
        own = expanded.get(section, {})
        if isinstance(own, Mapping):
            has_budget = section == "run" and any(budget in own for budget in _BUDGETS)
            kept = {key: value for key, value in settings.items() if not (has_budget and key in _BUDGETS)}
            expanded[section] = {**kept, **own}
    return expanded
