import importlib
import logging
import shlex
import shutil
import sys

import click
import click.testing
import pytest

from edgefl import __version__
from edgefl.cli.main import COMMANDS, EXAMPLES, THEMES, edgefl, main
from edgefl.cli.sources import NumberRange
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


def test_every_command_is_of_one_theme_and_has_an_example_that_can_be_typed():
    assert sorted(name for names in THEMES.values() for name in names) == sorted(COMMANDS)
    paths = {}
    for name in COMMANDS:
        command = edgefl.get_command(click.Context(edgefl), name)
        paths |= {" ".join((name, *path)): leaf for path, leaf in leaves(command) if not leaf.hidden}
    assert set(EXAMPLES) == set(paths)
    for path, leaf in paths.items():
        words = shlex.split(EXAMPLES[path])
        assert words[: len(path.split())] == path.split()
        arguments = words[len(path.split()) :]
        arguments = arguments[: arguments.index(">")] if ">" in arguments else arguments
        arguments = arguments[: arguments.index(">>")] if ">>" in arguments else arguments
        with click.Context(leaf) as context:
            parsed, left, _ = leaf.make_parser(context).parse_args(arguments)
        missing = [
            p.name for p in leaf.params if p.required and not isinstance(parsed.get(p.name), str | list | tuple)
        ]
        assert (missing, left) == ([], []), path
        edgefl.get_command(click.Context(edgefl), path.partition(" ")[0])  # two groups share a command
        assert f"edgefl {EXAMPLES[path]}" in click.testing.CliRunner().invoke(leaf, ["--help"]).stdout


def test_no_option_takes_what_is_no_number():
    commands = [edgefl.get_command(click.Context(edgefl), name) for name in COMMANDS]
    options = [option for command in commands for _, leaf in leaves(command) for option in leaf.params]
    ranges = [option for option in options if isinstance(option.type, click.FloatRange)]
    assert len(ranges) >= 10
    assert [option.name for option in ranges if not isinstance(option.type, NumberRange)] == []


def test_help_begins_with_the_first_day_and_says_whose_side_device_and_devices_are(run):
    text = run("--help").out
    assert text.index("The first day:") < text.index("edgefl run submit run.toml --watch") < text.index("Begin:")
    assert "On the board itself" in run("device", "--help").out
    assert "On the owner's side" in run("devices", "--help").out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(run, shell, monkeypatch):
    if shutil.which(shell):  # click asks bash for its version
        assert "_EDGEFL_COMPLETE" in run("completion", shell).out
    monkeypatch.setenv("_EDGEFL_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", "edgefl history round" if shell != "fish" else "edgefl history")
    monkeypatch.setenv("COMP_CWORD", "2" if shell != "fish" else "round")
    assert "rounds" in run().out


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


def test_what_signs_requests_to_a_storage_is_logged_at_no_verbosity(run, caplog):
    caplog.set_level(logging.DEBUG)  # as -vv does
    for name in ("botocore", "aiobotocore", "s3fs", "fsspec"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    run("-vv", "coordinator", "grafana")
    names = ("botocore.auth", "botocore.endpoint", "aiobotocore.httpsession", "s3fs", "fsspec.asyn")
    assert [name for name in names if logging.getLogger(name).isEnabledFor(logging.INFO)] == []


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
