"""Checks of every text engine: of the request before sampling, and of the segment before it is returned."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unirl.types.conditions import Condition
from unirl.types.errors import ContractError
from unirl.types.protocols.models import TextCodec
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment

LARGEST_LOGP = 1e-5
"""A certain token has log-prob 0; engines that subtract a logsumexp in float32 may give slightly more."""


def text_params(req: RolloutReq) -> ARSamplingParams:
    """The request's sampling parameters. Raises ContractError if they are not ARSamplingParams."""
    params = req.sampling_params
    if not isinstance(params, ARSamplingParams):
        raise ContractError(f"this engine needs ARSamplingParams, the request has {type(params).__name__}")
    return params


def prompt_conditions(req: RolloutReq, codec: TextCodec) -> dict[str, Condition]:
    """What the samples of a request continue: its prompts as tokens where it brings them, as later turns do, else those
    of its texts. Raises ConfigError if a prompt cannot be read."""
    given = dict(req.request_conditions)
    return given if "prompt" in given else codec.encode(req.primitives, text_params(req))


def verify_finished(
    segment: TextSegment, params: ARSamplingParams, stop_token_ids: Sequence[int], sample_length: int | None = None
) -> None:
    """`verify_text_segment` of the samples that were neither ended early nor refused."""
    if segment.status is None:
        verify_text_segment(segment, params, stop_token_ids, sample_length)
        return
    is_whole = (segment.status != SegmentStatus.ABORTED) & (segment.status != SegmentStatus.FAILED)
    if bool(is_whole.all()):
        verify_text_segment(segment, params, stop_token_ids, sample_length)
    elif bool(is_whole.any()):
        verify_text_segment(segment.select(is_whole.nonzero().flatten()), params, stop_token_ids, sample_length)


def verify_text_segment(
    segment: TextSegment, params: ARSamplingParams, stop_token_ids: Sequence[int], sample_length: int | None = None
) -> None:
    """Raise ContractError unless every sample has tokens, an end that matches its status, and finite log-probs.

    A completed sample ends with one of `stop_token_ids`, or has `sample_length` tokens where all samples have; a
    truncated one has max_new_tokens tokens; neither has an earlier stop token. Log-probs are at most 0, and may only be
    absent for greedy sampling.
    """
    if segment.params != params:
        raise ContractError(f"the engine sampled with {segment.params}, the request asked for {params}")
    stops = torch.tensor(sorted(stop_token_ids), dtype=torch.long, device=segment.tokens.device)
    status = [SegmentStatus.COMPLETED] * segment.batch_size if segment.status is None else segment.status.tolist()
    lengths, is_stop = segment.lengths.tolist(), torch.isin(segment.tokens, stops).tolist()
    start = 0
    for row, (length, ending) in enumerate(zip(lengths, status, strict=True)):
        end = start + length
        ends_with_stop = length > 0 and is_stop[end - 1]
        fault = None
        if ending == SegmentStatus.ABORTED:
            fault = "was aborted"
        elif length == 0 or length > params.max_new_tokens:
            fault = f"has {length} tokens, expected 1 to max_new_tokens = {params.max_new_tokens}"
        elif any(is_stop[start : end - 1]):
            fault = f"goes on behind a stop token: {segment.tokens[start:end].tolist()}"
        elif (ending == SegmentStatus.COMPLETED) != (
            ends_with_stop if sample_length is None else length == sample_length
        ):
            last = int(segment.tokens[end - 1])
            fault = f"is {SegmentStatus(ending).name} but its last token is {last} (stops: {stops.tolist()})"
        elif ending == SegmentStatus.TRUNCATED and length < params.max_new_tokens:
            fault = f"is TRUNCATED after {length} of max_new_tokens = {params.max_new_tokens}"
        if fault is not None:
            raise ContractError(f"sample {row} {fault}")
        start = end
    if segment.log_probs is None:
        if not params.is_greedy:
            raise ContractError("the engine returned no log-probs; ask it for the log-prob of every sampled token")
        return
    right = torch.isfinite(segment.log_probs) & (segment.log_probs <= LARGEST_LOGP)
    if not bool(right.all()):  # in this form, since what a rehearsal does not know reads True
        wrong = ~right
        found = segment.log_probs[wrong][:4].tolist()
        raise ContractError(f"{int(wrong.sum())} log-probs are not finite numbers of at most 0, first {found}")
