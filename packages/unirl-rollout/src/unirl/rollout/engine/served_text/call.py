"""Between our requests and tracks and the plain values that text engines in other processes take: pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from unirl.rollout.engine.served_images import shown_pictures
from unirl.rollout.text_checks import text_params, verify_text_segment
from unirl.sde.noise import noise_seed
from unirl.types.conditions import Condition, PromptCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Texts
from unirl.types.noise import noise_key
from unirl.types.rollout import RolloutReq, RolloutTrack
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment

_STATUS = {"stop": SegmentStatus.COMPLETED, "length": SegmentStatus.TRUNCATED, "abort": SegmentStatus.ABORTED}


@dataclass(frozen=True)
class Generate:
    """Sample one completion for each prompt."""

    number: int
    """Which call this is; an `Abort` names it."""
    prompts: list[list[int]]
    seeds: list[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_token_ids: list[int]
    pictures: list[str] = field(default_factory=list)
    """PNG files as data URIs, each once."""
    shown: list[list[int]] = field(default_factory=list)
    """Which pictures each prompt shows, in its order; empty where no prompt shows any."""
    placeholder: int | None = None
    """The token that the model reads as a piece of a picture."""


@dataclass(frozen=True)
class Generations:
    """The completions, in the order of the prompts."""

    policy_version: int
    tokens: list[list[int]]
    log_probs: list[list[float]]
    """Nats, of the distribution that was sampled from."""
    finish_reasons: list[str]
    """The words of vLLM and SGLang alike: "stop", "length" or "abort"."""


def prompt_tokens(conditions: Mapping[str, Condition]) -> list[list[int]]:
    """Token ids of each prompt, pieces of pictures among them. Raises ContractError where the conditions hold none."""
    prompt = conditions.get("prompt")
    if not isinstance(prompt, PromptCondition):
        raise ContractError(f"the conditions {sorted(conditions)} hold no PromptCondition under 'prompt'")
    return [tokens.tolist() for tokens in prompt.unpack("tokens")]


def generation(
    req: RolloutReq,
    conditions: Mapping[str, Condition],
    stop_token_ids: tuple[int, ...],
    number: int,
    *,
    placeholder: int | None = None,
) -> Generate:
    """The call for a request whose prompts are `conditions`.

    placeholder: the token that the engine's model reads as a piece of a picture; None in a model of text alone.
    A sample's seed follows from its id, the rollout and params.seed alone: it draws the same tokens in any batch.
    Raises ConfigError for pictures that the model does not read.
    """
    params = text_params(req)
    pictures, shown = shown_pictures(req.primitives.get("image"))
    if pictures and placeholder is None:
        raise ConfigError(
            "the request has images, but the engine's model names no image_token_id in its config.json: it reads text "
            "alone. Choose a vision-language model, or prompts without images."
        )
    return Generate(
        number=number,
        prompts=prompt_tokens(conditions),
        seeds=[noise_seed(params.seed, noise_key(req.rollout_id, sample)) for sample in req.sample_ids],
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_new_tokens=params.max_new_tokens,
        stop_token_ids=list(stop_token_ids),
        pictures=pictures,
        shown=shown if pictures else [],
        placeholder=placeholder,
    )


def check_fits(prompts: list[list[int]], max_new_tokens: int, *, context_length: int, vocab_size: int) -> None:
    """Raise ConfigError where a prompt does not fit the engine's context, or holds a token that the model lacks."""
    for row, prompt in enumerate(prompts):
        if len(prompt) + max_new_tokens > context_length:
            raise ConfigError(
                f"prompt {row} has {len(prompt)} tokens and may grow by max_new_tokens = {max_new_tokens}: "
                f"{len(prompt) + max_new_tokens} in all, of the engine's context of {context_length}. "
                "Raise engine.context_length, lower sampling.max_new_tokens or shorten the prompt."
            )
        if max(prompt) >= vocab_size:
            raise ConfigError(
                f"prompt {row} has token {max(prompt)}, but the engine's model has {vocab_size} tokens. "
                "Give the trainer's tokenizer and the engine the same model."
            )


def text_segment(answer: Generations, call: Generate, params: ARSamplingParams) -> TextSegment:
    """The segment of an answer. Raises ContractError unless every prompt has one completion that ended as it says, each
    token with a finite log-prob; aborted samples may end anywhere."""
    num = len(call.prompts)
    if not len(answer.tokens) == len(answer.log_probs) == len(answer.finish_reasons) == num:
        raise ContractError(
            f"the engine answered {num} prompts with {len(answer.tokens)} completions, {len(answer.log_probs)} rows of "
            f"log-probs and {len(answer.finish_reasons)} finish reasons"
        )
    unknown = sorted(set(answer.finish_reasons) - set(_STATUS))
    if unknown:
        raise ContractError(f"the engine ended samples with {unknown}; known are {sorted(_STATUS)}")
    status = [_STATUS[reason] for reason in answer.finish_reasons]
    log_probs = [torch.tensor(values, dtype=torch.float32) for values in answer.log_probs]
    segment = TextSegment.pack(
        tokens=[torch.tensor(tokens, dtype=torch.long) for tokens in answer.tokens],
        log_probs=None if params.is_greedy else log_probs,
        status=torch.tensor(status, dtype=torch.long),
        params=params,
    )
    finished = [row for row, ending in enumerate(status) if ending is not SegmentStatus.ABORTED]
    if finished:
        verify_text_segment(segment.select(finished), params, call.stop_token_ids)
    return segment


def text_track(
    req: RolloutReq, conditions: Mapping[str, Condition], segment: TextSegment, decoded: Texts, policy_version: int
) -> RolloutTrack:
    """The root track of a request, the policy's version on every sample."""
    track = req.make_root_track(conditions=conditions, segment=segment, decoded=decoded)
    track.policy_versions = torch.full((req.batch_size,), policy_version, dtype=torch.long)
    return track
