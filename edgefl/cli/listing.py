"""A command group whose help says what each command does in a whole sentence."""

from __future__ import annotations

import inspect

import click


class ListedGroup(click.Group):
    """Click itself cuts the first sentence of a command's help after 45 letters."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, _sentence(found))
                    for name in self.list_commands(ctx)
                    if (found := self.get_command(ctx, name)) is not None and not found.hidden
                ]
            )


def _sentence(command: click.Command) -> str:
    paragraph = inspect.cleandoc(command.help or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).removesuffix(".")
