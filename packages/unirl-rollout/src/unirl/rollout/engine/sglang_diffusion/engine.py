"""Rollouts of latents by SGLang Diffusion, the trainer's policy pushed to it and verified."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from unirl.rollout.engine.base import MediaBits
from unirl.rollout.engine.checkpoint import local_folder
from unirl.rollout.engine.child.devices import process_variables
from unirl.rollout.engine.child.messages import Message, MessageCodec
from unirl.rollout.engine.child.options import EngineProcesses
from unirl.rollout.engine.served_latents.call import LATENTS
from unirl.rollout.engine.served_latents.engine import ServedLatentsEngine
from unirl.rollout.engine.served_latents.folder import transformers
from unirl.rollout.engine.sglang_diffusion.families import family_of
from unirl.rollout.engine.sglang_diffusion.messages import CODEC, Ready
from unirl.rollout.engine.written_for import SGLANG_DIFFUSION
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.conditions import Condition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.precision import dtype_named
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore
from unirl.types.renamed import Renamed
from unirl.types.sampling import DiffusionSamplingParams

logger = logging.getLogger(__name__)


_PLACES = {"dit_cpu_offload": False, "text_encoder_cpu_offload": True, "vae_cpu_offload": True}
"""On a GPU: the unused text encoders and VAE stay in host memory."""


@bounded("engine")
class SGLangDiffusionEngine(ServedLatentsEngine):
    """Samples latents with SGLang Diffusion's native backend, given initial latents, noise and encoded prompts.

    See ChildEngine and ServedLatentsEngine. SGLang's diffusers backend is refused.

    pipeline: encodes prompts and decodes latents, as in training. forward_batch_size: samples denoised together.
    media_bits: of decoded media, see `unirl.rollout.engine.base.MediaBits`.
    drop_text_encoders: encode every prompt of the run before it starts, then free the trainer's encoders.
    processes: see `EngineProcesses`. SGLang rounds latents to `dtype` between steps. `num_devices` splits SD3 by tensor
        parallelism, other families as SGLang chooses; `engine_args` are fields of sglang's ServerArgs ({"tp_size": 2}).
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.engine.sglang_diffusion.rules"
    takes_media: ClassVar[bool] = True
    takes_media_of: ClassVar[tuple[str, ...] | None] = ("WanImageBundle",)
    sleep_levels: ClassVar[tuple[int, ...]] = (1,)
    renamed_keywords: ClassVar[Renamed] = {"num_gpus": "num_devices", "push_transport": None}
    codec: ClassVar[MessageCodec] = CODEC
    module: ClassVar[str] = "unirl.rollout.engine.sglang_diffusion.server"
    environment: ClassVar[str] = "environments/sglang-cpu"
    versions: ClassVar[tuple[str, ...]] = (SGLANG_DIFFUSION.version,)
    owned_options: ClassVar[frozenset[str]] = frozenset(
        # SGLang's own replicas (dp_size) would not receive pushes; num_instances replaces them.
        {"model_path", "model_id", "backend", "num_gpus", "dp_size"}
    )
    logp_gap_float32: ClassVar[float | None] = 1e-6
    kernels: ClassVar[dict[str, str]] = {"flow": "sde", "cps": "cps"}

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore | None = None,
        *,
        forward_batch_size: PositiveInt,
        media_bits: MediaBits = 32,
        drop_text_encoders: bool = False,
        track: str = "image",
        **processes: Any,  # Any: see EngineProcesses
    ) -> None:
        own = self._checked(EngineProcesses(**processes))
        folder = local_folder(own.model)
        self._family = family_of(folder)
        self._pipeline = pipeline
        self._forward_batch_size = forward_batch_size
        self._media_bits = media_bits
        self._track = track
        self._modality = self._family.modality
        self._served = self._family.settings | (frozenset() if len(transformers(folder)) == 1 else {"guidance_scale_2"})
        self._dtype = dtype_named(own.dtype, "engine.dtype")
        self._drops_text_encoders = drop_text_encoders
        options = {
            "model_id": self._family.model_id,
            "num_gpus": own.num_devices,
            "sleep_on_idle": True,  # or its scheduler would spin a core while the policy trains
            **({} if own.is_cpu else _PLACES),
            **self._family.split(own.num_devices, own.options),
            **own.options,
            "pipeline_config": {**own.options.get("pipeline_config", {}), "dit_precision": own.dtype},
        }
        self._launch(replace(own, model=str(folder)), options, process_variables(own.is_cpu, own.num_threads), policies)

    def _check_ready(self, answer: Message, pid: int) -> None:
        if not isinstance(answer, Ready):
            raise ContractError(f"SGLang's process began with {type(answer).__name__} instead of Ready")
        if answer.dtype != str(self._dtype):
            raise ConfigError(
                f"engine.dtype asks for {self._dtype}, SGLang loaded {answer.dtype}. Set engine.dtype to that."
            )
        logger.info(
            "SGLang Diffusion %s is up (pid %d): %s, %s",
            answer.version,
            pid,
            answer.transformer,
            answer.dtype,
        )

    def _inputs(
        self, conditions: dict[str, Condition], start: Tensor, params: DiffusionSamplingParams
    ) -> dict[str, Tensor]:
        return {LATENTS: self._family.initial(start), **self._family.inputs(conditions, params)}

    def _guidance_scale(self, params: DiffusionSamplingParams) -> float:
        return self._family.guidance_scale(params)

    def _latents(self, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
        return self._family.stored(stored, shape)

    def _layout(self, params: DiffusionSamplingParams) -> dict[str, Any]:  # Any: JSON
        return {"token_side": self._family.token_side, "distilled_guidance": params.distilled_guidance_scale}
