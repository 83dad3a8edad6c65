"""LAION's aesthetic predictor: how people rate the looks of an image, whatever it shows.

Legend: b samples, D embedding of CLIP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn

from unirl.reward.base import LocalScorer
from unirl.reward.card import ScorerCard
from unirl.reward.local.pixels import check_pixels, to_pictures
from unirl.reward.local.preprocess import CropPreprocessing, at_least_float32
from unirl.reward.local.pretrained import check_dtype, load_complete, load_state, load_transformers
from unirl.types.bounds import PositiveInt
from unirl.types.errors import ConfigError
from unirl.types.precision import DTYPES
from unirl.types.reward import RewardRequest


class AestheticScorer(LocalScorer):
    """head(CLIP embedding of the image / its norm), about 1 to 10, mostly 4 to 7; the prompt is not read.

    model: folder or hub id of CLIP ViT-L/14 in transformers' format. head: folder or hub id with `file`, linear layers
    "layers.<i>" of widths 768, 1024, 128, 64, 16, 1 without activations between them, as published under
    "sac+logos+ava1-l14-linearMSE.pth". dtype: of the tower, "fp32", "bf16" or "fp16"; the head runs in fp32.
    Images go through transformers' image processor; with gradients through `CropPreprocessing`, which differs by what
    rounding to bytes does. Needs the extra `clip`. The published weights themselves were not at hand.
    Raises ConfigError if weights cannot be loaded or do not fit, ImportError without transformers.
    Source: github.com/christophschuhmann/improved-aesthetic-predictor; LAION-5B (arXiv 2210.08402).
    """

    is_differentiable: ClassVar[bool] = True
    model_billions = 0.429
    reads_prompt: ClassVar[bool] = False
    card = ScorerCard(
        name="aesthetic",
        summary="how people rate the looks of an image",
        media=("image",),
        typical="1 to 10, mostly 4 to 7",
        extra="clip",
        source="LAION aesthetic predictor; LAION-5B, arXiv 2210.08402",
    )

    def __init__(
        self,
        *,
        model: str = "openai/clip-vit-large-patch14",
        head: str = "trl-lib/ddpo-aesthetic-predictor",
        file: str = "aesthetic-model.pth",
        dtype: str = "fp32",
        device: str = "cpu",
        name: str = "aesthetic",
        batch_size: PositiveInt = 8,
    ) -> None:
        super().__init__(name=name, batch_size=batch_size, device=device)
        check_dtype(dtype, name)
        transformers = load_transformers(f"scorer {name}")
        option = f"scorer {name}: head = {head!r}: {file}"
        layers = linear_layers(load_state(head, file, f"scorer {name}: head"), option)
        clip = load_complete(transformers.CLIPModel, model, f"scorer {name}: model", dtype=DTYPES["fp32"])
        if layers[0].in_features != clip.config.projection_dim:
            raise ConfigError(
                f"{option} takes {layers[0].in_features} numbers, model {model!r} embeds in "
                f"{clip.config.projection_dim}. Use the CLIP that the head was trained on, ViT-L/14."
            )
        try:
            # The PIL processor, not the torchvision one: rewards must not depend on what else is installed.
            self._processor = transformers.CLIPImageProcessorPil.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"scorer {name}: cannot load the processor of model {model!r}: {error}") from error
        self._preprocess = CropPreprocessing.of(self._processor, f"scorer {name}: model {model!r}")
        self._clip = clip.to(device=device, dtype=DTYPES[dtype]).eval().requires_grad_(False)
        self._head = nn.Sequential(*layers).to(device).eval().requires_grad_(False)

    def modules(self) -> list[nn.Module]:
        """CLIP and the head."""
        return [self._clip, self._head]

    def score_batch(self, request: RewardRequest) -> Tensor:
        """float32 [b]."""
        ready = self._processor(images=to_pictures(request.pixels), return_tensors="pt")
        return self._scores(ready["pixel_values"])

    def score_batch_with_gradient(self, request: RewardRequest) -> Tensor:
        """[b] with gradients to the pixels."""
        check_pixels(request.pixels)
        return self._scores(self._preprocess(request.pixels))

    def _scores(self, input_bCHW: Tensor) -> Tensor:
        found = self._clip.get_image_features(pixel_values=input_bCHW.to(self.device, self._clip.dtype)).pooler_output
        return self._head(nn.functional.normalize(at_least_float32(found), dim=-1)).squeeze(-1)


def linear_layers(state: Mapping[str, Tensor], what: str) -> list[nn.Linear]:
    """The linear layers of "layers.<i>.weight" and ".bias", in order; numbers between are dropouts.

    Raises ConfigError naming `what` if there are none, others, or ones that do not follow on one another.
    """
    places = sorted({int(key.split(".")[1]) for key in state if re.fullmatch(r"layers\.\d+\.(weight|bias)", key)})
    wanted = {f"layers.{place}.{kind}" for place in places for kind in ("weight", "bias")}
    if not places or wanted != set(state):
        raise ConfigError(f"{what} holds {sorted(state)[:4]}, not the linear layers of an aesthetic predictor")
    widths = [state[f"layers.{place}.weight"].shape for place in places]
    if any(first[0] != second[1] for first, second in pairwise(widths)) or widths[-1][0] != 1:
        raise ConfigError(f"{what}: layers of shapes {[tuple(each) for each in widths]} do not lead to one number")
    layers = []
    for place, (rows, columns) in zip(places, widths, strict=True):
        layer = nn.Linear(columns, rows)
        layer.load_state_dict({kind: state[f"layers.{place}.{kind}"] for kind in ("weight", "bias")})
        layers.append(layer)
    return layers
