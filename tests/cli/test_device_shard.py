"""`edgefl device shard show` and `forget`, of rows and files, beside a running collector."""

import io
import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urlencode

import psutil
import pytest
from collector_process import count_kept_rows, run_collector_process
from peer_boards import eventually
from table_parts import read_table

from edgefl.cli import device_shard
from edgefl.core.errors import StoreBusyError
from edgefl.device.collect.alignment import Row
from edgefl.device.collect.file_store import UNLABELLED, open_file_store
from edgefl.device.collect.forgetting import FORGET_NAME, has_forget_request
from edgefl.device.collect.row_store import StoreLimits, encode_rows, open_row_store
from edgefl.device.collect.store_state import lock_folder
from edgefl.device.training.shard_uses import USES_NAME

pytestmark = pytest.mark.timeout(60)
LIMITS = StoreLimits(max_bytes=10**6)


def _fill(folder, count=10):
    with open_row_store(folder, ("a", "who"), LIMITS) as store:
        store.commit([Row(float(time), (time / 2, "ab"[time % 2]), 1) for time in range(count)], {}, {}, 0.0)


def _read(folder, column="time"):
    return [row[0] for part in read_table(folder, "table", (column,)) for row in part.numbers.tolist()]


def test_what_lies_in_a_shard_of_rows_and_of_files_is_shown(run, tmp_path):
    _fill(tmp_path / "room")
    shown = run("device", "shard", "show", tmp_path / "room").out
    assert "10 rows, 1970-01-01 00:00:00 to 1970-01-01 00:00:09 UTC" in shown
    assert "who b: 5" in shown
    assert "newest: time 9.000, a 4.5, who b" in shown
    with open_file_store(tmp_path / "birds", LIMITS, "oldest") as store:
        store.add(b"1", "robin", ".png", 5.0)
        store.add(b"2", ".unlabelled", ".png", 6.0)
        store.commit(store.state, 7.0)
    told = json.loads(run("device", "shard", "show", tmp_path / "birds", "--format", "json").out)
    assert (told["classes"], told["total"]["last_s"]) == ({"label": {".unlabelled": 1, "robin": 1}}, 6.0)
    assert run("device", "shard", "show", tmp_path).code == 40


def test_the_newest_pictures_of_each_class_are_on_one_sheet_that_only_its_owner_may_read(run, tmp_path, monkeypatch):
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install -e '.[pictures]'")
    folder, sheet = tmp_path / "birds", tmp_path / "sheet.png"
    with open_file_store(folder, LIMITS, "oldest") as store:
        for label, level, count in (("robin", 200, 10), (".unlabelled", 60, 1)):
            for number in range(count):
                content = io.BytesIO()
                pillow.new("L", (20, 10), level + number).save(content, "PNG")
                store.add(content.getvalue(), label, ".png", float(number + level))
        store.add(b"no picture", "robin", ".png", 999.0)
        store.commit(store.state, 1000.0)
    assert f"9 pictures of {folder}" in run("device", "shard", "show", folder, "--pictures", sheet).out
    assert sheet.stat().st_mode & 0o777 == 0o600
    with pillow.open(sheet) as picture:
        assert picture.size == (8 * 96, 2 * (96 + 16))
        rows = [[picture.getpixel((column * 96 + 48, row * 112 + 60))[0] for column in range(8)] for row in (0, 1)]
    assert rows == [[60] + [255] * 7, list(range(209, 201, -1))]
    monkeypatch.setattr("edgefl.device.collect.shard_contents.MAX_PICTURE_CLASSES", 1)
    assert f"1 pictures of {folder}" in run("device", "shard", "show", folder, "--pictures", sheet).out
    for name, reason in (("sheet.jpg", "ends in .png"), ("none/sheet.png", "cannot be written: No such file")):
        failed = run("device", "shard", "show", folder, "--pictures", tmp_path / name)
        assert (failed.code, reason in failed.err) == (2, True)
    _fill(tmp_path / "room")
    assert "has no picture" in run("device", "shard", "show", tmp_path / "room", "--pictures", sheet).err


def test_the_drift_of_the_newest_days_is_that_of_each_column_to_all_before(run, refused, tmp_path, monkeypatch):
    day_s, folder = 86_400.0, tmp_path / "room"
    with open_row_store(folder, ("temp", "still", "who"), LIMITS) as store:
        rows = [
            Row(number * day_s / 10, (number % 10 + (5.0 if number >= 300 else 0.0), 1.0, "ada"), 1)
            for number in range(400)
        ]
        store.commit(rows, {}, {}, 0.0)
    monkeypatch.chdir(tmp_path)
    told = json.loads(run("device", "shard", "show", "room", "--drift", "9.95", "--format", "json").out)["drift"]
    assert [(column["name"], column["num_reference"], column["num_newer"]) for column in told] == [
        ("temp", 300, 100), ("still", 300, 100), ("who", 300, 100),
    ]  # fmt: skip
    assert told[0]["psi"] > 1
    assert told[0]["ks"] == pytest.approx(0.5)
    assert [(column["psi"], column["ks"]) for column in told[1:]] == [(0.0, 0.0), (0.0, None)]
    assert "drift of temp: psi " in run("device", "shard", "show", "room", "--drift", "9.95").out
    refused(["device", "shard", "show", "room", "--drift", "50"], 4, "nothing older than the newest 50 days")
    with open_file_store(tmp_path / "birds", LIMITS, "oldest") as store:
        for number in range(20):
            store.add(b"%d" % number, "robin" if number < 10 else "wren", ".png", number * day_s)
        store.commit(store.state, 0.0)
    (classes,) = json.loads(run("device", "shard", "show", "birds", "--drift", "9.5", "--format", "json").out)[
        "drift"
    ]
    assert (classes["name"], classes["ks"], classes["psi"] > 1) == ("label", None, True)


def test_what_is_forgotten_is_asked_about_and_the_runs_that_used_it_are_named(run, joined, tmp_path, monkeypatch):
    _fill(tmp_path / "room")
    settings = json.loads((joined / "device.json").read_text())
    settings["shards"] = {"series": str(tmp_path / "room")}
    (joined / "device.json").write_text(json.dumps(settings))
    uses = [["series", "run-old", 1.0, 2.0], ["series", "run-new", 3.0, 9e8], ["digits", "run-other", 3.0, 9e8]]
    (joined / USES_NAME).write_text(json.dumps({"v": 1, "uses": uses}))
    words = ("device", "shard", "forget", "series", "--state", joined, "--where", "who=a")
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert run(*words, "--since", "3").code == 1
    assert len(_read(tmp_path / "room")) == 10
    told = run(*words, "--since", "1970-01-01T00:00:03+00:00", "--yes").out
    assert "3 examples, 1970-01-01 00:00:04 to 1970-01-01 00:00:08 UTC" in told
    assert "used by run run-new of series" in told
    assert "run-other" not in told
    assert _read(tmp_path / "room") == [0, 1, 2, 3, 5, 7, 9]
    assert "nothing of that" in run(*words, "--since", "3").out


def test_what_a_kill_has_left_behind_is_no_row_to_forget_and_stops_no_forgetting(run, joined, tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "room")
    _fill(tmp_path / "link")
    settings = json.loads((joined / "device.json").read_text())
    settings["shards"] = {"series": str(tmp_path / "link")}
    (joined / "device.json").write_text(json.dumps(settings))
    (joined / USES_NAME).write_text(json.dumps({"v": 1, "uses": [["series", "run-new", 3.0, 9e8]]}))
    (segment,) = (tmp_path / "room").glob("*.csv")
    segment.write_bytes(segment.read_bytes() + encode_rows([Row(10.0, (5.0, "a"), 1)]))
    words = ("device", "shard", "forget", tmp_path / "room", "--state", joined, "--yes")
    assert "nothing of that" in run(*words, "--since", "10").out
    assert _read(tmp_path / "room") == list(range(10))
    assert "used by run run-new of series" in run(*words, "--since", "9").out
    segment.unlink()
    assert "nothing of that" in run(*words, "--since", "0").out
    assert run("device", "shard", "show", tmp_path / "room").code == 0


def test_a_request_that_says_nothing_or_a_column_that_is_none_is_refused(run, refused, tmp_path):
    _fill(tmp_path)
    words = ["device", "shard", "forget", tmp_path]
    refused(words, 2, "what is to be forgotten?")
    refused([*words, "--where", "b=1"], 2, "this shard has a, who")
    assert "must be COLUMN=TEXT" in run(*words, "--where", "b").err
    assert "such as 2026-03-01T14:00" in run(*words, "--since", "yesterday").err
    assert len(_read(tmp_path)) == 10


def test_a_collector_that_does_not_answer_is_left_the_request(run, tmp_path, monkeypatch):
    _fill(tmp_path)
    monkeypatch.setattr(device_shard, "WAIT_S", 0.3)
    with lock_folder(tmp_path):
        done = run("device", "shard", "forget", tmp_path, "--since", "0", "--until", "4", "--yes")
        assert "the collector of" in done.err
        assert done.code == StoreBusyError.exit_code
    assert has_forget_request(tmp_path)
    assert run("device", "shard", "forget", tmp_path, "--since", "8", "--yes").code == 0
    assert _read(tmp_path) == [5, 6, 7]


def _collector(folder, log, *, flush_s=0.05):
    path = folder.parent / "c.toml"
    path.write_text(
        f'[collect]\nfolder = "{folder}"\nevery_s = 0\nflush_s = {flush_s}\n[sources.one]\nkind = "lines"\n'
        f'path = "{log}"\ntime = "/t"\ncolumns = {{ a = "/n" }}\n'
    )
    return run_collector_process(path)


def _count_reads(pid):
    """Returns how often a process has read something; a collector reads its files in each turn."""
    found = re.search(r"syscr: (\d+)", Path(f"/proc/{pid}/io").read_text())
    return int(found.group(1))


@pytest.mark.extended
def test_rows_that_a_running_collector_has_not_written_yet_are_forgotten_too(run, tmp_path):
    folder, log = tmp_path / "shard", tmp_path / "app.jsonl"
    log.write_text('{"t": 99, "n": 99}\n')
    with _collector(folder, log) as process:
        eventually(lambda: count_kept_rows(folder) == 1, timeout_s=30)
        process.terminate()
        assert process.wait(20) == 0
    with _collector(folder, log, flush_s=3600) as process:
        with log.open("a") as file:
            file.writelines(f'{{"t": {time}, "n": {time}}}\n' for time in range(100, 120))
        collector = psutil.Process(process.pid)
        eventually(lambda: str(log) in {file.path for file in collector.open_files()}, timeout_s=30)
        reads = _count_reads(process.pid)
        eventually(lambda: _count_reads(process.pid) >= reads + 20, timeout_s=30)  # some turns
        assert count_kept_rows(folder) == 1
        done = run("device", "shard", "forget", folder, "--since", "105", "--until", "114", "--yes")
        last = "forgot 0 examples, and what the collector had not written of that"
        assert (done.code, done.out.splitlines()[-1]) == (0, last)
        process.terminate()
        assert process.wait(20) == 0
    assert _read(folder) == [*range(99, 105), *range(115, 120)]


@pytest.mark.extended
def test_a_running_collector_forgets_what_the_command_asks_for_and_goes_on(run, tmp_path):
    folder, log = tmp_path / "shard", tmp_path / "app.jsonl"
    log.write_text("".join(f'{{"t": {time}, "n": {time}}}\n' for time in range(100, 200)))
    with _collector(folder, log) as process:
        eventually(lambda: count_kept_rows(folder) == 100, timeout_s=30)
        done = run("device", "shard", "forget", folder, "--since", "120", "--until", "139", "--yes")
        last = "forgot 20 examples, and what the collector had not written of that"
        assert (done.code, done.out.splitlines()[-1]) == (0, last)
        with log.open("a") as file:
            file.writelines(f'{{"t": {time}, "n": {time}}}\n' for time in range(200, 210))
        eventually(lambda: count_kept_rows(folder) == 90, timeout_s=30)
        process.terminate()
        assert process.wait(20) == 0
    assert _read(folder) == [*range(100, 120), *range(140, 210)]
    spans = _read(folder, "span")
    assert len(set(spans[:20])) == len(set(spans[20:80])) == len(set(spans[80:])) == 1
    assert len({spans[0], spans[20], spans[80]}) == 3
    assert not (folder / FORGET_NAME).exists()


def test_the_page_for_labels_prints_address_and_pin_labels_a_file_and_ends_by_a_signal(tmp_path):
    with open_file_store(tmp_path, LIMITS, "oldest") as store:
        store.add(b"1", UNLABELLED, ".png", 5.0)
        store.commit(store.state, 6.0)
    words = [sys.executable, "-m", "edgefl", "device", "label", str(tmp_path), "--label", "robin", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            found = re.match(r"label at (http://127\.0\.0\.1:\d+/) with the PIN (\d{6});", process.stdout.readline())
            url, pin = found.groups()
            cookies = urllib.request.HTTPCookieProcessor()
            browser = urllib.request.build_opener(urllib.request.ProxyHandler({}), cookies)
            page = browser.open(url + "login", urlencode({"pin": pin}).encode(), timeout=20).read().decode()
            hidden = dict(re.findall(r'name="(token|key)" value="([^"]+)"', page))
            browser.open(url, urlencode({**hidden, "label": "robin"}).encode(), timeout=20).close()
            assert [path.parent.name for path in tmp_path.glob("*/*.png")] == ["robin"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--host", "board.local"), 3, "--host must be an IP address"),
        (("--model", "none.onnx"), 4, "there is no model file"),
        (("--model", "deployed"), 40, "on the coordinator: edgefl model deploy MODEL"),
    ],
)
def test_a_page_for_labels_that_cannot_be_is_refused(run, tmp_path, words, code, text):
    with open_file_store(tmp_path / "shard", LIMITS, "oldest") as store:
        store.add(b"1", UNLABELLED, ".png", 5.0)
        store.commit(store.state, 6.0)
    refused = run("device", "label", tmp_path / "shard", *words, "--state", tmp_path / "state")
    assert refused.code == code
    assert text in refused.err


def test_examples_go_out_to_be_labelled_elsewhere_and_their_labels_come_back(run, tmp_path):
    with open_file_store(tmp_path / "birds", LIMITS, "oldest") as store:
        store.add(b"1", UNLABELLED, ".png", 5.0)
        store.add(b"2", UNLABELLED, ".png", 6.0)
        store.commit(store.state, 7.0)
    out = tmp_path / "tasks"
    told = run("device", "shard", "export", tmp_path / "birds", out, "--label", "robin").out
    assert f"wrote 2 examples; {out / 'tasks.json'} lists them" in told
    first, second = json.loads((out / "tasks.json").read_text())
    assert first["data"]["image"].startswith("/data/local-files/?d=tasks/files/19700101T000005.000-")
    gone = {**second, "example": "19700101T000009.000-0123456789abcdef", "label": "robin"}
    (tmp_path / "labels.json").write_text(json.dumps([{**first["data"], "label": "robin"}, gone]))
    words = ("device", "shard", "import", tmp_path / "birds", tmp_path / "labels.json")
    assert "say --label 'robin'" in run(*words).err
    told = run(*words, "--label", "robin").out
    assert "1 examples have the labels of" in told
    assert "1 examples are not there any more" in told
    assert "label robin: 1" in run("device", "shard", "show", tmp_path / "birds").out
    assert "got 'a/b'" in run(*words, "--label", "a/b").err
