"""Where an MCP server is, in plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Address:
    """One of a command and a url."""

    command: tuple[str, ...] = ()
    """What starts it; "python" is the interpreter that runs."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables for the command."""
    url: str = ""
    """Where one runs already; empty with a command."""
    headers: tuple[tuple[str, str], ...] = ()
    """What requests to the url say."""

    def __str__(self) -> str:
        return f"the MCP server at {self.url}" if self.url else f"the MCP server `{' '.join(self.command)}`"
