"""Records the README's terminal session and draws it as an animated SVG.

    python docs/tools/terminal_recording.py [--out docs/images/demo.svg]

The commands really run, in a terminal of their own; what they print is drawn as it came, at the speed it came. The
typing is made up, long waits are shortened to `LONGEST_WAIT_S`, and the folder of the session is shown as `~`.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

COLUMNS, ROWS = 96, 32
COMMANDS = ("edgefl demo", "edgefl history why latest --dir demo-run/coordinator")
FRAME_S = 0.25
LETTER_S = 0.05
LONGEST_WAIT_S = 1.5
LAST_S = 5.0
CELL_X, CELL_Y, MARGIN = 8.4, 19, 16
COLOURS = {
    30: "#45475a", 31: "#f38ba8", 32: "#a6e3a1", 33: "#f9e2af",
    34: "#89b4fa", 35: "#f5c2e7", 36: "#94e2d5", 37: "#cdd6f4",
}  # fmt: skip
TEXT, BACKGROUND, DIM = "#cdd6f4", "#1e1e2e", "#9399b2"


@dataclass(frozen=True, slots=True)
class Cell:
    letter: str = " "
    colour: str = TEXT
    is_bold: bool = False


@dataclass(slots=True)
class Screen:
    """So much of a terminal as these commands need: text, colours, cursor up, erase."""

    lines: list[list[Cell]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    colour: str = TEXT
    is_bold: bool = False

    def write(self, text: str) -> None:
        """Takes what a program printed."""
        for piece in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\x1b\][^\x07]*\x07|[\r\n]|[^\x1b\r\n]+", text):
            if piece.startswith("\x1b["):
                self._control(piece[2:-1], piece[-1])
            elif piece == "\n":
                self.row += 1
                self.lines += [[] for _ in range(self.row + 1 - len(self.lines))]
            elif piece == "\r":
                self.column = 0
            elif not piece.startswith("\x1b"):
                self._print(piece)

    def shown(self) -> tuple[tuple[Cell, ...], ...]:
        """Returns the lines that the terminal shows."""
        top = max(0, len(self.lines) - ROWS)
        return tuple(tuple(line) for line in self.lines[top:])

    def _print(self, text: str) -> None:
        for letter in text:
            if self.column == COLUMNS:
                self.column, self.row = 0, self.row + 1
                self.lines += [[] for _ in range(self.row + 1 - len(self.lines))]
            line = self.lines[self.row]
            line += [Cell()] * (self.column + 1 - len(line))
            line[self.column] = Cell(letter, self.colour, self.is_bold)
            self.column += 1

    def _control(self, arguments: str, kind: str) -> None:
        first = int(arguments) if arguments.isdigit() else 0
        if kind == "A":
            self.row = max(0, self.row - max(1, first))
        elif kind == "K":
            self.lines[self.row] = [] if first == 2 else self.lines[self.row][: self.column]
        elif kind == "m":
            if mixed := re.search(r"38;2;(\d+);(\d+);(\d+)", arguments):
                self.colour = "#" + "".join(f"{int(part):02x}" for part in mixed.groups())
            elif numbered := re.search(r"38;5;(\d+)", arguments):
                self.colour = _of_cube(int(numbered[1]))
            else:
                for number in map(int, re.findall(r"\d+", arguments) or ["0"]):
                    self._style(number)

    def _style(self, number: int) -> None:
        if number == 0:
            self.colour, self.is_bold = TEXT, False
        elif number in {1, 2}:
            self.is_bold, self.colour = (True, self.colour) if number == 1 else (self.is_bold, DIM)
        elif number in COLOURS or number - 60 in COLOURS:
            self.colour = COLOURS.get(number, COLOURS.get(number - 60, TEXT))


def _of_cube(number: int) -> str:
    """Returns a colour of the 256 that terminals number: 16 named ones, a cube of 6 by 6 by 6, greys."""
    if number < 16:
        return COLOURS[30 + number % 8]
    if number >= 232:
        return "#" + f"{8 + 10 * (number - 232):02x}" * 3
    parts = ((number - 16) // 36, (number - 16) // 6 % 6, (number - 16) % 6)
    return "#" + "".join(f"{55 + 40 * part if part else 0:02x}" for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images/demo.svg"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgefl-session-") as folder:
        frames = [*frames_of(session(Path(folder)))]
    asked.out.write_text(drawn(frames), encoding="utf-8")
    print(f"{asked.out}: {len(frames)} frames, {frames[-1][0]:.1f} s, {asked.out.stat().st_size / 1000:.0f} kB")


def session(folder: Path) -> Iterator[tuple[float, str]]:
    """Yields what appears, with the seconds that it came after what was before it."""
    for command in COMMANDS:
        yield 0.6, "\x1b[32m$\x1b[0m "
        for letter in command:
            yield LETTER_S, letter
        yield 0.3, "\r\n"
        yield from output(command.split(), folder)


def output(words: list[str], folder: Path) -> Iterator[tuple[float, str]]:
    """Runs a command in a terminal and yields its output."""
    main_end, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(words, cwd=folder, env=environment, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    last = time.monotonic()
    rest = b""
    while True:
        try:
            ready, _, _ = select.select([main_end], [], [], 60.0)
            chunk = os.read(main_end, 65536) if ready else b""
        except OSError:  # the last program of the terminal has ended
            chunk = b""
        if not chunk:
            break
        now = time.monotonic()
        text, rest = _whole(rest + chunk)
        yield now - last, text.replace(str(folder.resolve()), "~")
        last = now
    os.close(main_end)
    if process.wait():
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")


def _whole(data: bytes) -> tuple[str, bytes]:
    """Returns the text of what came, and the bytes of a letter that was cut in two."""
    for cut in range(4):
        try:
            return data[: len(data) - cut].decode(), data[len(data) - cut :]
        except UnicodeDecodeError:
            continue
    raise ValueError("the output is not UTF-8")


def frames_of(events: Iterator[tuple[float, str]]) -> Iterator[tuple[float, tuple[tuple[Cell, ...], ...]]]:
    """Yields each screen with the second at which it appears; at most one in `FRAME_S`."""
    screen, at, shown_at = Screen(), 0.0, -FRAME_S
    before: tuple[tuple[Cell, ...], ...] = ()
    for wait, text in events:
        at += min(wait, LONGEST_WAIT_S)
        screen.write(text)
        if at - shown_at >= FRAME_S and screen.shown() != before:
            before, shown_at = screen.shown(), at
            yield at, before
    yield at + FRAME_S, screen.shown()


def drawn(frames: list[tuple[float, tuple[tuple[Cell, ...], ...]]]) -> str:
    """Returns an SVG: a strip of frames, of which an animation shows one at a time; without animation, the last."""
    width, height = COLUMNS * CELL_X + 2 * MARGIN, ROWS * CELL_Y + 2 * MARGIN + 24
    whole = frames[-1][0] + LAST_S
    lines: dict[tuple[Cell, ...], str] = {}
    strip, steps = [], []
    for number, (at, screen) in enumerate(frames):
        uses = []
        for row, line in enumerate(screen):
            if any(cell.letter != " " for cell in line):
                name = lines.setdefault(line, f"l{len(lines)}")
                uses.append(f'<use href="#{name}" y="{row * CELL_Y}"/>')
        strip.append(f'<g transform="translate(0 {number * height:.0f})">{"".join(uses)}</g>')
        steps.append(f"{100 * at / whole if number else 0:.3f}%{{transform:translateY({-number * height:.0f}px)}}")
    texts = "".join(f'<g id="{name}">{_line(line)}</g>' for line, name in lines.items())
    last = f"translateY({-(len(frames) - 1) * height:.0f}px)"
    dots = ("#f38ba8", "#f9e2af", "#a6e3a1")
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
            f"<title>A terminal session: {escape(', then '.join(COMMANDS))}</title>",
            "<style>",
            'text{font:14px ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace;white-space:pre}',
            f".film{{transform:{last};animation:film {whole:.2f}s step-end infinite}}",
            f"@keyframes film{{{''.join(steps)}}}",
            "@media (prefers-reduced-motion:reduce){.film{animation:none}}",
            "</style>",
            f'<rect width="100%" height="100%" rx="10" fill="{BACKGROUND}"/>',
            *(f'<circle cx="{22 + 20 * number}" cy="20" r="6" fill="{dot}"/>' for number, dot in enumerate(dots)),
            f"<defs>{texts}</defs>",
            f'<svg x="{MARGIN}" y="{MARGIN + 24}" width="{width - 2 * MARGIN:.0f}" height="{ROWS * CELL_Y}">',
            f'<g class="film">{"".join(strip)}</g></svg>',
            "</svg>",
        )
    )


def _line(line: tuple[Cell, ...]) -> str:
    spans, start = [], 0
    while start < len(line):
        end = start
        while end < len(line) and (line[end].colour, line[end].is_bold) == (line[start].colour, line[start].is_bold):
            end += 1
        text = "".join(cell.letter for cell in line[start:end])
        if text.strip():
            left = start + len(text) - len(text.lstrip())
            weight = ' font-weight="700"' if line[start].is_bold else ""
            shown = escape(text.strip())
            length = f' textLength="{len(text.strip()) * CELL_X:.1f}" lengthAdjust="spacingAndGlyphs"'
            spans.append(
                f'<text x="{left * CELL_X:.1f}" y="14" fill="{line[start].colour}"{weight}{length}>{shown}</text>'
            )
        start = end
    return "".join(spans)


if __name__ == "__main__":
    main()
