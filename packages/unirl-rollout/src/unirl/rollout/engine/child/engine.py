"""The trainer's side of engines in separate processes: instances, answers, pushes, sleep."""

from __future__ import annotations

import itertools
import json
import shutil
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file

from unirl.rollout.engine.base import BaseRolloutEngine
from unirl.rollout.engine.child.instance import EngineInstance, Launch
from unirl.rollout.engine.child.messages import (
    BeginWeights,
    FinishWeights,
    LoadAdapter,
    Loaded,
    Message,
    MessageCodec,
    Sleep,
    WakeUp,
)
from unirl.rollout.engine.child.options import EngineProcesses
from unirl.rollout.engine.child.process import interpreter
from unirl.rollout.engine.child.pushed_files import PushedFiles
from unirl.rollout.engine.child.rules import sleeps_otherwise
from unirl.rollout.engine.child.shared_push import SharedPush
from unirl.rollout.engine.push import check_version, refuse_other, refuse_other_base
from unirl.types.errors import ConfigError, ContractError, WeightSyncError, WorkerError
from unirl.types.member_pool import Member, MemberPool
from unirl.types.owned_folder import OwnedFolder
from unirl.types.protocols.training import PolicyStore
from unirl.types.renamed import Renamed
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.weights import AdapterConfig, WeightBucket, WeightReceipt, WeightSpec, peft_names

_MAX_ATTEMPTS = 4
"""How often one call may find all processes dead before it fails."""


class ChildEngine(BaseRolloutEngine):
    """An engine whose model runs in other processes, which map pushed weights from files. Implements WeightReceiver of
    unirl.types.protocols.engines.

    The processes start with the object and load while the trainer does; the first call waits for them. A process that
    dies is replaced: the new one receives the last pushed policy, must give the same answer as the others gave right
    after that push, and then gets calls. Unfinished calls of the dead process go to the others.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.engine.child.rules"
    has_own_weights: ClassVar[bool] = True
    adapter_option: ClassVar[str | None] = "max_lora_rank"
    can_sleep: ClassVar[bool] = True
    sleep_option: ClassVar[str | None] = "sleep_level"

    renamed_keywords: ClassVar[Renamed] = {}
    """Old names of constructor keywords, see `unirl.types.renamed`."""
    codec: ClassVar[MessageCodec]
    """Encodes this engine's messages; also has its name in errors."""
    module: ClassVar[str]
    """Module that the engine's interpreter runs; it calls `child.server.main`."""
    environment: ClassVar[str] = ""
    """Folder of the project that builds the engine's environment on a host without a GPU."""
    versions: ClassVar[tuple[str, ...]]
    """Supported versions of the engine's package; a prefix such as "0.5" matches all versions that begin with it."""
    owned_options: ClassVar[frozenset[str]]
    """Options of the engine's constructor that are set here and may not be in `engine.engine_args`."""
    sleep_levels: ClassVar[tuple[int, ...]] = (1, 2)
    """Values of `sleep_level` that free memory."""

    def _checked(self, processes: EngineProcesses) -> EngineProcesses:
        """The same keywords. Raises ConfigError for values that this engine does not support."""
        if repeated := sorted(self.owned_options & set(processes.options)):
            raise ConfigError(f"engine.engine_args sets {repeated}, which the engine sets itself")
        level = processes.sleep_level
        if level and level not in self.sleep_levels:
            raise ConfigError(sleeps_otherwise("engine", level, self.sleep_levels, type(self).__name__))
        if level and processes.is_cpu:
            raise ConfigError(f"engine.sleep_level = {level} does nothing on a CPU. Set it to 0.")
        return processes

    def _launch(
        self,
        processes: EngineProcesses,
        options: dict[str, Any],  # Any: options of the engine's own constructor
        variables: Mapping[str, str],
        policies: PolicyStore | None,
    ) -> None:
        """Start processes of `module`. variables: environment variables that all of them share."""
        launch = Launch(
            codec=self.codec,
            python=interpreter(processes.python, engine=self.codec.engine, environment=self.environment),
            module=self.module,
            versions=self.versions,
            model=processes.model,
            engine_args=options,
            policy_version=_version_of(policies),
            check=self._check_ready,
            start_timeout_s=processes.start_timeout_s,
            timeout_s=processes.timeout_s,
        )
        dealt = processes.variables(variables)
        self._begin(
            lambda root: [
                EngineInstance(launch, own, root / f"instance-{number}", root) for number, own in enumerate(dealt)
            ],
            policies,
            processes,
        )

    def _begin(
        self,
        make_instances: Callable[[Path], Sequence[Member]],
        policies: PolicyStore | None,
        processes: EngineProcesses,
    ) -> None:
        """Make the instances. make_instances: takes the folder for all files of this engine."""
        self._has_lora = processes.max_lora_rank is not None
        self._sleep_level = processes.sleep_level
        self._is_asleep = False
        self._policy_version = _version_of(policies)
        self._policy: str | None = None
        self._ready: Any = None  # Any: the engine's own message
        self._calls = itertools.count()
        self._num_adapters = itertools.count()
        self._push: list[Message] = []
        """Messages of the last push. Its files are kept, since a process that starts later loads them too."""
        self._proof: tuple[Message, Any] | None = None  # Any: what `_read` gives
        """The first call after the last push, and its answer."""
        self._restored: Message = None
        """Answer of the most recently started process to the end of that push."""
        self._owned = OwnedFolder("unirl-engine-", processes.transfer_dir)
        self._folder = self._owned.path
        self._pushed: PushedFiles | SharedPush = PushedFiles(self._folder)
        self._is_lost = False
        """True if a process has died whose policy was kept nowhere else."""
        self._pool = MemberPool(make_instances(self._folder), self._restore)

    @abstractmethod
    def _check_ready(self, answer: Message, pid: int) -> None:
        """Check the first message of a process. Raises ConfigError if the engine does not meet the trainer's needs."""

    def _restore(self, instance: Member) -> None:
        """Send the last pushed policy to a process that has just started, and prove that it took effect."""
        for message in self._push:
            self._restored = instance.call(message)
        self._is_lost = not self._pushed.keeps
        if not self._is_lost:
            self._prove(instance)
        if self._is_asleep:
            instance.call(Sleep(self._sleep_level))

    # A push is proved by the trainer's replay of the samples that follow it. All instances answer one call right after
    # the push and must agree; an instance that starts later answers the same call.

    def _proved(self, message: Message) -> Any:  # Any: what `_read` gives
        """The first instance's answer. Raises WeightSyncError if another instance answers differently."""
        found: list[Any] = []  # Any: what `_read` gives
        for _ in range(_MAX_ATTEMPTS):
            self._pool.heal()
            found = [self._read(answer) for answer in self._pool.broadcast(message)]
            if found:
                break
        else:
            raise WorkerError(self.codec.engine, f"no process survived {type(message).__name__}")
        first, *others = found
        for other in others:
            self._compare(other, first, "the other instances")
        self._proof = message, first
        return first

    def _prove(self, instance: Member) -> None:
        """Raise WeightSyncError if an instance that has just started does not sample what the others did."""
        if self._proof is not None:
            message, expected = self._proof
            found = self._read(instance.call(message))
            self._compare(found, expected, f"those that {instance.name} takes the place of")

    def _forget_proof(self) -> None:
        """Discard the answer that `_prove` compares with, since the policy changes."""
        self._proof = None

    @abstractmethod
    def _read(self, answer: Message) -> Any:  # Any: what `_compare` takes
        """Content of an answer. Raises ContractError if it does not answer this engine's calls."""

    @abstractmethod
    def _compare(self, found: Any, expected: Any, others: str) -> None:  # Any: as `_read`
        """Raise WeightSyncError if two answers to one call differ by more than rounding. others: who gave `expected`,
        for the message."""

    def ready(self) -> Any:  # Any: the engine's own message
        """First message of the first process, sent when its model is loaded. The first call waits for all processes and
        checks them."""
        if self._ready is None:
            try:
                self._ready = self._pool.ready()
            except ConfigError:
                self.shutdown()
                raise
        return self._ready

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def wait_until_ready(self) -> None:
        """Wait for the processes to load the model, see WeightReceiver."""
        self.ready()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def sleep(self) -> None:
        """Free device memory, as `sleep_level` says."""
        if self._sleep_level:
            self._pool.heal()
            self._is_asleep = True
            self._ask_all(Sleep(self._sleep_level))

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def wake_up(self) -> None:
        """Undo `sleep`. After sleep_level 2 the weights must be pushed before the engine generates."""
        if self._sleep_level:
            self._is_asleep = False
            self._ask_all(WakeUp())
            self._pool.heal()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def shutdown(self) -> None:
        """Stop the processes and delete their files. Safe to call twice."""
        self._pool.stop()
        self._owned.remove()

    @property
    def pids(self) -> list[int]:
        """Ids of the engine's processes; each is also its process group id."""
        return self._pool.pids

    @property
    def policy_version(self) -> int:
        """Version of the last pushed policy."""
        return self._policy_version

    def share_memory(self, device: torch.device) -> None:
        """Let the process load each bucket as it comes from now on, out of memory of `device` that it maps.

        A push takes no more memory than its largest bucket, and does not cross the host where the device is a GPU. But
        one that fails leaves weights of two policies, with which the engine does not sample, and a process that dies
        takes the policy with it: what is sampled before the next push is refused.
        Raises ConfigError if the engine cannot do that.
        """
        if not self.shares_memory:
            raise ConfigError(f"sync.transport: ipc is not for {type(self).__name__}, whose processes read files")
        self._pushed = SharedPush(self._folder, device)

    @property
    def bucket_device(self) -> torch.device:
        """The host, where its processes read files, or the device of `share_memory`."""
        return self._pushed.device

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def begin_weights(self, policy_version: int, specs: Sequence[WeightSpec]) -> None:
        """Announce a push of the whole model, see WeightReceiver."""
        if self._has_lora:
            raise ConfigError(
                "this engine was started for LoRA adapters (engine.max_lora_rank); push the adapter, or remove it"
            )
        self._pool.heal()
        begin = BeginWeights(policy_version, list(specs))
        self._ask_all(begin)
        self._push = [begin]
        self._pushed.begin()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def receive_weights(self, bucket: WeightBucket) -> None:
        """Send a bucket to the processes, see WeightReceiver."""
        refuse_other_base(bucket, self._policy_version)
        for message in self._pushed.take(bucket):
            self._ask_all(message)
            if self._pushed.keeps:
                self._push.append(message)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def finish_weights(self, policy_version: int, policy: str | None = None) -> WeightReceipt:
        """Load what was received, see WeightReceiver."""
        receipt = self._finish([*self._push, FinishWeights(policy_version)], policy)
        self._pushed.finish(policy_version)
        return replace(receipt, num_bytes=self._pushed.num_bytes)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def load_adapter(self, bucket: WeightBucket, config: AdapterConfig, policy: str | None = None) -> WeightReceipt:
        """Replace the LoRA adapter, see WeightReceiver."""
        folder = self._folder / f"adapter-{next(self._num_adapters)}"
        folder.mkdir()
        prefixed = {name: tensor.contiguous() for name, tensor in peft_names(bucket.tensors).items()}
        save_file(prefixed, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config.peft()), encoding="utf-8")
        self._pool.heal()
        receipt = self._finish([LoadAdapter(bucket.policy_version, str(folder), list(bucket.specs))], policy)
        for old in self._folder.glob("adapter-*"):
            if old != folder:  # the engine may read the present one again
                shutil.rmtree(old)
        return receipt

    def _check_policy(self, policy: str | None) -> None:
        """Raise WeightSyncError if `policy` is not the last pushed one."""
        refuse_other(policy, self._policy)

    def _check_version(self, answered: int) -> None:
        """Raise WeightSyncError if samples come from another version than the last pushed one."""
        if self._is_lost:
            raise WeightSyncError(
                f"a process of {self.codec.engine} died and took the pushed policy with it: sync.transport: ipc keeps "
                "none. Its samples are refused. Resume the run (resume=auto); without ipc it would have gone on."
            )
        check_version(answered, self._policy_version)

    def _finish(self, push: list[Message], policy: str | None) -> WeightReceipt:
        """Make all instances load the push. push: its messages, of which only the last is still to be sent."""
        answers = self._ask_all(push[-1])
        if not (answers or self._pushed.keeps):
            raise WeightSyncError(f"the process of {self.codec.engine} died during the push; push again")
        self._is_lost = False
        self._push = push if self._pushed.keeps else []
        self._forget_proof()
        self._pool.heal()
        loaded, *others = answers or [self._restored]  # where none was left, those in their place took it
        if not isinstance(loaded, Loaded):
            raise ContractError(f"{self.codec.engine} answered a push with {type(loaded).__name__}")
        other = [answer for answer in others if answer != loaded]
        if other:
            raise WeightSyncError(f"instances of one engine took different weights: {loaded}, {other[0]}")
        self._policy_version, self._policy = loaded.policy_version, policy
        return WeightReceipt(loaded.policy_version, loaded.num_tensors, loaded.num_bytes, loaded.num_bound)

    def _ask_all(self, message: Message) -> list[Any]:  # Any: the engine's own messages
        """Answers of the living instances; empty if none is left."""
        self.ready()
        return self._pool.broadcast(message)


def _version_of(policies: PolicyStore | None) -> int:
    return 0 if policies is None else policies.policy_version
