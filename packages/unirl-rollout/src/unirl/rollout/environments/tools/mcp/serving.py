"""Serves our tools over the Model Context Protocol, so that any client of it may call them:

    python -m unirl.rollout.environments.tools.mcp.serving NAME=IMPORT.PATH[:OPTIONS] ... [--port PORT]

OPTIONS are JSON, the keywords of the class. Without a port it speaks over standard input and output, with one over
streamable HTTP at http://127.0.0.1:PORT/mcp. Tools get no task: those that ask for the images of a row have none.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib
import io
import json
from collections.abc import Mapping
from typing import Any

import jsonschema
import uvicorn
from mcp import stdio_server, types
from mcp.server import Server
from PIL import Image

from unirl.rollout.environments.tools.base import Answer, Tool, ToolError, mcp_schema
from unirl.types.messages import ShownImage


def served(tools: Mapping[str, Tool]) -> Server[Any]:  # Any: of the library
    """A server of these tools. Arguments that do not fit and errors of a tool are results with `isError`."""

    async def listed(context: Any, params: Any) -> types.ListToolsResult:  # Any: of the library
        del context, params
        return types.ListToolsResult(
            tools=[types.Tool.model_validate(mcp_schema(name, tool)) for name, tool in tools.items()]
        )

    async def called(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:  # Any: of the library
        del context
        if params.name not in tools:
            return _failed(f"there is no tool {params.name!r}; there are {', '.join(tools)}")
        tool, arguments = tools[params.name], params.arguments or {}
        try:
            jsonschema.validate(arguments, dict(tool.parameters))
            answer = await asyncio.to_thread(tool, arguments, {})
        except jsonschema.ValidationError as error:
            return _failed(error.message)
        except ToolError as error:
            return _failed(str(error))
        answer = answer if isinstance(answer, Answer) else Answer(answer)
        images = [types.ImageContent(data=_png(image), mime_type="image/png") for image in answer.images]
        return types.CallToolResult(content=[*images, types.TextContent(text=answer.text)])

    return Server("unirl", on_list_tools=listed, on_call_tool=called)


def tool_of(words: str) -> tuple[str, Tool]:
    """The name and tool of NAME=IMPORT.PATH[:OPTIONS]. Raises ValueError if it is no such text."""
    name, mark, rest = words.partition("=")
    path, _, options = rest.partition(":")
    module, dot, attribute = path.rpartition(".")
    if not (name and mark and dot):
        raise ValueError(f"{words!r} is not NAME=IMPORT.PATH")
    tool = getattr(importlib.import_module(module), attribute)(**json.loads(options or "{}"))
    if not isinstance(tool, Tool):
        raise ValueError(f"{path} is no Tool")  # noqa: TRY004 - of a command line
    return name, tool


def _failed(reason: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=reason)], is_error=True)


def _png(image: ShownImage) -> str:
    written = io.BytesIO()
    Image.frombytes("RGB", (image.width, image.height), image.pixels).save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode()


async def _over_stdio(server: Server[Any]) -> None:  # Any: of the library
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="+", metavar="NAME=IMPORT.PATH[:OPTIONS]")
    parser.add_argument("--port", type=int)
    given = parser.parse_args()
    try:
        server = served(dict(map(tool_of, given.tools)))
    except (ValueError, ImportError, AttributeError) as error:
        parser.error(str(error))
    if given.port is None:
        asyncio.run(_over_stdio(server))
    else:
        uvicorn.run(server.streamable_http_app(), host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
