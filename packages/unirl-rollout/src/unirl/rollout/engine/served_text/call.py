"""Converts requests to the plain values that text engines in other processes take, and answers to tracks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch

from unirl.rollout.checks import step_noise_keys
from unirl.rollout.engine.begun_texts import BegunTexts
from unirl.rollout.engine.served_images import one_placeholder_each, shown_pictures
from unirl.rollout.engine.served_sounds import heard_sounds
from unirl.rollout.engine.versions import mark_versions
from unirl.rollout.text_checks import text_params, verify_finished
from unirl.sde.noise import noise_seed
from unirl.types.conditions import Condition, PromptCondition
from unirl.types.episodes import EPISODE
from unirl.types.errors import ConfigError, ContractError, RefusedError
from unirl.types.media import Texts
from unirl.types.rollout import RolloutReq, RolloutTrack
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment

_STATUS = {
    "stop": SegmentStatus.COMPLETED,
    "length": SegmentStatus.TRUNCATED,
    "abort": SegmentStatus.ABORTED,
    "refused": SegmentStatus.FAILED,
}

AGREEMENT = {"torch.float32": 1e-4, "torch.bfloat16": 0.25, "torch.float16": 0.03}
"""Largest difference between log-probs of two instances, in nats, that counts as rounding: the last places of each
precision for logits of about 20. Weights that differ by less are detected by versions and checksums."""
PROOF_NUMBER = 2**62
"""Number of the calls that compare instances: above all others, so that no abort ends one."""
_PROOF_PROMPTS, _PROOF_TOKENS = 8, 8
_CALLS_PER_INSTANCE = 16
"""Calls per instance that a request is split into: enough that little is lost if an instance dies, and that its
scheduler stays busy while answers travel."""


@dataclass(frozen=True)
class Generate:
    """Sample one completion for each prompt."""

    number: int
    """Number of this call, used by `Abort`."""
    prompts: list[list[int]]
    seeds: list[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_token_ids: list[int]
    pictures: list[str] = field(default_factory=list)
    """Images as PNG data URIs, without duplicates."""
    shown: list[list[int]] = field(default_factory=list)
    """Indices of the images of each prompt, in order; empty if no prompt has images."""
    placeholder: int | None = None
    """Token id that stands for a patch of an image."""
    sounds: list[str] = field(default_factory=list)
    """Waveforms as `served_sounds` writes them, without duplicates."""
    heard: list[list[int]] = field(default_factory=list)
    """Indices of the sounds of each prompt, in order; empty if no prompt has sounds."""
    sound_rate: int = 0
    """Samples per second of the sounds."""
    sound_placeholder: int | None = None
    """Token id that stands for a position of a sound."""
    num_begun: list[int] = field(default_factory=list)
    """Tokens of each completion that its prompt ends with; empty if none has any."""
    names: list[str] = field(default_factory=list)
    """What each completion is called in all calls that make a part of it, for engines that keep keys and values; empty:
    nothing is kept."""

    def budget(self, row: int) -> int:
        """Tokens that a completion may still get."""
        return self.max_new_tokens - (self.num_begun[row] if self.num_begun else 0)

    def short_prompts(self) -> list[list[int]]:
        """The prompts with a single placeholder for each image and sound, which engines repeat as often as the media
        take tokens."""
        own = ((self.placeholder, self.pictures), (self.sound_placeholder, self.sounds))
        placeholders = [token for token, media in own if token is not None and media]
        if not placeholders:
            return self.prompts
        ends = [len(prompt) - self.max_new_tokens + self.budget(row) for row, prompt in enumerate(self.prompts)]
        return [
            one_placeholder_each(prompt[:end], placeholders) + prompt[end:]
            for prompt, end in zip(self.prompts, ends, strict=True)
        ]


@dataclass(frozen=True)
class Generations:
    """The completions, in the order of the prompts."""

    policy_version: int
    tokens: list[list[int]]
    log_probs: list[list[float]]
    """Nats, under the distribution that was sampled from."""
    finish_reasons: list[str]
    """"stop", "length" or "abort", as in vLLM and SGLang, or "refused"."""
    refusals: list[str] = field(default_factory=list)
    """What the engine says of each prompt that it refused, "" of the others; empty if it refused none."""
    versions: list[list[int]] = field(default_factory=list)
    """The policy of each token; empty if all are of `policy_version`."""
    in_place: list[int] = field(default_factory=list)
    """Prompts whose completions went on with kept keys and values."""


def prompt_tokens(conditions: Mapping[str, Condition]) -> list[list[int]]:
    """Token ids of each prompt, image patches included. Raises ContractError if the conditions have no prompt."""
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
    sound_placeholder: int | None = None,
    begun: BegunTexts | None = None,
    keeps_cache: bool = False,
) -> Generate:
    """The call for a request whose prompts are `conditions`.

    placeholder, sound_placeholder: token ids that stand for an image patch and for a position of a sound; None if the
    model reads no such media. begun: of the request;
    None: there is nothing that wrote a placeholder. keeps_cache: the engine keeps keys and values of what ends early.
    A sample's seed depends only on its id, the rollout and params.seed, so it draws the same tokens in any batch. Where
    it was begun, it also depends on the tokens that it has, so that no draw comes twice.
    Raises ConfigError if the request has images or sounds and the model does not read them.
    """
    params = text_params(req)
    begun = BegunTexts.of(req, ()) if begun is None else begun
    pictures, shown = shown_pictures(req.primitives.get("image"))
    if pictures and placeholder is None:
        raise ConfigError(
            "the request has images, but the engine's model names no image_token_id in its config.json: it reads text "
            "alone. Choose a vision-language model, or prompts without images."
        )
    sounds, heard, rate = heard_sounds(req.primitives.get("audio"))
    if sounds and sound_placeholder is None:
        raise ConfigError(
            "the request has sounds, but the engine's model names no audio_token_id in its config.json: it hears none. "
            "Choose a model that does (Qwen3-Omni), or prompts without sounds."
        )
    all_names = step_noise_keys(req)
    names = [all_names[row] for row in begun.rows]
    return Generate(
        number=number,
        prompts=prompt_tokens(begun.prompts(conditions)),
        seeds=[
            noise_seed(params.seed, name + (f"@{num}" if num else ""))
            for name, num in zip(names, begun.lengths, strict=True)
        ],
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_new_tokens=params.max_new_tokens,
        stop_token_ids=list(stop_token_ids),
        pictures=pictures,
        shown=[shown[row] for row in begun.rows] if pictures else [],
        placeholder=placeholder,
        sounds=sounds,
        heard=[heard[row] for row in begun.rows] if sounds else [],
        sound_rate=rate,
        sound_placeholder=sound_placeholder,
        num_begun=begun.lengths if any(begun.lengths) else [],
        names=names if keeps_cache else [],
    )


@dataclass(frozen=True)
class Limits:
    """Input limits of an engine's model."""

    context_length: int
    """Most tokens of a prompt and its completion."""
    vocab_size: int
    image_token: int | None = None
    """Token id that stands for an image patch; None if the model sees none."""
    audio_token: int | None = None
    """Token id that stands for a position of a sound; None if the model hears none."""


def check_fits(prompts: list[list[int]], max_new_tokens: int, limits: Limits, num_begun: Sequence[int] = ()) -> None:
    """Raise ConfigError if a prompt does not fit the engine's context, or has a token outside the vocabulary."""
    for row, prompt in enumerate(prompts):
        length = len(prompt) - (num_begun[row] if num_begun else 0)
        if length + max_new_tokens > limits.context_length:
            raise ConfigError(
                f"prompt {row} has {length} tokens and may grow by max_new_tokens = {max_new_tokens}: "
                f"{length + max_new_tokens} in all, of the engine's context of {limits.context_length}. "
                "Raise engine.context_length, lower sampling.max_new_tokens or shorten the prompt."
            )
        if max(prompt) >= limits.vocab_size:
            raise ConfigError(
                f"prompt {row} has token {max(prompt)}, but the engine's model has {limits.vocab_size} tokens. "
                "Give the trainer's tokenizer and the engine the same model."
            )


def parts(group_ids: Sequence[str], num_instances: int) -> list[range]:
    """Rows of each call that a request is split into for `num_instances`; a single instance gets one call.

    A call has whole groups, whose samples share the keys and values of one prompt. A group larger than a call is split,
    so that every instance has work.
    """
    num = len(group_ids)
    if num_instances == 1:
        return [range(num)]
    size = math.ceil(num / (num_instances * _CALLS_PER_INSTANCE))
    ends = [row for row in range(1, num) if group_ids[row] != group_ids[row - 1]] + [num]
    cut, first = [], 0
    for end, following in zip(ends, [*ends[1:], None], strict=True):
        if following is None or following - first > size:
            num_calls = math.ceil((end - first) / size)
            bounds = [first + (end - first) * k // num_calls for k in range(num_calls + 1)]
            cut += [range(low, high) for low, high in pairwise(bounds)]
            first = end
    return cut


def part_of(call: Generate, rows: range, number: int) -> Generate:
    """Some rows of a call as a new call with this number."""
    pictures, shown = _used(call.pictures, call.shown[rows.start : rows.stop])
    sounds, heard = _used(call.sounds, call.heard[rows.start : rows.stop])
    return replace(
        call,
        number=number,
        prompts=call.prompts[rows.start : rows.stop],
        seeds=call.seeds[rows.start : rows.stop],
        pictures=pictures,
        shown=shown,
        sounds=sounds,
        heard=heard,
        num_begun=call.num_begun[rows.start : rows.stop],
        names=call.names[rows.start : rows.stop],
    )


def _used(media: Sequence[str], by_prompt: Sequence[Sequence[int]]) -> tuple[list[str], list[list[int]]]:
    """The media that some prompts have, and their indices among these; both empty if there are none."""
    places = sorted({place for each in by_prompt for place in each})
    if not places:
        return [], []
    return [media[place] for place in places], [[places.index(place) for place in each] for each in by_prompt]


def joined(answers: Sequence[Generations]) -> Generations:
    """The answers to the parts of a call, joined in order. They must have the same policy version."""
    firsts = list(accumulate((len(answer.tokens) for answer in answers[:-1]), initial=0))
    return Generations(
        answers[0].policy_version,
        [row for answer in answers for row in answer.tokens],
        [row for answer in answers for row in answer.log_probs],
        [reason for answer in answers for reason in answer.finish_reasons],
        [said for answer in answers for said in _refusals(answer)] if any(each.refusals for each in answers) else [],
        [row for answer in answers for row in _versions(answer)] if any(each.versions for each in answers) else [],
        [first + row for first, answer in zip(firsts, answers, strict=True) for row in answer.in_place],
    )


def _versions(answer: Generations) -> list[list[int]]:
    return answer.versions or [[answer.policy_version] * len(tokens) for tokens in answer.tokens]


def _refusals(answer: Generations) -> list[str]:
    return answer.refusals or [""] * len(answer.tokens)


def refuse_all(answer: Generations, engine: str) -> None:
    """Raise RefusedError if the engine refused every prompt."""
    if answer.tokens and all(_refusals(answer)):
        raise RefusedError(f"{engine} refused all of {len(answer.tokens)} prompts, the first: {answer.refusals[0]}")


def proof_of(call: Generate) -> Generate:
    """A short greedy call with the prompts of another call, which instances with the same weights answer alike."""
    first = part_of(call, range(min(len(call.prompts), _PROOF_PROMPTS)), PROOF_NUMBER)
    tokens = min(call.max_new_tokens, _PROOF_TOKENS)
    return replace(first, temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=tokens, num_begun=[], names=[])


def largest_gap(found: Generations, expected: Generations) -> float:
    """Largest difference between log-probs of two answers to `proof_of`, in nats.

    Infinity if they have different numbers of prompts, NaN if a log-prob is NaN.

    If two tokens are about equally probable, rounding decides which one is chosen, and all later tokens differ. So a
    row is compared up to and including the first token that differs.
    """
    if len(found.tokens) != len(expected.tokens):
        return math.inf
    gaps = [0.0]
    for row, tokens in enumerate(found.tokens):
        others = expected.tokens[row]
        same = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), len(tokens))
        pairs = zip(found.log_probs[row][: same + 1], expected.log_probs[row][: same + 1], strict=False)
        gaps += [abs(a - b) for a, b in pairs]
    return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps)


def text_segment(
    answer: Generations, call: Generate, params: ARSamplingParams, begun: BegunTexts | None = None
) -> TextSegment:
    """The segment of an answer, with what was begun. Raises ContractError unless every prompt has one completion, its
    end matches its finish reason, and each token has a finite log-prob. Aborted samples may end anywhere, those of
    refused prompts are empty."""
    num = len(call.prompts)
    if not len(answer.tokens) == len(answer.log_probs) == len(answer.finish_reasons) == num:
        raise ContractError(
            f"the engine answered {num} prompts with {len(answer.tokens)} completions, {len(answer.log_probs)} rows of "
            f"log-probs and {len(answer.finish_reasons)} finish reasons"
        )
    unknown = sorted(set(answer.finish_reasons) - set(_STATUS))
    if unknown:
        raise ContractError(f"the engine ended samples with {unknown}; known are {sorted(_STATUS)}")
    status = [_ending(answer, call, row) for row in range(num)]
    log_probs = [torch.tensor(values, dtype=torch.float32) for values in answer.log_probs]
    segment = TextSegment.pack(
        tokens=[torch.tensor(tokens, dtype=torch.long) for tokens in answer.tokens],
        log_probs=None if params.is_greedy else log_probs,
        versions=[torch.tensor(own, dtype=torch.long) for own in answer.versions] if answer.versions else None,
        status=torch.tensor(status, dtype=torch.long),
        params=params,
    )
    if begun is not None:
        segment = begun.whole(segment, answer.policy_version)
    verify_finished(segment, params, call.stop_token_ids)
    return segment


def _ending(answer: Generations, call: Generate, row: int) -> SegmentStatus:
    """How a sample ended. An abort in the step of its last token hides that it is whole."""
    tokens, ending = answer.tokens[row], _STATUS[answer.finish_reasons[row]]
    if ending != SegmentStatus.ABORTED or not tokens:
        return ending
    if tokens[-1] in call.stop_token_ids:
        return SegmentStatus.COMPLETED
    return SegmentStatus.TRUNCATED if len(tokens) == call.budget(row) else ending


def text_track(
    req: RolloutReq,
    conditions: Mapping[str, Condition],
    segment: TextSegment,
    decoded: Texts,
    policy_version: int,
    refusals: Mapping[int, str],
) -> RolloutTrack:
    """The root track of a request, with the policy versions of every sample. refusals: row -> why the engine refused
    it, which makes an episode that failed."""
    track = req.make_root_track(conditions=conditions, segment=segment, decoded=decoded)
    if refusals:
        ends = {row: {EPISODE: {"reward": 0.0, "end": "failed", "reason": said}} for row, said in refusals.items()}
        track.metadata = [{**row, **ends.get(number, {})} for number, row in enumerate(req.rows)]
    return mark_versions(track, policy_version)
