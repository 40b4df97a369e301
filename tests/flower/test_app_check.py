"""What of a Flower app runs here is said from its files, of which none is run."""

import pytest
from flower_apps import CLIENT, DATA, PROJECT, SERVER, write_app

from edgefl.core.errors import ConfigError
from edgefl.flower import app_folder
from edgefl.flower.app_check import check_app
from edgefl.flower.app_folder import read_app


@pytest.fixture
def found(tmp_path):
    """Returns the findings of the app with other files, without those that say that something works."""

    def check(**changes):
        names = {"project": "pyproject.toml", "sim": "sim.py"}
        files = {names.get(name, f"mean_app/{name}.py"): text for name, text in changes.items()}
        app = read_app(write_app(tmp_path / "app", files))
        return [(one.verdict, one.where, one.what) for one in check_app(app) if one.verdict != "works"]

    return check


def test_an_app_of_the_present_interface_that_reads_its_own_files_works(found, tmp_path):
    assert found() == []
    app = read_app(tmp_path / "app")
    assert (app.name, app.version, app.server) == ("mean-app", "1.2.0", "mean_app.server_app:app")
    assert app.config == {"num-nodes": 2, "num-server-rounds": 3, "model.size": 4}
    assert found(client_app=CLIENT.replace("ClientApp()", "ClientApp(client_fn=None)")) == []
    app = read_app(write_app(tmp_path / "app"))
    works = [(one.where, one.what) for one in check_app(app)]
    assert ("mean_app/client_app.py", "ClientApp that answers train, evaluate") in works


def test_no_code_of_the_app_runs_while_it_is_checked(found, tmp_path):
    mark = tmp_path / "ran"
    touch = f"open({str(mark)!r}, 'w')\n"
    found(server_app=touch + SERVER, client_app=touch + CLIENT, data=touch + DATA, __init__=touch)
    assert not mark.exists()


def test_what_makes_its_own_connection_fails_where_the_app_reaches_it(found):
    simulation = "import flwr as fl\nfl.simulation.start_simulation()\n"
    assert found(sim=simulation) == []
    ((verdict, where, what),) = found(data=simulation + DATA)
    assert (verdict, where) == ("fails", "mean_app/data.py")
    assert what.startswith("start_simulation: it makes a connection")


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        ({"client_app": CLIENT.replace("@app.", "@other.")}, "fails", "no function is marked @app.train()"),
        ({"client_app": "from somewhere import app\n"}, "check", "app is not assigned here"),
        ({"client_app": "def broken(:\n"}, "fails", "it is no Python"),
        ({"data": "import torchvision.datasets\n" + DATA}, "check", "imports torchvision.datasets: a board"),
        ({"project": PROJECT.replace("flwr[simulation]>=1.30", "flwr==1.2.0")}, "fails", "edgefl has flwr 1."),
        ({"project": PROJECT.replace("numpy>=1.26", "fastai>=2")}, "check", "fastai>=2: boards need it already"),
        ({"project": PROJECT.replace("numpy>=1.26", "x @ https://x.example/x.whl")}, "fails", "boards fetch nothing"),
        ({"project": PROJECT.replace("numpy>=1.26", "numpy=>1")}, "fails", "is no requirement"),
        ({"project": PROJECT.replace("client_app:app", "clients:app")}, "fails", "no file that is sent"),
    ],
)  # fmt: skip
def test_each_reason_is_said_with_its_place(found, change, verdict, words):
    ((actual, where, what),) = found(**change)
    assert (actual, words in what) == (verdict, True), what
    assert where


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[tool.flwr.app.components]", "[flower.components]", "there is no table [tool.flwr.app.components]"),
        ('name = "mean-app"', 'name = "../mean"', "project.name must be a name such as my-app, got '../mean'"),
        ("mean_app.server_app:app", "mean_app/server", "serverapp must be module:attribute"),
        ('"nobody"', '"n"\nfab-include = ["!"]', "fab-include: Invalid git pattern: '!'"),
        ("numpy>=1.26", "numpy\\nName: other", "project.dependencies must be a list of texts of one line each"),
        ("size = 4", "size = [4]", "tool.flwr.app.config.model.size must be a text, a number or true/false"),
        ("[project]", "[project", "pyproject.toml: "),
    ],
)
def test_a_project_that_is_no_flower_app_is_refused_in_one_line(tmp_path, old, new, words):
    with pytest.raises(ConfigError, match=r"pyproject\.toml|fab-include") as raised:
        read_app(write_app(tmp_path, {"pyproject.toml": PROJECT.replace(old, new)}))
    assert words in str(raised.value)
    assert "\n" not in str(raised.value).strip()


def test_files_that_flower_leaves_out_are_not_sent(tmp_path, monkeypatch):
    others = ".env", ".git/x.py", "venv/y.py", "data.npz", "mean_app/data_test.py", "credentials.json", "kept.json"
    root = write_app(tmp_path, {**dict.fromkeys(others, "secret"), "a.md": "", "mean_app/build/parts.py": "",
                                ".gitignore": "*.json  \n!kept.json\n# a.md\n"})  # fmt: skip
    (root / "link.py").symlink_to("/etc/hostname")
    names = {str(file) for file in read_app(root).files}
    assert names == {"pyproject.toml", "a.md", "kept.json", "mean_app/build/parts.py", *(
                     f"mean_app/{name}.py" for name in ("__init__", "server_app", "client_app", "data"))}  # fmt: skip
    included = 'fab-include = ["/mean_app", "*.npz", "*.json"]\n'
    write_app(root, {"pyproject.toml": PROJECT.replace('"nobody"', f'"n"\n{included}'
                     'fab-exclude = ["**/data.py", "build"]')})  # fmt: skip
    names = {str(file) for file in read_app(root).files}
    assert names == {"pyproject.toml", "data.npz", "kept.json", *(
                     f"mean_app/{name}.py" for name in ("__init__", "server_app", "client_app"))}  # fmt: skip
    monkeypatch.setattr("edgefl.flower.app_check.MAX_APP_BYTES", 100)
    assert check_app(read_app(root))[0].verdict == "fails"
    monkeypatch.setattr(app_folder, "MAX_FILES", 2)
    with pytest.raises(ConfigError, match="more than 2 files"):
        read_app(root)
