from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import click
import click.testing
import pytest

from edgefl import __version__, errors
from edgefl.cli.main import COMMANDS, main

CLI = Path(importlib.import_module("edgefl.cli").__file__ or "").parent


def _edgefl(*words):
    return subprocess.run(
        [sys.executable, "-m", "edgefl.cli.main", *words], capture_output=True, text=True, timeout=60, check=False
    )


def _leaves(command, path):
    if not isinstance(command, click.Group):
        return [path]
    return [leaf for name, inner in command.commands.items() for leaf in _leaves(inner, (*path, name))]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_a_module_and_a_help_text_for_each_of_its_parts(name):
    command = importlib.import_module(f"edgefl.cli.{name.replace('-', '_')}").command
    assert (CLI / f"{name.replace('-', '_')}.py").exists()
    for leaf in _leaves(command, ()):
        found = command
        for word in leaf:
            assert isinstance(found, click.Group)
            found = found.commands[word]
        assert found.get_short_help_str(), leaf


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_group_says_what_each_command_does_in_a_whole_sentence(name):
    command = importlib.import_module(f"edgefl.cli.{name.replace('-', '_')}").command
    text = click.testing.CliRunner().invoke(command, ["--help"]).stdout
    assert "..." not in text.partition("Commands:")[2]


def test_help_lists_every_command():
    done = _edgefl("--help")
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


def test_the_version_is_printed():
    assert _edgefl("--version").stdout.strip().endswith(__version__)


@pytest.mark.parametrize("words", [("dance",), ("run", "dance"), ("demo", "--devices", "none"), ("run", "submit")])
def test_wrong_arguments_end_with_2(words):
    done = _edgefl(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_an_error_is_one_line_on_stderr_and_its_exit_code(capsys, monkeypatch):
    command = click.Command("fails", callback=_fail)
    monkeypatch.setitem(COMMANDS, "fails", "for this test")
    monkeypatch.setitem(sys.modules, "edgefl.cli.fails", _module(command))
    with pytest.raises(SystemExit) as ended:
        main(["fails"])
    assert ended.value.code == 10
    assert capsys.readouterr() == ("", "edgefl: the store is gone; it was at /a look there\n")


def _fail():
    raise errors.StoreError("the store is gone; it was at /a\n look there")


def _module(command):
    return type("module", (), {"command": command})


def test_the_documented_exit_codes_are_those_of_the_classes():
    documented = {
        words[0]: int(words[1])
        for line in (errors.__doc__ or "").splitlines()
        if len(words := line.strip("│├└─ ").split()) > 1 and words[1].isdigit()
    }
    kinds = {
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.EdgeflError)
    }
    assert documented == kinds
    assert len(set(kinds.values())) == len(kinds)
