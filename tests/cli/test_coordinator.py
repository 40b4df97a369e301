import json
import socket
import tomllib
from dataclasses import replace

import pytest
from webhook_receiver import Receiver

from edgefl.cli.fleet.coordinator import grant_access
from edgefl.coordinator.directory import init_directory, load_directory
from edgefl.core.errors import (
    ConfigError,
    NetworkError,
    NotAllowedError,
    NotFoundError,
    RoleError,
    UsageError,
    WrongCaError,
)
from edgefl.core.protocol import JoinToken
from edgefl.simulation.local_fleet import find_free_port
from edgefl.storage.queries.history import read_history
from edgefl.storage.store import Store
from edgefl.system.api_client import CoordinatorClient, format_resource_path, get_operator_path, load_operator_file


@pytest.fixture
def coordinator(run):
    return lambda *arguments: run("coordinator", *arguments)


@pytest.fixture
def root(coordinator, tmp_path):
    """The directory of a coordinator that was set up."""
    ran = coordinator("init", "--dir", tmp_path / "c", "--host", "pi.local", "--fleet", "lab", "--port", 9000)
    assert (ran.code, ran.err) == (0, "")
    assert "pi.local:9000" in ran.out
    return tmp_path / "c"


def kept(root):
    return {file.name: file.read_bytes() for file in root.iterdir() if file.is_file() and file.name != "lock"}


def test_init_makes_the_directory_and_the_operator_file_and_again_changes_nothing(coordinator, refused, root):
    assert load_directory(root).fleet == "lab"
    assert load_operator_file(get_operator_path()).url == "https://127.0.0.1:9000"
    before = kept(root)
    assert coordinator("init", "--dir", root).code == 0
    refused(["coordinator", "init", "--dir", root, "--fleet", "other"], 3, "other")
    assert kept(root) == before


def test_init_without_a_directory_takes_the_users_own_and_keeps_the_operator_file_of_another_fleet(
    coordinator, root, tmp_path
):
    out = coordinator("init", "--fleet", "beta").out
    assert load_directory(tmp_path / "data" / "edgefl" / "coordinator").fleet == "beta"
    (second_one_s,) = get_operator_path().parent.glob("operator.beta-*.toml")
    assert str(second_one_s) in out
    assert "commands still go to fleet lab" in out
    assert load_operator_file(get_operator_path()).fleet == "lab"


def test_token_prints_the_token_and_the_line_to_type(coordinator, root):
    ran = coordinator("token", "--dir", root, "--ttl", "30m", "--uses", "4", "--group", "roof")
    token, line = ran.out.splitlines()
    assert JoinToken.parse(token).addresses == ("pi.local:9000",)
    assert line == f"EDGEFL_JOIN_TOKEN={token} edgefl device join pi.local:9000 --shard TASK=PATH"
    with Store.open(root / "edgefl.db") as store:  # as a running coordinator has it
        (record,) = store.list_tokens()
        value = json.loads(coordinator("token", "--dir", root, "--format", "json", "--role", "evaluator").out)
    assert (record.uses_left, record.groups, record.expires_at - record.created_at) == (4, ("roof",), 1800)
    assert (value["v"], value["role"], value["uses"]) == (1, "evaluator", 1)
    assert JoinToken.parse(value["token"]).token_id == value["token_id"]
    for words in (["--ttl", "soon"], ["--uses", "0"], ["--group", "A B"], ["--role", "boss"]):
        ran = coordinator("token", "--dir", root, *words)
        assert (ran.code, ran.out) == (2, ""), words


@pytest.mark.parametrize("words", [["token"], ["start"], ["readdress", "--port", 1], ["broker"]])
def test_a_directory_that_was_not_set_up_says_so(refused, tmp_path, words):
    refused(["coordinator", *words, "--dir", tmp_path / "none"], 36, "edgefl coordinator init")


def test_readdress_changes_what_tokens_and_the_operator_file_say(coordinator, root):
    assert coordinator("readdress", "--dir", root, "--port", "9001", "new.lan", "10.0.0.9").code == 0
    token = JoinToken.parse(coordinator("token", "--dir", root).out.splitlines()[0])
    assert token.addresses == ("new.lan:9001", "10.0.0.9:9001")
    assert load_operator_file(get_operator_path()).url == "https://127.0.0.1:9001"


def test_modules_that_run_files_may_name_are_remembered(coordinator, refused, root):
    assert coordinator("init", "--dir", root, "--allow-module", "mine", "--allow-module", "my_fleet.tasks").code == 0
    assert coordinator("init", "--dir", root).code == 0
    assert load_directory(root).allow_modules == ("mine", "my_fleet.tasks")
    before = kept(root)
    refused(["coordinator", "init", "--dir", root, "--allow-module", "subprocess"], 2, "Python's own library")
    refused(["coordinator", "start", "--dir", root, "--allow-module", "no-module"], 2, "must be the name of a module")
    assert kept(root) == before


def test_a_start_that_cannot_be_changes_no_settings_and_one_that_listens_remembers_its_port(
    coordinator, refused, root, tmp_path
):
    before, operator, port = kept(root), get_operator_path().read_bytes(), find_free_port()
    start = ["coordinator", "start", "--dir", root, "--host", "127.0.0.1", "--port"]
    refused([*start, port, "--test-shard", f"digits={tmp_path / 'nope.npz'}"], 4, "nope.npz")
    assert not (root / "lock").exists()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused([*start, taken.getsockname()[1]], 21, str(taken.getsockname()[1]))
        with load_directory(root).lock():
            refused([*start, port], 14, "another coordinator runs on")
        assert (kept(root), get_operator_path().read_bytes()) == (before, operator)
        refused([*start, port, "--broker-port", taken.getsockname()[1]], 21, str(taken.getsockname()[1]))
    assert load_directory(root).port == port
    assert load_operator_file(get_operator_path()).url == f"https://127.0.0.1:{port}"


def test_backup_and_restore_say_what_they_did_and_what_is_next(coordinator, refused, root, tmp_path):
    Store.open(root / "edgefl.db").close()
    ran = coordinator("backup", "--dir", root, tmp_path / "b.tar.gz")
    assert (ran.code, ran.err, "holds the fleet's keys" in ran.out) == (0, "", True)
    refused(["coordinator", "backup", "--dir", root, tmp_path / "b.tar.gz"], 2, "b.tar.gz")
    restore = ["restore", tmp_path / "b.tar.gz", "--dir", tmp_path / "new"]
    assert f"edgefl coordinator init --dir {tmp_path / 'new'}" in coordinator(*restore).out
    assert load_directory(tmp_path / "new").fleet == "lab"
    refused(["coordinator", *restore], 2, "new")
    (tmp_path / "torn.tar.gz").write_bytes((tmp_path / "b.tar.gz").read_bytes()[:5000])
    refused(["coordinator", "restore", tmp_path / "torn.tar.gz", "--dir", tmp_path / "other"], 10, "torn.tar.gz")


def test_a_store_on_a_database_server_has_to_be_dumped_by_its_own_tools(coordinator, root, tmp_path):
    settings = root / "settings.toml"
    settings.write_text(f'store = "postgresql://db/edgefl"\n{settings.read_text()}')
    out = coordinator("backup", "--dir", root, tmp_path / "b.tar.gz").out
    assert "(pg_dump) now" in out
    assert "its own tools" in coordinator("restore", tmp_path / "b.tar.gz", "--dir", tmp_path / "new").out


@pytest.mark.parametrize("verb", ["init", "start"])
def test_a_store_that_does_not_answer_is_not_remembered(refused, root, verb):
    port = ["--port", find_free_port()] if verb == "start" else []
    refused(
        ["coordinator", verb, "--dir", root, *port, "--store", "postgresql://u@127.0.0.1:1/x"], 10, "127.0.0.1:1/x"
    )
    assert "postgresql" not in (root / "settings.toml").read_text()


@pytest.mark.parametrize("verb", ["init", "start"])
def test_a_password_of_the_store_is_refused_where_all_users_see_it(refused, root, verb):
    refused(["coordinator", verb, "--dir", root, "--store", "postgresql://u:secret@db/x"], 2, "EDGEFL_STORE")
    assert "secret" not in (root / "settings.toml").read_text()


@pytest.mark.parametrize(
    ("models", "code", "words"),
    [
        ("file:///nowhere/at/all", 10, "no folder /nowhere/at/all"),
        ("/mnt/models", 2, "s3://BUCKET/PREFIX or file:///FOLDER"),
        ("s3://Not_A_Bucket/x", 2, "s3://"),
        ("file:///tmp", 2, "--store postgresql://"),
    ],
)
def test_shared_models_that_no_other_host_could_go_on_with_are_refused(refused, root, models, code, words):
    refused(["coordinator", "init", "--dir", root, "--models", models], code, words)
    assert "shared_models" not in (root / "settings.toml").read_text()


def test_a_test_alert_arrives_where_the_settings_say(run, refused, root):
    test = ["alerts", "test", "--dir", root]
    refused(test, 2, "nobody is told of alerts")
    with Receiver() as receiver:
        with (root / "settings.toml").open("a") as settings:
            settings.write(f'[alerts]\nwebhook = "{receiver.url}"\n')
        assert run(*test).out == "127.0.0.1 took the test alert\n"
        receiver.answers = [404]
        ran = run(*test, "--alert-secret", "very-secret")
        assert (ran.code, ran.out, "very-secret" in ran.err) == (20, "", False)
    assert receiver.told() == [("test", "coordinator", "notice")] * 2
    assert "X-Edgefl-Signature" in receiver.requests[1][0]
    refused([*test, "--alert-webhook", "no-url"], 3, "alerts.webhook must be a URL")


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")
def test_a_test_alert_goes_to_each_service_whatever_another_says(run, root):
    pytest.importorskip("apprise", reason="apprise is not installed: pip install 'edgefl-fleet[alerts]'")
    with Receiver() as webhook, Receiver() as service:
        address = service.url.replace("http:", "json:")
        with (root / "settings.toml").open("a") as settings:
            settings.write(f'[alerts]\nwebhook = "{webhook.url}"\nnotify = ["{address}"]\n')
        webhook.answers = [404]
        ran = run("alerts", "test", "--dir", root)
    assert (ran.code, ran.out) == (20, "json:// of alerts.notify 1 took the test alert\n")
    assert ran.err == "edgefl: 127.0.0.1 answered 404\n"
    assert service.bodies[0]["title"] == "[lab] NOTICE test coordinator"


def test_grafana_prints_a_dashboard(coordinator):
    dashboard = json.loads(coordinator("grafana").out)
    assert (dashboard["title"], len(dashboard["panels"]) > 15) == ("edgefl", True)


def test_users_are_added_listed_and_revoked_and_only_a_hash_is_kept(coordinator, refused, root, tmp_path):
    where = ("--dir", root)
    token = coordinator("user", "add", "ada", "--role", "operator", *where).out.strip()
    file = tmp_path / "bob.toml"
    ran = coordinator("user", "add", "bob", "--expires", "7d", "--file", file, *where)
    content = load_operator_file(file)
    assert (file.stat().st_mode & 0o777, content.url, content.operator_token) == (0o600, "https://pi.local:9000", "")
    assert content.viewer_token not in ran.out
    assert not any(token.encode() in content for content in kept(root).values())
    refused(["coordinator", "user", "add", "ada", *where], 35, "'ada' already")
    refused(["coordinator", "user", "add", "eve", "--file", file, *where], 2, "exists already")
    refused(
        ["coordinator", "user", "add", "eve", "--file", tmp_path / "no" / "file", *where], 10, "cannot be written"
    )
    refused(["coordinator", "user", "add", "eve", "--expires", "never", *where], 2, "lifetime")
    coordinator("user", "revoke", "ada", *where)
    refused(["coordinator", "user", "revoke", "ada", *where], 40, "no active user")
    rows = coordinator("user", "list", "--format", "json", *where).rows
    assert [(row["name"], row["role"], row["state"]) for row in rows] == [
        ("ada", "operator", "revoked"), ("bob", "viewer", "active"),
    ]  # fmt: skip
    assert rows[1]["expires_at"] - rows[1]["created_at"] == 7 * 86400
    with Store.open(root / "edgefl.db", read_only=True) as store:
        actions = [row["action"] for row in read_history(store, "audit")]
    assert actions == [
        "coordinator user add ada --role operator", "coordinator user add bob --role viewer",
        "coordinator user revoke ada",
    ]  # fmt: skip


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
    with pytest.raises(RoleError, match=r"needs the role operator or a higher one; init .* has the role viewer"):
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
    assert grant_access(directory) == (directory, get_operator_path())
    assert get_operator_path().read_bytes() == before
    assert tomllib.loads(before.decode())["url"] == "https://127.0.0.1:8001"
    beta, path = grant_access(init_directory(tmp_path / "b", fleet="beta", port=8002))
    assert load_operator_file(path).fleet == "beta"
    assert grant_access(beta) == (beta, path)
    assert CoordinatorClient.from_options().url == "https://127.0.0.1:8001"
    assert CoordinatorClient.from_options("https://127.0.0.1:8002").token == load_operator_file(path).operator_token


@pytest.fixture
def two_fleets(run, tmp_path):
    """Commands of a user who set up the fleets alpha, in use, and beta; nobody listens at either."""
    ports = [find_free_port(), find_free_port()]
    for fleet, port in zip(("alpha", "beta"), ports, strict=True):
        assert run("coordinator", "init", "--dir", tmp_path / fleet, "--fleet", fleet, "--port", port).code == 0
    return run, ports


def test_fleets_are_listed_chosen_and_forgotten_by_name(two_fleets):
    run, (first, second) = two_fleets
    rows = run("fleet", "list", "--format", "json").rows
    assert [(row["fleet"], row["in_use"]) for row in rows] == [("alpha", True), ("beta", False)]
    assert f"commands go to fleet beta at https://127.0.0.1:{second}" in run("fleet", "use", "beta").out
    assert load_operator_file(get_operator_path()).fleet == "beta"
    assert [row["fleet"] for row in run("fleet", "list", "--format", "json").rows] == ["beta", "alpha"]
    assert run("fleet", "use", rows[0]["name"]).code == 0
    assert load_operator_file(get_operator_path()).url == f"https://127.0.0.1:{first}"
    asked = run("fleet", "remove", "beta")
    assert (asked.code, "--yes" in asked.err) == (2, True)
    assert run("fleet", "remove", "beta", "--yes").code == 0
    lost = run("run", "list", "--fleet", "alhpa")
    assert (lost.code, lost.err) == (40, "edgefl: there is no fleet 'alhpa': did you mean alpha?\n")
    assert len(run("fleet", "list", "--format", "json").rows) == 1


def test_a_command_goes_to_the_fleet_of_its_option_else_to_that_of_the_variable(two_fleets, monkeypatch):
    run, (first, second) = two_fleets
    assert f"127.0.0.1:{second} cannot be reached" in run("run", "list", "--fleet", "beta").err
    assert f"127.0.0.1:{first} cannot be reached" in run("run", "list").err, "for that command alone"
    monkeypatch.setenv("EDGEFL_FLEET", "beta")
    assert f"127.0.0.1:{second} cannot be reached" in run("run", "list").err
    assert f"127.0.0.1:{first} cannot be reached" in run("run", "list", "--fleet", "alpha").err


def test_a_coordinator_that_is_not_reached_is_said_with_the_file_that_names_it_and_the_other_fleets(two_fleets):
    run, _ = two_fleets
    ran = run("devices", "list")
    assert (ran.code, ran.is_one_line) == (20, True)
    assert f"the operator file is {get_operator_path()}, of fleet alpha" in ran.err
    assert "edgefl coordinator start" in ran.err
    assert "other fleets: beta-" in ran.err


def test_the_certificate_of_another_fleet_is_said_with_the_file_and_the_fleet_that_has_this_address(
    granted_door, make_front_door
):
    other = make_front_door(grant=grant_access)
    path = get_operator_path()
    wrong = replace(load_operator_file(path), url=f"https://{other.address}")
    path.write_text(wrong.to_toml())
    with pytest.raises(WrongCaError, match="not from this fleet's CA") as refused:
        CoordinatorClient.from_options().get("/edgefl/v1/seen")
    assert f"the operator file is {path}, of fleet {wrong.fleet}; this address has " in str(refused.value)
    assert str(refused.value).endswith(": edgefl fleet use NAME")


def test_any_name_makes_a_path_and_one_that_cannot_is_not_found():
    assert format_resource_path("runs", "my run ü?#%") == "/edgefl/v1/runs/my%20run%20%C3%BC%3F%23%25"
    for name in ("a/b", ""):
        with pytest.raises(NotFoundError, match="there is no device"):
            format_resource_path("devices", name)
