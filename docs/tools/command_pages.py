"""The reference of the `edgefl` command, from the click tree itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click
from markup import code, prose, sections, table

from edgefl.cli.main import edgefl


def commands() -> str:
    """Returns a part for the command itself, and one for each group and command below it."""
    return sections(_parts(edgefl, click.Context(edgefl, info_name="edgefl"), level=2))


def _parts(command: click.Command, ctx: click.Context, level: int) -> Iterator[str]:
    path = ctx.command_path
    yield f"{'#' * level} `{path}`" if level > 2 or path != "edgefl" else ""
    yield _text(command.help or "")
    if not isinstance(command, click.Group):
        yield f"```text\n{path} {' '.join(command.collect_usage_pieces(ctx))}\n```"
        if command.epilog:
            yield "For example:\n\n```sh\n" + command.epilog.partition("Example:\n")[2].strip() + "\n```"
    yield _options(command, ctx)
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            found = command.get_command(ctx, name)
            if found is not None and not found.hidden:
                below = 2 if path == "edgefl" else level + 1
                yield from _parts(found, click.Context(found, parent=ctx, info_name=name), below)


def _options(command: click.Command, ctx: click.Context) -> str:
    records = [
        option.get_help_record(ctx)
        for option in command.get_params(ctx)
        if isinstance(option, click.Option) and option.name != "help"
    ]
    rows = [(code(names), prose(text)) for names, text in (record for record in records if record)]
    return table(("option", "meaning"), rows) if rows else ""


def _text(text: str) -> str:
    """Returns a help text as paragraphs; those that click must not wrap become blocks."""
    found = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b"):
            found.append("```text\n" + paragraph.lstrip("\b\n") + "\n```")
        else:
            found.append(prose(paragraph))
    return "\n\n".join(found)
