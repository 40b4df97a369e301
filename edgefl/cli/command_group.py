"""A command group whose help has a whole sentence per command."""

from __future__ import annotations

import inspect

import click


class FullHelpGroup(click.Group):
    """Command group with full summaries: Click itself cuts a command's first sentence after 45 letters."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, _format_summary(command))
                    for name in self.list_commands(ctx)
                    if (command := self.get_command(ctx, name)) is not None and not command.hidden
                ]
            )


def _format_summary(command: click.Command) -> str:
    paragraph = inspect.cleandoc(command.help or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).removesuffix(".")
