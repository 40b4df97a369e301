from __future__ import annotations

import asyncio
import base64
import datetime as dt
import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from fastapi import FastAPI
from noted_calls import NotedCalls
from small_fleet import SmallFleet, enroll

from edgefl.coordinator.auth import register_error_handler, require_device
from edgefl.coordinator.directory import init_directory
from edgefl.coordinator.enrolment.enrolment_service import RenewalService, renewal_router
from edgefl.coordinator.fleet.membership import DrainController, Membership
from edgefl.coordinator.fleet.presence import DevicePresence, PresenceTracker
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.fleet.supernode_presence import SuperNodePresence
from edgefl.coordinator.flower.superlink import SuperLink
from edgefl.coordinator.rollouts.deployments import select_devices
from edgefl.coordinator.rollouts.installations import get_incompatibility_reason
from edgefl.core.errors import NameTakenError, NotFoundError, UsageError
from edgefl.core.protocol import (
    BODY_HASH_HEADER,
    KEY_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    Command,
    CommandKind,
)
from edgefl.core.types import Role
from edgefl.device.enrolment.certificates import create_key, create_signing_request
from edgefl.storage.queries.history import read_history
from edgefl.storage.store import Store


def new_key() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class Site:
    """A store, Flower's state and a registry; `restart` keeps the store alone."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.restart()

    def restart(self) -> None:
        self.superlink = SuperLink(on_reply=lambda _: None, observer=NotedCalls())
        self.registry = DeviceRegistry(PresenceTracker(), lambda: 0.0)
        self.supernodes = SuperNodePresence(self.registry, lambda: 0.0)
        self.members = Membership(self.store, self.superlink, self.registry, self.supernodes)

    def join(self, name: str, key: bytes) -> int | None:
        enroll(self.store, name, key=key)
        self.members.add(name, key)
        return self.registry.get_node_id(name)

    def knows(self, key: bytes) -> int | None:
        found: int | None = self.superlink.state.get_node_id_by_public_key(key)
        return found

    def events(self) -> list[str]:
        return [str(row["kind"]) for row in read_history(self.store, "events")]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Store.open(tmp_path / "edgefl.db") as store:
        yield Site(store)


def test_who_joins_gets_one_place_however_often_it_asks(site: Site) -> None:
    key = new_key()
    node_id = site.join("pi", key)
    assert node_id is not None
    assert site.join("pi", key) == node_id == site.knows(key)
    assert site.events() == ["device-joined"]


def test_everybody_has_the_same_place_after_a_restart_and_who_had_none_yet_gets_one(
    site: Site,
) -> None:
    keys = {name: new_key() for name in ("pi-1", "pi-2")}
    places = {name: site.join(name, key) for name, key in keys.items()}
    late = new_key()
    enroll(site.store, "pi-3", key=late)
    site.restart()
    assert site.registry.list_devices() == []
    site.members.restore()
    assert {name: site.registry.get_node_id(name) for name in keys} == places
    assert {name: site.knows(key) for name, key in keys.items()} == places
    assert site.knows(late) == site.registry.get_node_id("pi-3") is not None


def test_after_a_restart_who_was_seen_before_is_offline_and_who_was_not_is_never_seen(site: Site) -> None:
    for name in ("pi-1", "pi-2"):
        site.join(name, new_key())
    site.store.update_device("pi-1", presence="online")
    site.restart()
    site.members.restore()
    assert [site.registry.format_presence(name) for name in ("pi-1", "pi-2")] == ["offline", "never seen"]


@pytest.mark.parametrize("is_known", [True, False], ids=["as usual", "only the store has heard of it"])
def test_who_is_removed_has_no_place_and_leaves_its_name(site: Site, is_known: bool) -> None:
    former, later = new_key(), new_key()
    site.join("pi", former)
    if is_known:
        site.members.remove("pi")
        assert (site.knows(former), site.registry.get_device("pi")) == (None, None)
    else:
        site.store.remove_device("pi", at=3.0)
    assert site.join("pi", later) == site.knows(later) is not None
    assert site.knows(former) is None
    with pytest.raises(NotFoundError, match="no device 'nobody'"):
        site.members.remove("nobody")


def test_a_renewed_key_takes_over_the_place(site: Site) -> None:
    before, after = new_key(), new_key()
    node_id = site.join("pi", before)
    site.members.update_key("pi", after)
    assert (site.knows(after), site.knows(before)) == (node_id, None)


def test_a_stranger_cannot_be_removed(site: Site) -> None:
    with pytest.raises(NotFoundError, match="no device 'nobody'"):
        site.members.remove("nobody")


def test_a_device_that_joins_costs_no_more_the_more_there_are(site: Site, tmp_path: Path) -> None:
    """What others can do is not even read: theirs is damaged here."""
    site.join("pi-1", new_key())
    site.store.record_capabilities("pi-1", {"cores": 4}, {"digits": 10}, 1.0)
    with sqlite3.connect(tmp_path / "edgefl.db") as raw:
        raw.execute("UPDATE capabilities SET facts = 'no JSON'")
    raw.close()
    assert site.join("pi-2", new_key()) is not None


def test_what_an_earlier_version_took_in_of_a_device_and_is_too_deep_now_is_left_out(site: Site) -> None:
    for name, facts in (("pi-1", {"cores": 4}), ("pi-2", {"cores": [[[[[[[[4]]]]]]]]})):
        site.join(name, new_key())
        site.store.record_capabilities(name, facts, {"digits": 10}, 1.0)
    site.restart()
    site.members.restore()
    known = {info.device_id: info.capabilities for info in site.registry.list_devices()}
    assert known == {"pi-1": {"cores": 4}, "pi-2": {}}


class DrainSite(SmallFleet):
    """A registry and a draining over one store; `sent` holds what devices were told."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.sent = list[tuple[str, str]]()
        self.draining = DrainController(store, self.registry, self._send, lambda: 9.0)
        for name in ("pi", "other"):
            self.add(name, state=None)
        self.draining.restore()
        self.draining.subscribe()

    def _send(self, device_id: str, command: Command) -> None:
        self.sent.append((device_id, command.kind))

    def workers(self) -> list[str]:
        return [info.device_id for info in self.registry.list_schedulable()]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "edgefl.db") as opened:
        yield opened


@pytest.fixture
def drain_site(store: Store) -> DrainSite:
    drain_site = DrainSite(store)
    drain_site.say("pi", "online")
    return drain_site


def test_a_drained_device_gets_no_work_from_that_moment_on(drain_site: DrainSite) -> None:
    assert drain_site.workers() == ["pi"]
    drain_site.draining.drain("pi")
    assert drain_site.workers() == []
    assert drain_site.sent == [("pi", CommandKind.DRAIN)]
    assert drain_site.registry.get_state("pi") is DevicePresence.ONLINE, "it has not obeyed yet"


def test_resuming_waits_for_the_device_to_say_that_it_is_online(drain_site: DrainSite) -> None:
    drain_site.draining.drain("pi")
    drain_site.say("pi", "draining")
    drain_site.draining.resume("pi")
    assert drain_site.sent[-1] == ("pi", CommandKind.RESUME)
    assert drain_site.workers() == []
    drain_site.say("pi", "online")
    assert drain_site.workers() == ["pi"]


@pytest.mark.parametrize("resumes", [False, True])
def test_a_device_that_missed_what_it_was_told_is_told_when_it_comes_back(
    drain_site: DrainSite, resumes: bool
) -> None:
    drain_site.draining.drain("pi")
    drain_site.say("pi", "draining")
    drain_site.say("pi", "offline")
    if resumes:
        drain_site.draining.resume("pi")
    drain_site.sent.clear()
    drain_site.say("pi", "draining" if resumes else "online", boot="boot-2", session=2)
    assert drain_site.sent == [("pi", CommandKind.RESUME if resumes else CommandKind.DRAIN)]
    assert drain_site.workers() == []


def test_a_coordinator_that_restarts_still_knows_who_is_drained(drain_site: DrainSite, store: Store) -> None:
    drain_site.draining.drain("pi")
    drain_site.draining.drain("other")
    drain_site.draining.resume("other")
    again = DrainSite(store)
    assert (again.registry.is_drained("pi"), again.registry.is_drained("other")) == (True, False)
    again.say("pi", "online", session=2)
    assert again.sent == [("pi", CommandKind.DRAIN)]
    store.record_event("device-joined", "as trainer", at=10.0, device_id="pi")
    assert not DrainSite(store).registry.is_drained("pi"), "it has joined anew"


def test_asking_twice_is_written_down_once_and_told_twice(drain_site: DrainSite, store: Store) -> None:
    drain_site.draining.drain("pi")
    drain_site.draining.drain("pi")
    assert [row["kind"] for row in read_history(store, "events")] == ["drain-requested"]
    assert drain_site.sent == [("pi", CommandKind.DRAIN)] * 2


@pytest.mark.parametrize("action", ["drain", "resume"])
def test_a_device_that_is_not_in_the_fleet_cannot_be_asked(drain_site: DrainSite, action: str) -> None:
    ask: Any = getattr(drain_site.draining, action)
    with pytest.raises(NotFoundError, match="'nobody'"):
        ask("nobody")


def test_a_supernode_is_a_trainer_of_its_apps_and_is_the_same_after_a_restart(site: Site) -> None:
    public = ec.generate_private_key(ec.SECP384R1()).public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    site.members.add_supernode(
        "node", public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode(), jobs=["flower-a"], groups=["x"]
    )
    node_id = site.knows(pem)
    for _ in range(2):
        device = site.registry.get_device("node")
        assert device is not None
        assert (device.role, device.tasks, device.groups) == (Role.TRAINER, ("flower-a",), ("x",))
        assert site.superlink.state.supernodes == {node_id}
        site.restart()
        site.members.restore()
    site.members.remove("node")
    assert site.knows(pem) is None
    assert site.superlink.state.supernodes == set()
    site.members.add_supernode("node", pem.decode(), jobs=["flower-a"], groups=[])


def test_what_is_no_supernode_is_refused(site: Site) -> None:
    pem = new_key().decode()
    curves = [ec.generate_private_key(curve()).public_key() for curve in (ec.BrainpoolP256R1, ec.SECP256K1)]
    others = [
        ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH),
        *(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo) for key in curves),
        b"ecdsa-sha2-nistp384 AAAA",
        b"",
    ]
    for key in others:
        with pytest.raises(UsageError, match="public key of a SuperNode must be one of ECDSA"):
            site.members.add_supernode("node", key.decode(), jobs=["flower-a"], groups=[])
    private = ec.generate_private_key(ec.SECP384R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with pytest.raises(UsageError, match="this is the private key"):
        site.members.add_supernode("node", private.decode(), jobs=["flower-a"], groups=[])
    for name, jobs, groups in (
        ("Node", ["flower-a"], []), ("node", [], []), ("node", ["flower-a"] * 51, []), ("node", ["flower-a b"], []),
        ("node", ["mnist"], []), ("node", ["flower-A"], []), ("node", ["flower-a"], ["a b"]),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            site.members.add_supernode(name, pem, jobs=jobs, groups=groups)
    site.members.add_supernode("node", pem, jobs=["flower-a"], groups=[])
    site.join("pi", new_key())
    for name, key in (("node", new_key().decode()), ("other", pem), ("pi", new_key().decode()), ("coordinator", pem)):
        with pytest.raises(NameTakenError):
            site.members.add_supernode(name, key, jobs=["flower-a"], groups=[])


def test_a_supernode_has_nothing_of_a_removed_board_whose_name_it_has(site: Site) -> None:
    site.join("pi", new_key())
    site.store.record_capabilities("pi", {"cores": 4, "installs": {"able": True}}, {"mnist": 10}, 1.0)
    site.members.remove("pi")
    site.members.add_supernode("pi", new_key().decode(), jobs=["flower-a"], groups=[])
    for _ in range(2):
        device = site.registry.get_device("pi")
        assert device is not None
        assert (device.tasks, device.examples) == (("flower-a",), {"flower-a": 0})
        assert "cores" not in device.capabilities
        assert get_incompatibility_reason(device) == "it is a SuperNode of Flower, which edgefl does not update"
        with pytest.raises(UsageError, match="no device has a shard for task mnist"):
            select_devices(site.registry, "mnist", None)
        site.restart()
        site.members.restore()


def test_a_supernode_s_signature_gets_it_no_certificate(site: Site, tmp_path: Path) -> None:
    """It covers the time alone: who reads one could ask for anything else in its name."""
    key = load_pem_private_key(create_key(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    site.members.add_supernode("node", public.decode(), jobs=["flower-a"], groups=[])
    service = RenewalService(
        directory=init_directory(tmp_path / "c", hosts=["127.0.0.1"], fleet="lab"), store=site.store,
        on_renewed=site.members.update_key, on_reenrolled=site.members.update_key, clock=time.time,
    )  # fmt: skip
    app, rejections = FastAPI(), list[str]()
    register_error_handler(app)
    check = require_device(
        site.members.get_signer, record_rejection=lambda _kind, _source, detail: rejections.append(detail)
    )
    app.include_router(renewal_router(service, device_check=check))
    stamp = dt.datetime.now(dt.UTC).isoformat()
    body = json.dumps({"v": 1, "csr": create_signing_request(create_key(), "node").decode()}).encode()
    headers = {
        KEY_HEADER: base64.b64encode(public).decode(),
        TIMESTAMP_HEADER: stamp,
        SIGNATURE_HEADER: base64.b64encode(key.sign(stamp.encode(), ec.ECDSA(hashes.SHA256()))).decode(),
        BODY_HASH_HEADER: hashlib.sha256(body).hexdigest(),
    }

    async def renew() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="https://c") as client:
            return await client.post("/edgefl/v1/renew", content=body, headers=headers)

    assert asyncio.run(renew()).status_code == 401
    assert rejections == ["/edgefl/v1/renew: a SuperNode's signature counts for Flower's messages alone"]
    assert site.store.get_device("node").certificate_serial is None
    with pytest.raises(NameTakenError):
        enroll(site.store, "node", key=public)
