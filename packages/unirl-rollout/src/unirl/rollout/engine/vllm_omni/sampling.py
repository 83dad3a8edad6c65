"""The denoising loop inside vLLM-Omni's workers, for every model. Imported only there.

Kernels and noise are the trainer's (`unirl.sde`), so log-probs differ from a replay's only as far as the two models do.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unirl.rollout.engine.served_latents.call import ECHOED_SIGMAS, LATENTS, LOG_PROBS, SampleLatents
from unirl.sde import loop
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, DDIMStrategy, FlowSDEStrategy
from unirl.sde.loop import Velocity
from unirl.sde.noise import step_noise

GIVEN = "unirl"
"""Key of a request's `extra_args`; its value is a dict with `call`, the fields of a SampleLatents, and `answer`, the
file to write."""
KERNELS = {each.name: each for each in (FlowSDEStrategy, CPSSDEStrategy, DanceSDEStrategy, DDIMStrategy)}

_OUTPUT: Any = importlib.import_module("vllm_omni.diffusion.data").DiffusionOutput


class SamplesGivenLatents:
    """A custom pipeline of vLLM-Omni that samples the latents that a request's file describes. Subclasses predict the
    velocity."""

    device: torch.device
    weight_prefix: str
    """Prefix added to the names of pushed weights when they are loaded."""

    @property
    @abstractmethod
    def pushed_modules(self) -> dict[str, nn.Module]:
        """Name prefix -> module that receives pushes."""

    @abstractmethod
    def velocity(self, call: SampleLatents, tensors: dict[str, Tensor], start: Tensor) -> Velocity:
        """The velocity function of a call. tensors: of its file, without the initial latents `start` [B, ...]."""

    def forward(self, req: Any) -> Any:  # Any: vLLM-Omni's own
        """Sample, and write the answer's file on the first rank. vLLM-Omni's warm-up request has no inputs for us and
        gets an empty answer."""
        given = (req.sampling_params_list[0].extra_args or {}).get(GIVEN)
        if given is not None:
            answer = self._sampled(SampleLatents(**given["call"]))
            if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
                save_file({name: tensor.cpu().contiguous() for name, tensor in answer.items()}, given["answer"])
        return _OUTPUT()

    def _sampled(self, call: SampleLatents) -> dict[str, Tensor]:
        tensors = {name: tensor.to(self.device) for name, tensor in load_file(call.path).items()}
        start = tensors.pop(LATENTS)
        predict = self.velocity(call, tensors, start)
        fed: list[float] = []

        def velocity(x: Tensor, sigma_B: Tensor, step_B: Tensor) -> Tensor:
            fed.append(float(sigma_B[0]))
            return predict(x, sigma_B, step_B)

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
