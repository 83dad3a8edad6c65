"""A server of the official library with tools that answer, fail, hang and die: `python mcp_served.py [PORT]`."""

import asyncio
import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import Image, MCPServer
from PIL import Image as Images

server = MCPServer("tests", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


@server.tool()
def fail(reason: str) -> str:
    """Say that it failed."""
    raise ValueError(reason)


@server.tool()
def pid() -> int:
    """Tell the process."""
    return os.getpid()


@server.tool()
def red() -> Image:
    """Show a red image of 2 x 3 pixels."""
    path = Path(os.environ["SCRATCH"]) / "red.png"
    Images.new("RGB", (3, 2), (255, 0, 0)).save(path)
    return Image(path)


@server.tool()
async def slow() -> str:
    """Answer after minutes."""
    await asyncio.sleep(1000)
    return "late"


@server.tool()
async def hang() -> str:
    """Answer nothing, nor let others."""
    time.sleep(1000)  # noqa: ASYNC251 - that is the fault
    return "late"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def die_once(flag: str) -> str:
    """End the server where the file is not there yet."""
    if Path(flag).exists():
        return "alive"
    Path(flag).touch()
    os._exit(3)


@server.tool()
def mutter() -> str:
    """Write to where messages go."""
    os.write(1, b"no message\n")
    return "said"


@server.tool()
def forget() -> str:
    """Have no `add` any more."""
    server.remove_tool("add")
    return "done"


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
