"""Make the base of the questions: `python -m unirl.worlds.shapes.questions.pretrain --out DIR [--seed 0]`.

Three stages, each with a fixed number of steps: the vision tower learns to name what is in each quadrant; then, behind
the frozen tower, the language model learns right answers, and last a pupil's, of which few are right where the pupil's
habits go wrong. docs/worlds/questions.md has time and figures.

Shape letters: I images, Q quadrants of all images, D width of the language model.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from unirl.models.qwen_vl.bundle import QwenVLBundle
from unirl.models.qwen_vl.pipeline import QwenVLPipeline
from unirl.pretraining.command_line import make_checkpoint
from unirl.pretraining.fit import fit
from unirl.pretraining.saving import load_in_fp32
from unirl.pretraining.text import byte_tokenizer
from unirl.pretraining.vision_language import make_image_processor, make_qwen_vl
from unirl.reward.worlds.shapes_grammar import COLORS, SHAPES, ShapeObject
from unirl.types.conditions import Condition, ImagePatchCondition
from unirl.types.media import ImageLists, Texts
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment
from unirl.worlds.shapes.questions.evaluate import HELDOUT, evaluate
from unirl.worlds.shapes.questions.world import Question, draw_pictures, draw_questions
from unirl.worlds.shapes.world import IMAGE_SIDE

logger = logging.getLogger(__name__)

PUPIL: Mapping[str, float] = {"right": 0.15, "habit": 0.60, "slip": 0.25}
"""Shares of a pupil's answers: right, by habit, and wrong in any other way."""
LESSON_SHARES: Mapping[str, float] = {"color": 0.25, "shape": 0.25, "place": 0.20, "count": 0.15, "compare": 0.15}
"""Shares of the lessons: more of what is hard to learn than among the prompts."""
NUM_LESSONS = 12000
PARAMS = ARSamplingParams(temperature=1.0, max_new_tokens=16)


@dataclass(frozen=True)
class Budget:
    """Optimiser steps of each stage."""

    seeing: int = 500
    right: int = 500
    pupil: int = 300


@dataclass(frozen=True)
class Lessons:
    """Questions as the model takes them, with every answer that may be shown."""

    conditions: dict[str, Condition]
    answers: list[list[Tensor]]
    """Tokens of the right answer, of the habit's, then of each slip."""
    contents: list[list[tuple[int, int]]]
    """Colour and shape of each quadrant of all images of a question, by their number; the number after the last is
    an empty quadrant."""


def main() -> None:
    """Read the command line and make the checkpoint."""
    make_checkpoint(pretrain, Budget, __doc__, has_snapshots=False)


def pretrain(out: Path, *, seed: int, budget: Budget, num_lessons: int = NUM_LESSONS, prompts: Path = HELDOUT) -> None:
    """Run all stages, judge the last two by `prompts`, and write the checkpoint to `out`. Seeds torch's generator."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(Path(folder))
        bundle = QwenVLBundle(folder, freeze_vision=False)
        pipeline = QwenVLPipeline(bundle)
        lessons = make_lessons(pipeline, draw_questions(num_lessons, rng, heldout=False, shares=LESSON_SHARES), rng)
        logger.info("%d lessons", len(lessons.answers))
        see(bundle, lessons, rng, num_steps=budget.seeing)
        bundle.model.model.visual.requires_grad_(False)
        learn(pipeline, lessons, {"right": 1.0}, rng, num_steps=budget.right, muon_rate=0.02, adam_rate=3e-3)
        save(bundle, out)
        logger.info("after the right answers: %s", evaluate(out, prompts))
        learn(pipeline, lessons, PUPIL, rng, num_steps=budget.pupil, muon_rate=0.005, adam_rate=1e-3)
        save(bundle, out)
    logger.info("after the pupil's answers: %s", evaluate(out, prompts))


def save_random_model(folder: Path) -> None:
    """A Qwen2.5-VL of two blocks of vision of width 64 and two decoder layers of width 128, as a checkpoint."""
    tokenizer = byte_tokenizer(["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
    make_image_processor(IMAGE_SIDE).save_pretrained(folder)
    make_qwen_vl(tokenizer.convert_tokens_to_ids, vocab_size=264, width=128, num_heads=4).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_lessons(pipeline: QwenVLPipeline, questions: list[Question], rng: np.random.Generator) -> Lessons:
    """Every question with its own drawing and its answers."""
    tokenizer = pipeline.bundle.tokenizer

    def tokens(answer: str) -> Tensor:
        return torch.tensor([*tokenizer(answer)["input_ids"], tokenizer.eos_token_id])

    pictures = [[torch.from_numpy(p).float() / 255 for p in draw_pictures(question, rng)] for question in questions]
    texts = Texts(texts=[question.prompt for question in questions])
    conditions = pipeline.encode({"text": texts, "image": ImageLists(images=pictures)}, PARAMS)
    answers = [[tokens(answer) for answer in (q.answer, q.habit, *q.slips)] for q in questions]
    contents = [[_numbers(item) for scene in question.scenes for item in scene] for question in questions]
    return Lessons(conditions, answers, contents)


def _numbers(item: ShapeObject | None) -> tuple[int, int]:
    return (len(COLORS), len(SHAPES)) if item is None else (COLORS.index(item.color), SHAPES.index(item.shape))


def see(
    bundle: QwenVLBundle, lessons: Lessons, rng: np.random.Generator, *, num_steps: int, batch_size: int = 128
) -> list[float]:
    """Teach the vision tower to tell colour and shape in every quadrant, read off its tokens by a linear layer that is
    thrown away; the loss of each step."""
    tower, images = bundle.model.model.visual, lessons.conditions["images"]
    reader = nn.Linear(bundle.model.config.text_config.hidden_size, len(COLORS) + 1 + len(SHAPES) + 1)

    def batch_loss() -> Tensor:
        rows = rng.integers(len(lessons.contents), size=batch_size).tolist()
        chosen = images.select(rows)
        assert isinstance(chosen, ImagePatchCondition)  # noqa: S101 - what the pipeline encodes
        grids_I3 = torch.tensor([grid for sample in chosen.grids for grid in sample])
        tokens_QD = tower(chosen.patches, grid_thw=grids_I3).pooler_output
        color_Q, shape_Q = torch.tensor([pair for row in rows for pair in lessons.contents[row]]).unbind(-1)
        read_color, read_shape = reader(tokens_QD).split([len(COLORS) + 1, len(SHAPES) + 1], dim=-1)
        cross_entropy = nn.functional.cross_entropy
        return cross_entropy(read_color, color_Q) + cross_entropy(read_shape, shape_Q)

    return fit(
        nn.ModuleList([tower, reader]),
        batch_loss,
        num_steps=num_steps,
        muon_rate=0.02,
        adam_rate=3e-3,
        is_hidden=lambda name: ".blocks." in name or ".merger.mlp." in name,
    )


def learn(
    pipeline: QwenVLPipeline,
    lessons: Lessons,
    shares: Mapping[str, float],
    rng: np.random.Generator,
    *,
    num_steps: int,
    muon_rate: float,
    adam_rate: float,
    batch_size: int = 128,
) -> None:
    """Cross entropy of answers drawn by their shares."""
    kinds = [shares.get(kind, 0.0) for kind in PUPIL]

    def answer(row: int) -> Tensor:
        answers = lessons.answers[row]
        kind = int(rng.choice(len(kinds), p=kinds))
        return answers[kind if kind < 2 else int(rng.integers(2, len(answers)))]

    def batch_loss() -> Tensor:
        rows = rng.integers(len(lessons.answers), size=batch_size).tolist()
        segment = TextSegment.pack(tokens=[answer(row) for row in rows])
        conditions = {name: condition.select(rows) for name, condition in lessons.conditions.items()}
        return -pipeline.replay(conditions, segment, PARAMS).logp_N.mean()

    fit(
        pipeline.bundle.model,
        batch_loss,
        num_steps=num_steps,
        muon_rate=muon_rate,
        adam_rate=adam_rate,
        is_hidden=lambda name: ".layers." in name,
    )


def save(bundle: QwenVLBundle, out: Path) -> None:
    """Write the checkpoint with its weights in fp16."""
    bundle.export_merged(str(out), {"model": {name: t.half() for name, t in bundle.model.state_dict().items()}})
    load_in_fp32(out / "config.json")


if __name__ == "__main__":
    main()
