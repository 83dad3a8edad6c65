"""One SGLang server as an instance of the pool: what the trainer's messages are in its HTTP interface."""

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
    """What a server says when it generates."""

    version: str
    max_running: int
    """Samples that it writes at once."""
    num_ranks: int
    """Processes that its model is split over."""
    num_hosts: int
    """Hosts that they are on."""


@dataclass(frozen=True, kw_only=True)
class ServerLaunch:
    """What all servers of an engine begin with."""

    model: Path
    dtype: str
    """Of its weights as torch writes it: "torch.bfloat16"."""
    policy_version: int
    has_lora: bool
    versions: tuple[str, ...]
    """Of SGLang."""
    environment: str
    """Project in a clone that makes one for a host without a GPU."""
    check: Callable[[ServerReady, int], None]
    """(what it says, process id): looks at a server that has begun."""
    start_timeout_s: float
    timeout_s: float


class SGLangInstance(WeightsHost):
    """A server that is started with the object, by `start(folder)`, and loads meanwhile; or one that runs already.

    Pushed weights are safetensors files that it reads. SGLang calls a push a success whatever it left out. So tensors
    are compared with the model's checkpoint here, and SGLang's own checksum of every parameter must have changed, and
    that of no constant. Where one has not, and in the first push, it fills them with noise and reads again.
    folder: of this instance alone, for the server's log and what it reads.
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
        """SGLang's checksums after the last push; None where its weights may be others since."""
        self._pushes = PushReceiver(checkpoint_shapes(launch.model), launch.dtype, launch.policy_version)
        self._aborts = Aborts()
        self._generating: list[int] = []
        """Numbers of the calls that the server has."""
        self._server = self._start(self._folder)

    @property
    def pid(self) -> int:
        """Id of the server's process, also of the group of all that it starts; 0 for a server that ran already."""
        return self._server.pid or 0

    @property
    def name(self) -> str:
        """Engine and process, as errors call them."""
        return self._server.name

    @property
    def is_alive(self) -> bool:
        """Whether the process runs; true for a server that ran already."""
        return self._server.is_alive

    def ready(self) -> ServerReady:
        """What the server says when it generates; waits for it once. Raises ConfigError for another version of SGLang
        than this was written against."""
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
        """Do what a message asks. Safe from several threads for `Generate`."""
        self.ready()
        return self._generate(message) if isinstance(message, Generate) else self.answer_weights(message)

    def post(self, message: Message) -> None:
        """Take an `Abort`: what the server has of those calls ends, what comes later does not begin."""
        if not isinstance(message, Abort):
            raise ContractError(f"an SGLang server does not take {type(message).__name__} without an answer")
        self._aborts.add(message.number)
        with self._counting:
            ends = any(number in self._aborts for number in self._generating)
        if ends:
            self._post("/abort_request", {"abort_all": True})

    def restart(self) -> None:
        """Begin another server in the place of this one."""
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
                num = len(call.prompts)
                return Generations(self._pushes.policy_version, [[]] * num, [[]] * num, ["abort"] * num)
            self._generating.append(call.number)
        try:
            answer = self._post("/generate", payload(call, self._adapter))
        finally:
            with self._counting:
                self._generating.remove(call.number)
        return generations(answer, [len(prompt) for prompt in call.prompts])

    # Weights ----------------------------------------------------------------------------------------------------

    def _begin_push(self) -> None:
        shutil.rmtree(self._push_folder, ignore_errors=True)
        # Other hosts may remember for a minute what a folder that they have seen had in it, so each push has its own.
        self._push_folder = self._folder / f"weights-{next(self._numbers)}"
        self._push_folder.mkdir()
        for path in self._launch.model.glob("*.json"):
            if not path.name.endswith(".index.json"):
                shutil.copy(path, self._push_folder)

    def _keep(self, path: str, bucket: WeightBucket) -> None:
        kept = self._push_folder / f"model-{next(self._numbers):05d}.safetensors"
        # SGLang reads Qwen2.5-VL under the names of its checkpoint alone.
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
        """Let the server read the push; its checksums then. Raises WeightSyncError where it says that it could not."""
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
        """SGLang's own of every parameter, a mapping for each of its ranks."""
        return checksums(self._check_weights("checksum"))

    def _finish_push(self, policy_version: int) -> Loaded:
        loaded = super()._finish_push(policy_version)
        shutil.rmtree(self._push_folder)
        return loaded

    @property
    def _takes_adapters(self) -> bool:
        return self._launch.has_lora

    def _act_with(self, adapter: SentAdapter) -> None:
        """Each adapter has a name of its own, so caches never mix them."""
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
        """Raise WeightSyncError unless the server answers under the version that was pushed."""
        found = (self._server.get("/model_info", self._launch.timeout_s) or {}).get("weight_version")
        if found != str(version):
            raise WeightSyncError(f"version {version} was pushed, but SGLang says that it has {found}")

    def _name_version(self, version: int) -> None:
        self._must("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def _post(self, path: str, body: dict[str, Any]) -> Any:  # Any: JSON
        return self._server.post(path, body, self._launch.timeout_s)

    def _must(self, path: str, body: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
        """POST what answers with a `success` of its own. Raises WeightSyncError where it is not true."""
        answer = self._post(path, body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise WeightSyncError(f"SGLang's {path} did not succeed: {answer}")
        return answer


def _whole(info: Mapping[str, Any], name: str) -> int:  # Any: JSON
    """A number of /server_info. Raises ContractError where it is none."""
    value = info.get(name)
    if not isinstance(value, int):
        raise ContractError(f"SGLang's /server_info says {name} = {value!r}, which is no number")
    return value


def _max_running(info: Mapping[str, Any]) -> int:  # Any: JSON
    """Samples that a server writes at once. Raises ContractError where it does not say."""
    try:
        return sum(int(state["effective_max_running_requests_per_dp"]) for state in info["internal_states"])
    except (KeyError, TypeError, ValueError) as error:
        raise ContractError(
            f"SGLang's /server_info does not say how many requests run at once ({type(error).__name__}: {error}): "
            f"{str(info.get('internal_states'))[:200]}"
        ) from error
