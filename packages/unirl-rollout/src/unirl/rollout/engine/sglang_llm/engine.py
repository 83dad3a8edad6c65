"""Rollouts of text by an SGLang server on a GPU host, the trainer's policy pushed to it and verified."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from safetensors.torch import save_file

from unirl.rollout.engine.base import BaseRolloutEngine
from unirl.rollout.engine.checkpoint import checkpoint_shapes
from unirl.rollout.engine.push import PushReceiver
from unirl.rollout.engine.served_text import (
    check_fits,
    check_version,
    generation,
    text_segment,
    text_track,
)
from unirl.rollout.engine.sglang_llm.request import PromptImages, data_uris, payload
from unirl.rollout.engine.sglang_llm.response import generations
from unirl.rollout.engine.sglang_llm.server import SGLangServer
from unirl.rollout.text_checks import text_params
from unirl.types.bounds import Bounds, Positive, PositiveInt, bounded
from unirl.types.errors import ConfigError, WeightSyncError
from unirl.types.protocols import PolicyStore, TextCodec
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import Precision
from unirl.types.weights import AdapterConfig, WeightBucket, WeightReceipt, WeightSpec

_DTYPES: dict[Precision, tuple[str, str]] = {
    "fp32": ("float32", "torch.float32"),
    "bf16": ("bfloat16", "torch.bfloat16"),
    "fp16": ("float16", "torch.float16"),
}
_TAGS = ["weights", "kv_cache"]
CONFIG_FILE = "config.json"
KEEP_PROMPTS = "SGLANG_MM_AVOID_RETOKENIZE=1"
"""Keeps the tokens of prompts with images; SGLang would otherwise decode and tokenise them again."""


@bounded("engine")
class SGLangRolloutEngine(BaseRolloutEngine):
    """Samples completions with SGLang. Implements RolloutEngine and WeightReceiver of unirl.types.protocols.

    Images of prompts travel with the request, in 8 bits, and SGLang must count as many tokens as the pipeline did.

    Pushed weights travel as safetensors files that the server reads by /update_weights_from_disk or /load_lora_adapter:
    nothing is pickled, and unlike tensors over HTTP (/update_weights_from_tensor) they need no
    begin_weight_update/end_weight_update session. So the server must see `transfer_dir`. SGLang does not say which of
    its parameters took a value; the tensors are compared with the model's checkpoint here instead.

    pipeline: makes prompts of requests and texts of tokens; SGLang sees tokens alone.
    model: folder of the weights that the server starts with, which must be the policy's; or a hub id whose files are
        here already, since the trainer has loaded it.
    url: of a server that runs already, with this model; None starts one on `port` + rank, with `server_args` as more
        options ({"tp-size": 2} is --tp-size 2).
    dtype: SGLang computes and keeps weights in it; pushes must bring it.
    context_length, vocab_size: limits, checked before a prompt is sent; None takes the model's own.
    max_lora_rank: for policies that are pushed as LoRA adapters; None for full weights.
    uses_memory_saver: whether `sleep` frees weights and caches; they must be pushed again after it.
    transfer_dir: where pushed weights lie; memory-backed by default, once the model's size.
    """

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
        rank: int = 0,
        port: Annotated[int, Bounds(ge=1, le=65535)] = 30000,
        dtype: Precision = "bf16",
        context_length: PositiveInt | None = None,
        vocab_size: PositiveInt | None = None,
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
        if url is not None and server_args:
            raise ConfigError(f"engine.server_args do nothing for a server that runs already, at {url}")
        name, torch_name = _DTYPES[dtype]
        self._pipeline = pipeline
        context_length = context_length or _limit(self._config, "max_position_embeddings")
        vocab_size = vocab_size or _limit(self._config, "vocab_size")
        self._limits = {"context_length": context_length, "vocab_size": vocab_size}
        self._has_lora = max_lora_rank is not None
        self._uses_memory_saver = uses_memory_saver
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._track = track
        self._calls = itertools.count()
        self._num_files = itertools.count()
        version = 0 if policies is None else policies.policy_version
        self._pushes = PushReceiver(checkpoint_shapes(self._model), torch_name, version)
        self._is_ready = False
        self._adapter: str | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="unirl-sglang-", dir=transfer_dir))
        options: dict[str, str | int | float | bool] = {
            "model-path": str(self._model.absolute()),
            "host": "127.0.0.1",
            "port": port + rank,
            "dtype": name,
            "context-length": context_length,
            "skip-tokenizer-init": True,
            "enable-memory-saver": uses_memory_saver,
            "enable-lora": self._has_lora,
            **({"max-lora-rank": max_lora_rank, "lora-target-modules": "all"} if max_lora_rank is not None else {}),
            **(server_args or {}),
        }
        command = None
        if url is None:
            command = ["env", KEEP_PROMPTS, sys.executable, "-m", "sglang.launch_server", *_flags(options)]
        self._server = SGLangServer(url or f"http://127.0.0.1:{port + rank}", command, self._folder / "log")

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
        call = generation(req, conditions, stops, next(self._calls), takes_images=True)
        check_fits(call, **self._limits)
        body = payload(call, self._adapter, self._images(req))
        answer = generations(self._post("/generate", body), [len(prompt) for prompt in call.prompts])
        check_version(answer, self._pushes.policy_version)
        segment = text_segment(answer, call, params)
        track = text_track(req, conditions, segment, self._pipeline.decode(segment), answer.policy_version)
        return RolloutResp(tracks={self._track: track})

    def _images(self, req: RolloutReq) -> PromptImages | None:
        """The images of a request; None where it has none."""
        shown = req.primitives.get("image")
        images = [] if shown is None else data_uris(shown)
        if not any(images):
            return None
        placeholder = self._config.get("image_token_id")
        if placeholder is None:
            raise ConfigError(
                f"the request has images, but {self._model / CONFIG_FILE} names no image_token_id: the model reads "
                "text alone. Choose a vision-language model, or prompts without images."
            )
        return PromptImages(images, int(placeholder))

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def check_prompts(self, req: RolloutReq) -> None:
        """Raise ConfigError where a prompt does not fit the context."""
        params = text_params(req)
        conditions = self._pipeline.encode(req.primitives, params)
        call = generation(req, conditions, self._pipeline.stop_token_ids(params), next(self._calls))
        check_fits(call, **self._limits)

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
            save_file({name: tensor.contiguous() for name, tensor in bucket.tensors.items()}, path, {"format": "pt"})

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def finish_weights(self, policy_version: int, policy: str | None = None) -> WeightReceipt:
        """Let the server read what was received, see WeightReceiver."""
        push = self._pushes.finish(policy_version)
        self._wait()
        with self._pushes.loading(policy_version, policy):
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
        shutil.rmtree(self._push_folder())
        return WeightReceipt(policy_version, push.num_tensors, push.num_bytes, None)

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
            self._name_version(self._pushes.policy_version)  # SGLang starts with the version "default"
            self._is_ready = True

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
    folder = Path(model)
    if not folder.is_dir() and model.count("/") == 1:
        try:
            from huggingface_hub import snapshot_download
            from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
        except ImportError as error:
            raise ImportError("hub ids need huggingface-hub: pip install 'unirl-rollout[sglang]'") from error
        with contextlib.suppress(LocalEntryNotFoundError, HFValidationError):
            folder = Path(snapshot_download(model, local_files_only=True))
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"engine.model = {model!r} is no folder with a {CONFIG_FILE}; SGLang's pushes are compared with its "
            "checkpoint. Give the folder of a model, or the hub id of one that has been downloaded."
        )
    return folder


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
