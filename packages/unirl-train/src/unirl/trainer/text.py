"""Texts of language and vision-language models: requests for completions, tables to look at."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import ClassVar

import torch

from unirl.data.data_source import MultimodalRLDataSource, PromptRow
from unirl.distributed.held import Held
from unirl.distributed.runtime import Runtime
from unirl.tracking.base import TableRow
from unirl.tracking.media import answered
from unirl.trainer.held_out import BaseEvaluator, EvaluationResult
from unirl.trainer.modality import Gallery, Modality
from unirl.trainer.request import build_text_request
from unirl.trainer.roles import EngineRole
from unirl.trainer.samples import sample_values, take_pictures
from unirl.trainer.text_evaluation import take_completions
from unirl.types.conditions import PromptCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

NUM_COMPLETIONS = 16


class TextModality(Modality[ARSamplingParams]):
    """Texts.

    balance_tokens: deal the samples of a rollout to the devices by their tokens, so that none waits for the one with
        the longest texts; samples that move go from device to device. With one device it does nothing.
    """

    trains_tokens: ClassVar[bool] = True

    def __init__(self, *, balance_tokens: bool = True) -> None:
        self._balances_tokens = balance_tokens

    def prepare(
        self,
        runtime: Runtime,
        data: MultimodalRLDataSource,
        sampling: ARSamplingParams,
        evaluator: BaseEvaluator | None,
    ) -> None:
        """Let the engine look at every prompt of texts alone, so that none that is too long stops the run later.

        Raises ConfigError naming the file.
        """
        refuse_long_prompts(runtime, data, sampling)

    def request(
        self, runtime: Runtime, rows: Sequence[PromptRow], sampling: ARSamplingParams, rollout_id: int
    ) -> RolloutReq:
        """A request for completions."""
        return build_text_request(rows, sampling, rollout_id=rollout_id)

    def training_costs(self, resp: Held, track: str) -> list[int] | None:
        """Tokens of each prompt and its completion."""
        if not self._balances_tokens:
            return None
        return [count for part in resp.map(count_tokens, track) for count in part]

    def show_rollout(self, resp: Held, track: str, step: int, gallery: Gallery) -> None:
        """The first samples with their scores and advantages, to the run directory and the trackers."""
        taken = [row for part in resp.map(take_completions, track, NUM_COMPLETIONS) for row in part]
        meta = resp.meta.track(track)
        rows = [
            {**row, **sample_values(meta, i), "advantage": float(meta.known_advantages[i])}
            for i, row in enumerate(taken[:NUM_COMPLETIONS])
        ]
        pictures = [each for part in resp.map(take_pictures, track, NUM_COMPLETIONS) for each in part]
        _show("rollout", rows, pictures[: len(rows)], step, gallery)

    def show_evaluation(self, result: EvaluationResult, step: int, gallery: Gallery) -> None:
        """Some greedy completions with their scores, to the run directory and the trackers."""
        _show("eval", result.completions, result.pictures, step, gallery)


def refuse_long_prompts(runtime: Runtime, data: MultimodalRLDataSource, sampling: ARSamplingParams) -> None:
    """Let the engine look at every prompt of texts alone. Raises ConfigError naming the file."""
    rows = [row for row in data.rows if not row.media]
    if not rows:
        return
    once = dataclasses.replace(sampling, samples_per_prompt=1)
    try:
        runtime.role("engine", EngineRole).check_prompts(build_text_request(rows, once, rollout_id=0))
    except ConfigError as error:
        raise ConfigError(f"{data.path}: {error}") from error


def _show(
    name: str,
    rows: Sequence[TableRow],
    pictures: Sequence[Sequence[torch.Tensor]],
    step: int,
    gallery: Gallery,
) -> None:
    if not rows:
        return
    folder = gallery.folder
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (folder / f"{name}-{step:06d}.jsonl").write_text("".join(lines), encoding="utf-8")
    for tracker in gallery.trackers:
        tracker.table(name, rows, step)
    if not any(pictures):
        return
    prompts, verdicts = [str(row["prompt"]) for row in rows], [verdict(row) for row in rows]
    picture = answered(pictures, prompts, verdicts)
    picture.save(folder / f"{name}-{step:06d}.png")
    for tracker in gallery.trackers:
        tracker.image(name, picture, step, [f"{p}: {v[0]}" for p, v in zip(prompts, verdicts, strict=True)])


def verdict(row: TableRow) -> tuple[str, bool | None]:
    """What to say of a completion below its pictures, and whether it is right: where there is a right answer, a reward
    of at least 1 says so."""
    said = str(row["completion"])
    if "answer" not in row:
        return f"{said} (reward {row['reward']:.3g})", None
    if float(row["reward"]) >= 1:
        return f"{said}: right", True
    return f"{said}: wrong, {row['answer']}", False


def count_tokens(resp: RolloutResp, track: str) -> list[int]:
    """Tokens of each sample, prompt and completion (runs where the response lies)."""
    own = resp.tracks[track]
    prompt, segment = own.conditions.get("prompt"), own.segment
    if not (isinstance(prompt, PromptCondition) and isinstance(segment, TextSegment)):
        raise ContractError(f"track {track!r} holds no prompt and text that could be trained on")
    return (prompt.lengths + segment.lengths).tolist()
