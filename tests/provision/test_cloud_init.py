"""What cloud-init reads is checked by cloud-init of Trixie: older ones accept typing errors."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from apt_packages import python_packages, unpacked

from edgefl.core.errors import ConfigError
from edgefl.provision.card_files import (
    _edit_cmdline,
    render_card_files,
    render_cloud_init_files,
    render_meta_data,
    render_network_config,
    render_user_data,
)
from edgefl.provision.sd_card import CardNetwork, CardOptions, OsFlavour

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFIp2etN me@pc"
WIFI = CardNetwork(ssid="Lab: net 'x'", psk="ab" * 32, country="DE", is_hidden=True)
STATIC = CardNetwork(address="10.0.0.7/24", gateway="10.0.0.1", dns=("10.0.0.1",))
IMAGER = """#cloud-config
hostname: kitchen
timezone: Europe/Berlin
users:
- name: eva
  passwd: $5$abc$def
  lock_passwd: false
runcmd:
- [rfkill, unblock, wifi]
"""


NEEDED = {
    "requests": "python3-requests", "jsonschema": "python3-jsonschema", "jinja2": "python3-jinja2",
    "configobj": "python3-configobj", "jsonpatch": "python3-jsonpatch", "oauthlib": "python3-oauthlib",
    "yaml": "python3-yaml",
}  # fmt: skip
"""What cloud-init imports, and the package of this system that has it."""


@pytest.fixture(scope="module")
def cloud_init():
    if not Path("/usr/bin/python3").exists():
        pytest.skip("no python3 of the system: sudo apt-get install python3")
    roots = [unpacked("trixie", "cloud-init")]
    if not all(_is_here(name) for name in NEEDED):
        roots.append(unpacked(None, *python_packages(*NEEDED.values())))
    return os.pathsep.join(str(root / "usr/lib/python3/dist-packages") for root in roots)


def _is_here(name):
    return (
        subprocess.run(["/usr/bin/python3", "-c", f"import {name}"], capture_output=True, check=False).returncode == 0
    )


def schema(cloud_init, kind, content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    command = ["/usr/bin/python3", "-W", "ignore", "-m", "cloudinit.cmd.main", "schema"]
    done = subprocess.run(
        [*command, "--schema-type", kind, "--config-file", str(tmp_path / "file")],
        env={"PYTHONPATH": cloud_init, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    if "No module named" in done.stderr:
        pytest.skip(f"{done.stderr.splitlines()[-1]}: sudo apt-get install cloud-init")
    return done


FULL = CardOptions(name="pi-01", hostname="kitchen", user="eva", ssh_keys=(KEY, KEY), network=WIFI)


@pytest.mark.extended
def test_cloud_init_accepts_what_it_is_told_and_would_find_a_typing_error(cloud_init, tmp_path):
    bare = CardOptions(name="pi-01")
    for kind, content, code in (
        ("cloud-config", render_user_data(bare, ""), 0),
        ("cloud-config", render_user_data(bare, "#cloud-config\n"), 0),
        ("cloud-config", render_user_data(FULL, IMAGER), 0),
        ("cloud-config", render_user_data(bare).replace(b"runcmd", b"runcmmd"), 1),
        ("network-config", render_network_config(CardNetwork()), 0),
        ("network-config", render_network_config(CardNetwork(interface="end0")), 0),
        ("network-config", render_network_config(STATIC), 0),
        ("network-config", render_network_config(CardNetwork()).replace(b"ethernets", b"ethernet"), 1),
    ):
        told = schema(cloud_init, kind, content, tmp_path)
        assert told.returncode == code, told.stdout + told.stderr


def netplan(tree, content, root):
    """cloud-init's own schema knows no Wi-Fi; on a board it asks netplan, whose generator is asked here."""
    place = root / "etc/netplan/50.yaml"
    place.parent.mkdir(parents=True)
    place.write_bytes(content)
    place.chmod(0o600)
    return subprocess.run(
        [str(tree / "usr/libexec/netplan/generate"), "--root-dir", str(root)],
        env={"LD_LIBRARY_PATH": str(next(tree.rglob("libnetplan.so*")).parent)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.extended
def test_netplan_makes_a_network_of_it_and_would_find_a_typing_error(tmp_path):
    known = ("libnetplan1", "libnetplan0")
    library = next((name for name in known if is_offered(name)), known[-1])
    tree = unpacked(None, "netplan.io", library)
    for number, network in enumerate((CardNetwork(), STATIC, WIFI, replace(STATIC, ssid="open"))):
        root = tmp_path / str(number)
        told = netplan(tree, render_network_config(network), root)
        assert told.returncode == 0, told.stderr
        made = "".join(path.read_text() for path in root.rglob("*") if path.is_file() and "run/" in str(path))
        assert ("10.0.0.7/24" in made) == (network.address is not None)
        assert ("ab" * 32 in made) == (network.psk is not None)
    wrong = render_network_config(WIFI).replace(b"access-points", b"acces-points")
    assert netplan(tree, wrong, tmp_path / "wrong").returncode != 0


def is_offered(package):
    words = ["apt-cache", "show", package]
    return bool(shutil.which(words[0])) and not subprocess.run(words, capture_output=True, check=False).returncode


def loaded(content):
    return yaml.safe_load(content)


def test_a_fresh_card_gets_an_account_without_a_password_and_the_device_s_name():
    value = loaded(render_user_data(CardOptions(name="pi-01", ssh_keys=(KEY,))))
    assert value["hostname"] == "pi-01"
    assert [user["name"] for user in value["users"]] == ["pi"]
    assert value["users"][0]["lock_passwd"] is True
    assert value["users"][0]["ssh_authorized_keys"] == [KEY]
    assert value["runcmd"] == [["systemctl", "enable", "--now", "ssh"], ["sh", "/boot/firmware/edgefl/firstboot.sh"]]


def test_what_imager_wrote_stays_where_nothing_else_is_wished():
    value = loaded(render_user_data(CardOptions(name="pi-01"), IMAGER))
    assert value["hostname"] == "kitchen"
    assert value["users"] == [{"name": "eva", "passwd": "$5$abc$def", "lock_passwd": False}]
    assert value["timezone"] == "Europe/Berlin"
    assert value["runcmd"] == [["rfkill", "unblock", "wifi"], ["sh", "/boot/firmware/edgefl/firstboot.sh"]]
    value = loaded(render_user_data(CardOptions(name="pi-01", hostname="hall", user="kim"), IMAGER))
    assert (value["hostname"], [user["name"] for user in value["users"]]) == ("hall", ["kim"])
    once = render_user_data(CardOptions(name="pi-01"), IMAGER).decode().replace("Written by edgefl provision", "mine")
    again = loaded(render_user_data(CardOptions(name="pi-01"), once))
    assert again["runcmd"].count(["sh", "/boot/firmware/edgefl/firstboot.sh"]) == 1
    assert loaded(render_meta_data(CardOptions(name="pi-01", instance_id="edgefl-pi-01-1"))) == {
        "dsmode": "local", "instance-id": "edgefl-pi-01-1", "local-hostname": "pi-01",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["#!/bin/sh\nreboot\n", "#cloud-config\n- a list\n", "#cloud-config\n{\n",
                                  "#cloud-config\nruncmd: reboot\n"])  # fmt: skip
def test_user_data_that_cannot_be_kept_is_refused_not_lost(text):
    with pytest.raises(ConfigError, match="user-data"):
        render_user_data(CardOptions(name="pi-01"), text)


def test_a_wi_fi_that_imager_configured_stays_without_one_here():
    known = b"network:\n  version: 2\n  wifis:\n    wlan0:\n      access-points:\n        home: {password: x}\n"
    card = {"network-config": known}
    assert "network-config" not in render_cloud_init_files(CardOptions(name="pi-01"), card.get)
    assert "network-config" in render_cloud_init_files(CardOptions(name="pi-01", network=WIFI), card.get)


@pytest.mark.parametrize("network", [WIFI, STATIC, CardNetwork(interface="end0")])
def test_a_network_that_an_earlier_call_said_stays_where_a_later_one_says_none(network):
    ours = render_cloud_init_files(CardOptions(name="pi-01", network=network), {}.get)["network-config"]
    for card in ({"network-config": ours}, {"network-config": ours, "network-config.before-edgefl": STOCK.encode()}):
        assert "network-config" not in render_card_files(OsFlavour.TRIXIE, CardOptions(name="pi-02"), {}, card.get)


def test_a_fixed_address_of_the_wire_takes_no_wi_fi_away():
    known = b"network: {version: 2, wifis: {wlan0: {access-points: {home: {password: x}}}}}\n"
    made = render_cloud_init_files(CardOptions(name="pi-01", network=STATIC), {"network-config": known}.get)[
        "network-config"
    ]
    value = loaded(bytes(made))["network"]
    assert value["wifis"] == {"wlan0": {"access-points": {"home": {"password": "x"}}}}
    assert value["ethernets"]["eth0"]["addresses"] == ["10.0.0.7/24"]


STOCK = "network: {version: 2, ethernets: {eth0: {dhcp4: true, optional: true}}}\n"


@pytest.mark.parametrize("known", ["", "# only words\n", STOCK])
def test_the_stock_network_is_replaced_by_one_that_the_first_boot_waits_for(known):
    made = render_cloud_init_files(CardOptions(name="pi-01"), {"network-config": known.encode()}.get)
    assert loaded(bytes(made["network-config"]))["network"]["ethernets"]["eth0"]["optional"] is False


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("root=x rootwait\n", "root=x rootwait cgroup_enable=memory\n"),
        ("root=x cgroup_enable=memory", "root=x cgroup_enable=memory\n"),
        ("root=x ds=nocloud;i=rpi-1 quiet", "root=x ds=nocloud;i=new quiet cgroup_enable=memory\n"),
        ("ds=nocloud;s=file:///x;i=old", "ds=nocloud;s=file:///x;i=new cgroup_enable=memory\n"),
    ],
)
def test_the_command_line_stays_one_line_and_names_no_older_instance(line, expected):
    assert _edit_cmdline(line, "new").decode() == expected
