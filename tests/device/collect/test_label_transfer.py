"""Labels made elsewhere: tasks that are written out, and labels that come back to their examples."""

import csv
import errno
import json
import math
from xml.etree import ElementTree as ET

import pytest
from table_parts import read_table

from edgefl.core.errors import DataError, NotFoundError, StoreFullError
from edgefl.device.collect import label_files, label_transfer
from edgefl.device.collect.alignment import Row
from edgefl.device.collect.file_store import UNLABELLED, list_files, open_file_store
from edgefl.device.collect.label_queue import open_target
from edgefl.device.collect.label_transfer import export_examples, import_labels
from edgefl.device.collect.row_store import StoreLimits, open_row_store
from edgefl.system.row_labels import LabelKind, LabelLine, append_row_labels

LIMITS = StoreLimits(max_bytes=10**6)
LABELS = ("robin", "wren")


def _files(folder, labels, suffix=".png"):
    with open_file_store(folder, LIMITS, "oldest") as store:
        for number, label in enumerate(labels):
            store.add(b"%d" % number, label, suffix, 1000.0 + number)
        store.commit(store.state, 0.0)
    return folder


def _rows(folder, count=180):
    with open_row_store(folder, ("power",), LIMITS) as store:
        store.commit([Row(1000.0 + at, (float(at),), 1) for at in range(count)], {}, {}, 0.0)
    return folder


def _export(folder, out, style="label-studio", *, labels=LABELS, is_all=True):
    export_examples(open_target(folder, 60.0), out, style, labels=labels, url="/files/", is_all=is_all)
    return out


def _read_classes(folder):
    """Returns the classes of files, in the order of their times."""
    return [file.label for file in sorted(list_files(folder))]


def _read_labels(folder):
    """Returns label by time of the rows that have one."""
    (part,) = read_table(folder, "table", ("time",), ("label",))
    return dict(zip(part.numbers[:, 0].tolist(), part.texts[0], strict=True))


def _import(folder, path, labels=LABELS, column="label"):
    counts = import_labels(folder, path, labels, column)
    return counts.labelled, counts.unclear, counts.gone


def _annotate(tasks, labels):
    """Returns tasks as Label Studio exports them, with an annotation of one choice each."""
    return [
        {
            "id": number,
            "data": task["data"],
            "annotations": [{"was_cancelled": False, "result": [{"type": "choices", "value": {"choices": [label]}}]}],
        }
        for number, (task, label) in enumerate(zip(tasks, labels, strict=True))
    ]


def _save(path, value):
    path.write_text(json.dumps(value))
    return path


def test_pictures_go_out_as_tasks_and_come_back_with_the_labels_of_their_annotations(tmp_path):
    birds = _files(tmp_path / "birds", [UNLABELLED, UNLABELLED, "robin"])
    out = _export(birds, tmp_path / "tasks")
    tasks = json.loads((out / "tasks.json").read_text())
    assert [(out / "files" / task["data"]["image"].removeprefix("/files/")).read_bytes() for task in tasks] == [
        b"0",
        b"1",
        b"2",
    ]
    assert [task.get("annotations") is not None for task in tasks] == [False, False, True]
    config = ET.fromstring((out / "config.xml").read_text())
    assert [choice.get("value") for choice in config.iter("Choice")] == ["robin", "wren"]
    # A file that was uploaded has another address, and its name a beginning of Label Studio's.
    for task in tasks:
        name = task["data"].pop("example")
        task["data"]["image"] = f"/data/upload/3/1a2b3c4d-{name}.png"
    assert _import(birds, _save(tmp_path / "export.json", _annotate(tasks, ["wren", "robin", "wren"]))) == (3, 0, 0)
    assert _read_classes(birds) == ["wren", "robin", "wren"]


def test_a_cancelled_annotation_counts_for_nothing_and_people_who_disagree_label_nothing(tmp_path):
    birds = _files(tmp_path / "birds", [UNLABELLED] * 3)
    tasks = json.loads((_export(birds, tmp_path / "tasks") / "tasks.json").read_text())
    first, second, third = _annotate(tasks, ["robin", "robin", "robin"])
    first["annotations"].append({**_annotate([tasks[0]], ["wren"])[0]["annotations"][0], "was_cancelled": True})
    second["annotations"] += _annotate([tasks[1]], ["wren"])[0]["annotations"]
    third["annotations"] += [{**_annotate([tasks[2]], ["wren"])[0]["annotations"][0], "ground_truth": True}]
    assert _import(birds, _save(tmp_path / "export.json", [first, second, third])) == (2, 1, 0)
    assert _read_classes(birds) == ["robin", UNLABELLED, "wren"]


@pytest.mark.parametrize("style", ["csv", "yolo"])
def test_labels_that_are_written_out_are_those_that_come_back(tmp_path, style):
    labels = ["robin", UNLABELLED, "=wren"]
    birds = _files(tmp_path / "birds", labels)
    out = _export(birds, tmp_path / "out", style, labels=())
    moved = _files(tmp_path / "other", [UNLABELLED] * 3)
    place = out if style == "yolo" else out / "labels.csv"
    assert _import(moved, place, ("robin", "=wren")) == (2, 0, 0)
    assert sorted(_read_classes(moved)) == sorted(labels)
    assert [label for label, name in _read_by_name(moved).items() if name != _read_by_name(birds)[label]] == []


def _read_by_name(folder):
    return {file.name: file.label for file in list_files(folder)}


def test_all_boxes_of_a_picture_must_be_of_one_class(tmp_path):
    birds = _files(tmp_path / "birds", [UNLABELLED] * 2)
    out = _export(birds, tmp_path / "out", "yolo")
    one, two = (file.name.removesuffix(".png") for file in sorted(list_files(birds)))
    (out / "labels" / f"9f8e7d6c-{one}.txt").write_text("1 0.5 0.5 0.2 0.2\n1 0.1 0.1 0.2 1.0000000000000002 -0.1\n")
    (out / "labels" / f"{two}.txt").write_text("1 0.5 0.5 0.2 0.2\n0 0.1 0.1 0.2 0.2\n")
    assert _import(birds, out) == (1, 1, 0)
    assert _read_by_name(birds) == {f"{one}.png": "wren", f"{two}.png": UNLABELLED}
    for line in ("2 0.5 0.5 0.2 0.2", "1 0.5 0.5 0.2", "1 0.5 0.5 0.2 nan"):
        (out / "labels" / f"{two}.txt").write_text(f"{line}\n")
        with pytest.raises(DataError, match=f"a class from 0 to 1 and at least 4 numbers, got '{line}"):
            _import(birds, out)


def test_the_number_of_a_class_is_that_of_its_line(tmp_path):
    birds = _files(tmp_path / "birds", [UNLABELLED])
    out = _export(birds, tmp_path / "out", "yolo")
    (file,) = list_files(birds)
    (out / "labels" / f"{file.name.removesuffix('.png')}.txt").write_text("1 0.5 0.5 1 1\n")
    for classes in ("robin\n\nwren\n", "\nrobin\nwren\n", ""):
        (out / "classes.txt").write_text(classes)
        with pytest.raises(DataError, match=f"classes.txt has a blank line {1 if classes[:1] != 'r' else 2}; "):
            _import(birds, out)
    (out / "classes.txt").write_text("robin\r\nwren\r\n\r\n\n")
    assert _import(birds, out) == (1, 0, 0)
    assert _read_classes(birds) == ["wren"]


def test_a_yolo_folder_is_read_whole_or_refused_and_each_class_once_a_file(tmp_path, monkeypatch):
    out = _export(_files(tmp_path / "birds", ["robin", "wren"]), tmp_path / "out", "yolo")
    for path in (out / "labels").iterdir():
        path.write_text("1 0.5 0.5 1 1\n0 0.5 0.5 1 1\n" * 50)
    assert [region.label for region in label_files.read_label_file(out, "")] == ["robin", "wren"] * 2
    monkeypatch.setattr(label_files, "MAX_FILES", 2)
    assert len(label_files.read_label_file(out, "")) == 4
    monkeypatch.setattr(label_files, "MAX_REGIONS", 3)
    with pytest.raises(DataError, match=r"more than 3 labels; give it in parts"):
        label_files.read_label_file(out, "")
    monkeypatch.setattr(label_files, "MAX_FILES", 1)
    with pytest.raises(DataError, match=r"more than 1 .txt files of examples; give it in parts"):
        label_files.read_label_file(out, "")


def test_windows_of_rows_go_out_as_curves_and_a_region_labels_the_rows_within(tmp_path):
    room = _rows(tmp_path / "room")
    append_row_labels(room, [LabelLine(since_s=1060, until_s=1119, label="shut", kind=LabelKind.EVENT)])
    out = _export(room, tmp_path / "tasks", labels=("open", "shut"))
    tasks = json.loads((out / "tasks.json").read_text())
    first = next(task for task in tasks if task["data"]["example"] == "rows-1000.000-1059.000")
    with (out / "files" / first["data"]["rows"].removeprefix("/files/")).open() as file:
        assert list(csv.reader(file))[:3] == [["time", "power"], ["1000.0", "0.0"], ["1001.0", "1.0"]]
    (predicted,) = (task for task in tasks if "predictions" in task)
    region = {"start": 1050.5, "end": 5000.0, "timeserieslabels": ["open"]}
    done = [
        {"data": first["data"], "annotations": [{"result": [{"type": "timeserieslabels", "value": region}]}]},
        *_annotate([predicted], ["open"]),
    ]
    assert _import(room, _save(tmp_path / "export.json", done), ("open",)) == (2, 0, 0)
    assert _read_labels(room) == {1000.0 + at: "open" for at in range(51, 120)}
    append_row_labels(room, [LabelLine(since_s=1060, until_s=1119, label="shut", kind=LabelKind.EVENT)])
    assert _read_labels(room)[1060.0] == "open"  # a person counts more than a later event


def test_files_of_rows_all_have_the_columns_of_the_labelling_interface(tmp_path):
    with open_row_store(tmp_path / "room", ("power", "light"), LIMITS) as store:
        lights = [math.nan if at == 70 else float(at) for at in range(180)]
        store.commit([Row(1000.0 + at, (1.0, light), 1) for at, light in enumerate(lights)], {}, {}, 0.0)
    out = _export(tmp_path / "room", tmp_path / "tasks")
    config = ET.fromstring((out / "config.xml").read_text())
    assert [channel.get("column") for channel in config.iter("Channel")] == ["power", "light"]
    lines = [path.read_text().splitlines() for path in sorted((out / "files").iterdir())]
    assert [found[0] for found in lines] == ["time,power,light"] * 3
    assert [found[1] for found in lines] == ["1000.0,1.0,0.0", "1060.0,1.0,60.0", "1120.0,1.0,120.0"]
    assert lines[1][10:13] == ["1069.0,1.0,69.0", "1070.0,1.0,", "1071.0,1.0,71.0"]  # one number alone is missing


def test_what_cannot_be_written_whole_leaves_nothing_in_the_way_of_the_next_try(tmp_path, monkeypatch):
    birds = _files(tmp_path / "birds", [UNLABELLED] * 3)

    def copy(source, target):
        target.write_bytes(b"half")
        if len(list(target.parent.iterdir())) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(label_transfer.shutil, "copyfile", copy)
        with pytest.raises(StoreFullError, match=r"out/tasks cannot be written: No space left .* free some space"):
            _export(birds, tmp_path / "out" / "tasks")
    assert list((tmp_path / "out").iterdir()) == []
    out = _export(birds, tmp_path / "out" / "tasks")
    assert list((tmp_path / "out").iterdir()) == [out]
    assert (len(list((out / "files").iterdir())), out.stat().st_mode & 0o777) == (3, 0o700)


def test_flat_exports_have_one_label_a_line_or_regions_as_json(tmp_path):
    room = _rows(tmp_path / "room", 120)
    regions = [{"start": 1000, "end": 1001, "timeserieslabels": ["open"]}]
    flat = [
        {"rows": "/files/rows-1000.000-1059.000.csv", "state": regions},
        {"rows": "/files/rows-1060.000-1119.000.csv", "state": "shut"},
    ]
    assert _import(room, _save(tmp_path / "min.json", flat), ("open", "shut"), "state") == (2, 0, 0)
    later = {1060.0 + at: "shut" for at in range(60)}
    assert _read_labels(room) == {1000.0: "open", 1001.0: "open"} | later
    cells = [[*entry.values()] for entry in flat]
    cells[0][1], cells[1][1] = "shut", json.dumps([{**regions[0], "start": 1060, "end": 1060}])
    with (tmp_path / "export.csv").open("w") as file:
        csv.writer(file).writerows([["rows", "state", "was_cancelled"], [*cells[0], "False"], [*cells[1], "True"]])
    assert _import(room, tmp_path / "export.csv", (), "state") == (1, 0, 0)
    assert _read_labels(room) == {1000.0 + at: "shut" for at in range(60)} | later


def test_what_is_wrong_with_a_file_is_said_before_anything_is_changed(tmp_path, monkeypatch):
    birds = _files(tmp_path / "birds", [UNLABELLED, "robin"])
    tasks = json.loads((_export(birds, tmp_path / "tasks") / "tasks.json").read_text())
    path = _save(tmp_path / "export.json", _annotate(tasks, ["robin", "robbin"]))
    with pytest.raises(DataError, match=r"has 'robbin' 1 times, .* has robin; is it a new one, say --label 'robbin'"):
        _import(birds, path, ())
    assert _read_classes(birds) == [UNLABELLED, "robin"]
    with pytest.raises(DataError, match="no label of an example"):
        _import(birds, _save(tmp_path / "export.json", [{"image": "cat.png", "label": "robin"}]))
    with pytest.raises(DataError, match=r"it is no list of tasks"):
        _import(birds, _save(tmp_path / "export.json", {}))
    with pytest.raises(DataError, match=r"labels come in a .json, .csv or .tsv file"):
        _import(birds, tmp_path / "tasks" / "config.xml")
    with pytest.raises(DataError, match="No such file"):
        _import(birds, tmp_path / "tasks")
    with pytest.raises(DataError, match="is there already"):
        _export(birds, tmp_path / "tasks")
    monkeypatch.setattr(label_files, "MAX_FILE_BYTES", 100)
    with pytest.raises(DataError, match="give it in parts"):
        _import(birds, _save(tmp_path / "export.json", ["x" * 100]))


def test_examples_that_are_gone_are_counted_and_all_of_them_are_an_error(tmp_path):
    birds = _files(tmp_path / "birds", [UNLABELLED] * 2)
    tasks = json.loads((_export(birds, tmp_path / "tasks") / "tasks.json").read_text())
    path = _save(tmp_path / "export.json", _annotate(tasks, ["robin", "wren"]))
    first, second = sorted(list_files(birds))
    (birds / UNLABELLED / first.name).unlink()
    assert _import(birds, path) == (1, 0, 1)
    assert _read_by_name(birds) == {second.name: "wren"}
    with pytest.raises(NotFoundError, match="none of the 2 examples"):
        _import(_rows(tmp_path / "room"), path)
    gone = [
        {"rows": "rows-2000.000-2059.000.csv", "label": "robin"},
        {"rows": "rows-1000.000-1059.000", "label": "wren"},
    ]
    assert _import(tmp_path / "room", _save(tmp_path / "rows.json", gone)) == (1, 0, 1)


def test_sounds_and_rows_are_no_pictures_for_yolo(tmp_path):
    with pytest.raises(DataError, match="yolo is for pictures"):
        _export(_files(tmp_path / "calls", [UNLABELLED], ".wav"), tmp_path / "out", "yolo")
    with pytest.raises(DataError, match="nothing to label"):
        _export(_files(tmp_path / "birds", ["robin"]), tmp_path / "out", is_all=False)
