"""HunyuanImage3's image generation inside vLLM-Omni's workers, from given tokens. Imported only there.

The model, its cache of the prefix and the loading of weights are vLLM-Omni's. Its template, noise levels (which it
shifts twice) and scheduler are not used.
Legend: B samples; R rows of equal length: samples and, with guidance, the same samples without prompts; P prefix tokens
of a row, L tokens of its image.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from unirl.rollout.engine.served_latents.call import SampleLatents
from unirl.rollout.engine.vllm_omni.sampling import SamplesGivenLatents
from unirl.rollout.engine.vllm_omni.tokens import FREE, FULL, interval_of, rows_of
from unirl.sde.loop import Velocity

_MODELS = "vllm_omni.diffusion.models.hunyuan_image3"
_PIPELINE: Any = importlib.import_module(f"{_MODELS}.pipeline_hunyuan_image3")
_PARTS: Any = importlib.import_module(f"{_MODELS}.hunyuan_image3_transformer")

_TIMESTEPS_PER_SIGMA = 1000.0
MODEL, HEAD = "model.", "lm_head."


class GivenHunyuanImage3Pipeline(SamplesGivenLatents, _PIPELINE.HunyuanImage3Pipeline):
    """Samples the images that a request's file describes."""

    weight_prefix = ""

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:  # Any: vLLM-Omni's own
        super().__init__(od_config)

    @property
    def pushed_modules(self) -> dict[str, nn.Module]:
        """Blocks with embedding and norm, and the output projection, which images do not use."""
        return {MODEL: self.model, HEAD: self.lm_head}

    def velocity(self, call: SampleLatents, tensors: dict[str, Tensor], start: Tensor) -> Velocity:
        """The first call runs the prefix and the image, later ones only time step and image."""
        count, grid = len(start), tuple(start.shape[-2:])
        rows = rows_of(tensors, FULL, count)
        if call.guidance_scale > 1:
            rows = rows + rows_of(tensors, FREE, count)
        low, high = interval_of(call.layout)
        # vLLM-Omni gives all rows of a forward the positions of the first, so a forward has rows of one length.
        by_length: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            by_length.setdefault(len(row), []).append(place)
        groups = [_Group(self, places, [rows[place] for place in places], grid) for places in by_length.values()]

        def velocity(x: Tensor, sigma_B: Tensor, step_B: Tensor) -> Tensor:
            del step_B
            out = x.new_empty(len(rows), *x.shape[1:])
            for group in groups:
                of_samples = [place % count for place in group.places]
                out[group.places] = group.velocity(x[of_samples], sigma_B[of_samples])
            full, *free = out.split(count)
            if not free or not low <= float(sigma_B[0]) <= high:
                return full
            return free[0] + call.guidance_scale * (full - free[0])

        return velocity


class _Group:
    """Rows with prefixes of equal length, and their keys and values, which vLLM-Omni keeps for one batch only."""

    def __init__(
        self, pipeline: Any, places: list[int], rows: list[list[int]], grid: tuple[int, ...]
    ) -> None:  # Any: vLLM-Omni's own
        self.places = places
        """Indices of these rows in the whole batch."""
        self._pipeline = pipeline
        self._device = pipeline.device
        self._ids_RP = torch.tensor(rows, device=self._device)
        self._length = grid[0] * grid[1]
        first = self._ids_RP.shape[1] + 1
        self._image = slice(first, first + self._length)
        self._table = _PARTS.build_batch_2d_rope(
            self._image.stop,
            pipeline.config.attention_head_dim,
            image_infos=[[(self._image, grid)]] * len(rows),
            device=self._device,
            base=pipeline.config.rope_theta,
        )
        self._known: list[Any] | None = None  # Any: vLLM-Omni's own
        """Cached prefix of each block."""

    def velocity(self, x: Tensor, sigma_R: Tensor) -> Tensor:
        """Velocity float32 [R, C, h, w] of the rows' latents."""
        keepers = [layer.self_attn.image_attn for layer in self._pipeline.model.layers]
        for layer in self._pipeline.model.layers:
            layer.self_attn.image_rope2d_emb.custom_pos_emb = None  # of another group
        is_first = self._known is None
        if self._known is not None:
            for keeper, (keys_and_values, lengths) in zip(keepers, self._known, strict=True):
                keeper.image_kv_cache_map, keeper.image_kv_cache_lens = keys_and_values, lengths
        dtype = self._pipeline.od_config.dtype
        # As vLLM-Omni runs it.
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=dtype != torch.float32):
            out = self._pipeline.forward_call(
                **(self._first() if is_first else self._following()),
                custom_pos_emb=self._table,
                mode="gen_image",
                first_step=is_first,
                images=x.to(dtype),
                timestep=sigma_R * _TIMESTEPS_PER_SIGMA,
                gen_timestep_scatter_index=torch.full((len(x), 1), self._image.start - 1, device=self._device),
                full_attn_spans=[[(self._image.start, self._image.stop)]] * len(x),
                num_image_tokens=self._length + 1,
                num_special_tokens=1,
                use_cache=False,
                return_dict=True,
            )
        if is_first:
            self._known = [(keeper.image_kv_cache_map, keeper.image_kv_cache_lens) for keeper in keepers]
        return out["diffusion_prediction"].float()

    def _first(self) -> dict[str, Any]:  # Any: keywords of vLLM-Omni's forward
        """Inputs of the first forward: prefix, time step and image."""
        num = self._image.stop
        sees = torch.ones(num, num, dtype=torch.bool, device=self._device).tril()
        sees[self._image, self._image] = True
        is_image = torch.zeros(num, dtype=torch.bool, device=self._device)
        is_image[self._image] = True
        # Time step and image have no token ids; the padding in their places is overwritten.
        ids = pad(self._ids_RP, (0, num - self._ids_RP.shape[1]))
        places = torch.arange(num, device=self._device)
        return {"input_ids": ids, "image_mask": is_image.expand(len(ids), -1), **self._queries(places, sees)}

    def _following(self) -> dict[str, Any]:  # Any: keywords of vLLM-Omni's forward
        """Inputs of later forwards: the time step, which attends to the prefix, and the image, which attends to
        everything."""
        places = torch.arange(self._image.start - 1, self._image.stop, device=self._device)
        sees = torch.ones(len(places), self._image.stop, dtype=torch.bool, device=self._device)
        sees[0, self._image] = False
        return {"input_ids": None, **self._queries(places, sees)}

    def _queries(self, places: Tensor, sees: Tensor) -> dict[str, Any]:  # Any: keywords of vLLM-Omni's forward
        """Queries at these positions, and what they attend to."""
        count = len(self.places)
        return {
            "position_ids": places.expand(count, -1),
            "attention_mask": sees.expand(count, 1, -1, -1),
            "query_lens": [len(places)] * count,
            "seq_lens": [sees.shape[1]] * count,
        }
