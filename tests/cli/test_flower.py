"""`edgefl flower`."""

import sys
import zipfile

from flower_apps import PROJECT, build_bundle, write_app

from edgefl.tasks.registry import find_task_factory


def test_a_check_lists_its_findings_and_its_exit_code_says_whether_the_app_would_run(run, tmp_path):
    fine = run("flower", "check", write_app(tmp_path / "fine"), "--format", "json")
    assert fine.code == 0
    assert {row["verdict"] for row in fine.rows} == {"works"}
    old = {"pyproject.toml": PROJECT.replace("flwr[simulation]>=1.30", "flwr<1.20")}
    failed = run("flower", "check", write_app(tmp_path / "old", old))
    assert failed.code == 50
    assert "fails    dependencies" in failed.out
    assert failed.err.count("\n") == 1
    assert "would not run: dependencies: flwr<1.20" in failed.err
    missing = run("flower", "check", tmp_path / "none")
    assert (missing.code, missing.is_one_line) == (3, True)


def test_a_packed_app_can_be_signed_for_boards_and_its_class_is_found_by_name(run, monkeypatch, tmp_path):
    app = write_app(tmp_path / "app", {"data.npz": "not sent"})
    packed = run("flower", "pack", app, "--out", tmp_path / "dist")
    assert packed.code == 0, packed.err
    wheel = tmp_path / "dist" / "edgefl_app_mean_app-1.2.0-py3-none-any.whl"
    assert packed.out.strip() == str(wheel)
    first = wheel.read_bytes()
    run("flower", "pack", app, "--out", tmp_path / "dist")
    assert wheel.read_bytes() == first
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith("data.npz")]
        metadata = archive.read("edgefl_app_mean_app-1.2.0.dist-info/METADATA").decode()
    assert "Requires-Dist: flwr>=1.30\n" in metadata
    assert run("signing", "init", "--keys", tmp_path / "keys", "--no-passphrase").code == 0
    options = ("--kind", "pack", "--version", "1.2.0", "--keys", tmp_path / "keys", "--out", tmp_path / "app.bundle")
    signed = run("signing", "sign", wheel, *options)
    assert signed.code == 0, signed.err
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setitem(sys.modules, "edgefl_app_mean_app", None)  # so that what is imported here is gone afterwards
    del sys.modules["edgefl_app_mean_app"]
    job = find_task_factory("flower-mean-app")()
    assert job.run_config["num-server-rounds"] == 3
    assert job.app.server == "mean_app.server_app:app"


def test_a_bundle_is_checked_and_packed_as_its_folder(run, tmp_path):
    folder = write_app(tmp_path / "app")
    bundle = build_bundle(folder, tmp_path / "bundle")
    (of_folder, of_bundle) = (run("flower", "check", app, "--format", "json") for app in (folder, bundle))
    assert (of_bundle.code, of_bundle.rows[1:]) == (0, of_folder.rows[1:])
    wheels = []
    for app in (folder, bundle):
        packed = run("flower", "pack", app, "--out", tmp_path / app.name.replace(".", "-"))
        assert packed.code == 0, packed.err
        with zipfile.ZipFile(packed.out.strip()) as archive:
            wheels.append({name: archive.read(name) for name in archive.namelist()})
    assert wheels[0] == wheels[1]
    (tmp_path / "text.fab").write_text("text")
    refused = run("run", "flower-app", tmp_path / "text.fab")
    assert (refused.code, refused.is_one_line) == (3, True)
    assert "text.fab is no bundle of a Flower app" in refused.err


def test_a_run_of_an_app_that_does_not_have_such_a_value_is_refused_before_it_is_sent(refused, tmp_path):
    app = write_app(tmp_path / "app")
    refused(
        ["run", "flower-app", app, "--run-config", "rounds=3"],
        3,
        "the app mean-app has no 'rounds'; it has model.size",
    )
