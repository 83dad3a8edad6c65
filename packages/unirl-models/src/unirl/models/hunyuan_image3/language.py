"""HunyuanImage3's decoder as a language model: called as `unirl.models.ar` calls those of transformers.

Legend: B rows, T tokens of a row, N tokens of all rows, I images, K experts of a token in all blocks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.models.hunyuan_image3.given_images import GivenImage, image_features
from unirl.models.hunyuan_image3.layout import Layout, Segment
from unirl.models.hunyuan_image3.model import ImageParts
from unirl.models.hunyuan_image3.template import WordIds
from unirl.models.hunyuan_image3.transformer import HunyuanImage3Decoder, Outputs
from unirl.models.packed.language import LanguageOutput, TextCache, rows_of
from unirl.models.packing import Packing


class HunyuanImage3Language:
    """Words, and images between them, through the decoder."""

    def __init__(self, decoder: HunyuanImage3Decoder, images: ImageParts, words: WordIds) -> None:
        self._decoder = decoder
        self._images = images
        self._words = words
        self._top_k = [layer.top_k for layer in decoder.config.layers]

    def __call__(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        use_cache: bool,
        packing: Packing | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TextCache | None = None,
        logits_to_keep: int = 0,
        experts: Tensor | None = None,
        **images: Tensor,
    ) -> LanguageOutput:
        """Logits [1, N, vocabulary] of packed rows, or [B, 1, vocabulary] of the last token of padded ones.

        input_ids: int64 [1, N] with `packing`, else [B, T] padded on the left as `attention_mask` [B, >= T] says in its
        last columns. position_ids: not read, positions follow from images and cache.
        experts: [N, K] that tokens are sent to, None lets the gates choose. images: see `experts`.
        """
        del position_ids, logits_to_keep
        cache = past_key_values if use_cache else None
        rows = rows_of(input_ids, packing, attention_mask)
        is_packed = packing is not None
        out, layout = self._run(rows, cache, experts, images, needs_all=is_packed)
        logits: Any = out.logits  # Any: logits, or what the scoring head gives in their place
        if cache is not None and out.layers is not None:
            cache.known = layout.extended(cache.known, out.layers)
            cache.prefixes = cache.known.prefixes
        return LanguageOutput(logits if is_packed else logits.transpose(0, 1))

    def experts(self, rows: Sequence[Tensor], **images: Tensor) -> Tensor:
        """[N, K] int16, the experts of all tokens of rows, block by block.

        images: `latents` [*, C] and `patches` [*, numbers] of all images in the order of the rows, and their
        `latent_grids` and `patch_grids`, int64 [I, 2]; nothing where there are none.
        """
        out, _ = self._run(rows, None, None, images, needs_all=False, keeps_routes=True)
        return torch.cat(out.routes or [], dim=-1).to(torch.int16)

    def _run(
        self,
        rows: Sequence[Tensor],
        cache: TextCache | None,
        experts: Tensor | None,
        images: dict[str, Tensor],
        *,
        needs_all: bool,
        keeps_routes: bool = False,
    ) -> tuple[Outputs, Layout]:
        ids = torch.cat(list(rows))
        shown = _shown(images)
        segments = [[Segment(len(row))] for row in rows]
        if shown:
            remaining, segments = iter(shown), []
            for row in rows:
                words = row.tolist()
                own = [next(remaining) for _ in range(words.count(self._words.timestep))]
                segments.append(self._words.segments(words, [image.grids for image in own]))
        known = None if cache is None else cache.known
        layout = Layout.of(segments, ids.device, contexts=None if cache is None else cache.prefixes, known=known)
        features, places = image_features(self._images, self._words, ids, shown)
        routes = None if experts is None else [part.long() for part in experts.split(self._top_k, dim=-1)]
        out = self._decoder(
            ids.where(ids < self._words.num_words, 0),
            layout,
            features=features,
            feature_places=places,
            known=known,
            logit_places=torch.arange(len(ids), device=ids.device) if needs_all else layout.last_places,
            keeps_keys=cache is not None,
            routes=routes,
            keeps_routes=keeps_routes,
        )
        return out, layout


def _shown(images: dict[str, Tensor]) -> list[GivenImage]:
    """All images, of tensors as `HunyuanImage3Language.experts` takes them."""
    if not images:
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
