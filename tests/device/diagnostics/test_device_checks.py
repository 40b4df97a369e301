import socket
import subprocess

import pytest
from broker_site import BROKERS, HOST, BrokerSite
from peer_boards import eventually
from requirements import needs

from edgefl.coordinator import pki
from edgefl.coordinator.brokers.mosquitto import find_mosquitto
from edgefl.core.errors import BrokerError
from edgefl.device.diagnostics.device_checks import BrokerAccessRules, check_broker_tls, probe_access_rules
from edgefl.simulation.local_fleet import find_free_port

KEEPS_TO_THEM = BrokerAccessRules(can_write_as_others=False, can_read_others=False)
NEEDS_MOSQUITTO = needs("mosquitto")


class Site(BrokerSite):
    def probe(self, name="pi-1", tls=None, timeout_s=5.0):
        return probe_access_rules(
            HOST, self.port, tls or self.tls(name), fleet="lab", identity=name, timeout_s=timeout_s
        )


@pytest.fixture
def site(tmp_path):
    made = Site(tmp_path)
    yield made
    made.close()


@pytest.fixture
def start_mosquitto(site):
    """Starts one with the fleet's certificates and rules of somebody else's making."""
    processes = []

    def start(rules):
        (site.folder / "acl").write_text(rules)
        lines = [
            f"listener {site.port} {HOST}", "user root", "allow_anonymous false",
            f"cafile {site.folder / 'server.ca'}", f"certfile {site.folder / 'server.cert'}",
            f"keyfile {site.folder / 'server.key'}", "require_certificate true", "use_identity_as_username true",
            *([f"acl_file {site.folder / 'acl'}"] if rules else []),
        ]  # fmt: skip
        (site.folder / "conf").write_text("\n".join(lines))
        command = [str(find_mosquitto()), "-c", site.folder / "conf"]
        processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        eventually(answers)

    def answers():
        try:
            check_broker_tls(HOST, site.port, site.tls("waiter"))
        except BrokerError:
            return False
        return True

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("spec", BROKERS)
def test_our_own_brokers_keep_to_the_rules_and_a_probe_leaves_nothing_and_pushes_no_other_device_off(tmp_path, spec):
    site, drops = Site(tmp_path, spec).start(), []
    other, got = site.client("pi-2", "edgefl/v1/lab/+/peer/pi-2", "edgefl/v1/lab/pi-2/status")
    other.on_disconnect = lambda *_: drops.append(1)
    assert [site.probe(), site.probe()] == [KEEPS_TO_THEM] * 2
    assert (drops, got) == ([], [])
    site.close()


@NEEDS_MOSQUITTO
def test_a_broker_that_lets_devices_read_each_other_or_has_no_rules_is_found_out(site, start_mosquitto):
    start_mosquitto("pattern read edgefl/v1/lab/#\npattern write edgefl/v1/lab/%u/#\n")
    assert site.probe() == KEEPS_TO_THEM  # nobody has said anything yet
    other, _ = site.client("pi-2")
    other.publish("edgefl/v1/lab/pi-2/status", b"{}", qos=1, retain=True).wait_for_publish(5)
    assert site.probe() == BrokerAccessRules(can_write_as_others=False, can_read_others=True)
    site.port = find_free_port()
    start_mosquitto("")
    assert site.probe().can_write_as_others
    site.port = find_free_port()
    start_mosquitto("topic read nothing\n")
    with pytest.raises(BrokerError, match="does not carry what this device may say"):
        site.probe(timeout_s=0.5)


def test_a_broker_that_is_not_there_says_nothing_or_has_another_ca_is_said(site):
    site.start()
    with pytest.raises(BrokerError, match="cannot be reached"):
        check_broker_tls(HOST, find_free_port(), site.tls("pi-1"))
    with socket.create_server((HOST, 0)) as mute, pytest.raises(BrokerError, match="cannot be reached"):
        check_broker_tls(HOST, mute.getsockname()[1], site.tls("pi-1"), timeout_s=0.3)
    stranger = site.tls("pi-9", pki.create_authority("lab"))
    with pytest.raises(BrokerError, match=r"cannot be reached|does not let this certificate in"):
        site.probe("pi-9", stranger, timeout_s=0.5)
    site.authority = pki.create_authority("lab")
    with pytest.raises(BrokerError, match="does not verify"):
        check_broker_tls(HOST, site.port, site.tls("pi-9"))
