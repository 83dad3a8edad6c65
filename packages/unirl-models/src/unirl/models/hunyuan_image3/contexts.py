"""The velocity of rows after what was said and shown before the image that is made.

Words do not see the image that follows them, so their keys and values serve every noise level: they are computed once,
and each call runs the time step and the image after them.
Legend: R rows, C h w latent, L = h w tokens of an image.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property

import torch
from torch import Tensor

from unirl.models.adapter import num_rows, require_condition
from unirl.models.guidance import Guidance, extrapolate
from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle
from unirl.models.hunyuan_image3.given_images import GivenImage, given_images, image_features
from unirl.models.hunyuan_image3.layout import Grid, Layout, Segment
from unirl.models.packed_rows import KeyValues, Prefix
from unirl.types.conditions import TextTokenCondition
from unirl.types.protocols import Conditions


class BoundVelocity:
    """velocity(x_R [R, C, h, w], sigma_R, step_R) -> [R, C, h, w] float32, see `DiffusionAdapter.bind`."""

    def __init__(self, bundle: HunyuanImage3Bundle, conditions: Conditions, guidance: Guidance, grid: Grid) -> None:
        self._bundle = bundle
        self._conditions = conditions
        self._guidance = guidance
        self._grid = grid
        self._layouts: dict[tuple[int, ...], Layout] = {}

    def __call__(self, x_R: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
        del step_R
        chosen = self._guidance.guided_rows(sigma_R)
        guided = list(range(len(x_R))) if chosen is None else chosen
        if not guided:
            return self._forward(x_R, sigma_R, ())
        # In one forward: guided rows without their prompts, then all rows.
        rows = guided + list(range(len(x_R)))
        out = self._forward(x_R[rows], sigma_R[rows], tuple(guided))
        free, full = out.split([len(guided), len(x_R)])
        index = torch.tensor(guided, device=x_R.device)
        return full.index_copy(0, index, extrapolate(full[index], free, self._guidance.scale))

    def _forward(self, x: Tensor, sigma: Tensor, guided: tuple[int, ...]) -> Tensor:
        bundle, device = self._bundle, x.device
        layout = self._layout(guided, device)
        features = bundle.images.latent_tokens(x, sigma).flatten(0, 1)
        places = torch.arange(len(features), device=device)
        out = bundle.decoder(
            torch.zeros_like(places),
            layout,
            features=features,
            feature_places=places,
            known=self.contexts[0],
            image_places=places.view(len(x), -1)[:, 1:].flatten(),
        )
        return bundle.images.velocity(out.images.unflatten(0, (len(x), -1)), sigma, self._grid)

    def _layout(self, guided: tuple[int, ...], device: torch.device) -> Layout:
        """Of one forward. Steps guide the same rows, or none, so there are few."""
        if guided not in self._layouts:
            known, full, masked = self.contexts
            chosen = [masked[row] for row in guided] + full
            row = [Segment(1), Segment(self._grid[0] * self._grid[1], (self._grid,))]
            self._layouts[guided] = Layout.of([row] * len(chosen), device, contexts=chosen, known=known)
        return self._layouts[guided]

    @cached_property
    def contexts(self) -> tuple[KeyValues, list[Prefix], list[Prefix]]:
        """Keys and values of all distinct contexts, with gradients where the decoder trains; and which one each row
        has, with its prompt and without."""
        images = given_images(self._conditions, num_rows(self._conditions))
        distinct: dict[Hashable, int] = {}
        kept: list[tuple[list[int], list[GivenImage]]] = []
        found: dict[str, list[int]] = {"text": [], "negative_text": []}
        for slot in found if self._guidance.is_on else ("text",):
            for ids, shown in zip(rows_of_ids(self._conditions, slot), images, strict=True):
                key = (tuple(ids), tuple(image.key for image in shown))
                if key not in distinct:
                    distinct[key] = len(kept)
                    kept.append((ids, shown))
                found[slot].append(distinct[key])
        bundle, words = self._bundle, self._bundle.words
        segments = [words.segments(ids, [image.grids for image in shown]) for ids, shown in kept]
        layout = Layout.of(segments, bundle.device)
        ids = torch.tensor([word for ids, _ in kept for word in ids], device=bundle.device)
        features, places = image_features(bundle.images, words, ids, [image for _, shown in kept for image in shown])
        out = bundle.decoder(
            ids.where(ids < words.num_words, 0), layout, features=features, feature_places=places, keeps_keys=True
        )
        known = layout.extended(None, out.layers)
        full, masked = ([known.prefixes[row] for row in rows] for rows in found.values())
        return known, full, masked


def rows_of_ids(conditions: Conditions, slot: str) -> list[list[int]]:
    """The words of each row, without padding."""
    tokens = require_condition(conditions, slot, TextTokenCondition)
    lengths = tokens.attention_mask.sum(1).tolist()
    return [ids[:length] for ids, length in zip(tokens.input_ids.tolist(), lengths, strict=True)]
