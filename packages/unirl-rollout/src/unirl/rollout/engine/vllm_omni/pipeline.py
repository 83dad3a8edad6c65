"""What samples inside vLLM-Omni's workers: a custom pipeline of it, imported by them alone.

Of vLLM-Omni it uses the transformer with its attention and parallelism, the loading of weights, adapters and guidance
over several devices. The loop, the kernels and the noise are those of the trainer (`unirl.sde`), so a log-prob differs
from a replay's by what the two transformers differ. No text encoder and no VAE is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unirl.rollout.engine.served_latents.call import ECHOED_SIGMAS, LATENTS, LOG_PROBS, SampleLatents
from unirl.rollout.engine.served_latents.folder import served_class
from unirl.rollout.engine.vllm_omni.families import NEGATIVE
from unirl.rollout.engine.vllm_omni.transformers import NATIVE, Text
from unirl.sde import loop
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, DDIMStrategy, FlowSDEStrategy
from unirl.sde.noise import step_noise

GIVEN = "unirl"
"""Key of a request's `extra_args`: a dict of `call`, the fields of a SampleLatents, and `answer`, the file to write."""
TRANSFORMER = "transformer."
"""What the names of the transformer's weights begin with here."""
KERNELS = {each.name: each for each in (FlowSDEStrategy, CPSSDEStrategy, DanceSDEStrategy, DDIMStrategy)}

_DIFFUSION = "vllm_omni.diffusion"
_CFG_PARALLEL: Any = importlib.import_module(f"{_DIFFUSION}.distributed.cfg_parallel").CFGParallelMixin
_OUTPUT: Any = importlib.import_module(f"{_DIFFUSION}.data").DiffusionOutput
_LOADER: Any = importlib.import_module(f"{_DIFFUSION}.model_loader.diffusers_loader").DiffusersPipelineLoader
_WEIGHTS_LOADER: Any = importlib.import_module("vllm.model_executor.models.utils").AutoWeightsLoader
_device: Any = importlib.import_module(f"{_DIFFUSION}.distributed.utils").get_local_device


class GivenLatentsPipeline(nn.Module, _CFG_PARALLEL):
    """Samples what a request's file describes; the transformer is the only module."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:  # Any: vLLM-Omni's own
        super().__init__()
        folder = Path(od_config.model)
        self.od_config = od_config
        self.device = _device()
        self.native = NATIVE[served_class(folder, NATIVE, "vLLM-Omni")]
        self.transformer = self.native.build(od_config)
        self.weights_sources = [
            _LOADER.ComponentSource(
                model_or_path=od_config.model, subfolder="transformer", revision=None, prefix=TRANSFORMER
            )
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load tensors under the checkpoint's names; the names of the parameters and buffers that took them."""
        return _WEIGHTS_LOADER(self).load_weights(weights)

    def predict_noise(self, **inputs: Any) -> Tensor:
        """Velocity of one branch of the guidance, in float32 as the trainer combines them."""
        return self.transformer(**inputs, return_dict=False)[0].float()

    def forward(self, req: Any) -> Any:  # Any: vLLM-Omni's own
        """Sample, and write the answer's file on the first rank. A request that is not ours, which is vLLM-Omni's
        warm-up, has nothing to sample from and gets nothing."""
        given = (req.sampling_params_list[0].extra_args or {}).get(GIVEN)
        if given is not None:
            answer = self._sampled(SampleLatents(**given["call"]))
            if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
                save_file({name: tensor.cpu().contiguous() for name, tensor in answer.items()}, given["answer"])
        return _OUTPUT()

    def _sampled(self, call: SampleLatents) -> dict[str, Tensor]:
        tensors = {name: tensor.to(self.device) for name, tensor in load_file(call.path).items()}
        start = tensors.pop(LATENTS)
        dtype = self.od_config.dtype
        texts = {slot: _text(tensors, slot, dtype) for slot in {name.rsplit(".", 1)[0] for name in tensors}}
        without = {slot.removeprefix(NEGATIVE): text for slot, text in texts.items() if slot.startswith(NEGATIVE)}
        conditional = {slot: text for slot, text in texts.items() if not slot.startswith(NEGATIVE)}
        fed: list[float] = []

        def velocity(x: Tensor, sigma_B: Tensor, step_B: Tensor) -> Tensor:
            fed.append(float(sigma_B[0]))
            out = self.predict_noise_maybe_with_cfg(
                do_true_cfg=bool(without),
                true_cfg_scale=call.guidance_scale,
                positive_kwargs=self.native.inputs(x.to(dtype), sigma_B, conditional, self.transformer),
                negative_kwargs=(
                    self.native.inputs(x.to(dtype), sigma_B, without, self.transformer) if without else None
                ),
                cfg_normalize=self.native.normalises_guidance,
            )
            return self.native.velocity(out, x.shape)

        stored = {0: start}

        def store(step: int, x: Tensor) -> None:
            if step + 1 in call.positions:
                stored[step + 1] = x

        trajectory = loop.sample(
            velocity,
            start,
            torch.tensor(call.sigmas),
            strategy=KERNELS[call.kernel](),
            eta=call.eta,
            sde_indices=call.sde_indices,
            step_noise=lambda step: step_noise(call.noise_keys, step, call.noise_seed, call.noise_shape),
            keep="last",
            on_step=store,
        )
        logp_BT = start.new_zeros(len(start), len(call.sigmas) - 1)
        if trajectory.sde_logp is not None:
            logp_BT[:, trajectory.sde_indices] = trajectory.sde_logp
        return {
            LATENTS: torch.stack([stored[position] for position in call.positions], dim=1),
            LOG_PROBS: logp_BT,
            ECHOED_SIGMAS: torch.tensor([*fed, call.sigmas[-1]]),
        }


def _text(tensors: dict[str, Tensor], slot: str, dtype: torch.dtype) -> Text:
    pooled = tensors.get(f"{slot}.pooled")
    return Text(
        embeds=tensors[f"{slot}.embeds"].to(dtype),
        mask=tensors.get(f"{slot}.mask"),
        pooled=None if pooled is None else pooled.to(dtype),
    )
