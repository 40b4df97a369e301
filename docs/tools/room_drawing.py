"""Draws docs/images/rooms.svg: the rooms of the package in their layers, and what each imports, from the imports.

python docs/tools/room_drawing.py
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from textwrap import wrap

from grimp import ImportGraph, build_graph

ROOT = Path(__file__).resolve().parents[2]
DRAWING = ROOT / "docs" / "images" / "rooms.svg"
EVERYWHERE = "core"
"""Imported by every room, so that no chip says so."""
WIDTH, MARGIN, GAP = 1000, 24, 14
BOX_TOP, LINE_HEIGHT, CHIP_HEIGHT, CHIP_GAP, ROW_GAP = 62, 18, 20, 6, 24
LETTER_WIDTH = 6.7
COLOURS = {
    "cli": "#6b7280", "client": "#b08900",
    "provision": "#8d6e3f", "simulation": "#7c5cbf", "coordinator": "#0072b2", "device": "#d55e00",
    "engine": "#3b5bdb", "history": "#2b8a9e", "flower": "#b5478a", "tasks": "#a8620b", "strategies": "#00795a",
    "compression": "#4d7c0f", "storage": "#9b2c2c", "system": "#52606d", "core": "#1f2933",
}  # fmt: skip


def main() -> None:
    """Writes the drawing."""
    graph = build_graph("edgefl", cache_dir=None)
    DRAWING.write_text(draw(read_layers(), count_imports(graph), count_files()), encoding="utf-8")


def read_layers() -> list[list[str]]:
    """Returns the rooms from the top layer down, as the contract in pyproject.toml has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = [contract["layers"] for contract in contracts if contract["id"] == "layers"]
    return [rooms for layer in layers if (rooms := [room.strip() for room in layer.split("|")]) != ["__main__"]]


def count_imports(graph: ImportGraph) -> dict[str, Counter[str]]:
    """Returns for each room the number of its modules that import each other room."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for module in graph.modules:
        room = _room(module)
        imported = {_room(name) for name in graph.find_modules_directly_imported_by(module)}
        counts[room].update(imported - {room, ""})
    return counts


def count_files() -> Counter[str]:
    return Counter(path.relative_to(ROOT / "edgefl").parts[0] for path in (ROOT / "edgefl").rglob("*.py"))


def draw(layers: Sequence[Sequence[str]], imports: Mapping[str, Counter[str]], files: Mapping[str, int]) -> str:
    """Returns the drawing as SVG."""
    parts, top = [*_legend()], 92
    for rooms in layers:
        width = (WIDTH - 2 * MARGIN - GAP * (len(rooms) - 1)) / len(rooms)
        chips = {room: _place_chips(imports[room], width, layers) for room in rooms}
        texts = {room: _describe(room, width) for room in rooms}
        chips_top = BOX_TOP + LINE_HEIGHT * (max(len(lines) for lines in texts.values()) - 1)
        height = chips_top + max(num_rows for num_rows, _ in chips.values()) * (CHIP_HEIGHT + CHIP_GAP) + 4
        for place, room in enumerate(rooms):
            left = MARGIN + place * (width + GAP)
            parts += _draw_room(room, left, top, width, height)
            parts += _draw_texts(room, left, top, width, texts[room], files[room])
            parts += (
                _draw_chip(left + x, top + chips_top + y, name, number) for x, y, name, number in chips[room][1]
            )
        top += height + ROW_GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" role="img" '
        'aria-label="The rooms of edgefl in layers; each imports only rooms below it">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{top}" rx="12" fill="#fbfbfa"/>', *parts, "</svg>\n"])


def _room(module: str) -> str:
    return [*module.split("."), ""][1]


def _place_chips(
    imports: Counter[str], width: float, layers: Sequence[Sequence[str]]
) -> tuple[int, list[tuple[float, float, str, int]]]:
    """Returns the number of rows, and left, top, room and number of each chip."""
    chips, x, row = [], 16.0, 0
    for room in (room for rooms in layers for room in rooms if imports[room] and room != EVERYWHERE):
        chip_width = _chip_width(room, imports[room])
        if x + chip_width > width - 12:
            x, row = 16.0, row + 1
        chips.append((x, row * (CHIP_HEIGHT + CHIP_GAP), room, imports[room]))
        x += chip_width + CHIP_GAP
    return row + 1 if chips else 0, chips


def _chip_width(room: str, number: int) -> float:
    return 22 + LETTER_WIDTH * len(f"{room} {number}")


def _draw_room(room: str, left: float, top: float, width: float, height: float) -> Iterator[str]:
    place = f'x="{left:.1f}" y="{top}" width="{width:.1f}" height="{height}"'
    yield f'<rect {place} rx="8" fill="#fff" stroke="#d8d8d4"/>'
    yield f'<path d="M{left:.1f} {top + 8} q0 -8 8 -8 h{width - 16:.1f} q8 0 8 8 z" fill="{COLOURS[room]}"/>'


def _draw_texts(
    room: str, left: float, top: float, width: float, lines: Sequence[str], num_files: int
) -> Iterator[str]:
    x, colour = f"{left + 16:.1f}", COLOURS[room]
    yield f'<text x="{x}" y="{top + 32}" font-size="17" font-weight="650" fill="{colour}">{room}</text>'
    yield (
        f'<text x="{left + width - 16:.1f}" y="{top + 32}" font-size="12" fill="#7b8794" text-anchor="end">'
        f"{num_files} files</text>"
    )
    for number, line in enumerate(lines):
        y = top + 51 + LINE_HEIGHT * number
        yield f'<text x="{x}" y="{y}" font-size="13" fill="#3e4c59">{escape(line)}</text>'


def _draw_chip(left: float, top: float, room: str, number: int) -> str:
    colour, width = COLOURS[room], _chip_width(room, number)
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{CHIP_HEIGHT}" rx="10" fill="{colour}" '
        f'fill-opacity="0.12"/><circle cx="{left + 10:.1f}" cy="{top + 10:.1f}" r="3.5" fill="{colour}"/>'
        f'<text x="{left + 18:.1f}" y="{top + 14:.1f}" font-size="12" fill="#243b53">{room} '
        f'<tspan fill="#7b8794">{number}</tspan></text>'
    )


def _legend() -> Iterator[str]:
    yield f'<text x="{MARGIN}" y="42" font-size="20" font-weight="650" fill="#1f2933">The rooms of edgefl</text>'
    yield (
        f'<text x="{MARGIN}" y="66" font-size="13" fill="#52606d">A room imports only rooms below it, never its '
        "neighbour. A chip: a room that it imports, and by how many of its modules. All import core.</text>"
    )


def _describe(room: str, width: float) -> list[str]:
    """Returns the first line of the room's docstring, in lines that fit."""
    source = (ROOT / "edgefl" / room / "__init__.py").read_text(encoding="utf-8")
    text = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return wrap(text.removesuffix(".").replace("`", ""), int((width - 32) / LETTER_WIDTH))


if __name__ == "__main__":
    main()
