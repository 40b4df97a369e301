"""Recognises names of Flower strategies without importing Flower."""

from __future__ import annotations

import importlib

PREFIX = "flwr:"
_FLOWER_MODULE = "flwr.serverapp.strategy"


def is_flower_strategy(name: str) -> bool:
    """Returns whether `name` is `flwr:Class`, or the `module:Class` of a subclass of Flower's `Strategy`."""
    if name.startswith(PREFIX):
        return True
    module_name, _, class_name = name.partition(":")
    if not class_name:
        return False
    try:
        candidate = getattr(importlib.import_module(module_name), class_name)
    except (Exception, SystemExit):  # noqa: BLE001 whoever makes the strategy meets the same error, and says it
        return False
    return any(base.__module__.startswith(_FLOWER_MODULE) for base in getattr(candidate, "__mro__", ()))
