"""Rollouts of latents by SGLang Diffusion, the trainer's policy pushed to it and verified."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from unirl.rollout.engine.checkpoint import local_folder
from unirl.rollout.engine.child.devices import dealt_gpus, process_variables
from unirl.rollout.engine.child.messages import Message, MessageCodec
from unirl.rollout.engine.served_latents.call import LATENTS
from unirl.rollout.engine.served_latents.engine import ServedLatentsEngine
from unirl.rollout.engine.sglang_diffusion.families import family_of
from unirl.rollout.engine.sglang_diffusion.messages import CODEC, Ready
from unirl.rollout.engine.written_for import SGLANG_DIFFUSION
from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.conditions import Condition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.precision import dtype_named
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore
from unirl.types.sampling import DiffusionSamplingParams, Precision

logger = logging.getLogger(__name__)


_PLACES = {"dit_cpu_offload": False, "text_encoder_cpu_offload": True, "vae_cpu_offload": True}
"""On a GPU: its text encoders and VAE, which nobody asks, stay in host memory."""


@bounded("engine")
class SGLangDiffusionEngine(ServedLatentsEngine):
    """Samples latents with SGLang Diffusion's native backend, given initial latents, noise and encoded prompts.

    See ChildEngine and ServedLatentsEngine. A run on SGLang's other backend, which is diffusers, is refused.

    pipeline: encodes prompts and decodes latents, as in training. model: folder of the pipeline that SGLang starts
        with, which must be the policy's; or a hub id whose files are here already.
    python: interpreter of the environment that has SGLang; None is the running one. Without a GPU, make one with
        `uv sync --project environments/sglang-cpu` and name `environments/sglang-cpu/.venv/bin/python`.
    dtype: of SGLang's transformer; pushes must bring it. Its latents are rounded through it between steps.
    forward_batch_size: samples denoised together.
    num_instances: of SGLang, each with the whole model. Batches go to the one that is free first, and another takes the
        place of one that dies. num_gpus: of each, over which SD3 is split by tensors, another family as SGLang
        chooses. gpus: of this host, dealt to the instances in this order; None where one instance takes what this
        process sees. engine_args: more keyword arguments of sglang's ServerArgs ({"tp_size": 2}).
    max_lora_rank: for policies that are pushed as LoRA adapters; None for full weights.
    push_transport: how weights reach SGLang's own processes: as files that it reads, or by its tensor call.
    num_threads: CPU threads of the process on a host without a GPU.
    sleep_level: 1 lets `sleep` move SGLang's memory to the host, on a GPU; 0 keeps it.
    drop_text_encoders: encode every prompt of the run before it starts, then free the trainer's encoders.
    transfer_dir: where requests, answers and pushed weights lie; memory-backed by default.
    start_timeout_s, timeout_s: for loading, and for any one call.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.engine.sglang_diffusion.rules"
    codec: ClassVar[MessageCodec] = CODEC
    module: ClassVar[str] = "unirl.rollout.engine.sglang_diffusion.server"
    environment: ClassVar[str] = "environments/sglang-cpu"
    versions: ClassVar[tuple[str, ...]] = (SGLANG_DIFFUSION.version,)
    owned_options: ClassVar[frozenset[str]] = frozenset(
        # A replica of its own that SGLang answers with would not be pushed to: num_instances are ours.
        {"model_path", "model_id", "backend", "num_gpus", "push_transport", "dp_size"}
    )
    logp_gap_float32: ClassVar[float | None] = 1e-6
    kernels: ClassVar[dict[str, str]] = {"flow": "sde", "cps": "cps"}

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore | None = None,
        *,
        model: str,
        forward_batch_size: PositiveInt,
        device: str = "cpu",
        python: str | None = None,
        dtype: Precision = "bf16",
        num_gpus: PositiveInt = 1,
        num_instances: PositiveInt = 1,
        gpus: Sequence[int] | None = None,
        max_lora_rank: PositiveInt | None = None,
        push_transport: Literal["disk", "tensor"] = "disk",
        num_threads: PositiveInt = 1,
        sleep_level: Literal[0, 1] = 0,
        drop_text_encoders: bool = False,
        transfer_dir: str = "/dev/shm",
        engine_args: Mapping[str, Any] | None = None,  # Any: values of SGLang's own options
        start_timeout_s: Positive = 900.0,
        timeout_s: Positive = 1800.0,
        track: str = "image",
    ) -> None:
        is_cpu = device == "cpu"
        self._check_options(engine_args, sleep_level, is_cpu)
        folder = local_folder(model)
        self._family = family_of(folder)
        self._pipeline = pipeline
        self._forward_batch_size = forward_batch_size
        self._track = track
        self._modality = self._family.modality
        self._takes_distilled_guidance = self._family.takes_distilled_guidance
        self._dtype = dtype_named(dtype, "engine.dtype")
        self._drops_text_encoders = drop_text_encoders
        options = {
            "model_id": self._family.model_id,
            "num_gpus": num_gpus,
            "push_transport": push_transport,
            "sleep_on_idle": True,  # or its scheduler would spin a core while the policy trains
            **({} if is_cpu else _PLACES),
            **self._family.split(num_gpus, engine_args or {}),
            **(engine_args or {}),
            "pipeline_config": {**(engine_args or {}).get("pipeline_config", {}), "dit_precision": dtype},
        }
        self._launch(
            (str(folder), options),
            [
                process_variables(is_cpu, num_threads) | devices
                for devices in dealt_gpus(is_cpu, num_instances, num_gpus, gpus)
            ],
            policies,
            python=python,
            has_lora=max_lora_rank is not None,
            sleep_level=sleep_level,
            transfer_dir=transfer_dir,
            start_timeout_s=start_timeout_s,
            timeout_s=timeout_s,
        )

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
