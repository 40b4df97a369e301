"""Sounds of a microphone: a program in the place of `arecord` plays a WAV file."""

import io
import math
import os
import signal
import struct
import sys
import threading
import time
import wave
from collections import Counter

import pytest
from collector_process import run_collector_process
from peer_boards import eventually

from edgefl.core.errors import ConfigError
from edgefl.device.collect import microphone, recorder
from edgefl.device.collect.collector import run_collector
from edgefl.device.collect.file_store import check_example
from edgefl.device.collect.microphone import Microphone, compute_dbfs
from edgefl.device.collect.recorder import Recorder
from edgefl.device.collect.settings import MicrophoneSection

pytestmark = pytest.mark.timeout(60)
RATE = 8000
PROGRAM = """#!{python} -IS
import signal, sys, time, wave
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
assert sys.argv[1] == "-q" and given["-t"] == "raw" and given["-f"] == "S16_LE", sys.argv
if given["-D"] == "absent":
    sys.exit("arecord: main:850: audio open error: No such file or directory")
if given["-D"] == "warns":
    print(*["overrun!!! (at least 1.2 ms long)"] * 10_000, "arecord: pcm_read:2221: read error", file=sys.stderr)
with wave.open({path!r}) as sound:
    assert (str(sound.getframerate()), str(sound.getnchannels())) == (given["-r"], given["-c"]), given
    sys.stdout.buffer.write(sound.readframes(sound.getnframes()))
    if given["-D"] == "stays":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdout.flush()
if given["-D"] in ("hangs", "stays"):
    time.sleep(60)
"""


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Returns what makes `arecord` play samples of one channel."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(recorder, "RETRY_S", 0.05)

    def play(samples, channels=1):
        with wave.open(str(tmp_path / "in.wav"), "wb") as sound:
            sound.setparams((channels, 2, RATE, 0, "NONE", ""))
            sound.writeframes(struct.pack(f"<{len(samples)}h", *samples))
        program = tmp_path / "arecord"
        program.write_text(PROGRAM.format(python=sys.executable, path=str(tmp_path / "in.wav")))
        program.chmod(0o755)

    return play


def _read(count, **settings):
    source = Microphone(MicrophoneSection(rate=RATE, seconds=0.1, **settings))
    try:
        return [source.read(threading.Event()) for _ in range(count)]
    finally:
        source.close()


def _samples(content):
    check_example(content, ".wav")
    with wave.open(io.BytesIO(content)) as sound:
        assert sound.getframerate() == RATE
        return list(struct.unpack(f"<{sound.getnframes() * sound.getnchannels()}h", sound.readframes(10**6)))


def test_sounds_have_their_length_and_follow_each_other_or_overlap_or_leave_gaps(play):
    samples = list(range(4000))
    play(samples)
    assert [_samples(file) for file in _read(3)] == [samples[:800], samples[800:1600], samples[1600:2400]]
    assert _samples(_read(2, step_s=0.15)[1]) == samples[1200:2000]
    play(samples, channels=2)
    assert [_samples(file) for file in _read(2, channels=2)] == [samples[:1600], samples[1600:3200]]


def test_a_step_below_the_length_makes_sounds_overlap(play):
    samples = list(range(4000))
    play(samples)
    source = Microphone(MicrophoneSection(rate=RATE, seconds=0.2, step_s=0.1))
    try:
        found = [_samples(source.read(threading.Event())) for _ in range(2)]
    finally:
        source.close()
    assert found == [samples[:1600], samples[800:2400]]


def test_sounds_below_a_level_are_left_out(play, monkeypatch):
    assert compute_dbfs(struct.pack("<4h", 3277, -3277, 3277, -3277)) == pytest.approx(-20, abs=0.01)
    assert compute_dbfs(b"\0" * 8) == -120
    loud, quiet = [10_000, -10_000] * 400, [100, -100] * 400
    play([*loud, *quiet, *loud])
    assert [bool(file) for file in _read(3, least_dbfs=-40)] == [True, False, True]
    monkeypatch.delattr(microphone, "compute_dbfs")  # which takes time, while the program waits
    assert all(_read(3))


def test_a_microphone_that_is_gone_is_opened_again_and_what_the_program_says_is_said_once(play, caplog):
    play([1] * 1000)
    counts = Counter()
    source = Recorder("room", ".wav", lambda: Microphone(MicrophoneSection(device="absent")), counts)
    source.start()
    eventually(lambda: counts["room.errors"] >= 3)
    source.close()
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.endswith("arecord has ended: arecord: main:850: audio open error: No such file or directory")


def test_a_program_that_warns_for_weeks_goes_on_and_its_last_words_say_why_it_ended(play):
    play([1] * 1000)
    source = Microphone(MicrophoneSection(rate=RATE, seconds=0.1, device="warns"))
    try:
        assert source.read(threading.Event())
        with pytest.raises(OSError, match=r"pcm_read:2221: read error$") as caught:
            source.read(threading.Event())
    finally:
        source.close()
    assert len(str(caught.value)) < 600


def test_a_program_that_hangs_is_ended_and_so_is_one_at_a_stop(play, monkeypatch):
    monkeypatch.setattr(microphone, "WAIT_S", 0.05)
    monkeypatch.setattr(microphone, "SILENCE_S", 0.2)
    play([1] * 1000)
    source = Microphone(MicrophoneSection(rate=RATE, seconds=0.1, device="hangs"))
    assert source.read(threading.Event())
    with pytest.raises(OSError, match=r"has recorded nothing for 0\.2 s"):
        source.read(threading.Event())
    source.close()
    assert source._process.returncode is not None
    stopping = threading.Event()
    stopping.set()
    other = Microphone(MicrophoneSection(rate=RATE, seconds=1, device="hangs"))
    start_s = time.monotonic()
    assert other.read(stopping) == b""
    other.close()
    assert time.monotonic() - start_s < 10


def test_a_program_that_does_not_end_when_it_is_asked_to_is_killed(play, monkeypatch):
    monkeypatch.setattr(microphone, "END_TIMEOUT_S", 0.1)
    play([1] * 1000)
    source = Microphone(MicrophoneSection(rate=RATE, seconds=0.1, device="stays"))
    assert source.read(threading.Event())
    source.close()
    assert source._process.returncode == -signal.SIGKILL


def test_the_time_of_a_sound_is_that_of_its_start(play):
    play([1] * 1000)
    source = Recorder(
        "room",
        ".wav",
        lambda: Microphone(MicrophoneSection(rate=RATE, seconds=0.1)),
        Counter(),
        length_s=0.1,
        clock=lambda: 100.0,
    )
    source.start()
    found = []
    eventually(lambda: found or found.extend(filter(None, [source.read()])))
    source.close()
    assert found[0].time_s == pytest.approx(99.9)
    assert math.isclose(len(_samples(found[0].content)), 800)


def test_a_collect_file_with_a_microphone_fills_its_shard(play, tmp_path):
    play([1] * 800 + [2] * 800 + [3] * 100)
    source = f'[sources.room]\nkind = "microphone"\nrate = {RATE}\nseconds = 0.1\n'
    (tmp_path / "c.toml").write_text(f'[collect]\nfolder = "{tmp_path / "shard"}"\n{source}')
    with run_collector_process(tmp_path / "c.toml"):
        eventually(lambda: len([*tmp_path.glob("shard/.unlabelled/*.wav")]) == 2, timeout_s=40)


def test_without_arecord_the_collector_says_how_it_is_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "collect.toml"
    path.write_text(f'[collect]\nfolder = "{tmp_path / "shard"}"\n[sources.room]\nkind = "microphone"\n')
    with pytest.raises(ConfigError, match="arecord, which is not installed: sudo apt-get install alsa-utils"):
        run_collector(path)
