"""Our export in a real Label Studio, and what that exports in our import."""

import json
import os
import subprocess
import urllib.request
from contextlib import suppress

import pytest
from device.collect.test_label_transfer import _export, _files, _import, _read_classes, _read_labels, _rows
from peer_boards import eventually

from edgefl.device.collect.file_store import UNLABELLED
from edgefl.simulation.local_fleet import find_free_port

PROGRAM = os.environ.get("EDGEFL_LABEL_STUDIO")
START_S = 900
"""It makes its database first, by hundreds of changes."""
USER, TOKEN = "tester@example.com", "0123456789abcdef0123456789abcdef01234567"
pytestmark = [
    pytest.mark.skipif(not PROGRAM, reason="no Label Studio is named: make test-label-studio"),
    pytest.mark.timeout(START_S + 300),
]


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    """Returns what sends a request to a Label Studio of this test's own, and gives the answer as bytes."""
    folder, url = tmp_path_factory.mktemp("studio"), f"http://127.0.0.1:{find_free_port()}"
    options = ["--no-browser", "--internal-host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    account = ["--username", USER, "--password", "a-password-of-tests", "--user-token", TOKEN]
    settings = {
        "LABEL_STUDIO_BASE_DATA_DIR": str(folder), "LABEL_STUDIO_ENABLE_LEGACY_API_TOKEN": "true",
        "COLLECT_ANALYTICS": "false", "LATEST_VERSION_CHECK": "false",
    }  # fmt: skip

    def call(path, value=None):
        request = urllib.request.Request(
            f"{url}/api/{path}",
            None if value is None else json.dumps(value).encode(),
            {"Authorization": f"Token {TOKEN}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    def is_ready():
        assert process.poll() is None, (folder / "log").read_text()[-2000:]
        with suppress(OSError):
            return bool(call("projects"))

    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [PROGRAM, "start", *options, *account], env={**os.environ, **settings}, stdout=log, stderr=log
        )
        try:
            eventually(is_ready, timeout_s=START_S)
            yield call
        finally:
            process.kill()
            process.wait()


class Project:
    """A project of an export's labelling interface, with its tasks."""

    def __init__(self, call, out):
        self._call = call
        config = (out / "config.xml").read_text()
        self.id = json.loads(call("projects", {"title": "edgefl", "label_config": config}))["id"]
        counts = json.loads(call(f"projects/{self.id}/import", json.loads((out / "tasks.json").read_text())))
        self.num_tasks, self.num_annotations = counts["task_count"], counts["annotation_count"]

    def annotate(self, results):
        """Adds an annotation to each task whose data has one of these texts."""
        for task in json.loads(self._call(f"projects/{self.id}/export?exportType=JSON&download_all_tasks=true")):
            for text, result in results.items():
                if text in task["data"]["example"]:
                    self._call(f"tasks/{task['id']}/annotations", {"result": result})

    def save(self, kind, path):
        path.write_bytes(self._call(f"projects/{self.id}/export?exportType={kind}"))
        return path


def _choose(label, kind):
    return {"from_name": "label", "to_name": kind, "type": "choices", "value": {"choices": [label]}}


@pytest.mark.parametrize(
    ("kind", "suffix"), [("JSON", ".json"), ("JSON_MIN", ".json"), ("CSV", ".csv"), ("TSV", ".tsv")]
)
def test_pictures_come_back_from_label_studio_with_the_labels_of_both(call, tmp_path, kind, suffix):
    project = Project(call, _export(_files(tmp_path / "birds", ["robin", "wren", UNLABELLED]), tmp_path / "out"))
    assert (project.num_tasks, project.num_annotations) == (3, 2)
    project.annotate({"19700101T001642": [_choose("wren", "image")]})
    other = _files(tmp_path / "other", [UNLABELLED] * 3)
    assert _import(other, project.save(kind, tmp_path / f"export{suffix}")) == (3, 0, 0)
    assert _read_classes(other) == ["robin", "wren", "wren"]


def test_windows_of_rows_come_back_from_label_studio_with_their_labels(call, tmp_path):
    room = _rows(tmp_path / "room")
    project = Project(call, _export(room, tmp_path / "out", labels=("open", "shut")))
    assert project.num_tasks == 3
    project.annotate({"rows-1000.000": [_choose("open", "rows")], "rows-1060.000": [_choose("shut", "rows")]})
    path = project.save("JSON", tmp_path / "export.json")
    assert _import(room, path, ("open", "shut")) == (2, 0, 0)
    assert _read_labels(room) == {1000.0 + at: "open" if at < 60 else "shut" for at in range(120)}
