"""Which tasks need torch, told without importing it."""

from types import SimpleNamespace

import pytest

from edgefl.tasks.registry import is_torch_task, list_backends, make_task


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("digits", {}, False),
        ("mnist", {}, True),
        ("mnist", {"model": "logistic"}, False),
        ("fashion-mnist", {"model": "resnet18-gn"}, True),
        ("mnist", {"model": "torchvision.models:resnet18", "channels": 3}, True),
        ("motionsense", {}, True),
        ("motionsense", {"model": "mlp"}, False),
        ("noop", {}, False),
    ],
)
def test_a_task_needs_torch_by_its_model(monkeypatch, name, options, expected):
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", "torchvision.models")
    assert is_torch_task(make_task(name, options)) is expected


def test_a_task_of_the_user_s_own_may_say_it_and_numpy_is_always_there():
    assert (is_torch_task(SimpleNamespace(needs_torch=True)), is_torch_task(SimpleNamespace())) == (True, False)
    assert list_backends()[0] == "numpy"
