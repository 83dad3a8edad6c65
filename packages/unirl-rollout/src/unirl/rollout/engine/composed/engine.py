"""Rollouts of two policies: a writer makes texts of the prompts, a painter images of the texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from unirl.rollout.engine.composed.reading import PromptReader
from unirl.rollout.engine.composed.stages import TwoStageEngine, decoded_texts, texts_of
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.copies import copies_of
from unirl.types.errors import ConfigError
from unirl.types.media import Primitive, Texts
from unirl.types.rollout import RolloutReq, RolloutTrack

PLACE = "{prompt}"
"""Where an instruction holds the user's prompt."""


@bounded("engine")
class ComposedEngine(TwoStageEngine):
    """Joins the engines of two policies, see `TwoStageEngine`.

    What the painter drew is its track's "text"; a scorer sees the user's prompt. Each engine samples from its own
    policy, by copies named as in `unirl.types.copies`. A request for images alone draws the prompts themselves, so
    images without the writer can be had too.

    engines: by policy. writer, painter: names of the policies that make texts and images.
    instruction: what the writer reads, with {prompt} where the user's prompt stands; None: the prompt alone.
    marker, max_chars: how a prompt is read off a completion, see `PromptReader`. Where there is none in it, the user's
        own prompt is drawn.
    Counted of every text: `fallback` and `shortened`, 1 where the user's prompt was drawn and where the prompt was cut
    to max_chars.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.engine.composed.rules"

    def __init__(
        self,
        pipelines: Mapping[str, Mapping[str, Any]],  # Any: pipelines of the recipe
        engines: Mapping[str, Any],  # Any: engines of the recipe, checked below
        *,
        writer: str = "writer",
        painter: str = "painter",
        instruction: str | None = None,
        marker: str | None = None,
        max_chars: PositiveInt | None = None,
    ) -> None:
        for role, name in (("writer", writer), ("painter", painter)):
            if name not in engines:
                raise ConfigError(f"engine.{role} = {name!r} is no policy of this recipe; there are {list(engines)}.")
        if instruction is not None and PLACE not in instruction:
            raise ConfigError(f"engine.instruction = {instruction!r} holds no {PLACE}, the place of the user's prompt.")
        super().__init__(engines[writer], engines[painter], next(iter(pipelines[painter].values())))
        self._names = writer, painter
        self._instruction = instruction
        self._reader = PromptReader(marker, max_chars)

    def _copies(self, policy: str | None) -> tuple[str | None, str | None]:
        copies, (writer, painter) = copies_of(policy), self._names
        return copies.get(writer), copies.get(painter)

    def _writer_reads(self, req: RolloutReq) -> dict[str, Primitive]:
        """With the prompts in the place of the instruction."""
        if self._instruction is None:
            return dict(req.primitives)
        # Not str.format: an instruction may hold braces of its own.
        texts = [self._instruction.replace(PLACE, text) for text in texts_of(req.primitives)]
        return {**req.primitives, "text": Texts(texts=texts)}

    def _painter_reads(self, written: RolloutTrack, req: RolloutReq) -> tuple[RolloutTrack, dict[str, Primitive]]:
        """The prompts that stand in the texts."""
        found = [self._reader.read(completion) for completion in decoded_texts(written)]
        short = [self._reader.shortened(prompt) for prompt in found]
        counts = {
            "fallback": torch.tensor([float(not prompt) for prompt in found]),
            "shortened": torch.tensor([float(a != b) for a, b in zip(found, short, strict=True)]),
        }
        prompts = [prompt or asked for prompt, asked in zip(short, texts_of(req.primitives), strict=True)]
        return written.replace(counts=counts), {"text": Texts(texts=prompts)}
