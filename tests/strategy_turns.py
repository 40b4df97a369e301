"""Single turns of a strategy, made by hand: views, updates, and what becomes of them."""

from types import SimpleNamespace

import numpy as np

from edgefl.core.types import DeviceInfo, SparseTensor, Update, UpdateMetrics


def view_of(*idle, busy=None, devices=None, now_s=0.0):
    """A fleet of idle and of busy devices; `devices` says who is there, if it is not these."""
    busy = dict(busy or {})
    names = [*idle, *busy] if devices is None else devices
    return SimpleNamespace(
        now_s=now_s, devices={name: DeviceInfo(device_id=name) for name in names},
        idle=[name for name in idle if name not in busy], busy=busy, speeds={}, progress={}, health={},
    )  # fmt: skip


def update_of(order, tensors, **metrics):
    """The answer to an order."""
    return Update(
        assignment_id=order.assignment_id, device_id=order.device_id, base_version=order.base_version,
        tensors={name: t if isinstance(t, SparseTensor) else np.asarray(t) for name, t in tensors.items()},
        metrics=UpdateMetrics(**metrics),
    )  # fmt: skip


def begun(strategy, model, names="abc"):
    """The state after these devices were asked, and their orders."""
    start = {name: np.asarray(tensor) for name, tensor in model.items()}
    state, decision = strategy.assign(strategy.init(start), view_of(*names))
    return state, {order.device_id: order for order in decision.instructions}


def moved(strategy, state, order, tensors, **metrics):
    """The state after an answer that is a version of its own."""
    return strategy.aggregate(strategy.receive(state, update_of(order, tensors, **metrics)))
