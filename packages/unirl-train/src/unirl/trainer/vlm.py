"""The trainer of language and vision-language models: requests for completions, tables to look at."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from unirl.distributed.runtime import Held, Runtime
from unirl.tracking.base import TableRow
from unirl.tracking.media import answered
from unirl.trainer.base import Trainer, TrainerSettings
from unirl.trainer.evaluation import EvaluationResult, sample_values
from unirl.trainer.request import build_text_request
from unirl.trainer.text_evaluation import take_completions, take_pictures
from unirl.types.conditions import PromptCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

NUM_COMPLETIONS = 16


class VLMTrainer(Trainer[ARSamplingParams]):
    """`Trainer` of texts.

    balance_tokens: deal the samples of a rollout to the devices by their tokens, so that none waits for the one with
        the longest texts. The rollout passes through the driver, images included. With one device it does nothing.
    Everything else comes from `unirl.trainer.wiring`.
    """

    trains_tokens: ClassVar[bool] = True
    track = "text"

    def __init__(
        self,
        runtime: Runtime,
        settings: TrainerSettings,
        *,
        balance_tokens: bool = True,
        **options: Any,  # Any: the keywords of Trainer
    ) -> None:
        super().__init__(runtime, settings, **options)
        self._balances_tokens = balance_tokens

    def prepare(self) -> None:
        """Let the engine look at every prompt of texts alone, so that none that is too long stops the run later.

        Raises ConfigError naming the file.
        """
        rows = [row for row in self._data.rows if not row.media]
        if not rows:
            return
        once = dataclasses.replace(self._sampling, samples_per_prompt=1)
        try:
            self._engine.check_prompts(build_text_request(rows, once, rollout_id=0))
        except ConfigError as error:
            raise ConfigError(f"{self._data.path}: {error}") from error

    def request(self, rollout_id: int, num_prompts: int) -> RolloutReq:
        """The next prompts of the data as a request."""
        return build_text_request(self._data.next(num_prompts), self._sampling, rollout_id=rollout_id)

    def training_costs(self, resp: Held) -> list[int] | None:
        """Tokens of each prompt and its completion."""
        if not self._balances_tokens:
            return None
        return [count for part in resp.map(count_tokens, self.track) for count in part]

    def show_rollout(self, resp: Held, track: str, step: int) -> None:
        """The first samples with their scores and advantages, to the run directory and the trackers."""
        taken = [row for part in resp.map(take_completions, track, NUM_COMPLETIONS) for row in part]
        meta = resp.meta.track(track)
        rows = [
            {**row, **sample_values(meta, i), "advantage": float(meta.known_advantages[i])}
            for i, row in enumerate(taken[:NUM_COMPLETIONS])
        ]
        pictures = [each for part in resp.map(take_pictures, track, NUM_COMPLETIONS) for each in part]
        self._show("rollout", rows, pictures[: len(rows)], step)

    def show_evaluation(self, result: EvaluationResult, step: int) -> None:
        """Some greedy completions with their scores, to the run directory and the trackers."""
        self._show("eval", result.completions, result.pictures, step)

    def _show(self, name: str, rows: Sequence[TableRow], pictures: Sequence[Sequence[torch.Tensor]], step: int) -> None:
        if not rows:
            return
        folder = self._run_dir / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (folder / f"{name}-{step:06d}.jsonl").write_text("".join(lines), encoding="utf-8")
        for tracker in self._trackers:
            tracker.table(name, rows, step)
        if not pictures:
            return
        prompts, verdicts = [str(row["prompt"]) for row in rows], [verdict(row) for row in rows]
        picture = answered(pictures, prompts, verdicts)
        picture.save(folder / f"{name}-{step:06d}.png")
        for tracker in self._trackers:
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
