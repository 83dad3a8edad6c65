"""Rollouts of text by an SGLang server, the trainer's policy pushed to it and verified."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from safetensors.torch import save_file

from unirl.rollout.engine.base import BaseRolloutEngine
from unirl.rollout.engine.checkpoint import checkpoint_names, checkpoint_shapes, local_folder
from unirl.rollout.engine.child.devices import dealt_gpus
from unirl.rollout.engine.child.process import interpreter
from unirl.rollout.engine.push import PushReceiver, check_version, refuse
from unirl.rollout.engine.served_text.call import (
    Limits,
    check_fits,
    generation,
    prompt_tokens,
    text_segment,
    text_track,
)
from unirl.rollout.engine.sglang_llm.request import payload
from unirl.rollout.engine.sglang_llm.response import (
    CONSTANTS,
    changed_constants,
    checksums,
    generations,
    kept_parameters,
    num_parameters,
)
from unirl.rollout.engine.sglang_llm.rules import adapters_need_a_gpu, unseen_pictures
from unirl.rollout.engine.sglang_llm.server import SGLangServer, free_port
from unirl.rollout.text_checks import text_params
from unirl.types.bounds import Bounds, Positive, PositiveInt, bounded
from unirl.types.errors import ConfigError, WeightSyncError
from unirl.types.protocols import PolicyStore, TextCodec
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import Precision
from unirl.types.weights import AdapterConfig, WeightBucket, WeightReceipt, WeightSpec

logger = logging.getLogger(__name__)

_DTYPES: dict[Precision, tuple[str, str]] = {
    "fp32": ("float32", "torch.float32"),
    "bf16": ("bfloat16", "torch.bfloat16"),
    "fp16": ("float16", "torch.float16"),
}
_TAGS = ["weights", "kv_cache"]
CONFIG_FILE = "config.json"
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
class SGLangRolloutEngine(BaseRolloutEngine):
    """Samples completions with SGLang. Implements RolloutEngine and WeightReceiver of unirl.types.protocols.

    Images of prompts travel with the request, in 8 bits, and SGLang must count as many tokens as the pipeline did.

    Pushed weights travel as safetensors files that the server reads by /update_weights_from_disk or /load_lora_adapter:
    nothing is pickled, and unlike tensors over HTTP (/update_weights_from_tensor) they need no
    begin_weight_update/end_weight_update session. So the server must see `transfer_dir`. SGLang calls a push a success
    whatever it left out. So the tensors are compared with the model's checkpoint here, SGLang fills its parameters with
    noise before it reads, and then its own checksum of every one must have changed, and that of no constant.

    pipeline: makes prompts of requests and texts of tokens; SGLang sees tokens alone.
    model: folder of the weights that the server starts with, which must be the policy's; or a hub id whose files are
        here already, since the trainer has loaded it.
    url: of a server that runs already, with this model; None starts one, with `server_args` as more options
        ({"schedule-policy": "fcfs"} is --schedule-policy fcfs), on `port` + rank, or on a free port where `port` is
        None.
    python: interpreter of the environment that has SGLang, for a server that is started here; None is the running one.
        Without a GPU, make one with `uv sync --project environments/sglang-cpu` and name
        `environments/sglang-cpu/.venv/bin/python`.
    dtype: SGLang computes and keeps weights in it; pushes must bring it.
    context_length, vocab_size: limits, checked before a prompt is sent; None takes the model's own.
    max_lora_rank: for policies that are pushed as LoRA adapters; None for full weights.
    kv_cache_tokens: tokens whose keys and values the server keeps; None leaves it to SGLang, on a GPU.
    tensor_parallel_size: devices that the model is split over, each in a process of the server; it must divide the
        model's heads. gpus: those of this host, as many; None takes what this process sees.
    num_threads: CPU threads of each process of a server on a host without a GPU.
    uses_memory_saver: whether `sleep` frees weights and caches; they must be pushed again after it.
    transfer_dir: where pushed weights lie; memory-backed by default, once the model's size.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.engine.sglang_llm.rules"
    environment: ClassVar[str] = "environments/sglang-cpu"
    versions: ClassVar[tuple[str, ...]] = ("0.5.23",)
    has_own_weights: ClassVar[bool] = True
    adapter_option: ClassVar[str | None] = "max_lora_rank"
    takes_media: ClassVar[bool] = True
    can_abort: ClassVar[bool] = True
    can_sleep: ClassVar[bool] = True
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
        self._model = _model_folder(model)
        self._config = json.loads((self._model / CONFIG_FILE).read_text(encoding="utf-8"))
        for unseen in unseen_pictures("engine", self._config):
            raise ConfigError(unseen)
        if url is not None and server_args:
            raise ConfigError(f"engine.server_args do nothing for a server that runs already, at {url}")
        if own := sorted(_OWNED.keys() & set(server_args or {})):
            raise ConfigError(f"engine.server_args sets {own[0]}. Set {_OWNED[own[0]]}.")
        executable = interpreter(python, engine="SGLang", environment=self.environment)
        is_cpu = device == "cpu" and url is None
        if is_cpu:
            _check_cpu(kv_cache_tokens, max_lora_rank, uses_memory_saver=uses_memory_saver)
        name, torch_name = _DTYPES[dtype]
        self._pipeline = pipeline
        context_length = context_length or _limit(self._config, "max_position_embeddings")
        vocab_size = vocab_size or _limit(self._config, "vocab_size")
        self._limits = Limits(context_length, vocab_size, self._config.get("image_token_id"))
        self._has_lora = max_lora_rank is not None
        self._uses_memory_saver = uses_memory_saver
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._track = track
        self._calls = itertools.count()
        self._num_files = itertools.count()
        version = 0 if policies is None else policies.policy_version
        self._pushes = PushReceiver(checkpoint_shapes(self._model), torch_name, version)
        self._names = checkpoint_names(self._model)
        self._is_ready = False
        self._adapter: str | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="unirl-sglang-", dir=transfer_dir))
        number = free_port() if port is None else port + rank
        options: dict[str, str | int | float | bool] = {
            "model-path": str(self._model.absolute()),
            "host": "127.0.0.1",
            "port": number,
            "dtype": name,
            "context-length": context_length,
            "skip-tokenizer-init": True,
            "tp-size": tensor_parallel_size,
            "enable-memory-saver": uses_memory_saver,
            "enable-lora": self._has_lora,
            **(_ON_A_CPU if is_cpu else {}),
            **({} if kv_cache_tokens is None else {"max-total-tokens": kv_cache_tokens}),
            **({"max-lora-rank": max_lora_rank, "lora-target-modules": "all"} if max_lora_rank is not None else {}),
            **(server_args or {}),
        }
        command = None
        if url is None:
            (devices,) = dealt_gpus(is_cpu, 1, tensor_parallel_size, gpus, keyword="tensor_parallel_size")
            variables = _VARIABLES | devices | (_cpu_variables(num_threads, tensor_parallel_size) if is_cpu else {})
            settings = [f"{key}={value}" for key, value in variables.items()]
            command = ["env", *settings, executable, "-m", "sglang.launch_server", *_flags(options)]
        self._server = SGLangServer(url or f"http://127.0.0.1:{number}", command, self._folder / "log")

    # Rollout ----------------------------------------------------------------------------------------------------

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """One completion for every row of this rank's request.

        Raises ConfigError for a prompt that does not fit, WeightSyncError where `policy` is not the one that was pushed
        last or the samples are not of it, WorkerError where the server fails.
        """
        self._pushes.require(policy)
        params = text_params(req)
        self._wait()
        conditions = self._pipeline.encode(req.primitives, params)
        stops = self._pipeline.stop_token_ids(params)
        call = generation(req, conditions, stops, next(self._calls), placeholder=self._limits.image_token)
        check_fits(call.prompts, call.max_new_tokens, self._limits)
        body = payload(call, self._adapter)
        answer = generations(self._post("/generate", body), [len(prompt) for prompt in call.prompts])
        check_version(answer.policy_version, self._pushes.policy_version)
        segment = text_segment(answer, call, params)
        track = text_track(req, conditions, segment, self._pipeline.decode(segment), answer.policy_version)
        return RolloutResp(tracks={self._track: track})

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def check_prompts(self, req: RolloutReq) -> None:
        """Raise ConfigError where a prompt does not fit the context."""
        params = text_params(req)
        prompts = prompt_tokens(self._pipeline.encode(req.primitives, params))
        check_fits(prompts, params.max_new_tokens, self._limits)

    def abort(self) -> None:
        """End the `generate` that runs in another thread: it returns what it has, unfinished samples ABORTED."""
        self._post("/abort_request", {"abort_all": True})

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def sleep(self) -> None:
        """Free device memory, where `uses_memory_saver` says so."""
        if self._uses_memory_saver:
            self._wait()
            self._post("/release_memory_occupation", {"tags": _TAGS})
            self._pushes.invalidate("its weights were freed by sleep")

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def wake_up(self) -> None:
        """Take the memory back. The weights must be pushed before the engine generates."""
        if self._uses_memory_saver:
            self._post("/resume_memory_occupation", {"tags": _TAGS})

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def shutdown(self) -> None:
        """Stop the server, if it is ours, and delete its files. Safe to call twice."""
        self._server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    # Weights ----------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Version of the policy that was pushed last."""
        return self._pushes.policy_version

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def begin_weights(self, policy_version: int, specs: Sequence[WeightSpec]) -> None:
        """Announce a push of the whole model, see WeightReceiver."""
        if self._has_lora:
            raise ConfigError("this engine was started for LoRA adapters (engine.max_lora_rank); push the adapter")
        self._pushes.announce(policy_version, specs)
        folder = self._push_folder()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for path in self._model.glob("*.json"):
            if not path.name.endswith(".index.json"):
                shutil.copy(path, folder)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def receive_weights(self, bucket: WeightBucket) -> None:
        """Take a bucket, see WeightReceiver."""
        path = self._push_folder() / f"model-{next(self._num_files):05d}.safetensors"
        with self._pushes.receiving(bucket):
            # SGLang reads Qwen2.5-VL under the names of its checkpoint alone.
            own = {self._names[name]: tensor.contiguous() for name, tensor in bucket.tensors.items()}
            save_file(own, path, {"format": "pt"})

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def finish_weights(self, policy_version: int, policy: str | None = None) -> WeightReceipt:
        """Let the server read what was received, see WeightReceiver."""
        push = self._pushes.finish(policy_version)
        self._wait()
        with self._pushes.loading(policy_version, policy):
            began = checksums(self._check_weights("checksum"))
            self._check_weights("reset_tensors", skip_tensor_list=CONSTANTS)
            noise = checksums(self._check_weights("checksum"))
            self._must(
                "/update_weights_from_disk",
                {
                    "model_path": str(self._push_folder()),
                    "load_format": "safetensors",
                    "flush_cache": True,
                    "weight_version": str(policy_version),
                },
            )
            self._check_version(policy_version)
            found = checksums(self._check_weights("checksum"))
            refuse("parameters of SGLang's model took no value", kept_parameters(noise, found))
            refuse("constants of SGLang's model changed", changed_constants(began, found))
        shutil.rmtree(self._push_folder())
        return WeightReceipt(policy_version, push.num_tensors, push.num_bytes, num_parameters(found))

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def load_adapter(self, bucket: WeightBucket, config: AdapterConfig, policy: str | None = None) -> WeightReceipt:
        """Swap the LoRA adapter, see WeightReceiver. Each version has a name of its own, so caches never mix them."""
        if not self._has_lora:
            raise ConfigError("this engine was started without LoRA: set engine.max_lora_rank")
        self._pushes.check_adapter(bucket, config.rank)
        name = f"policy-{bucket.policy_version}-{next(self._calls)}"
        folder = self._folder / name
        folder.mkdir()
        prefixed = {f"base_model.model.{key}": tensor.contiguous() for key, tensor in bucket.tensors.items()}
        save_file(prefixed, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config.peft()), encoding="utf-8")
        self._wait()
        with self._pushes.loading(bucket.policy_version, policy):
            if self._adapter is not None:
                self._must("/unload_lora_adapter", {"lora_name": self._adapter})
                shutil.rmtree(self._folder / self._adapter)
                self._adapter = None
            loaded = self._must("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
            if name not in (loaded.get("loaded_adapters") or {}):
                raise WeightSyncError(f"SGLang loaded adapters {loaded.get('loaded_adapters')}, but not {name}")
            self._adapter = name
            self._name_version(bucket.policy_version)
            self._check_version(bucket.policy_version)
        return WeightReceipt(bucket.policy_version, len(bucket.tensors), bucket.num_bytes, None)

    def _push_folder(self) -> Path:
        return self._folder / "weights"

    def _check_weights(self, action: str, **options: Any) -> dict[str, Any]:  # Any: JSON
        return self._must("/weights_checker", {"action": action, **options})

    def _check_version(self, version: int) -> None:
        """Raise WeightSyncError unless the server answers under the version that was pushed."""
        found = (self._server.get("/model_info", self._timeout_s) or {}).get("weight_version")
        if found != str(version):
            raise WeightSyncError(f"version {version} was pushed, but SGLang says that it has {found}")

    def _name_version(self, version: int) -> None:
        self._must("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    # The server -------------------------------------------------------------------------------------------------

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def wait_until_ready(self) -> None:
        """Wait for the server to generate, see WeightReceiver."""
        self._wait()

    def _wait(self) -> None:
        if not self._is_ready:
            self._server.wait_until_ready(self._start_timeout_s)
            self._check_engine()
            self._name_version(self._pushes.policy_version)  # SGLang starts with the version "default"
            self._is_ready = True

    def _check_engine(self) -> None:
        """Raise ConfigError for a version of SGLang that this was not written against."""
        found = (self._server.get("/server_info", self._timeout_s) or {}).get("version")
        if found not in self.versions:
            raise ConfigError(
                f"the server has SGLang {found}; this unirl-rollout speaks to {', '.join(self.versions)}. Make its "
                f"environment again (`uv sync --project {self.environment}`), or install that version."
            )
        pid = self._server.pid
        logger.info("SGLang %s is up (%s)", found, "already" if pid is None else f"pid {pid}")

    def _post(self, path: str, body: dict[str, Any]) -> Any:  # Any: JSON
        return self._server.post(path, body, self._timeout_s)

    def _must(self, path: str, body: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
        """POST what answers with a `success` of its own. Raises WeightSyncError where it is not true."""
        answer = self._post(path, body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise WeightSyncError(f"SGLang's {path} did not succeed: {answer}")
        return answer


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
