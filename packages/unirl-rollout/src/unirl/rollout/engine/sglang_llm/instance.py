"""One SGLang server as an instance of the pool: translates the trainer's messages to its HTTP interface."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from unirl.rollout.engine.checkpoint import checkpoint_names, checkpoint_shapes
from unirl.rollout.engine.child.adapter import SentAdapter
from unirl.rollout.engine.child.messages import Abort, Loaded, Message
from unirl.rollout.engine.child.server import Aborts
from unirl.rollout.engine.child.weights_host import WeightsHost
from unirl.rollout.engine.push import CompletePush, PushReceiver, refuse
from unirl.rollout.engine.served_text.call import Generate, Generations
from unirl.rollout.engine.sglang_llm.refusals import answered
from unirl.rollout.engine.sglang_llm.request import payload
from unirl.rollout.engine.sglang_llm.response import (
    CONSTANTS,
    changed_constants,
    checksums,
    generations,
    kept_parameters,
    num_parameters,
    refuse_unproved,
)
from unirl.rollout.engine.sglang_llm.server import SGLangServer
from unirl.types.errors import ConfigError, ContractError, WeightSyncError
from unirl.types.weights import WeightBucket

CONFIG_FILE = "config.json"
_TAGS = ["weights", "kv_cache"]


@dataclass(frozen=True, kw_only=True)
class ServerReady:
    """Facts about a server, read when it is ready."""

    version: str
    max_running: int
    """Samples generated at once."""
    num_ranks: int
    """Processes over which the model is split."""
    num_hosts: int
    """Hosts of these processes."""


@dataclass(frozen=True, kw_only=True)
class ServerLaunch:
    """Start arguments that all servers of an engine share."""

    model: Path
    dtype: str
    """Dtype of the weights, such as "torch.bfloat16"."""
    policy_version: int
    has_lora: bool
    versions: tuple[str, ...]
    """Supported versions of SGLang."""
    environment: str
    """Folder of the project that builds its environment on a host without a GPU."""
    check: Callable[[ServerReady, int], None]
    """Takes (facts, process id); checks a server that has started."""
    start_timeout_s: float
    timeout_s: float


class SGLangInstance(WeightsHost):
    """A server that `start(folder)` starts with the object and that loads in the background, or one that already runs.

    The server reads pushed weights from safetensors files. SGLang reports success even if it skips tensors, so tensors
    are compared with the model's checkpoint here, and SGLang's own checksum of every parameter must change, and that of
    no constant. In the first push, and if a checksum did not change, the weights are filled with noise and read again.
    folder: for the server's log and the files it reads; not shared with other instances.
    """

    called = "an SGLang server"

    def __init__(self, launch: ServerLaunch, start: Callable[[Path], SGLangServer], folder: Path) -> None:
        self._launch = launch
        self._start = start
        self._folder = folder
        self._names = checkpoint_names(launch.model)
        self._numbers = itertools.count()
        self._counting = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        launch = self._launch
        self._folder.mkdir(parents=True)
        self._ready: ServerReady | None = None
        self._adapter: str | None = None
        self._push_folder = self._folder / "weights"
        self._loaded: list[dict[str, str]] | None = None
        """SGLang's checksums after the last push; None if its weights may have changed since."""
        self._pushes = PushReceiver(checkpoint_shapes(launch.model), launch.dtype, launch.policy_version)
        self._aborts = Aborts()
        self._generating: list[int] = []
        """Numbers of the running calls."""
        self._server = self._start(self._folder)

    @property
    def pid(self) -> int:
        """Process id of the server, which is also its process group id; 0 for a server that we did not start."""
        return self._server.pid or 0

    @property
    def name(self) -> str:
        """Engine and process, as errors call them."""
        return self._server.name

    @property
    def is_alive(self) -> bool:
        """True if the process runs, and always for a server that we did not start."""
        return self._server.is_alive

    @property
    def death(self) -> str:
        return self._server.death

    def ready(self) -> ServerReady:
        """Facts about the server; the first call waits until it is ready. Raises ConfigError for an unsupported version
        of SGLang."""
        if self._ready is None:
            self._server.wait_until_ready(self._launch.start_timeout_s)
            info = self._server.get("/server_info", self._launch.timeout_s) or {}
            found = info.get("version")
            if found not in self._launch.versions:
                raise ConfigError(
                    f"the server has SGLang {found}; this unirl-rollout speaks to {', '.join(self._launch.versions)}. "
                    f"Make its environment again (`uv sync --project {self._launch.environment}`), or install that "
                    "version."
                )
            if _whole(info, "pp_size") > 1:
                raise ConfigError(
                    f"the server was started with --pp-size {info['pp_size']}; SGLang checks the weights of one stage "
                    "alone, so a push could not be proved. Split the model by --tp-size."
                )
            self._name_version(self._launch.policy_version)  # SGLang starts with the version "default"
            ready = ServerReady(
                version=found,
                max_running=_max_running(info),
                num_ranks=_whole(info, "tp_size"),
                num_hosts=_whole(info, "nnodes"),
            )
            self._launch.check(ready, self.pid)
            self._ready = ready
        return self._ready

    def call(self, message: Message) -> Message:
        """Answer a message. `Generate` may be called from several threads."""
        self.ready()
        return self._generate(message) if isinstance(message, Generate) else self.answer_weights(message)

    def post(self, message: Message) -> None:
        """Take an `Abort`: running requests of those calls end, later ones are not sent."""
        if not isinstance(message, Abort):
            raise ContractError(f"an SGLang server does not take {type(message).__name__} without an answer")
        self._aborts.add(message.number)
        with self._counting:
            ends = any(number in self._aborts for number in self._generating)
        if ends:
            self._post("/abort_request", {"abort_all": True})

    def restart(self) -> None:
        """Replace the server by a new one."""
        self._server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._begin()

    def stop(self) -> None:
        """End the server, if it is ours. Safe to call twice."""
        self._server.stop()

    # Generation -------------------------------------------------------------------------------------------------

    def _generate(self, call: Generate) -> Generations:
        self._pushes.require_usable()
        with self._counting:
            if call.number in self._aborts:
                return self._nothing(call)
            self._generating.append(call.number)
        try:
            return answered(call, self._asked, self._pushes.policy_version)
        finally:
            with self._counting:
                self._generating.remove(call.number)

    def _asked(self, call: Generate, attempt: int) -> Generations:
        if attempt and call.number in self._aborts:
            return self._nothing(call)
        answer = self._post("/generate", payload(call, self._adapter, attempt))
        return generations(answer, [len(prompt) for prompt in call.prompts])

    def _nothing(self, call: Generate) -> Generations:
        """The answer to a call that was aborted before it was sent."""
        num = len(call.prompts)
        return Generations(self._pushes.policy_version, [[]] * num, [[]] * num, ["abort"] * num)

    # Weights ----------------------------------------------------------------------------------------------------

    def _begin_push(self) -> None:
        shutil.rmtree(self._push_folder, ignore_errors=True)
        # Each push has a new folder, since other hosts may cache a folder's contents for a minute.
        self._push_folder = self._folder / f"weights-{next(self._numbers)}"
        self._push_folder.mkdir()
        for path in self._launch.model.glob("*.json"):
            if not path.name.endswith(".index.json"):
                shutil.copy(path, self._push_folder)

    def _keep(self, path: str, bucket: WeightBucket) -> None:
        kept = self._push_folder / f"model-{next(self._numbers):05d}.safetensors"
        # SGLang accepts Qwen2.5-VL tensors only under the checkpoint's names.
        own = {self._names[name]: tensor for name, tensor in bucket.tensors.items()}
        if own.keys() == bucket.tensors.keys():
            kept.hardlink_to(path)
        else:
            save_file(own, kept, {"format": "pt"})

    def _load_kept(self, push: CompletePush) -> int:
        last, self._loaded = self._loaded, None
        ready, began = self.ready(), last or self._checksums()
        found = None if last is None else self._updated(push.policy_version)
        if last is None or found is None or kept_parameters(last, found):
            self._check_weights("reset_tensors", skip_tensor_list=CONSTANTS)
            noise = self._checksums()
            found = self._updated(push.policy_version)
            hosts = f"; each of its {ready.num_hosts} hosts must see {self._push_folder}" if ready.num_hosts > 1 else ""
            refuse(f"parameters of SGLang's model took no value{hosts}", kept_parameters(noise, found))
        refuse("constants of SGLang's model changed", changed_constants(began, found))
        self._loaded = found
        return num_parameters(found)

    def _updated(self, version: int) -> list[dict[str, str]]:
        """Make the server read the push; returns its checksums afterwards. Raises WeightSyncError if the server reports
        a failure."""
        self._must(
            "/update_weights_from_disk",
            {
                "model_path": str(self._push_folder),
                "load_format": "safetensors",
                "flush_cache": True,
                "weight_version": str(version),
            },
        )
        self._check_version(version)
        found = self._checksums()
        refuse_unproved(found, self.ready().num_ranks)
        return found

    def _checksums(self) -> list[dict[str, str]]:
        """SGLang's own checksum of every parameter, one mapping per rank."""
        return checksums(self._check_weights("checksum"))

    def _finish_push(self, policy_version: int) -> Loaded:
        loaded = super()._finish_push(policy_version)
        shutil.rmtree(self._push_folder)
        return loaded

    @property
    def _takes_adapters(self) -> bool:
        return self._launch.has_lora

    def _act_with(self, adapter: SentAdapter) -> None:
        """Load the adapter. Each has a different name, so caches never mix them."""
        version = adapter.policy_version
        name = f"policy-{version}-{next(self._numbers)}"
        if self._adapter is not None:
            self._must("/unload_lora_adapter", {"lora_name": self._adapter})
            self._adapter = None
        loaded = self._must("/load_lora_adapter", {"lora_name": name, "lora_path": str(adapter.folder)})
        if name not in (loaded.get("loaded_adapters") or {}):
            raise WeightSyncError(f"SGLang loaded adapters {loaded.get('loaded_adapters')}, but not {name}")
        self._adapter = name
        self._name_version(version)
        self._check_version(version)

    def _sleep(self, level: int) -> None:
        del level
        self._post("/release_memory_occupation", {"tags": _TAGS})
        self._pushes.invalidate("its weights were freed by sleep")
        self._loaded = None

    def _wake_up(self) -> None:
        self._post("/resume_memory_occupation", {"tags": _TAGS})

    def _check_weights(self, action: str, **options: Any) -> dict[str, Any]:  # Any: JSON
        return self._must("/weights_checker", {"action": action, **options})

    def _check_version(self, version: int) -> None:
        """Raise WeightSyncError unless the server reports the pushed version."""
        found = (self._server.get("/model_info", self._launch.timeout_s) or {}).get("weight_version")
        if found != str(version):
            raise WeightSyncError(f"version {version} was pushed, but SGLang says that it has {found}")

    def _name_version(self, version: int) -> None:
        self._must("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def _post(self, path: str, body: dict[str, Any]) -> Any:  # Any: JSON
        return self._server.post(path, body, self._launch.timeout_s)

    def _must(self, path: str, body: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
        """POST a request whose answer has a `success` flag. Raises WeightSyncError if the flag is not true."""
        answer = self._post(path, body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise WeightSyncError(f"SGLang's {path} did not succeed: {answer}")
        return answer


def _whole(info: Mapping[str, Any], name: str) -> int:  # Any: JSON
    """A number in /server_info. Raises ContractError if it is not a number."""
    value = info.get(name)
    if not isinstance(value, int):
        raise ContractError(f"SGLang's /server_info says {name} = {value!r}, which is no number")
    return value


def _max_running(info: Mapping[str, Any]) -> int:  # Any: JSON
    """Samples that a server generates at once. Raises ContractError if it does not report it."""
    try:
        return sum(int(state["effective_max_running_requests_per_dp"]) for state in info["internal_states"])
    except (KeyError, TypeError, ValueError) as error:
        raise ContractError(
            f"SGLang's /server_info does not say how many requests run at once ({type(error).__name__}: {error}): "
            f"{str(info.get('internal_states'))[:200]}"
        ) from error
