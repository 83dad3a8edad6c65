"""Make the base of the zoom world: `python -m unirl.worlds.zoom.pretrain --out DIR [--seed 0]`.

Three stages: the vision tower learns to tell letters that can be read and the cells of the others; then, behind the
frozen tower, the language model learns right traces, half of them with a crop, and last mixed ones. There large letters
are read; of the small ones most are guessed, and a few are looked at through a crop. So the base knows how to look
closer and seldom does. docs/worlds/zoom.md has time and figures.

Shape letters: I images, D width of the language model.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from unirl.models.qwen_vl.bundle import QwenVLBundle
from unirl.models.qwen_vl.pipeline import QwenVLPipeline
from unirl.pretraining.command_line import make_checkpoint
from unirl.pretraining.fit import fit
from unirl.pretraining.saving import load_in_fp32
from unirl.pretraining.text import byte_tokenizer
from unirl.pretraining.vision_language import make_image_processor, make_qwen_vl
from unirl.types.conditions import ImagePatchCondition, PromptCondition
from unirl.types.media import ImageLists, Texts, shown_image
from unirl.types.messages import Message
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment
from unirl.worlds.zoom.world import CELL, LETTERS, NUM_CELLS, PROMPT, Sight, box_of, sights

logger = logging.getLogger(__name__)

LESSON_SHARES = {"small": 0.8, "large": 0.2}
"""Share of the right traces with a crop."""
CALL_SHARES = {"small": 0.12, "large": 0.04}
"""Share of the mixed traces with a crop."""
SLIP = 0.2
"""Share of the crops of another cell, and of the answers of another letter where the right one can be read, among mixed
traces."""
NUM_LESSONS = 6000
PARAMS = ARSamplingParams(temperature=1.0, max_new_tokens=32)
MARKERS = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
WORDS = ("user\n", "assistant\n", '{"name": "crop", "arguments": {"box": [', "]}}", ", ", "32", "64", "96", "128")
"""Pieces of the format that are one token each, as they would nearly be in a tokenizer of a real model."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ 'user' if m['role'] == 'tool' else m['role'] }}\n"
    "{% if m['role'] == 'tool' %}<tool_response>\n{% endif %}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% if m['role'] == 'tool' %}{{ '\n</tool_response>' }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen3-VL's, without system turns."""


@dataclass(frozen=True)
class Budget:
    """Optimiser steps of each stage."""

    seeing: int = 400
    right: int = 600
    traces: int = 250


@dataclass(frozen=True)
class Lessons:
    """Prompts as the model takes them, and what it is shown of each if it looks closer."""

    sights: list[Sight]
    prompts: PromptCondition
    images: ImagePatchCondition
    closer: list[list[tuple[int, list[int], ImagePatchCondition]]]
    """For each prompt, right cell first: the cell, what follows the call, and its image."""


def main() -> None:
    """Read the command line and make the checkpoint."""
    make_checkpoint(pretrain, Budget, __doc__, has_snapshots=False)


def pretrain(out: Path, *, seed: int, budget: Budget, num_lessons: int = NUM_LESSONS) -> None:
    """Run all stages and write the checkpoint to `out`. Seeds torch's generator."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(Path(folder))
        bundle = QwenVLBundle(folder, freeze_vision=False)
        pipeline = QwenVLPipeline(bundle)
        found = sights(num_lessons, rng, held_out=False, shares={"small": 0.6, "large": 0.4})
        lessons = make_lessons(pipeline, found, rng)
        logger.info("%d lessons", len(found))
        see(bundle, lessons, rng, num_steps=budget.seeing)
        bundle.model.model.visual.requires_grad_(False)
        speak(pipeline, lessons, LESSON_SHARES, 0.0, rng, num_steps=budget.right, muon_rate=0.02, adam_rate=3e-3)
        speak(pipeline, lessons, CALL_SHARES, SLIP, rng, num_steps=budget.traces, muon_rate=0.005, adam_rate=1e-3)
        bundle.export_merged(str(out), {"model": {name: t.half() for name, t in bundle.model.state_dict().items()}})
        load_in_fp32(out / "config.json")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, the markers, the tags, and the words of the format."""
    tokenizer = byte_tokenizer((*MARKERS, *TAGS))
    tokenizer.add_tokens([AddedToken(word, special=False) for word in WORDS])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_random_model(folder: Path) -> None:
    """A Qwen2.5-VL of two blocks of vision of width 64 and two decoder layers of width 128, as a checkpoint."""
    tokenizer = make_tokenizer()
    make_image_processor(CELL).save_pretrained(folder)
    make_qwen_vl(tokenizer.convert_tokens_to_ids, vocab_size=280, width=128, num_heads=4).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def call_text(box: Sequence[int]) -> str:
    """What a model writes to look at a box."""
    return f"<tool_call>\n{json.dumps({'name': 'crop', 'arguments': {'box': list(box)}})}\n</tool_call>"


def make_lessons(pipeline: QwenVLPipeline, found: Sequence[Sight], rng: np.random.Generator) -> Lessons:
    """Every sight, with its own cell and another."""
    images = [torch.from_numpy(sight.image()).float() / 255 for sight in found]
    primitives = {"text": Texts(texts=[PROMPT] * len(found)), "image": ImageLists(images=[[each] for each in images])}
    conditions = pipeline.encode(primitives, PARAMS)
    prompts, shown = conditions["prompt"], conditions["images"]
    assert isinstance(prompts, PromptCondition) and isinstance(shown, ImagePatchCondition)  # noqa: S101 - its parts
    closer = []
    for sight, image in zip(found, images, strict=True):
        other = (sight.cell + int(rng.integers(1, NUM_CELLS))) % NUM_CELLS
        parts = []
        for cell in (sight.cell, other):
            left, top, right, bottom = box_of(cell)
            crop = shown_image(image[:, top:bottom, left:right])
            bridge = pipeline.bridge([Message("tool", "", (crop,))])
            assert bridge.images is not None  # noqa: S101 - a crop is one
            parts.append((cell, bridge.tokens, bridge.images))
        closer.append(parts)
    return Lessons(list(found), prompts, shown, closer)


def see(
    bundle: QwenVLBundle, lessons: Lessons, rng: np.random.Generator, *, num_steps: int, batch_size: int = 128
) -> list[float]:
    """Teach the vision tower to tell letters, or cells where a letter is too small, read off its tokens by a layer that
    is thrown away; the loss of each step."""
    tower, letters = bundle.model.model.visual, list(LETTERS)
    num_tokens = 4
    reader = nn.Linear(num_tokens * bundle.model.config.text_config.hidden_size, NUM_CELLS + len(letters))

    def batch_loss() -> Tensor:
        rows = rng.integers(len(lessons.sights), size=batch_size).tolist()
        is_whole = rng.random(batch_size) < 0.5  # noqa: PLR2004 - half of each
        parts, targets = [], []
        for row, whole in zip(rows, is_whole, strict=True):
            sight = lessons.sights[row]
            if whole or sight.category == "large":
                parts.append((0, lessons.images.select([row])))
            else:
                parts.append((0, lessons.closer[row][0][2]))
            is_read = sight.category == "large" or not whole
            targets.append(NUM_CELLS + letters.index(sight.letter) if is_read else sight.cell)
        shown = ImagePatchCondition.in_turns([[part] for part in parts])
        grids_I3 = torch.tensor([grid for sample in shown.grids for grid in sample])
        tokens = tower(shown.patches, grid_thw=grids_I3).pooler_output
        return nn.functional.cross_entropy(reader(tokens.reshape(batch_size, -1)), torch.tensor(targets))

    return fit(
        nn.ModuleList([tower, reader]),
        batch_loss,
        num_steps=num_steps,
        muon_rate=0.02,
        adam_rate=3e-3,
        is_hidden=lambda name: ".blocks." in name or ".merger.mlp." in name,
    )


def speak(
    pipeline: QwenVLPipeline,
    lessons: Lessons,
    call_shares: Mapping[str, float],
    slip: float,
    rng: np.random.Generator,
    *,
    num_steps: int,
    muon_rate: float,
    adam_rate: float,
    batch_size: int = 96,
) -> list[float]:
    """Cross entropy of what the model says in traces; the loss of each step."""
    tokenizer = pipeline.bundle.tokenizer

    def tokens_of(text: str) -> list[int]:
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    def answer(sight: Sight, is_read: bool) -> list[int]:
        """The letter if it can be read, most of the time; else any."""
        is_right = is_read and rng.random() >= slip
        return tokens_of(sight.letter if is_right else list(LETTERS)[int(rng.integers(len(LETTERS)))])

    def batch_loss() -> Tensor:
        rows = rng.integers(len(lessons.sights), size=batch_size).tolist()
        tokens, masks, seen = [], [], []
        for row, prompt in zip(rows, lessons.prompts.select(rows).unpack("tokens"), strict=True):
            sight = lessons.sights[row]
            parts = [(0, lessons.images.select([row]))]
            if rng.random() < call_shares[sight.category]:
                cell, behind, image = lessons.closer[row][int(rng.random() < slip)]
                call = tokens_of(call_text(box_of(cell)))
                said = answer(sight, sight.category == "large" or cell == sight.cell)
                parts.append((len(prompt) + len(call), image))
                tokens.append([*call, *behind, *said])
                masks.append([True] * len(call) + [False] * len(behind) + [True] * len(said))
            else:
                tokens.append(answer(sight, sight.category == "large"))
                masks.append([True] * len(tokens[-1]))
            seen.append(parts)
        segment = TextSegment.pack(
            tokens=[torch.tensor(row) for row in tokens], loss_mask=[torch.tensor(row) for row in masks]
        )
        conditions = {"prompt": lessons.prompts.select(rows), "images": ImagePatchCondition.in_turns(seen)}
        return -pipeline.replay(conditions, segment, PARAMS).logp_N[segment.trained].mean()

    return fit(
        pipeline.bundle.model,
        batch_loss,
        num_steps=num_steps,
        muon_rate=muon_rate,
        adam_rate=adam_rate,
        is_hidden=lambda name: ".layers." in name,
    )


if __name__ == "__main__":
    main()
