"""Bodies of SGLang's /generate requests. Pure functions, written against sglang.srt.managers.io_struct of 0.5.23."""

from __future__ import annotations

from typing import Any

from unirl.rollout.engine.served_text.call import Generate
from unirl.types.errors import ConfigError


def payload(call: Generate, adapter: str | None, attempt: int = 0) -> dict[str, Any]:  # Any: JSON
    """The body of one /generate request for all prompts. attempt: distinguishes requests for rows of one call.

    SGLang repeats the single placeholder of an image once per patch.
    Raises ConfigError for top-p or top-k: SGLang reports log-probs of the whole softmax, not of the truncated
    distribution.
    """
    if call.temperature > 0 and (call.top_p < 1 or call.top_k > 0):
        raise ConfigError(
            f"SGLang's log-probs are of the whole softmax, but top_p = {call.top_p} and top_k = {call.top_k} draw from "
            "a part of it. Set sampling.top_p: 1 and sampling.top_k: 0."
        )
    return {
        "rid": [f"{call.number}-{attempt}-{row}" for row in range(len(call.prompts))],
        **_prompts(call),
        "sampling_params": [
            {
                "temperature": call.temperature,
                "max_new_tokens": call.budget(row),
                # Never ignore_eos: SGLang then ignores these as well.
                "stop_token_ids": call.stop_token_ids,
                # Used by servers that run with --enable-deterministic-inference.
                "sampling_seed": seed,
            }
            for row, seed in enumerate(call.seeds)
        ],
        "return_logprob": True,
        **({} if adapter is None else {"lora_path": [adapter] * len(call.prompts)}),
    }


def _prompts(call: Generate) -> dict[str, Any]:  # Any: JSON
    if call.placeholder is None or not call.pictures:
        return {"input_ids": call.prompts}
    return {
        "input_ids": call.short_prompts(),
        "image_data": [[call.pictures[place] for place in places] for places in call.shown],
    }
