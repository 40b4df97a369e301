import datetime as dt
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from edgefl.coordinator import pki
from edgefl.system.diagnostics import (
    DAY_S,
    FLOWER_RELEASES,
    check_certificate,
    check_clock,
    check_disk,
    check_flower,
    check_memory_limits,
    check_private,
    check_skew,
    check_software,
)

NOW = dt.datetime(2026, 11, 21, tzinfo=dt.UTC).timestamp()
AUTHORITY = pki.create_authority("lab")


def signed(days, key=AUTHORITY):
    """A client certificate of the CA, or of another key that says it is the CA, that ends in so many days."""
    authority = serialization.load_pem_private_key(key.key_pem, None)
    issuer = x509.load_pem_x509_certificate(AUTHORITY.cert_pem)
    start, end = dt.datetime(1970, 1, 1, tzinfo=dt.UTC), dt.datetime.fromtimestamp(NOW + days * DAY_S, dt.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "pi")])
    builder = x509.CertificateBuilder(issuer.subject, name, authority.public_key(), 7, start, end)
    return builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def level_of(cert_pem, **options):
    found = check_certificate("it", cert_pem, AUTHORITY.cert_pem, now=NOW, remedy="do this", **options)
    assert (found.level == "ok") == (found.remedy == "")
    return found.level


@pytest.mark.parametrize(("days", "expected"), [(31, "ok"), (29, "warning"), (0.5, "warning"), (-1, "problem")])
def test_a_certificate_that_ends_soon_is_a_warning_and_one_that_has_ended_a_problem(days, expected):
    assert level_of(signed(days)) is expected


def test_a_certificate_must_be_of_this_ca_and_fit_its_key():
    own, other = (
        pki.issue_client_certificate(AUTHORITY, "pi"),
        pki.issue_client_certificate(pki.create_authority("lab"), "pi"),
    )
    assert level_of(own.cert_pem, key_pem=own.key_pem) == "ok"
    assert level_of(AUTHORITY.cert_pem, key_pem=AUTHORITY.key_pem) == "ok"
    stranger = signed(90, pki.create_authority("lab"))
    assert {level_of(pem) for pem in (other.cert_pem, stranger, b"no certificate")} == {"problem"}
    assert {level_of(own.cert_pem, key_pem=key) for key in (other.key_pem, b"no key")} == {"problem"}


def test_clocks_that_are_seconds_apart_or_stand_in_1970_are_warnings():
    levels = {0.2: "ok", -4.9: "ok", 5.1: "warning"}
    assert {skew_s: check_skew(skew_s).level for skew_s in levels} == levels
    assert ("behind" in check_skew(-86400.0).text, "ahead" in check_skew(86400.0).text) == (True, True)
    assert (check_clock(100.0).level, check_clock(NOW).level) == ("warning", "ok")


def test_keys_that_others_can_read_and_files_that_are_missing_are_problems(tmp_path):
    root, key = tmp_path / "state", tmp_path / "state" / "key.pem"
    root.mkdir(mode=0o700)
    key.touch(mode=0o600)
    assert [found.level for found in check_private(root, [key])] == ["ok"]
    key.chmod(0o640)
    root.chmod(0o755)
    assert [found.remedy for found in check_private(root, [key])] == [f"chmod 700 {root}", f"chmod 600 {key}"]
    (found,) = [one for one in check_private(root, [root / "gone"]) if "missing" in one.text]
    assert found.level == "problem"


def test_what_runs_here_is_named_and_flower_is_of_a_release_that_the_project_admits(tmp_path):
    found = check_software()[0]
    assert (found.level, "flwr 1." in found.text) == ("ok", True)
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    pinned = [text for text in tomllib.loads(project)["project"]["dependencies"] if text.startswith("flwr")]
    assert pinned[0] == f"flwr>={FLOWER_RELEASES[0]},<2"
    assert metadata.version("flwr").rpartition(".")[0] in FLOWER_RELEASES
    assert check_disk(tmp_path).check == "disk"


@pytest.mark.parametrize(
    ("version", "levels"),
    [("1.41.0", []), ("1.42.3", []), ("1.100.0", ["warning"]), ("1.9.2", ["problem"]), (None, ["problem"])],
)
def test_a_release_of_flower_that_was_not_tested_is_named(version, levels):
    found = check_flower(version)
    assert [one.level for one in found] == levels
    assert all(f"flwr {version or 'none'} is installed" in one.text for one in found)


@pytest.mark.parametrize(
    ("file", "text", "levels"),
    [
        ("sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory pids\n", ["ok"]),
        ("sys/fs/cgroup/cgroup.controllers", "cpuset cpu io pids\n", ["warning"]),
        (
            "proc/cgroups",
            "#subsys_name hierarchy num_cgroups enabled\ncpu 1 2 1\nmemory 0 80 0\n",
            ["warning"],
        ),
        ("proc/cgroups", "#subsys_name hierarchy num_cgroups enabled\nmemory 7 80 1\n", ["ok"]),
        ("etc/nothing", "", []),
    ],
)
def test_a_kernel_without_its_memory_controller_is_told(tmp_path, file, text, levels):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    found = check_memory_limits(tmp_path)
    assert [finding.level for finding in found] == levels
    assert all("cgroup_enable=memory" in finding.remedy for finding in found if finding.level == "warning")
