"""Makers' programs, as real scripts on a PATH: well-behaved, slow, endless, failing, gone, and lying."""

import time
from pathlib import Path

import pytest
from board_trees import ORIN_JETPACK_7, PI_4, plant

from edgefl.device.hardware import board_reader
from edgefl.device.hardware.board_reader import (
    MAX_FILE_BYTES,
    OUTPUT_CACHE_S,
    BoardReader,
    ThrottleStatus,
    find_paths,
    read_int,
    read_kilobytes,
    read_strings,
    read_text,
    read_throttle_status,
    run_program,
    sanitise_text,
)
from edgefl.device.hardware.capabilities import probe

WITHOUT_MONITOR = {name: text for name, text in PI_4.items() if "hwmon" not in name}
# Without /sys a Jetson says what only its programs know.
BARE_JETSON = {name: text for name, text in ORIN_JETPACK_7.items() if "hwmon" not in name and "devfreq" not in name}
TEGRASTATS = (
    "11-22-2026 10:00:00 RAM 2500/7620MB (lfb 4x4MB) SWAP 0/3810MB CPU [12%@1510,0%@1510] EMC_FREQ 0% GR3D_FREQ 45% "
    "cpu@50.1C tj@52.5C VDD_IN 4500mW/4400mW VDD_CPU_GPU_CV 800mW/790mW"
)


@pytest.fixture
def script(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def make(name, body):
        path = folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return make


def test_gives_what_a_program_prints(script):
    script("teller", 'echo "said $1"')
    assert run_program(["teller", "a b; echo c"], 5.0) == "said a b; echo c"


def test_a_program_that_fails_says_nothing_or_is_not_there_gives_nothing(script):
    for body in ("exit 3", "echo half; exit 1", "true", "kill -9 $$"):
        script("teller", body)
        assert run_program(["teller"], 5.0) is None, body
    script("teller", "").write_bytes(b"\x7fELF nothing")
    for name in ("teller", "no-such-program-of-edgefl"):
        assert run_program([name], 1.0) is None


def test_one_that_goes_on_for_ever_is_ended_with_its_children_and_what_it_said_counts(script, tmp_path):
    script("teller", f'echo line; echo $$ > "{tmp_path}/pid"; sleep 60 & echo $! > "{tmp_path}/child"; wait')
    assert run_program(["teller"], 0.5) == "line"
    for name in ("pid", "child"):
        assert _is_gone(int((tmp_path / name).read_text())), f"the {name} lives on"
    script("teller", "yes")
    assert 0 < len(run_program(["teller"], 5.0)) < 1 << 20


def test_vcgencmd_tells_the_present_and_the_past_where_no_file_does(script, tmp_path):
    script("vcgencmd", '[ "$1" = get_throttled ] && echo throttled=0x50005')
    root = plant(tmp_path / "root", {**WITHOUT_MONITOR, "dev/vcio": ""})
    told = read_throttle_status(BoardReader(root))
    assert told == ThrottleStatus(now="under-voltage,throttled", since_boot="under-voltage,throttled")
    assert probe(root)["throttled_since_boot"] == "under-voltage,throttled"


def test_vcgencmd_is_not_run_where_the_firmware_cannot_be_reached(script, tmp_path):
    script("vcgencmd", "echo throttled=0x1")
    assert read_throttle_status(BoardReader(plant(tmp_path / "root", WITHOUT_MONITOR))) is None


@pytest.mark.parametrize("said", ["throttled=0xffffffff", "VCHI initialization failed", "throttled=", "0x5"])
def test_a_vcgencmd_that_makes_no_sense_falls_back_to_the_voltage_monitor(script, tmp_path, said):
    script("vcgencmd", f"echo '{said}'")
    assert read_throttle_status(BoardReader(plant(tmp_path / "root", {**PI_4, "dev/vcio": ""}))) == ThrottleStatus(
        now="ok"
    )


def test_a_program_is_asked_again_after_half_a_minute_and_not_before(script, tmp_path):
    script("vcgencmd", f'echo x >> "{tmp_path}/runs"; echo throttled=0x0')
    now_s = 0.0
    board = BoardReader(plant(tmp_path / "root", {**WITHOUT_MONITOR, "dev/vcio": ""}), clock=lambda: now_s)
    for _ in range(5):
        assert read_throttle_status(board) == ThrottleStatus(now="ok", since_boot="ok")
    now_s += OUTPUT_CACHE_S
    read_throttle_status(board)
    assert (tmp_path / "runs").read_text() == "x\nx\n"


def test_a_jetson_s_programs_tell_what_no_file_does(script, tmp_path, monkeypatch):
    monkeypatch.setattr(board_reader, "TEGRASTATS_S", 1.0)
    script("nvpmodel", '[ "$1" = -q ] && printf "NV Power Mode: MAXN_SUPER\\n2\\n"')
    script("tegrastats", f"while true; do echo '{TEGRASTATS}'; sleep 1; done")
    board = BoardReader(plant(tmp_path / "root", BARE_JETSON))
    assert board_reader.read_power_mode(board) == "MAXN_SUPER"
    assert board_reader.read_jetson_status(board) == {"gpu_load": 0.45, "power_w": 4.5}


def test_a_jetson_whose_programs_hang_answers_all_the_same(script, tmp_path, monkeypatch):
    for name in ("nvpmodel", "tegrastats"):
        script(name, "exec sleep 60")
        monkeypatch.setattr(board_reader, f"{name.upper()}_S", 0.1)
    root = plant(tmp_path / "root", BARE_JETSON)
    assert "power_mode" not in probe(root)
    assert board_reader.read_jetson_status(BoardReader(root)) == {"gpu_load": None, "power_w": None}


def _is_gone(pid):
    """Whether a process has ended, at the latest in a second; one that nobody has waited for yet counts."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def written(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"42\n", 42), (b"-5\0", -5), (b"", None), (b"4.2", None), ("²".encode(), None), ("٣".encode(), None),
        (b"9" * 15, 10**15 - 1), (b"9" * 16, None), (b"\xff", None),
    ],
)  # fmt: skip
def test_a_number_is_one_that_a_board_can_mean(tmp_path, content, value):
    assert read_int(written(tmp_path / "x", content)) == value


def test_a_file_without_end_is_read_to_a_limit_and_what_is_none_says_nothing(tmp_path):
    told = read_text(written(tmp_path / "x", b"a" * (4 * MAX_FILE_BYTES)))
    assert told is not None
    assert len(told) == MAX_FILE_BYTES
    assert [read_text(Path("/dev/zero")), read_text(tmp_path), read_text(tmp_path / "missing")] == [None] * 3
    assert find_paths(tmp_path / "missing", "*") == []
    first, second = written(tmp_path / "a", b"\0\0"), written(tmp_path / "b", b"one\0two\0")
    assert read_strings(tmp_path / "missing", first, second) == ["one", "two"]


def test_kilobytes_are_read_line_by_line_and_what_is_no_size_is_passed_over(tmp_path):
    path = written(tmp_path / "x", "Total:  8 kB\nFree: many kB\nHuge: -2 kB\nPages: 7\nOdd: ٣ kB\n".encode())
    assert read_kilobytes(path) == {"Total": 8}


def test_what_is_shown_is_printable_and_short():
    assert sanitise_text(" a\x1b[1m\u202eb\n") == "a[1mb"
    assert sanitise_text("\x07") is sanitise_text(None) is None
    assert len(sanitise_text("x" * 9999) or "") == 200
