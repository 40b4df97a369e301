import json

import pytest


def test_the_cut_is_told_for_people_and_for_programs_as_the_cards_on_disk_say(run, tmp_path):
    words = ("data", "shard", "digits", "--scheme", "by-class", "--devices", "5", "--out", tmp_path)
    names = [*(f"device-0{number}" for number in range(1, 6)), "test"]
    rows = {line.split()[0]: line.split()[1:] for line in run(*words).out.splitlines() if line.split()}
    assert set(names) <= set(rows)
    assert all(int(rows[name][0]) == sum(map(int, rows[name][1:])) for name in names)
    printed = json.loads(run(*words, "--format", "json").out)
    assert (printed["v"], [row["shard"] for row in printed["shards"]]) == (1, names)
    for row in printed["shards"]:
        card = json.loads((tmp_path / f"{row['shard']}.json").read_text())
        for name in ("task", "num_examples", "counts", "sha256"):
            assert row[name] == card[name]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["digits", "--scheme", "magic"], 3, "scheme must be one of natural, iid"),
        (["mnist", "--data", "nowhere"], 4, "nowhere of task mnist does not exist"),
        (["cifar"], 5, "'cifar' has no data set to cut"),
    ],
)
def test_bad_input_is_one_line_and_its_exit_code(refused, tmp_path, words, code, told):
    refused(["data", "shard", *words, "--out", tmp_path], code, told)
    assert not list(tmp_path.iterdir())
