"""An app's wheel has what its boards need, and no more."""

import tomllib
import zipfile

from flower_apps import PROJECT, write_app

from edgefl.flower.app_folder import read_app
from edgefl.flower.app_job import compute_fingerprint
from edgefl.flower.app_pack import write_app_wheel

FEDERATIONS = """# not for boards
[[tool.other]]
at = 2024-01-01
[tool.flwr.federations]
default = "lab"
[tool.flwr.federations.lab]
address = "lab.example:9093"
"""


def test_a_pack_has_the_same_fingerprint_and_no_federations(tmp_path):
    included = PROJECT.replace('"nobody"', '"n"\nfab-include = ["*.py"]') + FEDERATIONS
    app = read_app(write_app(tmp_path / "app", {"pyproject.toml": included, ".gitignore": "data.py", "a.md": ""}))
    with zipfile.ZipFile(write_app_wheel(app, tmp_path)) as wheel:
        wheel.extractall(tmp_path / "site")
    root = tmp_path / "site" / "edgefl_app_mean_app" / "app"
    text = (root / "pyproject.toml").read_text()
    assert "lab" not in text
    assert tomllib.loads(text)["tool"]["other"] == tomllib.loads(included)["tool"]["other"]
    (root / "mean_app" / "__pycache__").mkdir()
    (root / "mean_app" / "__pycache__" / "data.pyc").write_bytes(b"x")
    packed = read_app(root, is_packed=True)
    assert packed.files == app.files
    assert compute_fingerprint(packed) == compute_fingerprint(app)
    (root / "added.py").touch()
    assert compute_fingerprint(read_app(root, is_packed=True)) != compute_fingerprint(app)
