"""The library of each served engine: the one supported version, and the attributes that are used.

Does not import the engines itself. `require` runs in the engine's process before the library is used, so that a wrong
version raises an error that lists what is missing.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unirl.types.errors import ConfigError


@dataclass(frozen=True)
class WrittenFor:
    """Requirements of one engine on its library."""

    name: str
    library: str
    """Module with `__version__`."""
    version: str
    extra: str
    """Extra of unirl-rollout that installs it on a GPU host."""
    environment: str
    """Folder in `environments` that installs it on a host without a GPU."""
    uses: Mapping[str, tuple[str, ...]]
    """"module:attribute" -> keywords that it is called with."""

    def missing(self) -> list[str]:
        """What the installed library lacks, one entry each."""
        return [problem for path, keywords in self.uses.items() for problem in _problems(path, keywords)]

    def require(self) -> Any:  # Any: an optional module
        """The imported library. Raises ConfigError if it is not installed or lacks something that is used."""
        try:
            library = importlib.import_module(self.library)
        except ImportError as error:
            raise ConfigError(
                f"{self.name} cannot be imported in its process ({error}). On a GPU host install "
                f"'unirl-rollout[{self.extra}]'; without a GPU, `uv sync --project environments/{self.environment}`, "
                "and set engine.python to that environment's interpreter."
            ) from error
        missing = self.missing()
        if missing:
            raise ConfigError(
                f"{self.name} {library.__version__} is installed, this unirl-rollout is written for {self.version} and "
                f"misses: {'; '.join(missing)}. Install that version: 'unirl-rollout[{self.extra}]', or `uv sync "
                f"--project environments/{self.environment}`."
            )
        return library


def _problems(path: str, keywords: tuple[str, ...]) -> Iterator[str]:
    module, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module)  # Any: whatever the library has there
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        yield f"{path} ({error})"
        return
    if keywords:
        parameters = inspect.signature(found).parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        lacking = [name for name in keywords if name not in parameters]
        if lacking and not takes_any:
            yield f"{path} takes no {', '.join(lacking)}"


_DIFFUSION = "sglang.multimodal_gen"
_RUNTIME = f"{_DIFFUSION}.runtime"
_STAGES = f"{_RUNTIME}.pipelines_core.stages"
_SCHEDULERS = f"{_RUNTIME}.models.schedulers"
_TRAINED = f"{_RUNTIME}.entrypoints.post_training.io_struct"

SGLANG_DIFFUSION = WrittenFor(
    name="SGLang Diffusion",
    library="sglang",
    version="0.5.23",
    extra="sglang",
    environment="sglang-cpu",
    uses={
        f"{_DIFFUSION}:DiffGenerator.from_pretrained": ("model_path",),
        f"{_RUNTIME}.scheduler_client:sync_scheduler_client.forward": (),
        f"{_RUNTIME}.entrypoints.utils:prepare_request": ("server_args", "sampling_params"),
        f"{_DIFFUSION}.configs.sample.sampling_params:SamplingParams.from_user_sampling_params_args": ("server_args",),
        f"{_DIFFUSION}.configs.sample.sampling_params:SamplingParams": (
            "rollout",
            "rollout_sde_type",
            "rollout_noise_level",
            "rollout_log_prob_no_const",
            "rollout_sde_step_indices",
            "rollout_return_step_indices",
            "rollout_return_dit_trajectory",
        ),
        f"{_TRAINED}:UpdateWeightFromDiskReqInput": ("model_path", "target_modules"),
        f"{_TRAINED}:UpdateWeightFromTensorReqInput": (),
        f"{_TRAINED}:GetWeightsChecksumReqInput": ("module_names",),
        f"{_TRAINED}:ReleaseMemoryOccupationReqInput": (),
        f"{_TRAINED}:ResumeMemoryOccupationReqInput": (),
        "sglang.srt.utils:MultiprocessingSerializer.serialize": ("output_str",),
        f"{_SCHEDULERS}.scheduling_flow_match_euler_discrete:FlowMatchEulerDiscreteScheduler": ("shift",),
        f"{_RUNTIME}.platforms.plugins:HookRegistry.register": (),
        f"{_RUNTIME}.post_training.flow_rollout_controller:FlowRolloutController._rollout_variance_noise": (),
        f"{_RUNTIME}.post_training.weights_updater:load_weights_into_model": (),
        f"{_STAGES}.text_encoding:TextEncodingStage.forward": (),
        f"{_STAGES}.denoising:DenoisingStage._prepare_denoising_loop": (),
        f"{_STAGES}.decoding:DecodingStage.forward": (),
    },
)

VLLM = WrittenFor(
    name="vLLM",
    library="vllm",
    version="0.32.0",
    extra="vllm",
    environment="vllm-cpu",
    uses={
        "vllm:EngineArgs": (
            "model",
            "worker_extension_cls",
            "logprobs_mode",
            "stream_interval",
            "skip_tokenizer_init",
        ),
        "vllm:LLMEngine.from_engine_args": ("enable_multiprocessing",),
        "vllm:LLMEngine.add_request": ("lora_request",),
        "vllm:LLMEngine.abort_request": (),
        "vllm:LLMEngine.step": (),
        "vllm:LLMEngine.collective_rpc": ("args",),
        "vllm:LLMEngine.add_lora": (),
        "vllm:LLMEngine.reset_prefix_cache": (),
        "vllm:LLMEngine.reset_mm_cache": (),
        "vllm:LLMEngine.reset_encoder_cache": (),
        "vllm:LLMEngine.sleep": ("level",),
        "vllm:LLMEngine.wake_up": (),
        "vllm:SamplingParams": (
            "temperature",
            "top_p",
            "top_k",
            "max_tokens",
            "seed",
            "stop_token_ids",
            "ignore_eos",
            "logprobs",
            "detokenize",
            "output_kind",
        ),
        "vllm.sampling_params:RequestOutputKind.DELTA": (),
        "vllm.lora.request:LoRARequest": ("load_inplace",),
    },
)

VLLM_OMNI = WrittenFor(
    name="vLLM-Omni",
    library="vllm_omni",
    version="0.30.0",
    extra="vllm-omni",
    environment="vllm-omni-cpu",
    uses={
        "vllm_omni.entrypoints.omni:Omni": ("model",),
        "vllm_omni.inputs.data:OmniDiffusionSamplingParams": (
            "height",
            "width",
            "num_inference_steps",
            "lora_request",
            "extra_args",
        ),
        "vllm_omni.diffusion.worker.diffusion_worker:CustomPipelineWorkerExtension": (),
        "vllm_omni.diffusion.data:DiffusionOutput": (),
        "vllm_omni.diffusion.distributed.parallel_state:get_world_group": (),
        "vllm_omni.diffusion.distributed.cfg_parallel:CFGParallelMixin": (),
        "vllm_omni.diffusion.distributed.utils:get_local_device": (),
        "vllm_omni.diffusion.model_loader.diffusers_loader:DiffusersPipelineLoader": (),
        "vllm_omni.lora.request:LoRARequest": (),
        "vllm.model_executor.models.utils:AutoWeightsLoader": (),
    },
)
