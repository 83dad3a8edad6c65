"""The loop of verifiers' null harness in this process: turns and tool calls until a turn calls nothing."""

from __future__ import annotations

import functools
import importlib
import json
from contextlib import AsyncExitStack
from typing import Any


@functools.cache
def chat_harness() -> type[Any]:  # Any: of a library that another Python environment has
    """The class, made where the library is."""
    null: Any = importlib.import_module("verifiers.v1.harnesses.null").NullHarness
    mcp: Any = importlib.import_module("verifiers.v1.harnesses.utils.mcp")
    result: Any = importlib.import_module("verifiers.v1.runtimes").ProgramResult
    wire: Any = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire
    httpx: Any = importlib.import_module("httpx")

    class Chat(null):
        SUPPORTS_TOOL_INTERCEPTION = False

        async def setup(self, runtime: Any) -> None:  # Any: of the library
            """Nothing to install."""

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
        ) -> Any:  # Any: of the library
            """Talk until a turn calls no tool."""
            system, prompt = self.resolve_prompt(data)
            messages = [] if system is None else [{"role": "system", "content": system}]
            messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(wire, prompt)
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            async with AsyncExitStack() as stack:
                tools, dispatch, clients = await mcp.connect_mcp({"mcpServers": servers}, stack)
                headers = {"authorization": f"Bearer {secret}"}
                client = await stack.enter_async_context(httpx.AsyncClient(headers=headers, timeout=None))
                while True:
                    offered = {"tools": tools} if tools else {}
                    body = {"model": ctx.model, "messages": messages, **offered}
                    answer = await client.post(f"{endpoint}/chat/completions", json=body)
                    if answer.is_error:
                        return result(exit_code=1, stdout="", stderr=answer.text)
                    message = answer.json()["choices"][0]["message"]
                    messages.append(message)
                    if not message.get("tool_calls"):
                        return result(exit_code=0, stdout="", stderr="")
                    for call in message["tool_calls"]:
                        name, given = call["function"]["name"], json.loads(call["function"]["arguments"])
                        if name in dispatch:
                            content = await mcp.call_mcp(clients, dispatch, name, given)
                        else:
                            content = f"error: unknown tool {name!r}"
                        messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})

    return Chat
