"""What tools of MCP servers need of a recipe and of a machine. See `unirl.types.recipe`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from unirl.rollout.environments.tools.mcp.server import McpServer, UnreachableError, names_of
from unirl.types.errors import ConfigError
from unirl.types.recipe import TARGET, Fault, Machine, Messages, Part, Run

SERVER = f"{McpServer.__module__}.{McpServer.__qualname__}"


def server_has_one_address(own: Part, run: Run) -> Messages:
    """What the constructor refuses."""
    try:
        _made(own)
    except ConfigError as error:
        yield f"{own.at}: {str(error).partition(': ')[2]}"


def names_are_there_once(own: Part, run: Run) -> Messages:
    """No two tools are called alike, as far as the recipe names them."""
    names = _named(own)
    for other in _earlier(own, run):
        yield from _twice(own, names, other, _named(other))


def server_has_its_tools(own: Part, run: Run, machine: Machine) -> Messages:
    """The library is there, the server starts or can be reached, and has tools by other names than the rest."""
    del machine
    if importlib.util.find_spec("mcp") is None:
        yield f"{own.at}: MCP servers need the library mcp: pip install 'unirl-rollout[mcp]'"
        return
    try:
        names = set(_made(own).offer())
        for other in _earlier(own, run):
            if SERVER in other.lineage:
                yield from _twice(own, names - _named(own), other, set(_made(other).offer()))
            else:
                yield from _twice(own, names - _named(own), other, _named(other))
    except UnreachableError as error:
        yield f"{own.at}: {str(error).partition(': ')[2]}"
    except ConfigError as error:
        yield Fault(f"{own.at}: {str(error).partition(': ')[2]}")


def _made(own: Part) -> McpServer:
    return McpServer(**{name: value for name, value in own.node.items() if name != TARGET})


def _named(own: Part) -> set[str]:
    """The names that the recipe gives its tools; none of a server that offers all that it has."""
    if SERVER not in own.lineage:
        return {own.at.rpartition(".")[2]}
    tools = own.get("tools")
    return set() if tools is None else set(names_of(tools).values())


def _earlier(own: Part, run: Run) -> Iterator[Part]:
    """The tools and servers that stand before this one in its environment."""
    for stage in run.stages:
        environment = None if stage.turns is None else stage.turns.inner.get("environment")
        tools = [] if environment is None else list(environment.inside("tools").values())
        if own in tools:
            yield from tools[: tools.index(own)]
            return


def _twice(own: Part, names: set[str], other: Part, others: set[str]) -> Messages:
    for name in sorted(names & others):
        yield (
            f"{own.at} and {other.at} both have a tool {name!r}. Give one another name, such as {own.at}.tools: "
            f"{{{name}: OTHER}}."
        )


RULES = (server_has_one_address, names_are_there_once)
MACHINE_RULES = (server_has_its_tools,)
