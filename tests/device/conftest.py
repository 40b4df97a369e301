"""A device that has joined, a card that fills up, and a fleet whose boards talk to each other directly."""

import resource
from contextlib import contextmanager

import pytest
from peer_boards import PeerFleet, direct_threads, eventually

from edgefl.coordinator import pki
from edgefl.device.enrolment.enroll import EnrolmentOptions, enroll
from edgefl.device.state_dir import DeviceSettings, save_enrolment


@pytest.fixture(scope="session")
def joined(tmp_path_factory):
    """A fleet's authority and the certificate of a device."""
    authority = pki.create_authority("lab")
    return authority, pki.issue_client_certificate(authority, "pi-1")


@pytest.fixture
def state(joined, tmp_path):
    """That of a device which has joined a fleet whose coordinator is away."""
    authority, pair = joined
    device = DeviceSettings(
        device_id="pi-1", fleet="lab", role="trainer", ca_fingerprint=pki.compute_fingerprint(authority.cert_pem),
        addresses=("127.0.0.1:9",), broker_port=9, accelerator="cpu", threads=1,
    )  # fmt: skip
    (tmp_path / "device").mkdir(mode=0o700)
    return save_enrolment(
        tmp_path / "device", device, key_pem=pair.key_pem, cert_pem=pair.cert_pem, ca_pem=authority.cert_pem
    )


@pytest.fixture
def joined_state(front_door, tmp_path):
    """That of a device which has joined the coordinator of the front door."""
    wishes = EnrolmentOptions(
        name="pi-1", role="trainer", shards={}, examples={}, accelerator="cpu", threads=1, facts={}
    )
    return enroll(front_door.token(), wishes, root=tmp_path / "device", addresses=[front_door.address])


@pytest.fixture
def full_card():
    """A limit on file sizes is the nearest thing to a full card that needs no mount.

    It holds for what pytest itself writes too, and so for no longer than a `with`.
    """

    @contextmanager
    def full(limit_bytes=10):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return full


@pytest.fixture
def peers(tmp_path):
    fleet = PeerFleet(tmp_path)
    yield fleet
    fleet.close()
    eventually(lambda: not direct_threads(), f"the end of {direct_threads()}")
