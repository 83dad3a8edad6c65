"""HunyuanImage3 as a language model: it thinks and writes a caption before it draws, chooses the size of the image, and
answers questions about images.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from unirl.models.adapter import require_condition
from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle
from unirl.models.hunyuan_image3.pictures import given_pictures
from unirl.models.hunyuan_image3.sizes import Size
from unirl.models.hunyuan_image3.template import Template
from unirl.models.packed.given_images import given_images, grids_of
from unirl.models.packed.text_adapter import PackedTextAdapter
from unirl.models.text_adapter import require_one_per_text
from unirl.types.bounds import bounded
from unirl.types.conditions import Condition, ExpertCondition, ImagePatchCondition, PromptCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Primitive, Texts
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

Task = Literal["answer", "think", "recaption", "think_recaption"]


@bounded("pipeline")
class HunyuanImage3TextAdapter(PackedTextAdapter):
    """A prompt is that of `Template`, and the mark that begins what the task asks for.

    task: "answer" writes until the end; "think" a thought, "recaption" a caption, "think_recaption" both.
    system_prompt: see `Template`; the published ones lie next to the checkpoint.
    chooses_size: a caption is followed by the words up to the size of the image, which the model chooses. Words between
        them are not drawn: they are given, and nothing is learned from them.
    Raises ConfigError if answers are to choose a size.
    """

    bundle: HunyuanImage3Bundle

    def __init__(
        self,
        bundle: HunyuanImage3Bundle,
        *,
        task: Task = "answer",
        system_prompt: str | None = None,
        chooses_size: bool = False,
    ) -> None:
        super().__init__(bundle, chat_template=False)
        if chooses_size and task == "answer":
            raise ConfigError("chooses_size does nothing for an answer. Choose another task, or set it to false.")
        self._chooses_size = chooses_size
        words = bundle.words
        starts: dict[str, list[int]] = {"answer": [], "recaption": [words.recaption]}
        self._start = starts.get(task, [words.think])
        ends: dict[str, list[int]] = {"answer": [words.answer_end], "think": [words.think_end]}
        self._stops = list(words.ratios) if chooses_size else ends.get(task, [words.recaption_end])
        # After these two words, the third. A row that begins has no word before its first.
        follows = [(None, words.think_end, words.recaption)] if task != "answer" else []
        if chooses_size:
            follows += [
                (None, words.recaption_end, words.answer),
                (words.recaption_end, words.answer, words.image_begin),
                (words.answer, words.image_begin, words.size),
            ]
        self._follows = follows
        self._template = Template(
            bundle.tokenizer, words, bundle.style, drops_thoughts=False, system_prompt=system_prompt
        )

    def stop_token_ids(self, params: ARSamplingParams) -> tuple[int, ...]:
        """The end of everything, what ends the task, and those of `params`, sorted."""
        return tuple(sorted({*super().stop_token_ids(params), *self._stops}))

    def prompts_of(
        self, texts: Sequence[str], primitives: Mapping[str, Primitive]
    ) -> tuple[list[list[int]], dict[str, Condition]]:
        """With the slot "image" also "latents" and "patches"."""
        pictures = given_pictures(self.bundle, primitives)
        images = [[]] * len(texts) if pictures is None else pictures.ids
        require_one_per_text(len(images), len(texts))
        prompts = [self._template.prompt(text, shown) + self._start for text, shown in zip(texts, images, strict=True)]
        return prompts, {} if pictures is None else pictures.conditions

    def prompt_tokens(self, text: str) -> list[int]:
        """Tokens of a prompt without images."""
        return self._template.prompt(text, []) + self._start

    def decode(self, segment: TextSegment) -> Texts:
        """What was written, with the marks around thought and caption, as the slot "thought" of an image takes it; of
        an answer the text alone."""
        words, tokenizer = self.bundle.words, self.bundle.tokenizer
        rows = []
        for tokens in segment.unpack("tokens"):
            ids = [*self._start, *tokens.tolist()]
            kept = ids[: ids.index(words.answer)] if words.answer in ids and self._start else ids
            rows.append([word for word in kept if word != words.end])
        return Texts(texts=list(tokenizer.batch_decode(rows, skip_special_tokens=not self._start)))

    @property
    def _usable(self) -> list[tuple[int, Size]]:
        """Words of the sizes that the autoencoder can make, each with its size."""
        factor = self.bundle.config.vae.factor
        words = zip(self.bundle.words.ratios, self.bundle.sizes, strict=True)
        return [(word, size) for word, size in words if size[0] % factor == size[1] % factor == 0]

    @property
    def image_sizes(self) -> tuple[Size, ...]:
        """Those that a text may end with; none unless `chooses_size`."""
        return tuple(dict.fromkeys(size for _, size in self._usable)) if self._chooses_size else ()

    def chosen_sizes(self, segment: TextSegment) -> list[Size | None]:
        """Height and width of the image that each text ends with; None of one that ended before it chose."""
        chosen: dict[int, Size] = dict(self._usable) if self._chooses_size else {}
        return [chosen.get(int(tokens[-1])) if len(tokens) else None for tokens in segment.unpack("tokens")]

    def forced(self, written: Tensor, logits: Tensor) -> Tensor | None:
        """See `TextAdapter.forced`. The size itself is the most probable of those that the autoencoder can make."""
        if not self._follows:
            return None
        before, last = functional.pad(written, (2, 0), value=-1)[:, -2:].T
        found = torch.full_like(last, -1)
        for earlier, word, following in self._follows:
            applies = (last == word) if earlier is None else (last == word) & (before == earlier)
            found = found.where(~applies, following)
        if self._chooses_size:
            words = self.bundle.words
            ratios = torch.tensor([word for word, _ in self._usable], device=last.device)
            best = ratios[logits.index_select(-1, ratios).argmax(-1)]
            found = torch.where((last == words.size) & (before == words.image_begin), best, found)
        return found

    def prompt_keys(self, conditions: Conditions) -> list[Hashable]:
        prompts = require_condition(conditions, "prompt", PromptCondition).to("cpu").unpack("tokens")
        images = given_images(conditions, len(prompts))
        return [
            (tuple(prompt.tolist()), tuple(image.key for image in shown))
            for prompt, shown in zip(prompts, images, strict=True)
        ]

    def model_inputs(self, conditions: Conditions) -> dict[str, Tensor]:
        """Latents, patches and grids of all images in the order of the prompts, and experts where they are kept."""
        inputs: dict[str, Tensor] = {}
        if "experts" in conditions:
            inputs["experts"] = require_condition(conditions, "experts", ExpertCondition).experts
        if "latents" not in conditions:
            return inputs
        for slot, name in (("latents", "latent_grids"), ("patches", "patch_grids")):
            images = require_condition(conditions, slot, ImagePatchCondition)
            if not len(images.patches):
                return inputs
            inputs[slot] = images.patches
            inputs[name] = grids_of(images)
        return inputs
