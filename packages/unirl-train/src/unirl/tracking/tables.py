"""Tables of texts, as plain text. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.tracking.base import TableRow

MAX_MARKDOWN_CELL = 2000
"""Characters of a cell before it is cut."""


def columns(rows: Sequence[TableRow]) -> list[str]:
    """Every column of any row, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def cells(rows: Sequence[TableRow], names: Sequence[str], absent: str | None = "") -> list[list[str | float | None]]:
    """The rows as lists of the named columns. absent: the cell of a row without a column."""
    return [[row.get(name, absent) for name in names] for row in rows]


def shown(value: str | float, limit: int) -> str:
    """A cell: numbers with four digits, texts on one line and cut in the middle, where a completion says least."""
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    half = limit // 2
    return text if len(text) <= limit else f"{text[: half - 3]} ... {text[len(text) - half + 2 :]}"


def numbered(lines: Sequence[str]) -> str:
    """A numbered list, which is Markdown too."""
    return "\n".join(f"{number}. {' '.join(line.split())}" for number, line in enumerate(lines, start=1))


def markdown(rows: Sequence[TableRow]) -> str:
    """A Markdown table."""
    names = columns(rows)
    lines = [names, ["---"] * len(names)]
    for row in rows:
        lines.append([shown(row.get(name, ""), MAX_MARKDOWN_CELL).replace("|", "\\|") for name in names])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
