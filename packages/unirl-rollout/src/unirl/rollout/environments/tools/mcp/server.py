"""The tools of a server of the Model Context Protocol (MCP), in turns with a language model."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jsonschema

from unirl.rollout.environments.base import Task
from unirl.rollout.environments.programs import end_programs, mark_of_this_process, new_mark
from unirl.rollout.environments.tools.base import Answer, Tool, ToolError, ToolServer, ToolUnavailableError
from unirl.rollout.environments.tools.mcp.address import Address
from unirl.types.bounds import Positive, bounded
from unirl.types.errors import ConfigError

_PLACE = "turns.environment.tools"


class UnreachableError(ConfigError):
    """A server that another machine may be able to start or reach."""


@bounded(_PLACE)
class McpServer(ToolServer):
    """Offers the tools of an MCP server. Errors of a tool, calls that take too long and the end of a server are told to
    the model and counted; an episode fails only where a server cannot be started or reached again.

    command: program and arguments that start it, asked over standard input and output; "python" is the interpreter that
        runs. Each process of the environment has one, which is ended with it and serves all of its episodes.
    url: instead, of a server that runs (streamable HTTP).
    tools: which ones the model may call: their names, or the server's name -> what the model calls it. None: all.
    env: variables for the command, besides HOME, LOGNAME, PATH, SHELL, TERM and USER. headers: of requests to the url.
    timeout_s: of one call with all that it takes. shows_images: whether images in answers are shown, else they are
        named. deterministic: whether equal calls always have equal answers.
    Raises ConfigError for a server or tools that cannot be, and from `offer` and `prepare` for what the server lacks.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.environments.tools.mcp.rules"

    def __init__(
        self,
        *,
        command: Sequence[str] | None = None,
        url: str | None = None,
        tools: Sequence[str] | Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: Positive = 3.0,
        shows_images: bool = False,
        deterministic: bool = False,
    ) -> None:
        for message in _mistakes(command, url, tools, env, headers):
            raise ConfigError(f"{_PLACE}: {message}")
        pairs = [() if each is None else tuple(sorted(each.items())) for each in (env, headers)]
        self._address = Address(tuple(command or ()), pairs[0], url or "", pairs[1])
        self._timeout_s = timeout_s
        self._chosen = None if tools is None else names_of(tools)
        self._offered: dict[str, Tool] = {}
        self.shows_images = shows_images
        self.deterministic = deterministic
        self.starts_programs = command is not None

    def offer(self) -> Mapping[str, Tool]:
        """Ask a server, which is ended after that if it was started."""
        mark = new_mark()
        connection = _connection(self._address, mark)
        try:
            self._offered = self._asked(connection)
        finally:
            connection.close()
            end_programs(mark)
        return self._offered

    def prepare(self) -> None:
        """Start the server of this process."""
        found = self._asked(connected(self._address))
        changed = [name for name, tool in self._offered.items() if tool.parameters != found[name].parameters]
        if changed:
            raise ConfigError(
                f"{_PLACE}: {self._address} takes other arguments for {', '.join(changed)} than when the run began. "
                "Start it again, with one version of the server on all nodes."
            )

    def _asked(self, connection: Any) -> dict[str, Tool]:  # Any: a `Connection`, whose module needs the library
        try:
            listed = {tool.name: tool for tool in connection.tools()}
        except _connections().CANNOT_BE_ASKED as error:
            is_named = isinstance(error, RuntimeError)
            why = " ".join(str(error).split()) or type(error).__name__
            said = why if is_named else f"{self._address} does not list its tools: {why}"
            raise UnreachableError(f"{_PLACE}: {said}") from error
        chosen = {name: name for name in listed} if self._chosen is None else self._chosen
        if missing := [name for name in chosen if name not in listed]:
            raise ConfigError(
                f"{_PLACE}: {self._address} has no tool {', '.join(missing)}. It has {', '.join(listed) or 'none'}."
            )
        if not chosen:
            raise ConfigError(f"{_PLACE}: {self._address} has no tools.")
        return {own: self._tool(listed[name]) for name, own in chosen.items()}

    def _tool(self, listed: Any) -> McpTool:  # Any: a tool as the library lists it
        schema = listed.input_schema
        try:
            jsonschema.validators.validator_for(schema).check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ConfigError(
                f"{_PLACE}: the arguments of {listed.name} of {self._address} have no valid JSON schema: "
                f"{error.message}. Leave it out with tools."
            ) from error
        if elsewhere := [place for place in _references(schema) if not place.startswith("#")]:
            raise ConfigError(
                f"{_PLACE}: the JSON schema of {listed.name} of {self._address} refers to {elsewhere[0]}, and none is "
                "read from elsewhere. Leave it out with tools."
            )
        return McpTool(self, self._address, listed, self._timeout_s)


class McpTool(Tool):
    """A tool of a server, called over the session of this process."""

    def __init__(self, server: ToolServer, address: Address, listed: Any, timeout_s: float) -> None:  # Any: as above
        self._address = address
        self._timeout_s = timeout_s
        self._name = str(listed.name)
        self.description = listed.description or listed.title or listed.name
        self.parameters = listed.input_schema
        self.shows_images = server.shows_images
        self.deterministic = server.deterministic

    def __call__(self, arguments: Mapping[str, Any], task: Task) -> Answer:  # Any: JSON
        """What the server answers. Raises ToolError for what it refuses or calls an error, ToolUnavailableError if it
        does not answer or ends, and RuntimeError if it cannot be started or reached again."""
        connections = _connections()
        results = importlib.import_module("unirl.rollout.environments.tools.mcp.results")
        try:
            result = connected(self._address).call(self._name, dict(arguments), self._timeout_s)
        except TimeoutError as error:
            raise ToolUnavailableError(f"no answer within {self._timeout_s:g} s") from error
        except connections.MCPError as error:
            raise ToolError(str(error)) from error
        except connections.ServerLostError as error:
            raise ToolUnavailableError("the tool ended before it answered") from error
        except connections.NoServerError:
            raise
        except (ValueError, RuntimeError) as error:
            raise ToolUnavailableError("the tool answered what cannot be read") from error
        return results.answer_of(result, shows_images=self.shows_images)


@functools.cache
def connected(address: Address) -> Any:  # Any: a `Connection`, whose module needs the library
    """The connection of this process to a server."""
    return _connection(address, mark_of_this_process())


def names_of(tools: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """The server's names of chosen tools -> what the model calls them."""
    return dict(tools) if isinstance(tools, Mapping) else {name: name for name in tools}


def _connection(address: Address, mark: str | None) -> Any:  # Any: a `Connection`, whose module needs the library
    return _connections().Connection(address, mark)


def _connections() -> Any:  # Any: a module that needs the library
    try:
        return importlib.import_module("unirl.rollout.environments.tools.mcp.connection")
    except ImportError as error:
        raise UnreachableError(
            f"{_PLACE}: MCP servers need the library mcp ({error}): pip install 'unirl-rollout[mcp]'"
        ) from error


def _mistakes(
    command: Sequence[str] | None,
    url: str | None,
    tools: Sequence[str] | Mapping[str, str] | None,
    env: Mapping[str, str] | None,
    headers: Mapping[str, str] | None,
) -> Iterator[str]:
    if (command is None) == (url is None):
        yield f"an MCP server has a command or a url, and here command = {command} and url = {url}. Give one of them."
    elif command is not None and (isinstance(command, str) or not command or not command[0]):
        yield f"command = {command!r} of an MCP server is no list of a program and its arguments. Write [program, ...]."
    elif url is not None and not url.startswith(("http://", "https://")):
        yield f"url = {url!r} of an MCP server must begin with http:// or https://"
    elif url is not None and env is not None:
        yield f"env is for a command, and the MCP server at {url} runs already. Remove env."
    elif command is not None and headers is not None:
        yield "headers are for a url, and this MCP server has a command. Remove headers, or use env."
    chosen = [] if tools is None else list(names_of(tools).values())
    given = [] if tools is None else list(tools.values() if isinstance(tools, Mapping) else tools)
    if tools is not None and not chosen:
        yield "tools of an MCP server is empty. Name some, or leave it out for all."
    if twice := sorted({name for name in given if given.count(name) > 1}):
        yield f"tools of an MCP server has {', '.join(twice)} twice. Give each its own name."


def _references(schema: Any) -> Iterator[str]:  # Any: JSON
    if isinstance(schema, Mapping):
        if isinstance(place := schema.get("$ref"), str):
            yield place
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            yield from _references(each)
