"""Text rollouts with SGLang servers, to which the policy is pushed and verified."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from unirl.rollout.engine.checkpoint import local_folder
from unirl.rollout.engine.child.devices import KEEPS_MEMORY
from unirl.rollout.engine.child.messages import Message, MessageCodec
from unirl.rollout.engine.child.options import EngineProcesses
from unirl.rollout.engine.child.process import interpreter
from unirl.rollout.engine.ports import free_port
from unirl.rollout.engine.served_text.call import Generate, Generations, Limits
from unirl.rollout.engine.served_text.engine import ServedTextEngine
from unirl.rollout.engine.sglang_llm.instance import CONFIG_FILE, ServerLaunch, SGLangInstance
from unirl.rollout.engine.sglang_llm.rules import (
    adapters_need_a_gpu,
    is_memory,
    running_server,
    unseen_pictures,
    unshared,
)
from unirl.rollout.engine.sglang_llm.server import SGLangServer
from unirl.rollout.engine.written_for import SGLANG_DIFFUSION
from unirl.types.bounds import Bounds, PositiveInt, bounded
from unirl.types.device_kinds import USUAL
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import TextCodec
from unirl.types.protocols.training import PolicyStore
from unirl.types.renamed import Renamed
from unirl.types.sampling import Precision

logger = logging.getLogger(__name__)

_DTYPES: dict[Precision, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_VARIABLES = {
    "SGLANG_MM_AVOID_RETOKENIZE": "1",
    "SGLANG_VLM_CACHE_SIZE_MB": "0",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
"""The first keeps the tokens of prompts with images, which SGLang would otherwise decode and tokenise again. The second
disables the cache of image embeddings, which SGLang does not clear after a push. The third is needed where the
context that samples may fill and `_KEPT_TOKENS` exceed what the model names."""
_KEPT_TOKENS = 6
"""Tokens of its context that SGLang leaves unused: it takes prompts of at most so many less, also of texts that it
continues, and ends samples two before the context."""
StartServer = Callable[[Path, int, Path], SGLangServer]
"""(engine folder, instance number, instance folder) -> server."""
_ON_A_CPU: dict[str, str | int | float | bool] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "mm-attention-backend": "sdpa",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-cuda-graph": True,
    "disable-custom-all-reduce": True,
    "disable-overlap-schedule": True,
    "skip-server-warmup": True,
    "mem-fraction-static": 0.1,  # of the host's memory, of which kv_cache_tokens takes what it needs
}


@bounded("engine")
class SGLangRolloutEngine(ServedTextEngine):
    """Samples completions with SGLang. Implements RolloutEngine and WeightReceiver of unirl.types.protocols.engines.

    Prompt images are sent with the request in 8 bits, and SGLang must count as many tokens as the pipeline did.

    See ChildEngine, ServedTextEngine and SGLangInstance. Pushed weights travel as safetensors files that the server
    reads by /update_weights_from_disk or /load_lora_adapter: nothing is pickled, and unlike tensors over HTTP
    (/update_weights_from_tensor) they need no begin_weight_update/end_weight_update session. So the server must see
    `transfer_dir`.

    pipeline: encodes prompts and decodes tokens; SGLang only sees tokens.
    url: of a running server with this model; of the first host if there are several (docs/reference/engines.md, "Over
        several hosts"). None starts `num_instances` servers, on `port` + instance number, or on free ports if `port`
        is None.
    context_length, vocab_size: limits, checked before a prompt is sent; None takes the model's. A running server uses
        6 tokens less of its context.
    kv_cache_tokens: size of the server's KV cache; None, on a GPU only, lets SGLang choose.
    processes: see `EngineProcesses`. `model` must be a folder, or a hub id whose files are downloaded. `num_devices`
        must divide the model's heads; `engine_args` are options of the server ({"schedule-policy": "fcfs"} is
        --schedule-policy fcfs).
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.engine.sglang_llm.rules"
    environment: ClassVar[str] = "environments/sglang-cpu"
    device_share: ClassVar[float | None] = 0.88  # of SGLang 0.5 on a device of 80 GB; it counts what is left
    share_options: ClassVar[tuple[str, ...]] = ("mem-fraction-static", "mem_fraction_static")
    versions: ClassVar[tuple[str, ...]] = (SGLANG_DIFFUSION.version,)
    codec: ClassVar[MessageCodec] = MessageCodec("SGLang", Generate, Generations)
    sleep_levels: ClassVar[tuple[int, ...]] = (2,)
    owned_options: ClassVar[frozenset[str]] = frozenset({"tp-size", "tensor-parallel-size"})
    renamed_keywords: ClassVar[Renamed] = {
        "tensor_parallel_size": "num_devices",
        "server_args": "engine_args",
        "uses_memory_saver": ("sleep_level", {True: 2, False: 0}),
    }

    def __init__(
        self,
        pipeline: TextCodec,
        policies: PolicyStore | None = None,
        *,
        url: str | None = None,
        port: Annotated[int, Bounds(ge=1, le=65535)] | None = None,
        context_length: PositiveInt | None = None,
        vocab_size: PositiveInt | None = None,
        kv_cache_tokens: PositiveInt | None = None,
        track: str = "text",
        **processes: Any,  # Any: see EngineProcesses
    ) -> None:
        own = EngineProcesses(**processes)
        own = self._checked(own if url is None else replace(own, device=USUAL))  # a running server has its own devices
        folder = _model_folder(own.model)
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        for unseen in unseen_pictures("engine", config):
            raise ConfigError(unseen)
        if url is not None:
            given = {**vars(own), "port": port, "kv_cache_tokens": kv_cache_tokens}
            for wrong in running_server("engine", url, given):
                raise ConfigError(wrong)
        elif own.is_cpu:
            _check_cpu(own, kv_cache_tokens)
        self._pipeline = pipeline
        self._track = track
        self._dtype = f"torch.{_DTYPES[own.dtype]}"
        self._transfer_dir = own.transfer_dir
        context_length = context_length or _limit(config, "max_position_embeddings")
        self._model_limits = Limits(
            context_length if url is None else context_length - _KEPT_TOKENS,
            vocab_size or _limit(config, "vocab_size"),
            config.get("image_token_id"),
        )
        start = self._attached(url) if url is not None else self._started(own, folder, port, kv_cache_tokens)
        launch = ServerLaunch(
            model=folder,
            dtype=self._dtype,
            policy_version=0 if policies is None else policies.policy_version,
            has_lora=own.max_lora_rank is not None,
            versions=self.versions,
            environment=self.environment,
            check=self._check_ready,
            start_timeout_s=own.start_timeout_s,
            timeout_s=own.timeout_s,
        )
        self._begin(
            lambda root: [
                SGLangInstance(launch, functools.partial(start, root, number), root / f"instance-{number}")
                for number in range(own.num_instances)
            ],
            policies,
            own,
        )

    def _attached(self, url: str) -> StartServer:
        """Connects to a running server."""
        return lambda root, number, folder: SGLangServer(url, None, folder / "log", root)

    def _started(self, own: EngineProcesses, model: Path, port: int | None, kv_cache_tokens: int | None) -> StartServer:
        """Starts a server."""
        executable = interpreter(own.python, engine="SGLang", environment=self.environment)
        options: dict[str, str | int | float | bool] = {
            "model-path": str(model.absolute()),
            "host": "127.0.0.1",
            "dtype": _DTYPES[own.dtype],
            "context-length": self._model_limits.context_length + _KEPT_TOKENS,
            "skip-tokenizer-init": True,
            "tp-size": own.num_devices,
            "enable-memory-saver": own.sleep_level > 0,
            "enable-lora": own.max_lora_rank is not None,
            **(_ON_A_CPU if own.is_cpu else {}),
            **({} if kv_cache_tokens is None else {"max-total-tokens": kv_cache_tokens}),
            **({} if own.max_lora_rank is None else {"max-lora-rank": own.max_lora_rank, "lora-target-modules": "all"}),
            **own.options,
        }
        variables = own.variables(_VARIABLES | (_cpu_variables(own.num_threads, own.num_devices) if own.is_cpu else {}))

        def start(root: Path, number: int, folder: Path) -> SGLangServer:
            at = free_port() if port is None else port + own.rank * own.num_instances + number
            settings = [f"{key}={value}" for key, value in variables[number].items()]
            command = ["env", *settings, executable, "-m", "sglang.launch_server", *_flags(options | {"port": at})]
            return SGLangServer(f"http://127.0.0.1:{at}", command, folder / "log", root)

        return start

    def _limits(self) -> Limits:
        return self._model_limits

    def _dtype_name(self) -> str:
        return self._dtype

    def _max_running(self) -> int:
        return self.ready().max_running

    def _check_ready(self, answer: Message, pid: int) -> None:
        if answer.num_hosts > 1 and is_memory(self._transfer_dir):
            raise ConfigError(
                f"SGLang is split over {answer.num_hosts} hosts, {unshared('engine', self._transfer_dir)}"
            )
        logger.info(
            "SGLang %s is up (%s), %d ranks on %d hosts",
            answer.version,
            f"pid {pid}" if pid else "already",
            answer.num_ranks,
            answer.num_hosts,
        )


def _model_folder(model: str) -> Path:
    """Local folder of a model. Raises ConfigError if there is none."""
    folder = local_folder(model)
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"engine.model = {model!r} is no folder with a {CONFIG_FILE}; SGLang's pushes are compared with its "
            "checkpoint. Give the folder of a model, or the hub id of one that has been downloaded."
        )
    return folder


def _check_cpu(own: EngineProcesses, kv_cache_tokens: int | None) -> None:
    """Raise ConfigError for options that need a GPU."""
    if kv_cache_tokens is None:
        raise ConfigError(
            "engine.kv_cache_tokens is needed on a CPU: SGLang would take a share of the host's memory for them. Set "
            "it to the tokens of all samples that are drawn at once."
        )
    if own.max_lora_rank is not None:
        raise ConfigError(adapters_need_a_gpu("engine", own.max_lora_rank))


def _cpu_variables(num_threads: int, num_ranks: int) -> dict[str, str]:
    """Variables that set threads per process. SGLang refuses several ranks on one NUMA node unless they are told their
    cores, and must be told not to use NCCL, which torch includes even without a GPU."""
    threads = {"OMP_NUM_THREADS": str(num_threads), **KEEPS_MEMORY}
    if num_ranks == 1:
        return threads
    cores = sorted(os.sched_getaffinity(0))
    dealt = [cores[rank::num_ranks] or [cores[rank % len(cores)]] for rank in range(num_ranks)]
    bound = "|".join(",".join(map(str, each)) for each in dealt)
    return threads | {"SGLANG_CPU_OMP_THREADS_BIND": bound, "SGLANG_NCCL_SO_PATH": "none"}


def _limit(config: Mapping[str, Any], name: str) -> int:  # Any: JSON
    """A value of the language model's configuration, which vision-language models keep in a sub-configuration."""
    value = config.get(name, config.get("text_config", {}).get(name))
    if not isinstance(value, int):
        raise ConfigError(f"the model's {CONFIG_FILE} has no {name}; set engine.context_length and engine.vocab_size")
    return value


def _flags(options: Mapping[str, str | int | float | bool]) -> list[str]:
    """Command-line options: true is the flag alone, false leaves it out."""
    flags: list[str] = []
    for name, value in options.items():
        if value is not False:
            flags += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return flags
