"""The velocity of rows after what was said and shown before the image that is made.

Words do not see the image that follows them, so their keys and values serve every noise level: they are computed once,
and each call runs the time step and the image after them.
Legend: R rows, C h w latent, L = h w tokens of an image.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from unirl.models.adapter import num_rows, require_condition
from unirl.models.guidance import Guidance, extrapolate
from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle
from unirl.models.hunyuan_image3.given_images import GivenImage, given_images, image_features
from unirl.models.hunyuan_image3.image_experts import RowExperts, packed_experts, row_experts
from unirl.models.hunyuan_image3.layout import Grid, Layout, Segment
from unirl.models.packed.rows import KeyValues, Prefix
from unirl.types.conditions import ExpertCondition, TextTokenCondition
from unirl.types.errors import ContractError
from unirl.types.protocols.models import Conditions


class BoundVelocity:
    """velocity(x_R [R, C, h, w], sigma_R, step_R) -> [R, C, h, w] float32, see `DiffusionAdapter.bind`.

    Where the conditions hold experts, tokens go to these. keeps_experts: remember those that the gates choose, for
    `experts`.
    """

    def __init__(
        self,
        bundle: HunyuanImage3Bundle,
        conditions: Conditions,
        guidance: Guidance,
        grid: Grid,
        *,
        keeps_experts: bool = False,
    ) -> None:
        self._bundle = bundle
        self._conditions = conditions
        self._guidance = guidance
        self._grid = grid
        self._keeps_experts = keeps_experts
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._top_k = [layer.top_k for layer in bundle.config.decoder.layers]
        self._found: list[RowExperts] = []
        """With `keeps_experts`, of each row."""

    def __call__(self, x_R: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
        steps = step_R.tolist() if self._keeps_experts or self._given is not None else []
        chosen = self._guidance.guided_rows(sigma_R)
        guided = list(range(len(x_R))) if chosen is None else chosen
        if not guided:
            return self._forward(x_R, sigma_R, (), steps)
        # In one forward: guided rows without their prompts, then all rows.
        rows = guided + list(range(len(x_R)))
        out = self._forward(x_R[rows], sigma_R[rows], tuple(guided), steps)
        free, full = out.split([len(guided), len(x_R)])
        index = torch.tensor(guided, device=x_R.device)
        return full.index_copy(0, index, extrapolate(full[index], free, self._guidance.scale))

    def _forward(self, x: Tensor, sigma: Tensor, guided: tuple[int, ...], steps: list[int]) -> Tensor:
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
            routes=self._routes_of_steps(guided, steps),
            keeps_routes=self._keeps_experts,
        )
        if self._keeps_experts and out.routes is not None:
            self._remember(torch.cat(out.routes, dim=-1).split([features.shape[0] // len(x)] * len(x)), guided, steps)
        return bundle.images.velocity(out.images.unflatten(0, (len(x), -1)), sigma, self._grid)

    def _layout(self, guided: tuple[int, ...], device: torch.device) -> Layout:
        """Layout of one forward, cached. Steps guide the same rows, or none, so there are few."""
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
        kept: list[tuple[list[int], list[GivenImage], Tensor | None]] = []
        found: dict[str, list[int]] = {"text": [], "negative_text": []}
        given, slots = self._given, self._slots
        for place, slot in enumerate(slots):
            for row, (ids, shown) in enumerate(zip(rows_of_ids(self._conditions, slot), images, strict=True)):
                own = None if given is None else given[row].words[place]
                # Words with other experts have other keys and values.
                sent = None if own is None else own.cpu().numpy().tobytes()
                key = (tuple(ids), tuple(image.key for image in shown), sent)
                if key not in distinct:
                    distinct[key] = len(kept)
                    kept.append((ids, shown, own))
                found[slot].append(distinct[key])
        bundle, words = self._bundle, self._bundle.words
        segments = [words.segments(ids, [image.grids for image in shown]) for ids, shown, _ in kept]
        layout = Layout.of(segments, bundle.device)
        ids = torch.tensor([word for ids, _, _ in kept for word in ids], device=bundle.device)
        features, places = image_features(bundle.images, words, ids, [image for _, shown, _ in kept for image in shown])
        out = bundle.decoder(
            ids.where(ids < words.num_words, 0),
            layout,
            features=features,
            feature_places=places,
            keeps_keys=True,
            routes=self._by_block([own for _, _, own in kept if own is not None]),
            keeps_routes=self._keeps_experts,
        )
        if self._keeps_experts and out.routes is not None:
            parts = torch.cat(out.routes, dim=-1).split([len(ids) for ids, _, _ in kept])
            rows = zip(*(found[slot] for slot in slots), strict=True)
            self._found = [RowExperts(tuple(parts[place].to(torch.int16) for place in row), {}) for row in rows]
        known = layout.extended(None, out.layers)
        full, masked = ([known.prefixes[row] for row in rows] for rows in found.values())
        return known, full, masked

    # Experts ---------------------------------------------------------------------------------------------------------

    @property
    def _slots(self) -> tuple[str, ...]:
        return ("text", "negative_text") if self._guidance.is_on else ("text",)

    @cached_property
    def _read(self) -> list[tuple[object, ...]]:
        """What each row reads: words, with the prompt and without, and images."""
        words = [rows_of_ids(self._conditions, slot) for slot in self._slots]
        images = given_images(self._conditions, num_rows(self._conditions))
        return [(*map(tuple, own), *(image.key for image in shown)) for *own, shown in zip(*words, images, strict=True)]

    @cached_property
    def _given(self) -> list[RowExperts] | None:
        words = [rows_of_ids(self._conditions, slot) for slot in self._slots]
        lengths = [[len(ids) for ids in own] for own in zip(*words, strict=True)]
        return row_experts(self._conditions, self._read, lengths, 1 + self._grid[0] * self._grid[1])

    @property
    def experts(self) -> ExpertCondition:
        """Those that the gates chose in all calls so far, each of one step of every row."""
        return packed_experts(self._found, self._read)

    def _by_block(self, rows: list[Tensor]) -> list[Tensor] | None:
        """The experts of rows, end to end, block by block; None without rows, where the gates choose."""
        if not rows:
            return None
        return [part.long() for part in torch.cat(rows).to(self._bundle.device).split(self._top_k, dim=-1)]

    def _routes_of_steps(self, guided: tuple[int, ...], steps: list[int]) -> list[Tensor] | None:
        given = self._given
        if given is None:
            return None
        missing = sorted({step for row, step in enumerate(steps) if step not in given[row].steps})
        if missing:
            raise ContractError(
                f"experts are kept of the steps {sorted(given[0].steps)}, and asked for at {missing}. Replay the "
                "rollout's stochastic steps, or set pipeline.replays_experts: false."
            )
        free = [given[row].steps[steps[row]][1] for row in guided]
        return self._by_block([*free, *(own.steps[step][0] for own, step in zip(given, steps, strict=True))])

    def _remember(self, parts: Sequence[Tensor], guided: tuple[int, ...], steps: list[int]) -> None:
        free = dict(zip(guided, parts, strict=False))
        for row, (own, full, step) in enumerate(zip(self._found, parts[len(guided) :], steps, strict=True)):
            # A row that is not guided here has a place all the same, so that all steps have as many.
            pair = (full, free.get(row, full))
            own.steps[step] = tuple(part.to(torch.int16) for part in pair[: len(self._slots)])


def rows_of_ids(conditions: Conditions, slot: str) -> list[list[int]]:
    """The words of each row, without padding."""
    tokens = require_condition(conditions, slot, TextTokenCondition)
    lengths = tokens.attention_mask.sum(1).tolist()
    return [ids[:length] for ids, length in zip(tokens.input_ids.tolist(), lengths, strict=True)]
