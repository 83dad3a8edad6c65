"""Rollouts of latents by vLLM-Omni, the trainer's policy pushed to it and verified."""

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
from unirl.rollout.engine.vllm_omni.families import family_of, text_tensors
from unirl.rollout.engine.vllm_omni.messages import CODEC, Ready
from unirl.rollout.engine.written_for import VLLM_OMNI
from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.conditions import Condition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.precision import dtype_named
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore
from unirl.types.sampling import DiffusionSamplingParams, Precision

logger = logging.getLogger(__name__)


@bounded("engine")
class VLLMOmniEngine(ServedLatentsEngine):
    """Samples latents with vLLM-Omni's transformers, given initial latents, noise and encoded prompts.

    See ChildEngine and ServedLatentsEngine. The sampling loop and the kernels in vLLM-Omni's workers are the trainer's.
    Of a unified model (BAGEL, HunyuanImage3) it draws the images, of texts and thoughts that are given as tokens.

    pipeline: encodes prompts and decodes latents, as in training. model: folder of the pipeline that vLLM-Omni starts
        with, which must be the policy's; or a hub id whose files are here already.
    python: interpreter of the environment that has vLLM-Omni; None is the running one. Without a GPU, make one with
        `uv sync --project environments/vllm-omni-cpu` and name `environments/vllm-omni-cpu/.venv/bin/python`.
    dtype: of vLLM-Omni's transformer; pushes must bring it. Latents between steps are float32.
    forward_batch_size: samples denoised together.
    num_instances: of vLLM-Omni, each with the whole model. Batches go to the one that is free first, and another takes
        the place of one that dies. num_gpus: of each, over which a transformer is split by tensor parallelism. gpus: of
        this host, dealt to the instances in this order; None where one instance takes what this process sees.
        engine_args: more keyword arguments of vLLM-Omni's Omni ({"enforce_eager": true}).
    max_lora_rank: for policies that are pushed as LoRA adapters; None for full weights.
    push_transport: how weights reach vLLM-Omni's workers: as files that they read, or in its call of them.
    num_threads: CPU threads of the process on a host without a GPU.
    sleep_level: 1 lets `sleep` move the weights to the host, on a GPU; 0 keeps them.
    drop_text_encoders: encode every prompt of the run before it starts, then free the trainer's encoders.
    transfer_dir: where requests, answers and pushed weights lie; memory-backed by default.
    start_timeout_s, timeout_s: for loading, and for any one call.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.engine.vllm_omni.rules"
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
            "push_transport",
            # A custom pipeline is not split over the tokens, whatever these say.
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
        model: str,
        forward_batch_size: PositiveInt,
        device: str = "cpu",
        python: str | None = None,
        dtype: Precision = "bf16",
        num_gpus: PositiveInt = 1,
        num_instances: PositiveInt = 1,
        gpus: Sequence[int] | None = None,
        max_lora_rank: PositiveInt | None = None,
        push_transport: Literal["files", "tensor"] = "files",
        num_threads: PositiveInt = 1,
        sleep_level: Literal[0, 1] = 0,
        drop_text_encoders: bool = False,
        transfer_dir: str = "/dev/shm",
        engine_args: Mapping[str, Any] | None = None,  # Any: values of vLLM-Omni's own options
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
        self._settings = self._family.settings
        if max_lora_rank is not None and not self._family.takes_adapters:
            raise ConfigError(
                f"engine.max_lora_rank = {max_lora_rank}: adapters of {folder.name} cannot be pushed to vLLM-Omni "
                "as they are. Set it to null, and push them merged: sync._target_: "
                "unirl.distributed.weight_sync.full.FullWeightSync."
            )
        self._dtype = dtype_named(dtype, "engine.dtype")
        self._drops_text_encoders = drop_text_encoders
        options = {
            "dtype": str(self._dtype).removeprefix("torch."),
            "push_transport": push_transport,
            **({"enable_sleep_mode": True} if sleep_level else {}),
            **({"tensor_parallel_size": num_gpus} if num_gpus > 1 else {}),
            **(engine_args or {}),
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
        return dict(params.sampler_kwargs)
