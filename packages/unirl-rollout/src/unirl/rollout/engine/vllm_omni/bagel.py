"""BAGEL's image generation inside vLLM-Omni's workers, from given texts and thoughts. Imported only there.

The decoder, its caches, its guidance and the loading of weights are vLLM-Omni's. Its autoencoder and vision tower are
not loaded. Its single stage reads the tokens of the trainer's pipeline instead of its own prompt. Legend: B samples, L
latent tokens of an image, D numbers of one.
"""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unirl.rollout.engine.checkpoint import part_shapes
from unirl.rollout.engine.served_latents.call import SampleLatents
from unirl.rollout.engine.vllm_omni.sampling import SamplesGivenLatents
from unirl.rollout.engine.vllm_omni.tokens import FREE, FULL, interval_of, rows_of
from unirl.sde.loop import Velocity

_MODELS = "vllm_omni.diffusion.models.bagel"
_PIPELINE: Any = importlib.import_module(f"{_MODELS}.pipeline_bagel")
_PARTS: Any = importlib.import_module(f"{_MODELS}.bagel_transformer")
_tokenizers: Any = importlib.import_module("transformers").AutoTokenizer
_device: Any = importlib.import_module("vllm_omni.diffusion.distributed.utils").get_local_device

LANGUAGE = "language_model."
_PUBLISHED_FACTOR = 8
"""Pixels per latent element on a side for the published model; for other autoencoders it follows from each call."""

Rows = list[list[int]]
"""Tokens before the image of each sample."""


class GivenBagelPipeline(SamplesGivenLatents, _PIPELINE.BagelPipeline):
    """Samples the images that a request's file describes. The decoder with its latent projections is the only
    module."""

    weight_prefix = LANGUAGE

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:  # Any: vLLM-Omni's own
        nn.Module.__init__(self)
        folder = Path(od_config.model)
        self.od_config = od_config
        self.device = _device()
        said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        language = _PARTS.Qwen2MoTConfig.from_json_file(folder / "llm_config.json")
        language.qk_norm, language.tie_word_embeddings = True, False
        language.layer_module = "Qwen2MoTDecoderLayer"
        own = {"parallel_config": od_config.parallel_config, "quant_config": od_config.quantization_config}
        self.language_model = _PARTS.Qwen2MoTForCausalLM(language, prefix="bagel.language_model", **own)
        self.transformer = self.language_model.model
        patch = said.get("latent_patch_size", 2)
        # Like our modules, it reads the number of channels from the weights.
        width = part_shapes(folder, {"vae2llm.": ""})["weight"][1]
        config = _PIPELINE.BagelConfig(
            visual_gen=True,
            visual_und=False,
            llm_config=language,
            vae_config=_PIPELINE._VaeCfg(z_channels=width // patch**2, downsample=_PUBLISHED_FACTOR),
            latent_patch_size=patch,
            max_latent_size=said.get("max_latent_size", 32),
        )
        self.bagel = _PARTS.Bagel(
            language_model=self.language_model, vit_model=None, config=config, prefix="bagel", **own
        )
        _, self.marks, _ = _PIPELINE.add_special_tokens(_tokenizers.from_pretrained(folder, local_files_only=True))
        self.weights_sources = [
            _PIPELINE.DiffusersPipelineLoader.ComponentSource(
                model_or_path=od_config.model, subfolder=None, revision=None, prefix=""
            )
        ]
        self.to(self.device)

    @property
    def pushed_modules(self) -> dict[str, nn.Module]:
        """The decoder with its embedding and output projection."""
        return {LANGUAGE: self.language_model}

    def velocity(self, call: SampleLatents, tensors: dict[str, Tensor], start: Tensor) -> Velocity:
        """Guided by the contexts of `unirl.models.bagel`, without images: the full context, it without prompt and
        thought, and the prompt alone."""
        count, length = start.shape[:2]
        system, text, thought, free = (rows_of(tensors, slot, count) for slot in ("system_text", FULL, "thought", FREE))
        image_scale = float(call.layout.get("guidance_scale_image", 1.0))
        branches = [_joined(system, text, thought)]
        if call.guidance_scale > 1:
            branches.append(_joined(system, free))
            if image_scale > 1:
                branches.append(_joined(system, text))
        low, high = interval_of(call.layout)
        known: dict[tuple[int, ...], Any] = {}  # Any: vLLM-Omni's cache
        with self._precision():
            caches = [_PARTS.NaiveCache.merge([self._cache(row, known) for row in rows]) for rows in branches]
        self.bagel.latent_downsample = math.isqrt(call.height * call.width // length)
        packed = self._packed(call, branches[0])
        # All tokens of an image share the position after its context.
        positions = [self._on_device([len(row) for row in rows for _ in range(length + 2)]) for rows in branches]
        guidance = {
            "cfg_renorm_type": call.layout.get("guidance_renorm", "global"),
            "cfg_renorm_min": float(call.layout.get("guidance_renorm_min", 0.0)),
            "cfg_branch_pids": positions,
            "cfg_branch_caches": caches,
            # Lengths are per sample; vLLM-Omni treats a batch as one sample.
            "cfg_vae_lengths": [length] * count,
            "cfg_text_scales": [call.guidance_scale] * count,
            "cfg_img_scales": [image_scale] * count,
        }

        def velocity(x: Tensor, sigma_B: Tensor, step_B: Tensor) -> Tensor:
            del step_B
            is_guided = len(branches) > 1 and low < float(sigma_B[0]) <= high
            with self._precision():
                out = self.bagel(
                    x_t=x.flatten(0, 1),
                    timestep=sigma_B.repeat_interleave(length),
                    packed_position_ids=positions[0],
                    past_key_values=caches[0],
                    **packed,
                    **(guidance if is_guided else {}),
                )
            return out.unflatten(0, (count, length)).float()

        return velocity

    def _cache(self, row: list[int], known: dict[tuple[int, ...], Any]) -> Any:  # Any: vLLM-Omni's own
        """Keys and values of a context."""
        key = tuple(row)
        if key not in known:
            empty = _PARTS.NaiveCache(self.bagel.config.llm_config.num_hidden_layers)
            known[key] = (
                empty
                if not row
                else self.bagel.forward_cache_update_text(
                    empty,
                    packed_text_ids=self._on_device(row),
                    packed_text_position_ids=self._on_device(range(len(row))),
                    text_token_lens=self._on_device([len(row)]),
                )
            )
        return known[key]

    def _packed(self, call: SampleLatents, rows: Rows) -> dict[str, Tensor]:
        """Positions of the latent tokens of all samples and of the markers around them."""
        lengths = [len(row) for row in rows]
        found = self.bagel.prepare_input(lengths, lengths, [(call.height, call.width)] * len(rows), self.marks)
        del found["packed_init_noises"], found["packed_position_ids"]
        return {name: tensor.to(self.device) for name, tensor in found.items()}

    def _on_device(self, numbers: Any) -> Tensor:  # Any: a sequence of numbers
        return torch.tensor(list(numbers), device=self.device)

    def _precision(self) -> torch.autocast:
        """Autocast as in vLLM-Omni."""
        return torch.autocast(self.device.type, enabled=self.device.type != "cpu", dtype=self.od_config.dtype)


def _joined(*parts: Rows) -> Rows:
    return [[word for part in row for word in part] for row in zip(*parts, strict=True)]
