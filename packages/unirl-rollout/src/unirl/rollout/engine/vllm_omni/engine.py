"""Latent rollouts with vLLM-Omni, to which the policy is pushed and verified."""

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
from unirl.rollout.engine.vllm_omni.families import DISTILLED_GUIDANCE, family_of, text_tensors
from unirl.rollout.engine.vllm_omni.messages import CODEC, Ready
from unirl.rollout.engine.written_for import VLLM_OMNI
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.conditions import Condition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.precision import dtype_named
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore
from unirl.types.renamed import Renamed
from unirl.types.sampling import DiffusionSamplingParams

logger = logging.getLogger(__name__)


@bounded("engine")
class VLLMOmniEngine(ServedLatentsEngine):
    """Samples latents with vLLM-Omni's transformers, given initial latents, noise and encoded prompts.

    See ChildEngine and ServedLatentsEngine. The workers run the trainer's sampling loop and kernels. For unified models
    (BAGEL, HunyuanImage3) it draws images from texts and thoughts given as tokens.

    pipeline: encodes prompts and decodes latents, as in training. forward_batch_size: samples denoised together.
    media_bits: of decoded media, see `unirl.rollout.engine.base.MediaBits`.
    drop_text_encoders: encode every prompt of the run before it starts, then free the trainer's encoders.
    processes: see `EngineProcesses`. Latents between steps are float32, whatever `dtype`. `num_devices` splits a
        transformer by tensor parallelism; `engine_args` are options of vLLM-Omni's Omni ({"enforce_eager": true}).
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.engine.vllm_omni.rules"
    takes_media: ClassVar[bool] = True
    takes_media_of: ClassVar[tuple[str, ...] | None] = (
        "QwenImageEditBundle",
        "WanImageBundle",
        "HunyuanVideo15ImageBundle",
        "Flux2KleinBundle",
        "FluxKontextBundle",
        "FluxFillBundle",
    )
    sleep_levels: ClassVar[tuple[int, ...]] = (1,)
    shares_memory: ClassVar[bool] = True
    renamed_keywords: ClassVar[Renamed] = {"num_gpus": "num_devices", "push_transport": None}
    codec: ClassVar[MessageCodec] = CODEC
    module: ClassVar[str] = "unirl.rollout.engine.vllm_omni.server"
    environment: ClassVar[str] = "environments/vllm-omni-cpu"
    versions: ClassVar[tuple[str, ...]] = (VLLM_OMNI.version,)
    owned_options: ClassVar[frozenset[str]] = frozenset(
        {
            "model",
            "dtype",
            "custom_pipeline_args",
            "deploy_config",
            "trust_remote_code",
            "worker_extension_cls",
            "enable_sleep_mode",
            # These have no effect: a custom pipeline does not split the tokens.
            "ulysses_degree",
            "ring_degree",
            "sequence_parallel_size",
        }
    )
    logp_gap_float32: ClassVar[float | None] = 1e-6
    kernels: ClassVar[dict[str, str]] = {name: name for name in ("flow", "cps", "dance", "ddim")}

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
        self._settings = self._family.settings
        self._served = self._family.served | (frozenset() if len(transformers(folder)) == 1 else {"guidance_scale_2"})
        self._dtype = dtype_named(own.dtype, "engine.dtype")
        self._drops_text_encoders = drop_text_encoders
        options = {
            "dtype": str(self._dtype).removeprefix("torch."),
            **({"enable_sleep_mode": True} if own.sleep_level else {}),
            **({"tensor_parallel_size": own.num_devices} if own.num_devices > 1 else {}),
            **own.options,
        }
        self._launch(replace(own, model=str(folder)), options, process_variables(own.is_cpu, own.num_threads), policies)

    def _check_ready(self, answer: Message, pid: int) -> None:
        if not isinstance(answer, Ready):
            raise ContractError(f"vLLM-Omni's process began with {type(answer).__name__} instead of Ready")
        if answer.dtype != str(self._dtype):
            raise ConfigError(
                f"engine.dtype asks for {self._dtype}, vLLM-Omni loaded {answer.dtype}. Set engine.dtype to that."
            )
        logger.info("vLLM-Omni %s is up (pid %d): %s, %s", answer.version, pid, answer.transformer, answer.dtype)

    def _inputs(
        self, conditions: dict[str, Condition], start: Tensor, params: DiffusionSamplingParams
    ) -> dict[str, Tensor]:
        return {LATENTS: start, **text_tensors(conditions, self._family, params)}

    def _latents(self, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
        return stored

    def _layout(self, params: DiffusionSamplingParams) -> dict[str, Any]:  # Any: JSON
        scale = params.distilled_guidance_scale
        return {**params.sampler_kwargs, **({} if scale is None else {DISTILLED_GUIDANCE: scale})}
