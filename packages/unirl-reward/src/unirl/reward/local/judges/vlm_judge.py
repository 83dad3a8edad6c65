"""A judge in this process: Qwen2-VL, Qwen2.5-VL or Qwen3-VL by transformers.

Legend: b questions, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from unirl.reward.local.judges.answers import surface_forms
from unirl.reward.local.judges.judge import JudgeError, Question, Reply, Step
from unirl.reward.local.pretrained import check_dtype, load_transformers
from unirl.reward.local.vision_language.qwen_vl import QwenVLReader
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import ConfigError, ContractError
from unirl.types.precision import DTYPES

NUM_RIVALS = 20
"""Tokens whose probabilities a reply keeps at every step, as many as endpoints give."""
_Answer = TypeVar("_Answer")


@bounded("judge")
class VLMJudge:
    """Asks a model that lies in a folder or on the hub, greedily, `batch_size` questions at a time.

    model: folder or hub id. dtype: "fp32", "bf16" or "fp16"; probabilities are computed in fp32.
    min_pixels, max_pixels: of an image after resizing; the model's own where None. Lower max_pixels to save time.
    Probabilities are over the whole vocabulary, of the first token of each way to write an answer; tokens that two ways
    share count once. A repetition penalty or temperature of the model's generation settings is not applied.
    Raises ConfigError if the model cannot be loaded or is of another family, ImportError without transformers.
    """

    model_billions: ClassVar[float] = 8.29
    """Size of Qwen2.5-VL-7B, for `trainer check --memory`."""

    def __init__(
        self,
        *,
        model: str,
        dtype: str = "bf16",
        device: str = "cpu",
        batch_size: PositiveInt = 8,
        min_pixels: PositiveInt | None = None,
        max_pixels: PositiveInt | None = None,
    ) -> None:
        owner = f"judge {model}"
        check_dtype(dtype, owner)
        transformers = load_transformers(owner)
        self._reader = QwenVLReader(model, owner, min_pixels=min_pixels, max_pixels=max_pixels)
        try:
            loaded = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=DTYPES[dtype])
        except (OSError, ValueError) as error:
            raise ConfigError(f"{owner}: cannot load the model: {error}") from error
        self._model: Any = loaded.to(device).eval().requires_grad_(False)  # Any: transformers is optional
        ends = loaded.generation_config.eos_token_id
        self._greedy = transformers.GenerationConfig(
            do_sample=False,
            eos_token_id=self._reader.tokenizer.eos_token_id if ends is None else ends,
            pad_token_id=self._reader.tokenizer.pad_token_id,
        )
        self.batch_size = batch_size

    @property
    def has_probabilities(self) -> bool:
        """Always."""
        return True

    def modules(self) -> list[nn.Module]:
        """The model."""
        return [self._model]

    def answer_probabilities(self, questions: Sequence[Question], answers: Sequence[str]) -> list[float | JudgeError]:
        """P(answer) of the first token, over the whole vocabulary."""
        if len(questions) != len(answers):
            raise ContractError(f"{len(questions)} questions cannot have {len(answers)} expected answers")

        def probabilities(asked: list[int]) -> list[float]:
            logits_bV = self._model(**self._inputs([questions[i] for i in asked]), logits_to_keep=1).logits[:, -1]
            found_bV = logits_bV.float().softmax(dim=-1)
            return [
                found_V[list(self._first_tokens(answers[i]))].sum().item()
                for i, found_V in zip(asked, found_bV, strict=True)
            ]

        return self._each(questions, probabilities)

    def replies(self, questions: Sequence[Question], max_tokens: int) -> list[Reply | JudgeError]:
        """Greedy replies with the probabilities of the NUM_RIVALS likeliest tokens at every step."""

        def replies(asked: list[int]) -> list[Reply]:
            inputs = self._inputs([questions[i] for i in asked])
            found = self._model.generate(
                **inputs,
                generation_config=self._greedy,
                max_new_tokens=max_tokens,
                output_logits=True,
                return_dict_in_generate=True,
            )
            written_bT = found.sequences[:, inputs["input_ids"].shape[1] :]
            top = [
                logits_bV.float().softmax(dim=-1).topk(min(NUM_RIVALS, logits_bV.shape[1]))
                for logits_bV in found.logits
            ]
            return [
                self._reply(written_T.tolist(), [(each.values[row], each.indices[row]) for each in top])
                for row, written_T in enumerate(written_bT)
            ]

        return self._each(questions, replies)

    @torch.no_grad()
    def _each(
        self, questions: Sequence[Question], answer: Callable[[list[int]], list[_Answer]]
    ) -> list[_Answer | JudgeError]:
        """Answers in batches; a question whose text holds special tokens is not asked."""
        found: dict[int, _Answer | JudgeError] = {}
        for i, question in enumerate(questions):
            try:
                self._reader.check_text(question.text)
            except ValueError as error:
                found[i] = JudgeError(str(error))
        asked = [i for i in range(len(questions)) if i not in found]
        for start in range(0, len(asked), self.batch_size):
            batch = asked[start : start + self.batch_size]
            found.update(zip(batch, answer(batch), strict=True))
        return [found[i] for i in range(len(questions))]

    def _inputs(self, questions: Sequence[Question]) -> dict[str, Tensor]:
        chats = [self._reader.chat(question.text, len(question.pictures)) for question in questions]
        pixels, grids = self._reader.pixels([picture for question in questions for picture in question.pictures])
        # Padded on the left, so that the last position of every row is where its reply starts.
        inputs = self._reader.tokens(chats, grids, padding_side="left")
        inputs |= {"pixel_values": pixels.to(self._model.dtype), "image_grid_thw": grids}
        return {key: value.to(self._model.device) for key, value in inputs.items()}

    def _first_tokens(self, answer: str) -> set[int]:
        return {
            self._reader.tokenizer(form, add_special_tokens=False)["input_ids"][0] for form in surface_forms(answer)
        }

    def _reply(self, written: list[int], top: list[tuple[Tensor, Tensor]]) -> Reply:
        tokenizer = self._reader.tokenizer
        ends = self._greedy.eos_token_id
        ends = {self._greedy.pad_token_id, *(ends if isinstance(ends, list) else [ends])}
        steps = []
        for token, (values, indices) in zip(written, top, strict=True):
            if token in ends:
                break
            rivals = dict(zip(tokenizer.batch_decode(indices[:, None]), values.tolist(), strict=True))
            steps.append(Step(tokenizer.decode([token]), rivals))
        return Reply(text="".join(step.token for step in steps), steps=tuple(steps))
