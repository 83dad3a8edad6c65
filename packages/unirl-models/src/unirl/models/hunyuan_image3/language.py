"""HunyuanImage3's decoder as a language model: called as `unirl.models.ar` calls those of transformers.

Legend: N tokens of all rows, I images, K experts of a token in all blocks together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unirl.models.hunyuan_image3.layout import Layout, Segment
from unirl.models.hunyuan_image3.model import ImageParts
from unirl.models.hunyuan_image3.template import WordIds
from unirl.models.hunyuan_image3.transformer import HunyuanImage3Decoder
from unirl.models.packed.given_images import GivenImage
from unirl.models.packed.language import PackedLanguage, TextCache
from unirl.models.packed.layers import Outputs


class HunyuanImage3Language(PackedLanguage):
    """Words, and images between them, through the decoder."""

    def __init__(self, decoder: HunyuanImage3Decoder, images: ImageParts, words: WordIds) -> None:
        self._decoder = decoder
        self._images = images
        self._words = words
        self._top_k = [layer.top_k for layer in decoder.config.layers]

    def run(
        self,
        rows: list[Tensor],
        cache: TextCache,
        inputs: Mapping[str, Tensor],
        *,
        needs_all: bool,
        keeps_keys: bool = False,
        keeps_routes: bool = False,
    ) -> tuple[Outputs, Layout]:
        """See the base. inputs: images as in `experts`, and `experts` [N, K] that tokens are sent to; without them the
        gates choose."""
        ids = torch.cat(rows)
        shown = _shown(inputs)
        segments = [[Segment(len(row))] for row in rows]
        if shown:
            remaining, segments = iter(shown), []
            for row in rows:
                words = row.tolist()
                own = [next(remaining) for _ in range(words.count(self._words.timestep))]
                segments.append(self._words.segments(words, [image.grids for image in own]))
        layout = Layout.of(segments, ids.device, contexts=cache.prefixes, known=cache.known)
        features, places = self._images.features(ids, shown, self._words.num_words)
        experts = inputs.get("experts")
        routes = None if experts is None else [part.long() for part in experts.split(self._top_k, dim=-1)]
        out = self._decoder(
            ids.where(ids < self._words.num_words, 0),
            layout,
            features=features,
            feature_places=places,
            known=cache.known,
            logit_places=torch.arange(len(ids), device=ids.device) if needs_all else layout.last_places,
            keeps_keys=keeps_keys,
            routes=routes,
            keeps_routes=keeps_routes,
        )
        return out, layout

    def experts(self, rows: Sequence[Tensor], **images: Tensor) -> Tensor:
        """[N, K] int16, the experts of all tokens of rows, block by block.

        images: `latents` [*, C] and `patches` [*, numbers] of all images in the order of the rows, and their
        `latent_grids` and `patch_grids`, int64 [I, 2]; nothing where there are none.
        """
        out, _ = self.run(list(rows), TextCache(), images, needs_all=False, keeps_routes=True)
        return torch.cat(out.routes or [], dim=-1).to(torch.int16)


def _shown(images: Mapping[str, Tensor]) -> list[GivenImage]:
    """All images, of tensors as `HunyuanImage3Language.experts` takes them."""
    if "latents" not in images:
        return []
    grids = [[(rows, columns) for rows, columns in images[f"{kind}_grids"].tolist()] for kind in ("latent", "patch")]
    parts = [
        images[name].split([rows * columns for rows, columns in own])
        for name, own in zip(("latents", "patches"), grids, strict=True)
    ]
    return [
        GivenImage(latents, patches, pair, None)
        for latents, patches, pair in zip(*parts, zip(*grids, strict=True), strict=True)
    ]
