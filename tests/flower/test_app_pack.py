"""An app's wheel has what its boards need, and no more."""

import tomllib
import zipfile

from flower_apps import PROJECT, write_app

from edgefl.cli.experiments import clear_folder
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


def test_a_demo_or_a_coordinator_in_the_apps_folder_is_no_part_of_the_app(tmp_path):
    root = write_app(tmp_path / "app", {"deep/kept.toml": "", "operator.toml": 'token = "secret"'})
    files = read_app(root).files
    assert {"deep/kept.toml", "operator.toml"} & {*map(str, files)} == {"deep/kept.toml"}
    clear_folder(root / "flower-demo")
    for place in ("flower-demo/fleet/config/edgefl/operator.toml", "flower-demo/site/app.py"):
        (root / place).parent.mkdir(parents=True)
        (root / place).touch()
    (root / "deep" / "coordinator").mkdir()
    for name in ("coordinator.key", "settings.toml"):
        (root / "deep" / "coordinator" / name).touch()
    app = read_app(root)
    assert app.files == files
    clear_folder(root / "flower-demo")
    write_app_wheel(app, tmp_path / "dist")
