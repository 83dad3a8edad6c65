"""OCR reward by GOT-OCR 2.0, a vision-language model that reads, in transformers.

Legend: b images, T tokens.
"""

from __future__ import annotations

import torch
from PIL import Image
from torch import nn

from unirl.reward.card import ScorerCard
from unirl.reward.local.ocr.ocr import OCRScorer
from unirl.reward.local.pretrained import check_dtype, load_complete, load_transformers
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.precision import DTYPES

END = "<|im_end|>"
"""Ends the model's turn."""
NECK_STRIDE = 4
"""By which the vision tower's neck reduces its grid of patches, each way."""


@bounded("scorer")
class GOTOCRScorer(OCRScorer):
    """The OCR reward as GOT-OCR 2.0 reads, greedily. Needs the extra `got-ocr`.

    model: folder or hub id in transformers' format. dtype: "fp32", "bf16" or "fp16".
    max_new_tokens: of one image's text, which is cut there.
    Raises ConfigError if the model cannot be loaded, ImportError without transformers.
    Source: General OCR Theory (arXiv 2409.01704).
    """

    model_billions = 0.561
    card = ScorerCard(
        name="got_ocr",
        summary="the text that the prompt quotes stands in the image, as GOT-OCR 2.0 reads",
        media=("image",),
        needs="prompt with quotes",
        low=0,
        high=1,
        extra="got-ocr",
        source="Flow-GRPO, arXiv 2505.05470; GOT-OCR 2.0, arXiv 2409.01704",
    )

    def __init__(
        self,
        *,
        model: str = "stepfun-ai/GOT-OCR-2.0-hf",
        max_new_tokens: PositiveInt = 256,
        dtype: str = "fp32",
        device: str = "cpu",
        name: str = "got_ocr",
        batch_size: PositiveInt = 4,
    ) -> None:
        super().__init__(name=name, batch_size=batch_size, device=device)
        check_dtype(dtype, name)
        transformers = load_transformers(f"scorer {name}", "got-ocr")
        loaded = load_complete(
            transformers.GotOcr2ForConditionalGeneration, model, f"scorer {name}: model", dtype=DTYPES[dtype]
        )
        try:
            # The PIL processor, not the torchvision one: rewards must not depend on what else is installed.
            self._processor = transformers.GotOcr2Processor(
                transformers.GotOcr2ImageProcessorPil.from_pretrained(model),
                transformers.AutoTokenizer.from_pretrained(model),
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"scorer {name}: cannot load the processor of model {model!r}: {error}") from error
        self._end = self._processor.tokenizer.convert_tokens_to_ids(END)
        if self._end is None or self._end == self._processor.tokenizer.unk_token_id:
            raise ConfigError(f"scorer {name}: the tokenizer of {model!r} has no {END}. Use GOT-OCR 2.0's.")
        self._model = loaded.to(device).eval().requires_grad_(False)
        side, patch = loaded.config.vision_config.image_size, loaded.config.vision_config.patch_size
        self._num_image_tokens = (side // patch // NECK_STRIDE) ** 2
        self._max_new_tokens = max_new_tokens

    def modules(self) -> list[nn.Module]:
        """The model."""
        return [self._model]

    @torch.no_grad()
    def read(self, pictures: list[Image.Image]) -> list[str]:
        """What the model writes when asked to read, without its end mark."""
        ready = self._processor(images=pictures, num_image_tokens=self._num_image_tokens, return_tensors="pt")
        ready = ready.to(self.device, self._model.dtype)
        # Every question has the same tokens, so nothing is padded.
        written_bT = self._model.generate(
            **ready,
            do_sample=False,
            max_new_tokens=self._max_new_tokens,
            eos_token_id=self._end,
            pad_token_id=self._end,
        )
        return self._processor.batch_decode(written_bT[:, ready["input_ids"].shape[1] :], skip_special_tokens=True)
