import tomllib

import pytest

from edgefl.cli.operator_file import grant_access
from edgefl.coordinator.directory import init_directory
from edgefl.core.errors import ConfigError, NetworkError, NotAllowedError, NotFoundError, UsageError, WrongCaError
from edgefl.simulation.local_fleet import find_free_port
from edgefl.system.api_client import CoordinatorClient, format_resource_path, get_operator_path, load_operator_file


@pytest.fixture(autouse=True)
def own_config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("EDGEFL_URL", raising=False)
    monkeypatch.delenv("EDGEFL_TOKEN", raising=False)


@pytest.fixture
def granted_door(make_front_door):
    return make_front_door(grant=grant_access)


def test_the_operator_file_is_all_that_a_command_needs(granted_door, monkeypatch):
    operator = CoordinatorClient.from_options()
    assert operator.url == f"https://{granted_door.address}"
    assert operator.get("/edgefl/v1/seen", {"word": "a&b", "run": None}) == {"v": 1, "word": "a&b"}
    assert operator.post("/edgefl/v1/done", {"what": "drain"}) == {"v": 1, "did": "drain"}
    with pytest.raises(NotFoundError, match="no run 'x'"):
        operator.get("/edgefl/v1/missing")
    with pytest.raises(NetworkError, match="404"):
        operator.get("/edgefl/v1/no-such-path")
    monkeypatch.setenv("EDGEFL_URL", f"https://localhost:{granted_door.port}/")
    assert CoordinatorClient.from_options().url == f"https://localhost:{granted_door.port}"
    assert CoordinatorClient.from_options().get("/edgefl/v1/seen")["v"] == 1
    assert CoordinatorClient.from_options(operator.url).url == operator.url, "the option comes first"


def test_the_operator_file_is_private_and_its_secrets_stay_out_of_reprs(granted_door):
    assert get_operator_path().stat().st_mode & 0o777 == 0o600
    content = load_operator_file(get_operator_path())
    assert content.operator_token not in repr(content)
    assert content.operator_token not in repr(CoordinatorClient.from_options())
    assert content.ca_fingerprint == granted_door.directory.compute_ca_fingerprint()


def test_a_viewer_token_reads_and_changes_nothing_and_a_wrong_one_is_not_allowed(granted_door, monkeypatch):
    monkeypatch.setenv("EDGEFL_TOKEN", load_operator_file(get_operator_path()).viewer_token)
    assert CoordinatorClient.from_options().get("/edgefl/v1/seen")["v"] == 1
    with pytest.raises(NotAllowedError, match="operator token"):
        CoordinatorClient.from_options().post("/edgefl/v1/done", {"what": "x"})
    monkeypatch.setenv("EDGEFL_TOKEN", "wrong")
    with pytest.raises(NotAllowedError, match="wrong"):
        CoordinatorClient.from_options().get("/edgefl/v1/seen")


def test_another_coordinator_at_the_url_gets_no_token(granted_door, make_front_door):
    other = make_front_door()
    with pytest.raises(WrongCaError, match="not from this fleet's CA"):
        CoordinatorClient.from_options(f"https://{other.address}").get("/edgefl/v1/seen")
    assert other.requests == []


def test_a_missing_and_a_damaged_file_plain_http_and_a_coordinator_that_is_away_are_told(tmp_path):
    with pytest.raises(NotAllowedError, match="edgefl coordinator init"):
        CoordinatorClient.from_options()
    get_operator_path().parent.mkdir(parents=True)
    for text in ("", "url = 3", "url ="):
        get_operator_path().write_text(text)
        with pytest.raises(ConfigError, match=r"operator\.toml"):
            CoordinatorClient.from_options()
    get_operator_path().unlink()
    grant_access(init_directory(tmp_path / "c"))
    with pytest.raises(UsageError, match="https://"):
        CoordinatorClient.from_options("http://127.0.0.1:8000")
    with pytest.raises(NetworkError):
        CoordinatorClient.from_options(f"https://127.0.0.1:{find_free_port()}").get("/edgefl/v1/seen")


def test_granting_again_changes_nothing_and_the_file_of_another_fleet_is_kept_and_found_by_its_url(tmp_path):
    directory, _ = grant_access(init_directory(tmp_path / "a", fleet="alpha", port=8001))
    before = get_operator_path().read_bytes()
    assert grant_access(directory) == (directory, None)
    assert get_operator_path().read_bytes() == before
    assert tomllib.loads(before.decode())["url"] == "https://127.0.0.1:8001"
    _, kept = grant_access(init_directory(tmp_path / "b", fleet="beta", port=8002))
    assert load_operator_file(kept).fleet == "alpha"
    assert CoordinatorClient.from_options().url == "https://127.0.0.1:8002"
    assert CoordinatorClient.from_options("https://127.0.0.1:8001").token == load_operator_file(kept).operator_token


def test_any_name_makes_a_path_and_one_that_cannot_is_not_found():
    assert format_resource_path("runs", "my run ü?#%") == "/edgefl/v1/runs/my%20run%20%C3%BC%3F%23%25"
    for name in ("a/b", ""):
        with pytest.raises(NotFoundError, match="there is no device"):
            format_resource_path("devices", name)
