import importlib
import sys

import click
import click.testing
import pytest

from edgefl import __version__
from edgefl.cli.main import COMMANDS, main
from edgefl.core import errors


def leaves(command, path=()):
    if not isinstance(command, click.Group):
        return [(path, command)]
    return [leaf for name, inner in command.commands.items() for leaf in leaves(inner, (*path, name))]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_module_and_says_in_a_whole_sentence_what_each_part_does(name):
    module, _, attribute = COMMANDS[name][0].partition(":")
    command = getattr(importlib.import_module(module), attribute)
    assert all(leaf.get_short_help_str() for _, leaf in leaves(command))
    text = click.testing.CliRunner().invoke(command, ["--help"]).stdout
    assert "..." not in text.partition("Commands:")[2]


def test_help_lists_every_command_and_the_version_is_printed(run):
    shown = run("--help")
    assert shown.code == 0
    assert all(f"  {name} " in shown.out for name in COMMANDS)
    assert run("--version").out.strip().endswith(__version__)


@pytest.mark.parametrize("words", ["dance", "run dance", "demo --devices none", "run submit"])
def test_wrong_arguments_end_with_2(run, words):
    ran = run(*words.split())
    assert (ran.code, ran.out, ran.err != "") == (2, "", True)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("runs list", "there is no command 'runs': did you mean edgefl run?"),
        ("history round", "there is no command 'round': did you mean edgefl history rounds?"),
        ("coordinator user lst", "did you mean edgefl coordinator user list?"),
        ("dance", "there is no command 'dance': see edgefl --help"),
    ],
)
def test_a_mistyped_command_gets_a_hint(run, words, hint):
    ran = run(*words.split())
    assert (ran.code, hint in ran.err) == (2, True), ran.err


def test_an_error_is_one_line_on_stderr_and_its_exit_code(capsys, monkeypatch):
    def fail():
        raise errors.StoreError("the store is gone; it was at /a\n look there")

    command = click.Command("fails", callback=fail)
    monkeypatch.setitem(COMMANDS, "fails", ("edgefl.cli.fails:command", "for this test"))
    monkeypatch.setitem(sys.modules, "edgefl.cli.fails", type("module", (), {"command": command}))
    with pytest.raises(SystemExit) as ended:
        main(["fails"])
    assert ended.value.code == 10
    assert capsys.readouterr() == ("", "edgefl: the store is gone; it was at /a look there\n")


def test_the_documented_exit_codes_are_those_of_the_classes():
    documented = {
        words[0]: int(words[1])
        for line in errors.__doc__.splitlines()
        if len(words := line.strip("│├└─ ").split()) > 1 and words[1].isdigit()
    }
    kinds = {
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.EdgeflError)
    }
    assert documented == kinds
    assert len(set(kinds.values())) == len(kinds)
