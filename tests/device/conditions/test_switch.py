"""The owner's switch: a file in a board's tree, and a topic of a real Mosquitto."""

import pytest
from board_trees import plant
from device.collect.test_collector import _mosquitto, _publisher
from peer_boards import eventually
from requirements import needs

from edgefl.core.conditions import Conditions, Switch, find_blocker, parse_conditions
from edgefl.core.errors import ConfigError
from edgefl.device.collect.mqtt_source import MqttSource
from edgefl.device.conditions import switch as switch_module
from edgefl.device.conditions.budgets import Clocks
from edgefl.device.conditions.facts import FactReader
from edgefl.device.conditions.gate import SWITCH_RETRY_S, ConditionGate, save_conditions
from edgefl.device.conditions.switch import SwitchReader
from edgefl.device.hardware.board_reader import BoardReader

LINE = "sys/class/gpio/gpio529/value"
GPIO = f'[conditions.switch]\nfile = "/{LINE}"\n'


@pytest.mark.parametrize(
    ("text", "state"), [("1\n", True), ("0\n", False), ("ON", True), ("off", False), ("", None), ("maybe", None)]
)
def test_a_board_trains_only_while_the_line_of_its_switch_is_on_and_not_where_that_is_not_known(
    tmp_path, text, state
):
    board = BoardReader(plant(tmp_path / "board", {LINE: text}))
    gate = ConditionGate(tmp_path, board=board)
    reasons = {True: None, False: "its switch is off", None: "its switch is not known"}
    opposite = {True: "its switch is on", False: None, None: "its switch is not known"}
    for expected, more in ((reasons[state], ""), (opposite[state], "inverted = true\n")):
        save_conditions(tmp_path, (GPIO + more).encode())
        blocker = gate.check()
        assert (blocker and blocker.reason) == expected
        assert blocker is None or blocker.kind == "switch"


def test_a_switch_that_is_set_back_lets_it_train_at_once(tmp_path):
    tree = plant(tmp_path / "board", {LINE: "0\n"})
    save_conditions(tmp_path, GPIO.encode())
    gate = ConditionGate(tmp_path, board=BoardReader(tree))
    assert gate.check() is not None
    plant(tree, {LINE: "1\n"})
    assert gate.check() is None


def test_a_file_that_is_not_there_is_no_switch_that_is_on(tmp_path):
    assert SwitchReader(Switch(file="/nowhere"), tmp_path).read() is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("", "must have host and topic, or a file"),
        ('host = "broker"', "must have host and topic, or a file"),
        ('host = "broker"\ntopic = "a"\nfile = "/x"', "must have host and topic, or a file"),
        ('topic = "a"\nfile = "/x"', "must have host and topic, or a file"),
        ('file = "x"', "must be an absolute path, got 'x'"),
        ('file = "/x"\ntls = true\nlogin_file = "/y"', "has no broker, so leave out login_file, tls"),
        ('file = "/x"\nport = 1883\nca_file = "/y"', "has no broker, so leave out port, ca_file"),
    ],
)
def test_half_a_switch_or_two_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        parse_conditions(f"[conditions.switch]\n{settings}\n")


def test_a_topic_with_wildcards_is_refused_by_the_name_of_its_setting(tmp_path):
    gate = ConditionGate(tmp_path)
    with pytest.raises(ConfigError, match=r"^conditions\.switch\.topic must be TOPIC"):
        gate.list_unknown(Conditions(switch=Switch(host="127.0.0.1", topic="home/+")))


def test_a_login_that_is_missing_when_the_agent_starts_blocks_until_it_is_mended(tmp_path, monkeypatch):
    monkeypatch.setattr(MqttSource, "start", lambda _: None)
    now_s, login = [100.0], tmp_path / "login"
    text = f'[conditions.switch]\nhost = "127.0.0.1"\ntopic = "t"\nlogin_file = "{login}"\n'
    save_conditions(tmp_path, text.encode())
    gate = ConditionGate(tmp_path, clocks=Clocks(boot_id="b", boot_time=lambda: now_s[0]))
    assert gate.check().kind == "file"
    login.write_text("user\npassword\n")
    login.chmod(0o600)
    now_s[0] += SWITCH_RETRY_S - 0.1
    assert gate.check().kind == "file"
    now_s[0] += 0.2
    assert gate.check().reason == "its switch is not known"


@needs("mosquitto")
@pytest.mark.parametrize(
    "payload",
    [b"maybe", b'{"other": 1}', b'{"state": "ajar"}', b'{"state": "ON", "text": "' + b"x" * 4096 + b'"}', b""],
)
def test_what_cannot_be_read_ends_the_state_before_it_whatever_the_clock_is_set_to(tmp_path, monkeypatch, payload):
    wall_s = [1e9]
    monkeypatch.setitem(MqttSource.__init__.__kwdefaults__, "clock", lambda: wall_s[0])
    with _mosquitto(tmp_path) as port, _publisher(port) as publisher:
        reader = SwitchReader(Switch(host="127.0.0.1", port=port, topic="t#/state"), tmp_path)
        try:
            publisher.publish("t", b'{"state": "ON"}', qos=1, retain=True).wait_for_publish(5)
            eventually(lambda: reader.read() is True)
            wall_s[0] += 3600.0
            assert reader.read() is True
            publisher.publish("t", payload, qos=1).wait_for_publish(5)
            eventually(lambda: reader.read() is None)
            publisher.publish("t", b'{"state": "off"}', qos=1).wait_for_publish(5)
            eventually(lambda: reader.read() is False)
        finally:
            reader.close()


@needs("mosquitto")
def test_a_topic_of_another_broker_switches_training_and_what_it_said_before_the_broker_left_does_not_count(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(switch_module, "EARLY_S", 0.2)
    with _mosquitto(tmp_path) as port, _publisher(port) as publisher:
        publisher.publish("home/train", b'{"state": "ON"}', qos=1, retain=True).wait_for_publish(5)
        conditions = Conditions(switch=Switch(host="127.0.0.1", port=port, topic="home/train#/state"))
        facts = FactReader(BoardReader(tmp_path))
        facts.set_switch(conditions.switch, wait_s=10)
        assert facts.read(conditions).switch_is_on is True  # kept by the broker
        publisher.publish("home/train", b'{"state": "OFF"}', qos=1).wait_for_publish(5)
        eventually(lambda: facts.read(conditions).switch_is_on is False)
        blocker = find_blocker(conditions, facts.read(conditions), 0.0)
        assert blocker is not None
        assert blocker.reason == "its switch is off"
        publisher.publish("home/train", b'{"state": "on"}', qos=1).wait_for_publish(5)
        eventually(lambda: facts.read(conditions).switch_is_on is True)
    eventually(lambda: facts.read(conditions).switch_is_on is None)
    facts.set_switch(None, wait_s=0)
    assert facts.read(Conditions()).switch_is_on is None


def test_a_switch_survives_being_written_and_read_again():
    conditions = Conditions(switch=Switch(host="broker", topic="a/b", inverted=True))
    assert conditions.to_json() == {"switch": {"host": "broker", "topic": "a/b", "inverted": True}}
