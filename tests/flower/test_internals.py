import importlib
import sys
from importlib.metadata import version

import pytest
from flwr.app import Metadata, RecordDict

from edgefl.core.errors import TaskError
from edgefl.flower.internals import ensure_identity, make_message
from edgefl.system.diagnostics import FLOWER_RELEASES

METADATA = Metadata(
    run_id=1, message_id="", src_node_id=2, dst_node_id=3, reply_to_message_id="", group_id="", created_at=0.0,
    ttl=1.0, message_type="train",
)  # fmt: skip


def make_one():
    make_message(METADATA, content=RecordDict())


@pytest.mark.parametrize("is_module_missing", [True, False], ids=["no module", "no name"])
@pytest.mark.parametrize(
    ("use", "module", "name"),
    [
        (ensure_identity, "flwr.supercore.task_identity", "TaskIdentity"),
        (make_one, "flwr.app.message", "make_message"),
    ],
)
def test_a_flower_without_an_undocumented_name_is_one_line_with_the_tested_releases(
    monkeypatch, use, module, name, is_module_missing
):
    use()
    if is_module_missing:
        monkeypatch.setitem(sys.modules, module, None)
    else:
        monkeypatch.delattr(importlib.import_module(module), name)
    with pytest.raises(TaskError) as raised:
        use()
    text = str(raised.value)
    assert text.startswith(f"edgefl is tested with Flower {' and '.join(FLOWER_RELEASES)}, found {version('flwr')}")
    assert ("\n" in text, "pip install" in text) == (False, True)
