"""Rollouts of text by an SGLang server, the trainer's policy pushed to it and verified."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from unirl.rollout.engine.checkpoint import local_folder
from unirl.rollout.engine.child.devices import dealt_gpus
from unirl.rollout.engine.child.messages import Message, MessageCodec
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
from unirl.types.bounds import Bounds, Positive, PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import TextCodec
from unirl.types.protocols.training import PolicyStore
from unirl.types.sampling import Precision

logger = logging.getLogger(__name__)

_DTYPES: dict[Precision, tuple[str, str]] = {
    "fp32": ("float32", "torch.float32"),
    "bf16": ("bfloat16", "torch.bfloat16"),
    "fp16": ("float16", "torch.float16"),
}
_VARIABLES = {
    "SGLANG_MM_AVOID_RETOKENIZE": "1",
    "SGLANG_VLM_CACHE_SIZE_MB": "0",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
"""The first keeps the tokens of prompts with images; SGLang would otherwise decode and tokenise them again. The second
keeps no embeddings of pictures: SGLang forgets keys and values after a push, and them not."""
_OWNED = {"tp-size": "engine.tensor_parallel_size", "tensor-parallel-size": "engine.tensor_parallel_size"}
"""Options of the server that are keywords of the engine."""
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

    Images of prompts travel with the request, in 8 bits, and SGLang must count as many tokens as the pipeline did.

    See ChildEngine, ServedTextEngine and SGLangInstance. Pushed weights travel as safetensors files that the server
    reads by /update_weights_from_disk or /load_lora_adapter: nothing is pickled, and unlike tensors over HTTP
    (/update_weights_from_tensor) they need no begin_weight_update/end_weight_update session. So the server must see
    `transfer_dir`.

    pipeline: makes prompts of requests and texts of tokens; SGLang sees tokens alone.
    model: folder of the weights that the server starts with, which must be the policy's; or a hub id whose files are
        here already, since the trainer has loaded it.
    url: of a server that runs already, with this model; of one that is split over hosts, of the first (docs/engines.md,
        "Over several hosts"). None starts one, with `server_args` as more options
        ({"schedule-policy": "fcfs"} is --schedule-policy fcfs), on `port` + its number, or on a free port where it is
        None.
    python: interpreter of the environment that has SGLang, for a server that is started here; None is the running one.
        Without a GPU, make one with `uv sync --project environments/sglang-cpu` and name
        `environments/sglang-cpu/.venv/bin/python`.
    dtype: SGLang computes and keeps weights in it; pushes must bring it.
    context_length, vocab_size: limits, checked before a prompt is sent; None takes the model's own.
    max_lora_rank: for policies that are pushed as LoRA adapters; None for full weights.
    kv_cache_tokens: tokens whose keys and values the server keeps; None leaves it to SGLang, on a GPU.
    tensor_parallel_size: devices that the model is split over, each in a process of the server; it must divide the
        model's heads. num_instances: servers, each with the whole model. gpus: those of this host, dealt to the servers
        in this order; None where one server takes what this process sees.
    num_threads: CPU threads of each process of a server on a host without a GPU.
    uses_memory_saver: whether `sleep` frees weights and caches; they must be pushed again after it.
    transfer_dir: where pushed weights lie, until the next push; memory-backed by default, once the model's size.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.engine.sglang_llm.rules"
    environment: ClassVar[str] = "environments/sglang-cpu"
    versions: ClassVar[tuple[str, ...]] = (SGLANG_DIFFUSION.version,)
    codec: ClassVar[MessageCodec] = MessageCodec("SGLang", Generate, Generations)
    sleep_option: ClassVar[str | None] = "uses_memory_saver"

    def __init__(
        self,
        pipeline: TextCodec,
        policies: PolicyStore | None = None,
        *,
        model: str,
        url: str | None = None,
        device: str = "cuda",
        rank: int = 0,
        python: str | None = None,
        port: Annotated[int, Bounds(ge=1, le=65535)] | None = None,
        dtype: Precision = "bf16",
        context_length: PositiveInt | None = None,
        vocab_size: PositiveInt | None = None,
        kv_cache_tokens: PositiveInt | None = None,
        tensor_parallel_size: PositiveInt = 1,
        num_instances: PositiveInt = 1,
        gpus: Sequence[int] | None = None,
        num_threads: PositiveInt = 1,
        max_lora_rank: PositiveInt | None = None,
        uses_memory_saver: bool = False,
        transfer_dir: str = "/dev/shm",
        server_args: Mapping[str, str | int | float | bool] | None = None,
        start_timeout_s: Positive = 900.0,
        timeout_s: Positive = 1800.0,
        track: str = "text",
    ) -> None:
        folder = _model_folder(model)
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        for unseen in unseen_pictures("engine", config):
            raise ConfigError(unseen)
        if url is not None:
            given = {
                "port": port,
                "kv_cache_tokens": kv_cache_tokens,
                "tensor_parallel_size": tensor_parallel_size,
                "gpus": gpus,
                "server_args": server_args,
                "num_instances": num_instances,
                "transfer_dir": transfer_dir,
            }
            for wrong in running_server("engine", url, given):
                raise ConfigError(wrong)
        if own := sorted(_OWNED.keys() & set(server_args or {})):
            raise ConfigError(f"engine.server_args sets {own[0]}. Set {_OWNED[own[0]]}.")
        executable = "" if url is not None else interpreter(python, engine="SGLang", environment=self.environment)
        is_cpu = device == "cpu" and url is None
        if is_cpu:
            _check_cpu(kv_cache_tokens, max_lora_rank, uses_memory_saver=uses_memory_saver)
        name, torch_name = _DTYPES[dtype]
        self._pipeline = pipeline
        self._track = track
        self._dtype = torch_name
        self._transfer_dir = transfer_dir
        self._model_limits = Limits(
            context_length or _limit(config, "max_position_embeddings"),
            vocab_size or _limit(config, "vocab_size"),
            config.get("image_token_id"),
        )
        options: dict[str, str | int | float | bool] = {
            "model-path": str(folder.absolute()),
            "host": "127.0.0.1",
            "dtype": name,
            "context-length": self._model_limits.context_length,
            "skip-tokenizer-init": True,
            "tp-size": tensor_parallel_size,
            "enable-memory-saver": uses_memory_saver,
            "enable-lora": max_lora_rank is not None,
            **(_ON_A_CPU if is_cpu else {}),
            **({} if kv_cache_tokens is None else {"max-total-tokens": kv_cache_tokens}),
            **({"max-lora-rank": max_lora_rank, "lora-target-modules": "all"} if max_lora_rank is not None else {}),
            **(server_args or {}),
        }
        common = _VARIABLES | (_cpu_variables(num_threads, tensor_parallel_size) if is_cpu else {})
        devices = (
            [{}]
            if url is not None
            else dealt_gpus(is_cpu, num_instances, tensor_parallel_size, gpus, keyword="tensor_parallel_size")
        )
        launch = ServerLaunch(
            model=folder,
            dtype=torch_name,
            policy_version=0 if policies is None else policies.policy_version,
            has_lora=max_lora_rank is not None,
            versions=self.versions,
            environment=self.environment,
            check=self._check_ready,
            start_timeout_s=start_timeout_s,
            timeout_s=timeout_s,
        )

        def instances(root: Path) -> list[SGLangInstance]:
            def started(number: int, own: Path) -> SGLangServer:
                if url is not None:
                    return SGLangServer(url, None, own / "log", root)
                at = free_port() if port is None else port + rank * num_instances + number
                settings = [f"{key}={value}" for key, value in (common | devices[number]).items()]
                flags = _flags(options | {"port": at})
                command = ["env", *settings, executable, "-m", "sglang.launch_server", *flags]
                return SGLangServer(f"http://127.0.0.1:{at}", command, own / "log", root)

            return [
                SGLangInstance(launch, functools.partial(started, number), root / f"instance-{number}")
                for number in range(num_instances)
            ]

        self._begin(
            instances,
            policies,
            has_lora=max_lora_rank is not None,
            sleep_level=2 if uses_memory_saver else 0,
            transfer_dir=transfer_dir,
        )

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
    """The folder of a model on this machine. Raises ConfigError where there is none."""
    folder = local_folder(model)
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"engine.model = {model!r} is no folder with a {CONFIG_FILE}; SGLang's pushes are compared with its "
            "checkpoint. Give the folder of a model, or the hub id of one that has been downloaded."
        )
    return folder


def _check_cpu(kv_cache_tokens: int | None, max_lora_rank: int | None, *, uses_memory_saver: bool) -> None:
    """Raise ConfigError for what SGLang cannot do without a GPU."""
    if kv_cache_tokens is None:
        raise ConfigError(
            "engine.kv_cache_tokens is needed on a CPU: SGLang would take a share of the host's memory for them. Set "
            "it to the tokens of all samples that are drawn at once."
        )
    if max_lora_rank is not None:
        raise ConfigError(adapters_need_a_gpu("engine", max_lora_rank))
    if uses_memory_saver:
        raise ConfigError(
            "engine.uses_memory_saver: true would end SGLang on a CPU at its first sleep. Set it to false."
        )


def _cpu_variables(num_threads: int, num_ranks: int) -> dict[str, str]:
    """Threads of each process. Several ranks on one NUMA node must be told their cores, or SGLang refuses them; and
    that there is no NCCL, which torch brings along without a GPU too."""
    threads = {"OMP_NUM_THREADS": str(num_threads)}
    if num_ranks == 1:
        return threads
    cores = sorted(os.sched_getaffinity(0))
    dealt = [cores[rank::num_ranks] or [cores[rank % len(cores)]] for rank in range(num_ranks)]
    bound = "|".join(",".join(map(str, own)) for own in dealt)
    return threads | {"SGLANG_CPU_OMP_THREADS_BIND": bound, "SGLANG_NCCL_SO_PATH": "none"}


def _limit(config: Mapping[str, Any], name: str) -> int:  # Any: JSON
    """A number of the language model, which the configurations of vision-language models keep in a part of theirs."""
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
