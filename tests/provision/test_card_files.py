"""Bookworm's firstrun.sh and rpi-preseed's settings."""

import configparser
import os
import re
import stat
import subprocess
import tomllib
from dataclasses import replace

import pytest
from apt_packages import unpacked
from requirements import require

from edgefl.core.errors import ConfigError, UsageError
from edgefl.provision import card_files
from edgefl.provision.card_files import render_card_files
from edgefl.provision.sd_card import MEMORY_CGROUP_ARGUMENT, CardNetwork, CardOptions, OsFlavour, detect_system

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFIp2etN me@pc"
NASTY = CardOptions(
    name="pi-01",
    user="eva",
    ssh_keys=(KEY,),
    network=CardNetwork(ssid="a'; touch owned; '$(touch owned)", psk="ab" * 32, country="DE"),
)
CMDLINE = b"console=tty1 root=PARTUUID=x rootwait quiet init=/usr/lib/raspberrypi-sys-mods/firstboot\n"


@pytest.mark.parametrize(
    ("files", "system"),
    [
        ({"user-data": b"#cloud-config\n"}, OsFlavour.TRIXIE),
        ({"meta-data": b"dsmode: local\n", "cmdline.txt": CMDLINE}, OsFlavour.TRIXIE),
        ({"rpi-preseed.toml": b"", "user-data": b""}, OsFlavour.PRESEED),
        ({"issue.txt": b"Raspberry Pi reference 2024-11-19\nGenerated using pi-gen", "cmdline.txt": b"x"},
         OsFlavour.BOOKWORM),
        ({"issue.txt": b"Raspberry Pi reference 2025-10-01\n", "cmdline.txt": b"x"}, OsFlavour.BOOKWORM),
        ({"issue.txt": b"Raspberry Pi reference 2026-06-18\n", "cmdline.txt": b"x"}, OsFlavour.TRIXIE),
        ({"cmdline.txt": CMDLINE}, OsFlavour.BOOKWORM),
        ({}, OsFlavour.TRIXIE),
    ],
)  # fmt: skip
def test_the_system_is_seen_from_what_lies_on_the_card(files, system):
    assert detect_system(files.get)[0] is system


def test_bookworm_s_command_line_runs_the_script_once_and_keeps_the_rest():
    made = card_files.render_firstrun_files(CardOptions(name="pi-01"), {"cmdline.txt": CMDLINE}.get)
    line = bytes(made["cmdline.txt"]).decode()
    assert line.count("\n") == 1
    assert line.startswith(CMDLINE.decode().strip())
    assert line.split()[-4:] == ["cgroup_enable=memory", *card_files.FIRSTRUN_CMDLINE_WORDS]
    again = card_files.render_firstrun_files(CardOptions(name="pi-01"), {"cmdline.txt": line.encode()}.get)
    assert sorted(bytes(again["cmdline.txt"]).split()) == sorted(line.encode().split())


PROFILES = "etc/NetworkManager/system-connections"


def run_firstrun(script, root):
    """Runs the script with /boot and /usr below `root`, and returns what it called."""
    boot, programs = root / "boot/firmware", root / "usr/lib"
    for place, program in (("raspberrypi-sys-mods", "imager_custom"), ("userconf-pi", "userconf")):
        (programs / place).mkdir(parents=True)
        (programs / place / program).write_text(f'#!/bin/sh\nprintf "%s\\n" "{program}" "$@" >>"{root}/calls"\n')
        (programs / place / program).chmod(0o755)
    (boot / "edgefl").mkdir(parents=True)
    (boot / "edgefl/firstboot.sh").write_text(f'printf "%s\\n" firstboot "$@" >>"{root}/calls"\n')
    (boot / "cmdline.txt").write_bytes(CMDLINE.strip() + b" systemd.run=/boot/firmware/firstrun.sh\n")
    (root / PROFILES).mkdir(parents=True)
    (root / PROFILES / "preconfigured.nmconnection").touch()  # as set_wlan leaves it
    text = script.decode().replace("/boot/firmware", str(boot)).replace("/usr/lib", str(programs))
    text = text.replace("/etc/", f"{root}/etc/")
    (boot / "firstrun.sh").write_text(text)
    done = subprocess.run(["sh", boot / "firstrun.sh"], cwd=root, env={"PATH": os.environ["PATH"]}, check=False)
    assert done.returncode == 0
    assert not (boot / "firstrun.sh").exists()
    assert "systemd.run" not in (boot / "cmdline.txt").read_text()
    return (root / "calls").read_text().splitlines()


def test_firstrun_passes_the_wishes_as_words_whatever_they_hold(tmp_path):
    calls = run_firstrun(card_files.render_script(NASTY), tmp_path)
    assert calls == [
        *("imager_custom", "set_hostname", "pi-01"),
        *("userconf", "eva", "*"),
        *("imager_custom", "enable_ssh", "-k", KEY),
        *("imager_custom", "set_wlan", "a'; touch owned; '$(touch owned)", "ab" * 32, "DE"),
        *("firstboot", "--no-start"),
    ]
    assert not (tmp_path / "owned").exists()
    calls = run_firstrun(card_files.render_script(CardOptions(name="pi-01")), tmp_path / "bare")
    assert calls == ["imager_custom", "set_hostname", "pi-01", "firstboot", "--no-start"]


FIXED = CardNetwork(address="10.0.0.7/24", gateway="10.0.0.1", dns=("10.0.0.1", "10.0.0.2"), interface="end0")
ODD_SSID = "caf\u00e9; 'x'\\s"


@pytest.mark.extended
def test_network_manager_finds_the_fixed_address_of_bookworm_s_wi_fi_or_wire(tmp_path):
    tree = unpacked(None, "network-manager", "libnm0")
    library = next(tree.rglob("libnm.so.0")).parent

    def profiles(network, name):
        """Runs a firstrun.sh, and returns the profiles that NetworkManager would find, each read by itself."""
        root, found = tmp_path / name, {}
        run_firstrun(card_files.render_script(CardOptions(name="pi-01", network=network)), root)
        for path in (root / PROFILES).iterdir():
            found[path.name] = configparser.RawConfigParser()
            if not path.stat().st_size:
                continue
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            told = subprocess.run(
                [tree / "usr/bin/nmcli", "--offline", "connection", "modify", "connection.autoconnect", "yes"],
                input=path.read_text(), env={"LD_LIBRARY_PATH": str(library)}, capture_output=True, text=True,
                check=False,
            )  # fmt: skip
            if "error while loading shared libraries" in told.stderr:
                pytest.skip(f"{told.stderr.strip()}: sudo apt-get install network-manager")
            assert told.returncode == 0, told.stderr
            found[path.name].read_string(told.stdout)
        return found

    wifi = replace(FIXED, ssid=ODD_SSID, psk="ab" * 32, country="DE", is_hidden=True)
    (made,) = profiles(wifi, "edgefl-wifi").values()
    assert made["connection"]["type"] == "wifi"
    assert bytes(map(int, made["wifi"]["ssid"].strip(";").split(";"))).decode() == ODD_SSID
    assert (made["wifi"]["hidden"], made["wifi-security"]["psk"]) == ("true", "ab" * 32)
    assert dict(made["ipv4"]) == {"method": "manual", "address1": "10.0.0.7/24,10.0.0.1", "dns": "10.0.0.1;10.0.0.2;"}
    made = profiles(replace(FIXED, ssid="lab", country="DE"), "open")["edgefl-wifi.nmconnection"]
    assert (made["wifi"]["ssid"], made.has_section("wifi-security")) == ("lab", False)
    found = profiles(FIXED, "wire")
    assert set(found) == {"edgefl-ethernet.nmconnection", "preconfigured.nmconnection"}
    made = found["edgefl-ethernet.nmconnection"]
    assert (made["connection"]["type"], made["connection"]["interface-name"]) == ("ethernet", "end0")
    assert made["ipv4"]["address1"] == "10.0.0.7/24,10.0.0.1"
    both = CardNetwork(address="fd00::7/64", gateway="fd00::1", dns=("fd00::1", "10.0.0.2"))
    made = profiles(both, "both")["edgefl-ethernet.nmconnection"]
    assert (made["ipv6"]["method"], made["ipv6"]["address1"]) == ("manual", "fd00::7/64,fd00::1")
    assert (made["ipv4"]["method"], made["ipv4"]["dns"], made["ipv6"]["dns"]) == ("auto", "10.0.0.2;", "fd00::1;")


def test_a_bookworm_script_that_was_not_run_yet_is_replaced_and_not_kept_with_its_key():
    network = CardNetwork(ssid="lab", psk="ab" * 32, country="DE")
    card = provisioned({"cmdline.txt": CMDLINE}, OsFlavour.BOOKWORM, CardOptions(name="pi-01", network=network))
    again = provisioned(card, OsFlavour.BOOKWORM, CardOptions(name="pi-01"))
    assert not any(b"ab" * 32 in body for body in again.values())


@pytest.mark.parametrize("wishes", [CardOptions(name="pi-01"), NASTY])
def test_firstrun_is_posix_and_without_fault(wishes, tmp_path):
    require("shellcheck", "dash")
    (tmp_path / "firstrun.sh").write_bytes(card_files.render_script(wishes))
    assert subprocess.run(["dash", "-n", tmp_path / "firstrun.sh"], check=False).returncode == 0
    # SC2016: a name of a network may well hold what looks like a command.
    command = ["shellcheck", "--shell=sh", "--exclude=SC2016,SC1003", tmp_path / "firstrun.sh"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout


def test_imager_s_own_firstrun_is_not_overwritten():
    card = {"cmdline.txt": CMDLINE, "firstrun.sh": b"#!/bin/bash\nset +e\n"}
    with pytest.raises(ConfigError, match=r"firstrun\.sh"):
        card_files.render_firstrun_files(CardOptions(name="pi-01"), card.get)


def test_preseed_is_toml_that_calls_the_payload_and_says_the_wishes():
    value = tomllib.loads(card_files.render_preseed(NASTY).decode())
    assert value["config_version"] == "1.1"
    assert value["runcmd"]["early"] == ["sh /boot/firmware/edgefl/firstboot.sh"]
    assert value["system"] == {"hostname": "pi-01"}
    assert value["wlan"]["ssid"] == NASTY.network.ssid
    assert value["wlan"]["password_encrypted"] is True
    assert value["ssh"]["authorized_keys"] == [KEY]
    value = tomllib.loads(card_files.render_preseed(CardOptions(name="pi-01", network=FIXED)).decode())
    assert (value["ethernet"]["interface"], value["ethernet"]["address"]) == ("end0", "10.0.0.7/24")
    with pytest.raises(UsageError, match=r"no fixed address of a Wi-Fi.*trixie and bookworm"):
        card_files.render_preseed(CardOptions(name="pi-01", network=replace(FIXED, ssid="lab", country="DE")))


def test_preseed_keeps_what_the_card_s_own_says():
    known = 'config_version = "1.1"\n[user]\nname = "eva"\n[runcmd]\nearly = ["date"]\n[system]\nhostname = "hall"\n'
    value = tomllib.loads(card_files.render_preseed(CardOptions(name="pi-01"), known).decode())
    assert (value["user"], value["system"]) == ({"name": "eva"}, {"hostname": "hall"})
    assert value["runcmd"]["early"] == ["date", "sh /boot/firmware/edgefl/firstboot.sh"]
    for unkept in (
        "[", "[user]\nborn = 2026-01-01\n", "[wlan.more]\nssid = 'x'\n", "'odd key' = 1\n",
        "[runcmd]\nlate = [{ a = 1 }]\n",
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"no TOML|cannot be kept"):
            card_files.render_preseed(CardOptions(name="pi-01"), unkept)


def test_what_is_replaced_is_kept_beside_it_once_and_never_with_a_token():
    card = {"user-data": b"#cloud-config\nhostname: a\n", "meta-data": b"x: efl1.abc\n"}
    made = render_card_files(OsFlavour.TRIXIE, CardOptions(name="pi-01"), {}, card.get)
    assert made["user-data.before-edgefl"] == card["user-data"]
    assert "meta-data.before-edgefl" not in made
    second = {**card, **{name: bytes(content) for name, content in made.items()}}
    again = render_card_files(OsFlavour.TRIXIE, CardOptions(name="pi-02"), {}, second.get)
    assert "user-data.before-edgefl" not in again
    assert b"hostname: a" in bytes(again["user-data"])


TRIXIE_LINE = "console=tty1 root=PARTUUID=11111111-02 rootfstype=ext4 rootwait resize ds=nocloud;i=rpi-imager-1\n"
BOOKWORM_LINE = "console=tty1 root=PARTUUID=11111111-02 rootwait quiet init=/usr/lib/raspberrypi-sys-mods/firstboot\n"
NEW_ROOT = "console=tty1 root=PARTUUID=22222222-02"


def provisioned(card, system, wishes):
    """Returns the card with what a call writes onto it."""
    made = render_card_files(system, wishes, {}, card.get)
    return card | {name: content for name, content in made.items() if isinstance(content, bytes)}


def booted(card):
    """Returns the card after a first boot of Raspberry Pi OS: another disk id, and no word of the first boot."""
    line = card["cmdline.txt"].decode().replace("11111111", "22222222").replace(" resize", "")
    line = re.sub(r" init=\S+| systemd\.\S+", "", line)
    return {name: body for name, body in card.items() if name != "firstrun.sh"} | {"cmdline.txt": line.encode()}


@pytest.mark.parametrize(
    ("system", "line", "rest"),
    [
        (OsFlavour.TRIXIE, TRIXIE_LINE, "rootfstype=ext4 rootwait ds=nocloud;i=second"),
        (OsFlavour.BOOKWORM, BOOKWORM_LINE, "rootwait quiet"),
        (OsFlavour.PRESEED, TRIXIE_LINE, "rootfstype=ext4 rootwait ds=nocloud;i=rpi-imager-1"),
    ],
)  # fmt: skip
def test_a_card_that_was_booted_keeps_the_root_partition_that_its_first_boot_named(system, line, rest):
    card = booted(provisioned({"cmdline.txt": line.encode()}, system, CardOptions(name="pi-01", instance_id="first")))
    again = provisioned(card, system, CardOptions(name="pi-01", instance_id="second"))
    start = card_files.FIRSTRUN_CMDLINE_WORDS if system is OsFlavour.BOOKWORM else ()
    assert again["cmdline.txt"].decode() == " ".join([NEW_ROOT, rest, MEMORY_CGROUP_ARGUMENT, *start]) + "\n"
    assert again["cmdline.txt.before-edgefl"].decode() == line


def test_another_system_than_before_takes_the_earlier_one_s_start_out_of_the_command_line():
    card = provisioned({"cmdline.txt": BOOKWORM_LINE.encode()}, OsFlavour.BOOKWORM, CardOptions(name="pi-01"))
    again = provisioned(card, OsFlavour.TRIXIE, CardOptions(name="pi-01"))
    assert again["cmdline.txt"].decode() == f"{BOOKWORM_LINE.strip()} {MEMORY_CGROUP_ARGUMENT}\n"


def test_what_starts_a_script_of_somebody_else_stays_in_the_command_line():
    line = " ".join([TRIXIE_LINE.strip(), *card_files.FIRSTRUN_CMDLINE_WORDS])
    card = provisioned({"cmdline.txt": line.encode()}, OsFlavour.TRIXIE, CardOptions(name="pi-01"))
    again = provisioned(card, OsFlavour.TRIXIE, CardOptions(name="pi-01"))
    assert set(card_files.FIRSTRUN_CMDLINE_WORDS) < set(again["cmdline.txt"].decode().split())
