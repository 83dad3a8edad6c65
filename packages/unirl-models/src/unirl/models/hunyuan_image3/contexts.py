"""The velocity of rows after what was said and shown before the image that is made: time step and image after them.

Legend: R rows, C h w latent, L = h w tokens of an image.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from unirl.models.adapter import num_rows
from unirl.models.guidance import Guidance
from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle
from unirl.models.hunyuan_image3.image_experts import RowExperts, packed_experts, row_experts
from unirl.models.hunyuan_image3.layout import Grid, Layout, Segment
from unirl.models.packed.contexts import Contexts, ContextVelocity, rows_of_ids
from unirl.models.packed.given_images import GivenImage, given_images
from unirl.types.conditions import ExpertCondition
from unirl.types.errors import ContractError
from unirl.types.protocols.models import Conditions


class BoundVelocity(ContextVelocity[Layout, Guidance]):
    """The velocity of rows [R, C, h, w].

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
        image = [Segment(1), Segment(grid[0] * grid[1], (grid,))]
        super().__init__(conditions, guidance, Layout, image)
        self._bundle = bundle
        self._grid = grid
        self._keeps_experts = keeps_experts
        self._top_k = [layer.top_k for layer in bundle.config.decoder.layers]
        self._found: list[RowExperts] = []
        """With `keeps_experts`, of each row."""

    def forward(self, x: Tensor, sigma: Tensor, step_R: Tensor, guided: tuple[int, ...]) -> Tensor:
        bundle, device = self._bundle, x.device
        steps = step_R.tolist() if self._keeps_experts or self._given is not None else []
        layout = self.layout(guided, device)
        features = bundle.images.latent_tokens(x, sigma).flatten(0, 1)
        places = torch.arange(len(features), device=device)
        out = bundle.decoder(
            torch.zeros_like(places),
            layout,
            features=features,
            feature_places=places,
            known=self.contexts.known,
            image_places=places.view(len(x), -1)[:, 1:].flatten(),
            routes=self._routes_of_steps(guided, steps),
            keeps_routes=self._keeps_experts,
        )
        if self._keeps_experts and out.routes is not None:
            self._remember(torch.cat(out.routes, dim=-1).split([features.shape[0] // len(x)] * len(x)), guided, steps)
        return bundle.images.velocity(out.images.unflatten(0, (len(x), -1)), sigma, self._grid)

    @cached_property
    def contexts(self) -> Contexts:
        """With the prompts and, where guidance is on, without."""
        images = given_images(self.conditions, num_rows(self.conditions))
        distinct: dict[Hashable, int] = {}
        kept: list[tuple[list[int], list[GivenImage], Tensor | None]] = []
        given, slots = self._given, self._slots
        found: dict[str, list[int]] = {slot: [] for slot in slots}
        for place, slot in enumerate(slots):
            for row, (ids, shown) in enumerate(zip(rows_of_ids(self.conditions, slot), images, strict=True)):
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
        features, places = bundle.images.features(
            ids, [image for _, shown, _ in kept for image in shown], words.num_words
        )
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
        full, *free = ([known.prefixes[row] for row in rows] for rows in found.values())
        return Contexts(known, full, free)

    # Experts ---------------------------------------------------------------------------------------------------------

    @property
    def _slots(self) -> tuple[str, ...]:
        return ("text", "negative_text") if self.guidance.is_on else ("text",)

    @cached_property
    def _read(self) -> list[tuple[object, ...]]:
        """What each row reads: words, with the prompt and without, and images."""
        words = [rows_of_ids(self.conditions, slot) for slot in self._slots]
        images = given_images(self.conditions, num_rows(self.conditions))
        return [(*map(tuple, own), *(image.key for image in shown)) for *own, shown in zip(*words, images, strict=True)]

    @cached_property
    def _given(self) -> list[RowExperts] | None:
        words = [rows_of_ids(self.conditions, slot) for slot in self._slots]
        lengths = [[len(ids) for ids in own] for own in zip(*words, strict=True)]
        return row_experts(self.conditions, self._read, lengths, 1 + self._grid[0] * self._grid[1])

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
