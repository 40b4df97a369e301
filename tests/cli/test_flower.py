"""`edgefl flower`."""

from flower_apps import PROJECT, write_app


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
