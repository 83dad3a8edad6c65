"""A task set with its own harness, which does what the prompt says; most of it no conversation of tokens can carry."""

import asyncio

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class OddTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def two_turns(self, trace):
        return float(trace.num_turns == 2)


class OddTasks(vf.Taskset[OddTask]):
    def load(self):
        for prompt in ("nothing", "stream", "sampling", "shorten", "image", "twice", "hang"):
            yield OddTask(vf.TaskData(prompt=prompt), self.config.task)


class Odd(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE, NEEDS_CONTAINER = False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        does, messages = data.prompt, [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {secret}"}, timeout=30) as client:

            async def asked(**given):
                body = {"model": ctx.model, "messages": messages, **given}
                return await client.post(f"{endpoint}/chat/completions", json=body)

            answer = await asked(**({"stream": True} if does == "stream" else {}))
            said = "streamed" if does == "stream" else answer.json()["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "again"}]
            if does == "hang":
                await asyncio.sleep(60)
            if does == "shorten":
                messages = messages[2:]
            if does == "image":
                image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
                messages[-1] = {"role": "user", "content": [image]}
            extra = {"temperature": 0.5} if does == "sampling" else {}
            answers = await asyncio.gather(*(asked(**extra) for _ in range(2 if does == "twice" else 1)))
        code = int(any(answer.is_error for answer in answers))
        return ProgramResult(exit_code=code, stdout="", stderr="refused" if code else "")


__all__ = ["Odd", "OddTasks"]
