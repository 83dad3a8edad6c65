"""Custom pipeline that samples inside vLLM-Omni's workers. Imported only there.

It uses vLLM-Omni's transformer with its attention and parallelism, its loading of weights and adapters, and its
guidance over several devices. The loop is that of `sampling`. Text encoders and VAE are not loaded.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unirl.rollout.engine.served_latents.call import SampleLatents
from unirl.rollout.engine.served_latents.folder import (
    SECOND_EXPERT,
    TRANSFORMER,
    boundary_of,
    transformers,
)
from unirl.rollout.engine.vllm_omni.families import DISTILLED_GUIDANCE, FAMILY, FEATURES, FRAMES, NEGATIVE, PATCHES
from unirl.rollout.engine.vllm_omni.sampling import SamplesGivenLatents
from unirl.rollout.engine.vllm_omni.transformers import NATIVE, FirstFrame, Given, Text, Texts
from unirl.sde.loop import Velocity
from unirl.types.batch import rows_by

_DIFFUSION = "vllm_omni.diffusion"
_CFG_PARALLEL: Any = importlib.import_module(f"{_DIFFUSION}.distributed.cfg_parallel").CFGParallelMixin
_LOADER: Any = importlib.import_module(f"{_DIFFUSION}.model_loader.diffusers_loader").DiffusersPipelineLoader
_WEIGHTS_LOADER: Any = importlib.import_module("vllm.model_executor.models.utils").AutoWeightsLoader
_device: Any = importlib.import_module(f"{_DIFFUSION}.distributed.utils").get_local_device


class GivenLatentsPipeline(SamplesGivenLatents, nn.Module, _CFG_PARALLEL):
    """Samples the latents that a request's file describes. The transformers are the only modules."""

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:  # Any: vLLM-Omni's own
        super().__init__()
        folder = Path(od_config.model)
        self.od_config = od_config
        self.device = _device()
        self.native = NATIVE[od_config.custom_pipeline_args[FAMILY]]
        self.boundary = boundary_of(folder)
        self.folder = folder
        self._dit_modules = list(transformers(folder))
        for name in self._dit_modules:
            setattr(self, name, self.native.build(od_config, folder / name))
        # A push names the component where there are two.
        self.weight_prefix = "" if len(self._dit_modules) > 1 else f"{TRANSFORMER}."
        self.weights_sources = [
            _LOADER.ComponentSource(model_or_path=od_config.model, subfolder=name, revision=None, prefix=f"{name}.")
            for name in self._dit_modules
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load tensors under the checkpoint's names; returns the names of parameters and buffers that took one."""
        return _WEIGHTS_LOADER(self).load_weights((name.replace("/", "."), tensor) for name, tensor in weights)

    def predict_noise(self, transformer: Any, **inputs: Any) -> Tensor:  # Any: vLLM-Omni's own
        """Velocity of one guidance branch, in float32 as in the trainer."""
        return self.native.forward(transformer, inputs).float()

    @property
    def pushed_modules(self) -> dict[str, nn.Module]:
        """The transformers."""
        return {f"{name}.": getattr(self, name) for name in self._dit_modules}

    def velocity(self, call: SampleLatents, tensors: dict[str, Tensor], start: Tensor) -> Velocity:
        """Velocity of the transformer of each level, guided if there is a negative prompt: a forward per group of rows
        that it takes together."""
        dtype = self.od_config.dtype
        shown = self._pictures(tensors) or self._frames(call, tensors)
        slots = {name.rsplit(".", 1)[0] for name in tensors if name.endswith(".embeds")}
        texts = {slot: _text(tensors, slot, dtype) for slot in slots}
        groups = shown or [(rows, None) for rows in self.native.rows_together(texts)]
        if len(groups) == 1:
            ((_, only),) = groups
            return lambda x, sigma_B, step_B: self._predicted(call, x, sigma_B, texts, only)
        parts = [(rows, {slot: text.select(rows) for slot, text in texts.items()}, given) for rows, given in groups]

        def velocity(x: Tensor, sigma_B: Tensor, step_B: Tensor) -> Tensor:
            del step_B
            out = torch.empty_like(x)
            for rows, own, given in parts:
                out[rows] = self._predicted(call, x[rows], sigma_B[rows], own, given)
            return out

        return velocity

    def _pictures(self, tensors: dict[str, Tensor]) -> list[tuple[list[int], Given]]:
        """Rows whose images have the same sizes, with these; empty without images."""
        slot = next((name.removesuffix(PATCHES) for name in tensors if name.endswith(PATCHES)), None)
        if slot is None:
            return []
        grids = iter(tuple(grid) for grid in tensors[f"{slot}.grids"].tolist())
        samples = [tuple(islice(grids, num)) for num in tensors[f"{slot}.images"].tolist()]
        lengths = [sum(math.prod(grid) for grid in sample) for sample in samples]
        tokens = tensors[f"{slot}{PATCHES}"].to(self.od_config.dtype).split(lengths)
        return [
            (rows, self.native.pictures(torch.stack([tokens[row] for row in rows]), sample))
            for sample, rows in rows_by(samples).items()
        ]

    def _frames(self, call: SampleLatents, tensors: dict[str, Tensor]) -> list[tuple[list[int], Given]]:
        """All rows with their given frames, or with where the parts of their latents are; empty without."""
        rows, transformer = list(range(call.num_samples)), getattr(self, TRANSFORMER)
        if self.native.streams is not None:
            return [(rows, self.native.streams(self.folder, transformer, call))]
        latents, features = (
            next((tensor for name, tensor in tensors.items() if name.endswith(end)), None) for end in (FRAMES, FEATURES)
        )
        if latents is None:
            return []
        return [(rows, self.native.given_frames(latents, features, transformer))]

    def _predicted(
        self,
        call: SampleLatents,
        x: Tensor,
        sigma_B: Tensor,
        texts: Texts,
        given: Given | None,
    ) -> Tensor:
        """Velocity [B, ...] of rows of one noise level."""
        without = {slot.removeprefix(NEGATIVE): text for slot, text in texts.items() if slot.startswith(NEGATIVE)}
        conditional = {slot: text for slot, text in texts.items() if not slot.startswith(NEGATIVE)}
        is_second = self.boundary is not None and bool(sigma_B[0] < self.boundary)
        transformer: Any = getattr(self, SECOND_EXPERT if is_second else TRANSFORMER)
        distilled = call.layout.get(DISTILLED_GUIDANCE)
        guidance = {} if distilled is None else {"guidance": sigma_B.new_full((len(x),), distilled)}

        def inputs(branch: Texts) -> dict[str, Any]:
            own = self.native.inputs(x.to(self.od_config.dtype), sigma_B, branch, transformer)
            own = {"transformer": transformer, **guidance, **own}
            return own if given is None else given.beside(own)

        scale = call.scale_of_second if is_second else call.guidance_scale
        out = self.predict_noise_maybe_with_cfg(
            do_true_cfg=bool(without),
            true_cfg_scale=scale + 1 - self.native.unguided_scale,
            positive_kwargs=inputs(conditional),
            negative_kwargs=inputs(without) if without else None,
            cfg_normalize=self.native.normalises_guidance,
        )
        velocity = self.native.velocity(out, x.shape)
        return given.kept(velocity, x, sigma_B) if isinstance(given, FirstFrame) else velocity


def _text(tensors: dict[str, Tensor], slot: str, dtype: torch.dtype) -> Text:
    pooled = tensors.get(f"{slot}.pooled")
    return Text(
        embeds=tensors[f"{slot}.embeds"].to(dtype),
        mask=tensors.get(f"{slot}.mask"),
        pooled=None if pooled is None else pooled.to(dtype),
    )
