"""Pretrained weights of libraries become the file of a base, with the names of the network's tensors."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgefl.core.errors import NetworkError, TaskError, UsageError
from edgefl.tasks.adaptation.pretrained_weights import fetch_weights

torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")


class Library:
    """What torchvision.models and timm have of it: names, and networks with weights where they are asked for."""

    def __init__(self):
        self.asked = []

    def list_models(self, module=None):
        return ["tiny", "small"]

    def create_model(self, name, **options):
        self.asked.append((name, options))
        if name != "tiny" and not name.startswith("tiny."):
            raise RuntimeError(f"No pretrained weights exist for {name}.\n Use something else")
        layers = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        torch.nn.init.constant_(layers[0].weight, 0.5)
        return layers

    get_model = create_model


@pytest.fixture
def library(monkeypatch):
    made = Library()
    for name in ("timm", "torchvision.models"):
        monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture
def hub(tmp_path, monkeypatch):
    asked = []

    def download(repository, file, revision=None):
        asked.append((repository, file, revision))
        if repository == "lab/none":
            raise OSError("no such repository")
        save_file({"fc.weight": np.ones((2, 3), np.float32)}, tmp_path / "cached")
        return str(tmp_path / "cached")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))
    return asked


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("timm:tiny", ("tiny", {"pretrained": True})),
        ("timm:tiny.in1k", ("tiny.in1k", {"pretrained": True})),
        ("torchvision:tiny", ("tiny", {"weights": "DEFAULT"})),
    ],
)
def test_the_weights_of_a_network_keep_names_values_and_types(library, tmp_path, name, asked):
    fetch_weights(name, tmp_path / "base")
    assert library.asked == [asked]
    found = load_file(tmp_path / "base")
    assert sorted(found) == sorted(
        ["0.bias", "0.weight", *(f"1.{own}" for own in Library().create_model("tiny")[1].state_dict())]
    )
    assert (found["0.weight"] == 0.5).all()
    assert found["1.num_batches_tracked"].dtype == np.int64


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("hf:lab/tiny.in1k", ("lab/tiny.in1k", "model.safetensors", None)),
        ("hf:lab/tiny@v1:half/a.safetensors", ("lab/tiny", "half/a.safetensors", "v1")),
    ],
)
def test_a_file_of_the_hub_is_copied_as_it_is(hub, tmp_path, name, asked):
    fetch_weights(name, tmp_path / "base")
    assert hub == [asked]
    assert (tmp_path / "base").read_bytes() == (tmp_path / "cached").read_bytes()


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("timm:tine", UsageError, "timm has no such network; did you mean tiny"),
        ("torchvision:tiny.in1k", UsageError, "torchvision has no such network"),
        (
            "timm:small",
            NetworkError,
            "weights timm:small cannot be fetched: No pretrained weights exist for small. Use",
        ),
        ("hf:lab/none", NetworkError, "weights hf:lab/none cannot be fetched: no such repository"),
        ("hf:none", UsageError, "hf:OWNER/REPOSITORY, with @REVISION or :FILE behind it, got 'hf:none'"),
        ("hf:lab/../x", UsageError, "hf:OWNER/REPOSITORY"),
        ("hf:lab/tiny:pytorch_model.bin", UsageError, "only .safetensors files are read"),
    ],
)
def test_what_cannot_be_fetched_is_one_line_and_leaves_no_file(library, hub, tmp_path, name, kind, message):
    with pytest.raises(kind, match=message) as error:
        fetch_weights(name, tmp_path / "base")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "base").exists()


def test_a_library_that_is_missing_says_how_it_is_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(TaskError, match=r"weights of the Hub need huggingface_hub, .* install it with: .*timm"):
        fetch_weights("hf:lab/tiny", tmp_path / "base")
