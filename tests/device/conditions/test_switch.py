"""The owner's switch: a file in a board's tree, and a topic of a real Mosquitto."""

import contextlib
import errno
import inspect
import sys
from types import SimpleNamespace

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
from edgefl.device.conditions.switch import MAX_GPIO_TRIES, SwitchReader
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
        ("", "must have host and topic, or a file, or gpio"),
        ('host = "broker"', "must have host and topic, or a file, or gpio"),
        ('host = "broker"\ntopic = "a"\nfile = "/x"', "must have host and topic, or a file, or gpio"),
        ('topic = "a"\nfile = "/x"', "must have host and topic, or a file, or gpio"),
        ('file = "x"', "must be an absolute path, got 'x'"),
        ('file = "/x"\ntls = true\nlogin_file = "/y"', "has no broker, so leave out login_file, tls"),
        ('file = "/x"\ngpio = "/dev/gpiochip0:1"', "must have host and topic, or a file, or gpio"),
        ('host = "broker"\ngpio = "/dev/gpiochip0:1"', "must have host and topic, or a file, or gpio"),
        ('gpio = "/dev/gpiochip0:1"\ntls = true', "gpio has no broker, so leave out tls"),
        ('file = "/x"\nbias = "pull-up"', "bias is of a GPIO line, so leave it out"),
        ('gpio = "/dev/gpiochip0:1"\nbias = "up"', "'as-is', 'pull-up', 'pull-down', 'disabled'"),
        ('gpio = "/dev/gpiochip0"', "such as /dev/gpiochip0:17, got '/dev/gpiochip0'"),
        ('gpio = "/dev/gpiochip0:"', "such as /dev/gpiochip0:17, got '/dev/gpiochip0:'"),
        ('gpio = "gpiochip0:17"', "such as /dev/gpiochip0:17, got 'gpiochip0:17'"),
        ('file = "/x"\nport = 1883\nca_file = "/y"', "has no broker, so leave out port, ca_file"),
    ],
)
def test_half_a_switch_or_two_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        parse_conditions(f"[conditions.switch]\n{settings}\n")


class Lines:
    """Lines of a chip in place of the kernel's, by gpiod's own calls: levels by line, and who has one."""

    def __init__(self, monkeypatch, levels):
        self.gpiod = pytest.importorskip("gpiod", reason="gpiod is not installed: pip install -e '.[gpio]'")
        self.levels, self.num_busy, self.asked, self.num_open = levels, 0, [], 0
        signature = inspect.signature(self.gpiod.request_lines)
        monkeypatch.setattr(
            self.gpiod, "request_lines", lambda *args, **kw: self._request(**signature.bind(*args, **kw).arguments)
        )

    def _request(self, *, path, config, consumer):
        ((line, settings),) = config.items()
        self.asked.append((path, line, settings.direction, settings.bias))
        if self.num_busy:
            self.num_busy -= 1
            raise OSError(errno.EBUSY, "Device or resource busy")
        if line not in self.levels:
            raise ValueError(f"no line {line}")
        return self._open(line)

    @contextlib.contextmanager
    def _open(self, line):
        self.num_open += 1
        yield SimpleNamespace(
            get_value=lambda asked: self.gpiod.line.Value(self.levels[line] if asked == line else None)
        )
        self.num_open -= 1


@pytest.mark.parametrize("line", ["17", "GPIO17"])
def test_a_gpio_line_is_read_by_offset_or_name_with_its_bias_and_is_free_between_readings(
    monkeypatch, tmp_path, line
):
    name = int(line) if line.isdecimal() else line
    lines = Lines(monkeypatch, {name: 1})
    gate = ConditionGate(tmp_path, board=BoardReader(tmp_path))
    text = f'[conditions.switch]\ngpio = "/dev/gpiochip0:{line}"\nbias = "pull-up"\ninverted = true\n'
    save_conditions(tmp_path, text.encode())
    assert gate.check().reason == "its switch is on"
    lines.levels[name], lines.num_busy = 0, MAX_GPIO_TRIES - 1
    assert gate.check() is None  # a command of this board had it for a moment
    lines.num_busy = MAX_GPIO_TRIES
    assert gate.check().reason == "its switch is not known"
    assert lines.num_open == 0
    settings = lines.gpiod.line.Direction.INPUT, lines.gpiod.line.Bias.PULL_UP
    assert set(lines.asked) == {(str(tmp_path / "dev/gpiochip0"), name, *settings)}


def test_a_gpio_chip_that_is_none_lets_nothing_be_trained_and_is_named(tmp_path):
    pytest.importorskip("gpiod", reason="gpiod is not installed: pip install -e '.[gpio]'")
    plant(tmp_path, {"dev/gpiochip0": ""})
    for gpio, why in (("/dev/gpiochip0:1", "Inappropriate ioctl"), ("/dev/gpiochip1:1", "No such file")):
        save_conditions(tmp_path, f'[conditions.switch]\ngpio = "{gpio}"\n'.encode())
        assert f"conditions.switch.gpio {gpio}: " in (
            reason := ConditionGate(tmp_path, board=BoardReader(tmp_path)).check().reason
        )
        assert why in reason


def test_a_gpio_line_without_gpiod_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gpiod", None)
    with pytest.raises(ConfigError, match=r"edgefl-fleet\[gpio\]"):
        SwitchReader(Switch(gpio="/dev/gpiochip0:1"), tmp_path)


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
