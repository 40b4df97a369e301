"""Pretrained weights of torchvision, timm and the Hugging Face Hub, as the file of a base.

The libraries download what is not in their caches. Of the Hub only safetensors are read, which hold numbers alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from edgefl.core.errors import ConfigError, NetworkError, UsageError, format_install_command
from edgefl.system.atomic_files import compute_sha256, copy_file, make_store_error, write_atomic
from edgefl.tasks.adaptation.base_file import MAX_BASE_BYTES, encode_base
from edgefl.tasks.learners.torch_learner import find_library_network
from edgefl.tasks.registry import import_extra

DEFAULT_FILE, SUFFIX = "model.safetensors", ".safetensors"
_HUB_NAME = re.compile(r"hf:([\w.-]{1,96}/[\w.-]{1,96})(?:@([\w./-]{1,100}))?(?::([\w./-]{1,200}))?", re.ASCII)


def fetch_weights(name: str, path: Path) -> None:
    """Writes pretrained weights into a safetensors file, with the names that the network's tensors have in a task.

    Args:
        name: `torchvision:NAME` for the library's best weights of a network, `timm:NAME` or `timm:NAME.TAG`, or
            `hf:OWNER/REPOSITORY`, which may be followed by `@REVISION` and by `:FILE`.
        path: of the file.

    Raises:
        UsageError: the name is none of these, or the library has no such network.
        TaskError: the library is missing.
        NetworkError: they cannot be fetched, or there are none.
        StoreError: the file cannot be written.
    """
    if name.startswith("hf:"):
        _copy_from_hub(name, path)
        return
    try:
        models, network = find_library_network(name, may_have_tag=True)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    is_timm = name.startswith("timm:")
    options: dict[str, Any] = {"pretrained": True} if is_timm else {"weights": "DEFAULT"}
    try:
        module = (models.create_model if is_timm else models.get_model)(network, **options)
    except Exception as error:  # what a library and its network raise is anything
        raise _make_error(name, error) from error
    content = encode_base({key: value.numpy(force=True) for key, value in module.state_dict().items()})
    try:
        write_atomic(path, content)
    except OSError as error:
        raise make_store_error(path, error) from None


def _copy_from_hub(name: str, path: Path) -> None:
    match = _HUB_NAME.fullmatch(name)
    if match is None or ".." in name:
        raise UsageError(
            f"weights of the Hub are hf:OWNER/REPOSITORY, with @REVISION or :FILE behind it, got {name!r:.100}"
        )
    repository, revision, file = match[1], match[2], match[3] or DEFAULT_FILE
    if not file.endswith(SUFFIX):
        raise UsageError(f"only {SUFFIX} files are read, which hold numbers alone; got {file!r:.100}")
    hub = import_extra("huggingface_hub", "weights of the Hub need huggingface_hub", format_install_command("timm"))
    try:
        found = Path(hub.hf_hub_download(repository, file, revision=revision))
        size = found.stat().st_size
    except Exception as error:  # likewise
        raise _make_error(name, error) from error
    if size > MAX_BASE_BYTES:
        raise UsageError(f"{name} has {size} bytes, a device takes {MAX_BASE_BYTES} at most")
    try:
        copy_file(found, path, compute_sha256(found))
    except OSError as error:
        raise make_store_error(path, error) from None


def _make_error(name: str, error: Exception) -> NetworkError:
    text = " ".join(str(error).split()) or type(error).__name__
    return NetworkError(f"the weights {name:.100} cannot be fetched: {text:.300}")
