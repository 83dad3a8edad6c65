"""How right the samples of a checkpoint are: exact answers of language models, and scores of verifiers."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from unirl.data.datasets import read_rows
from unirl.models.text_pipeline import AutoregressivePipeline
from unirl.trainer.request import build_text_request
from unirl.types.sampling import ARSamplingParams

logger = logging.getLogger(__name__)

SCORED_AT_ONCE = 128

SampleT = TypeVar("SampleT")
ModelT = TypeVar("ModelT")
PromptsT = TypeVar("PromptsT", contravariant=True)
PipelineT = TypeVar("PipelineT", contravariant=True)


class Evaluation(Protocol[PipelineT, PromptsT]):
    """Samples a checkpoint and says how right it is."""

    def __call__(
        self, pipeline: PipelineT, prompts: PromptsT, /, *, num_samples: int, num_steps: int, seed: int
    ) -> Mapping[str, float]:
        """Figures by name."""
        ...


def exact_answers(
    pipeline: AutoregressivePipeline, prompts: Path, *, max_new_tokens: int, batch_size: int
) -> dict[str, float]:
    """Share of exact answers to a prompt file: "greedy", "sampled" at temperature 1, and each by category."""
    rows = read_rows(prompts)
    found: dict[str, float] = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        params = ARSamplingParams(temperature=temperature, max_new_tokens=max_new_tokens)
        answers: list[str] = []
        for start in range(0, len(rows), batch_size):
            part = rows[start : start + batch_size]
            conditions = pipeline.encode(build_text_request(part, params, rollout_id=0).primitives, params)
            with pipeline.evaluating():
                segment = pipeline.generate(conditions, params, noise_keys=[row.prompt_id for row in part])
            answers += pipeline.decode(segment).texts
        is_right = [answer == row.metadata["answer"] for answer, row in zip(answers, rows, strict=True)]
        found[name] = fmean(is_right)
        for category in sorted({row.metadata["category"] for row in rows}):
            chosen = [right for right, row in zip(is_right, rows, strict=True) if row.metadata["category"] == category]
            found[f"{name}/{category}"] = fmean(chosen)
    return found


def print_shares(judge: Callable[[Path, Path], dict[str, float]], heldout: Path, description: str | None) -> None:
    """Read a command line of a checkpoint and a prompt file and print what `judge` finds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=heldout)
    arguments = parser.parse_args()
    for name, share in judge(arguments.checkpoint, arguments.prompts).items():
        print(f"{name:28s}{share:.3f}")  # noqa: T201 - the result is the output


def accuracy(
    score: Callable[[Sequence[SampleT]], tuple[Tensor, Tensor]],
    samples: Sequence[SampleT],
    category_of: Callable[[SampleT], str],
    categories: Sequence[str],
) -> dict[str, float]:
    """Mean strict score over all samples and per category, and the mean soft score, to three places.

    score: strict and soft scores of a batch of samples that are still to be made.
    """
    strict: list[float] = []
    soft: list[float] = []
    for start in range(0, len(samples), SCORED_AT_ONCE):
        strict_B, soft_B = score(samples[start : start + SCORED_AT_ONCE])
        strict += strict_B.tolist()
        soft += soft_B.tolist()
    found = {"strict": fmean(strict), "soft": fmean(soft)}
    for category in categories:
        found[category] = fmean(s for s, each in zip(strict, samples, strict=True) if category_of(each) == category)
    return {name: round(value, 3) for name, value in found.items()}


def print_accuracy(
    load: Callable[[Path], ModelT],
    evaluate: Evaluation[ModelT, PromptsT],
    prompts: Mapping[str, PromptsT],
    description: str | None,
    *,
    num_samples: int = 512,
) -> None:
    """Read a command line of a checkpoint and log what `evaluate` finds on each of the named prompts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--samples", type=int, default=num_samples)
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    model = load(arguments.checkpoint)
    for name, chosen in prompts.items():
        found = evaluate(model, chosen, num_samples=arguments.samples, num_steps=arguments.steps, seed=arguments.seed)
        logger.info("%s %s", name, found)
