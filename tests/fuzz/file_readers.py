"""Files that people write or copy: run files, graphs, hosts, tokens, join files, the settings of cards."""

from __future__ import annotations

import json
import tomllib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from fuzz.reader import Form, Reader, Seed

from edgefl.coordinator.directory import init_directory, load_directory
from edgefl.core.config import load_run, parse_run_text
from edgefl.core.protocol import JoinToken
from edgefl.device.enrolment.join_file import JoinFile
from edgefl.provision.card_files import _parse_network, render_preseed, render_user_data
from edgefl.provision.sd_card import CardOptions
from edgefl.provision.ssh_host import CommandResult, parse_hosts
from edgefl.provision.ssh_provisioning import HostFacts
from edgefl.simulation.faults import apply_faults, load_faults
from edgefl.simulation.profiles import load_catalogue
from edgefl.storage.queries.filters import decode_cursor, encode_cursor
from edgefl.strategies.peer_algorithms.topology import read_hosts, read_topology
from edgefl.system.api_client import OperatorFile, _parse_reply, load_operator_file

RUN = b"""[run]
task = "digits"
rounds = 50
seed = 7
name = "first try"
local_test_fraction = 0.2
[task]
model = "mlp"
[strategy]
name = "esync"
learning_rate = 0.032
epochs = 1.5
[compression]
up = "topk:0.01|int8|rice"
down = "dense|fp16"
[devices]
groups = ["lab"]
[simulation]
devices = 100
"""
FAULTS = b"""[[fault]]
device = "pi-*"
at_s = 10
kind = "kill"
for_s = 5.5
[[fault]]
device = "pi-2"
at_s = 20.0
kind = "slow"
factor = 3
[[fault]]
device = "*"
at_s = 0
kind = "link"
factor = 0.25
"""
PROFILES = b"""v = 1
[profile.board]
model = "Board 1"
speed = 0.5
jitter = 0.1
up_bytes_per_s = 1e6
down_bytes_per_s = 2e6
latency_s = 0.01
memory_bytes = 1000000000
mtbf_s = 3600.0
mttr_s = 60
offline = [[10, 20], [30, inf]]
throttling = [[0, 1.0], [60, 2.0]]
temperature_c = [[0, 50.0]]
battery = [[0, 1.0]]
accelerators = ["cpu"]
groups = ["a"]
[profile.board.iterations]
digits = 0.01
mnist = { fixed_s = 0.001, example_s = 0.0001 }
[profile.board.source]
speed = "measured: here"
[reference]
digits = 0.002
"""
GRAPH = {
    "nodes": {
        "a": {"device": "cpu", "round": 4, "edges": {"b": 0, "c": 1}},
        "b": {"round": 4, "edges": {"a": 0, "c": 2}},
        "c": {"round": 4, "edges": {"a": 1, "b": 2}},
    }
}
HOSTS = {"hosts": [{"name": "a", "addr": "10.0.0.1", "port": 5}, {"name": "b", "addr": "b.lan", "port": 6}]}
SSH_HOSTS = b"""# shelf
pi@192.168.1.21           name=shelf-1  digits=/home/pi/digits.npz
pi@shelf-2.local:2222     name=shelf-2  digits="/srv/data/digits"  role=evaluator
[fe80::1%eth0]:22 name=shelf-3
"""
USER_DATA = b"""#cloud-config
hostname: pi
users:
  - name: pi
    groups: [sudo, video]
    ssh_authorized_keys: [ssh-ed25519 AAAA me]
runcmd:
  - [systemctl, enable, ssh]
  - date > /boot/when
write_files:
  - {path: /etc/x, content: &note "a\\n", permissions: "0644"}
  - {path: /etc/y, content: *note}
"""
NETWORK = b"""network:
  version: 2
  wifis:
    wlan0: {dhcp4: true, access-points: {"my net": {password: "abc"}}}
"""
PRESEED = b"""config_version = "1.1"
[system]
hostname = "pi"
[user]
name = "me"
password_encrypted = true
[ssh]
enabled = true
[wlan]
ssid = "net"
hidden = false
[runcmd]
early = ["echo a", "echo b"]
"""
FACTS = b"".join(
    b"edgefl: " + line + b"\n"
    for line in (
        b"root sudo", b"time 1000000000", b"machine aarch64", b"bits 64", b"systemd yes", b"python 3.11.2",
        b"python 3.13",
        b"free_mb 5000", b"version 0.9.1", b"active active",
        b'device {"v": 1, "device_id": "pi-1", "fleet": "lab", "ca_fingerprint": "ab"}', b"end 1",
    )
)  # fmt: skip
READ_AS_ON_BOARDS_EVERY = 8
TOKEN = JoinToken(
    ca_fingerprint="ab" * 32, token_id="t1", secret="s" * 20, fleet="lab", addresses=("pi.local:8000", "[::1]:80")
)


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _of_file(folder: Path, name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    path = folder / name

    def feed(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return feed


def run_files(folder: Path) -> Reader:
    """Run files, from disk and as they are pasted on the page."""
    from_disk = _of_file(folder, "run.toml", load_run)

    def feed(data: bytes) -> None:
        if len(data) % 2:
            from_disk(data)
        else:
            json.dumps(parse_run_text(data.decode(errors="replace")).to_json(), allow_nan=False)

    seeds = [Seed(content=RUN, form=Form.TOML), Seed(content=RUN + b"#", form=Form.TOML)]
    return Reader(feed=feed, seeds=tuple(seeds))


def fault_scripts(folder: Path) -> Reader:
    def read(path: Path) -> None:
        faults = load_faults(path)
        apply_faults("pi-2", next(iter(catalogue.profiles.values())), faults)

    catalogue = load_catalogue()
    return Reader(feed=_of_file(folder, "faults.toml", read), seeds=(Seed(content=FAULTS, form=Form.TOML),))


def profiles(folder: Path) -> Reader:
    read = _of_file(folder, "profiles.toml", lambda path: load_catalogue([path]))
    return Reader(feed=read, seeds=(Seed(content=PROFILES, form=Form.TOML),))


def graphs(folder: Path) -> Reader:
    read = _of_file(folder, "node_list.json", read_topology)
    listed = {"nodes": {name: {"edges": list(node["edges"])} for name, node in GRAPH["nodes"].items()}}
    return Reader(feed=read, seeds=tuple(_json_seeds(GRAPH, listed)))


def node_hosts(folder: Path) -> Reader:
    return Reader(feed=_of_file(folder, "hosts.json", read_hosts), seeds=tuple(_json_seeds(HOSTS)))


def ssh_hosts(_folder: Path) -> Reader:
    words = (b"name=", b"role=trainer", b'"', b"\\", b"#", b"digits=/x", b"pi@h", b"name=shelf-1")
    hosts = json.dumps({"hosts": [{"name": "pi-1", "addr": "192.168.1.21", "port": 8884}]}).encode()
    workers = json.dumps([[0, "a1b2", "192.168.1.21"], [1, "c3d4", "192.168.1.22"]]).encode()
    seeds = (
        Seed(content=SSH_HOSTS, form=Form.TEXT),
        *(Seed(content=one, form=Form.JSON) for one in (hosts, workers)),
    )
    return Reader(feed=lambda data: parse_hosts(_text(data)), seeds=seeds, words=words)


def join_files(_folder: Path) -> Reader:
    file = JoinFile(token=TOKEN.text(), name="pi-1", shards={"digits": "/srv/digits"}, addresses=("a:1",))
    seeds = (Seed(content=file.to_text().encode(), form=Form.JSON),)
    return Reader(feed=lambda data: JoinFile.parse(_text(data)), seeds=seeds)


def tokens(_folder: Path) -> Reader:
    """Join tokens; behind their checksum too."""
    import base64  # noqa: PLC0415 for the inner content alone
    import hashlib  # noqa: PLC0415 likewise

    def close(content: bytes) -> bytes:
        return b"efl1." + base64.urlsafe_b64encode(hashlib.sha256(content).digest()[:3] + content).rstrip(b"=")

    inner = [TOKEN.ca_fingerprint, TOKEN.token_id, TOKEN.secret, TOKEN.fleet, list(TOKEN.addresses)]
    seeds = (
        Seed(content=TOKEN.text().encode(), form=Form.TEXT),
        Seed(content=json.dumps(inner).encode(), form=Form.JSON, close=close),
    )

    def feed(data: bytes) -> None:
        token = JoinToken.parse(_text(data))
        assert JoinToken.parse(token.text()) == token

    return Reader(feed=feed, seeds=seeds)


def operator_files(folder: Path) -> Reader:
    file = OperatorFile(
        url="https://pi:8000", fleet="lab", ca_fingerprint="ab" * 32, ca_pem="-----BEGIN\nX\n", operator_token="t"
    )
    read = _of_file(folder, "operator.toml", load_operator_file)
    return Reader(feed=read, seeds=(Seed(content=file.to_toml().encode(), form=Form.TOML),))


def coordinator_files(folder: Path) -> Reader:
    """`coordinator.toml` in a coordinator's directory."""
    root = init_directory(folder / "c", hosts=["pi.local"], fleet="lab").root
    path = next(iter(root.glob("*.toml")))
    content = path.read_bytes()

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        load_directory(root)

    more = content + b'[alerts]\nwebhook = "https://x.org/a"\n[certificates]\nclient_days = 90\n'
    return Reader(
        feed=feed,
        seeds=(Seed(content=content, form=Form.TOML), Seed(content=more, form=Form.TOML)),
        takes_seeds=False,
    )


def operator_answers(_folder: Path) -> Reader:
    """What a coordinator answers to the commands of an operator; the first byte is the status."""
    statuses = (200, 400, 401, 404, 500)

    def feed(data: bytes) -> None:
        _parse_reply("https://pi:8000", statuses[data[0] % len(statuses)] if data else 200, data[1:])

    value = {"v": 1, "rows": [{"run_id": "r", "name": "x"}], "error": "token-invalid", "message": "no"}
    content = json.dumps(value).encode()
    seeds = tuple(
        Seed(content=content, form=Form.JSON, close=lambda found, n=n: bytes([n]) + found)
        for n in range(len(statuses))
    )
    return Reader(feed=feed, seeds=seeds, takes_seeds=False)


def cards_user_data(_folder: Path) -> Reader:
    """What lies on a card already: user-data and network-config of cloud-init."""

    wishes = CardOptions(name="pi-01", ssh_keys=("ssh-ed25519 AAAA me",))
    fast = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    def feed(data: bytes) -> None:
        text = data[1:].decode(errors="replace")
        if data[:1] == b"n":
            _parse_network(text)
            return
        made = render_user_data(wishes, text)
        # What reads it on a board is the parser in Python, which takes ten times longer.
        yaml.load(made, yaml.SafeLoader if zlib.crc32(data) % READ_AS_ON_BOARDS_EVERY == 0 else fast)

    seeds = (
        Seed(content=USER_DATA, form=Form.TEXT, close=lambda found: b"u" + found),
        Seed(content=NETWORK, form=Form.TEXT, close=lambda found: b"n" + found),
    )
    words = (b"&a", b"*a", b"!!python/object:os.system", b"- ", b"{", b"[", b"1979-13-40", b"0x" + b"f" * 5000,
    b"!!int x",
             b"? ", b"!!binary x", b"!!timestamp x", b"<<: *note", b".inf", b"9" * 5000, b"!!set {a, b}",
             b"[" * 2000)  # fmt: skip
    return Reader(feed=feed, seeds=seeds, words=words)


def cards_preseed(_folder: Path) -> Reader:
    """The settings of Raspberry Pi OS that lie on a card already."""
    wishes = CardOptions(name="pi-01", ssh_keys=("ssh-ed25519 AAAA me",))

    def feed(data: bytes) -> None:
        tomllib.loads(render_preseed(wishes, data.decode(errors="replace")).decode())

    return Reader(feed=feed, seeds=(Seed(content=PRESEED, form=Form.TOML),))


def board_facts(_folder: Path) -> Reader:
    """What a board that is reached by ssh says of itself."""

    def feed(data: bytes) -> None:
        facts = HostFacts.from_result(CommandResult(status=0, output=data.decode(errors="replace"), errors=""))
        facts.format_skew(1e9)
        facts.check(now=1e9, is_offline=False, target="pi@pi")

    device = FACTS.split(b"device ")[1].split(b"\n")[0]
    inner = Seed(
        content=device, form=Form.JSON, close=lambda found: FACTS.replace(device, found.replace(b"\n", b" "))
    )
    return Reader(feed=feed, seeds=(Seed(content=FACTS, form=Form.TEXT), inner))


def places(_folder: Path) -> Reader:
    """Places in the history, as URLs carry them."""
    seeds = (
        Seed(content=encode_cursor([5.5, "a1"]).encode(), form=Form.JSON),
        Seed(content=b"[1, 2]", form=Form.JSON),
    )
    return Reader(feed=lambda data: decode_cursor(data.decode(errors="replace")), seeds=seeds)


def _json_seeds(*values: Any) -> list[Seed]:
    return [Seed(content=json.dumps(value).encode(), form=Form.JSON) for value in values]
