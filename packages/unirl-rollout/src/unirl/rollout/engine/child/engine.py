"""What engines in processes of their own share on the trainer's side: instances, answers, pushes, sleep."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

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
    ReceiveWeights,
    Sleep,
    WakeUp,
)
from unirl.rollout.engine.child.options import EngineProcesses
from unirl.rollout.engine.child.process import interpreter
from unirl.rollout.engine.child.rules import sleeps_otherwise
from unirl.rollout.engine.push import check_version, refuse_other, refuse_unkept
from unirl.types.bucket_files import BucketFiles
from unirl.types.errors import ConfigError, ContractError, WeightSyncError, WorkerError
from unirl.types.member_pool import Member, MemberPool
from unirl.types.owned_folder import OwnedFolder
from unirl.types.protocols.training import PolicyStore
from unirl.types.renamed import Renamed
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.weights import AdapterConfig, WeightBucket, WeightReceipt, WeightSpec, peft_names

_MAX_ATTEMPTS = 4
"""Times that all processes may end of one call."""


class ChildEngine(BaseRolloutEngine):
    """An engine whose model lives in other processes, which read a pushed policy in place. Implements WeightReceiver of
    unirl.types.protocols.engines.

    The processes start with the object and load while the trainer does; the first call waits for them. Another takes
    the place of one that dies: it is given the policy that was pushed last, must answer as the others did right after
    that push, and then gets work. What the dead one left unfinished goes to the others.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.engine.child.rules"
    has_own_weights: ClassVar[bool] = True
    adapter_option: ClassVar[str | None] = "max_lora_rank"
    can_sleep: ClassVar[bool] = True
    sleep_option: ClassVar[str | None] = "sleep_level"

    renamed_keywords: ClassVar[Renamed] = {}
    """See `unirl.types.renamed`."""
    codec: ClassVar[MessageCodec]
    """Messages of this engine, and its name in errors."""
    module: ClassVar[str]
    """What the engine's interpreter runs; it calls `child.server.main`."""
    environment: ClassVar[str] = ""
    """Project in a clone that makes an environment for a host without a GPU."""
    versions: ClassVar[tuple[str, ...]]
    """Versions of the engine whose interfaces its side was written against; a prefix of components names all."""
    owned_options: ClassVar[frozenset[str]]
    """Options of the engine's own constructor that ours sets, so that `engine.engine_args` may not."""
    sleep_levels: ClassVar[tuple[int, ...]] = (1, 2)
    """Values of `sleep_level` that free something."""

    def _checked(self, processes: EngineProcesses) -> EngineProcesses:
        """The keywords themselves. Raises ConfigError for what does not go with this engine."""
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
        """Start processes of `module`. variables: their environment, but for what each has for itself."""
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
        """Make the instances, given a folder for all files of this engine."""
        self._has_lora = processes.max_lora_rank is not None
        self._sleep_level = processes.sleep_level
        self._is_asleep = False
        self._policy_version = _version_of(policies)
        self._policy: str | None = None
        self._ready: Any = None  # Any: the engine's own message
        self._calls = itertools.count()
        self._num_adapters = itertools.count()
        self._push: list[Message] = []
        """The last push, of which the files are kept: a process that starts later takes them too."""
        self._proof: tuple[Message, Any] | None = None  # Any: what `_read` gives
        """The first call after the last push, and what answered it."""
        self._restored: Message = None
        """What the process that started last answered to the end of that push."""
        self._owned = OwnedFolder("unirl-engine-", processes.transfer_dir)
        self._folder = self._owned.path
        self._files = BucketFiles(self._folder)
        self._pool = MemberPool(make_instances(self._folder), self._restore)

    @abstractmethod
    def _check_ready(self, answer: Message, pid: int) -> None:
        """Look at the first message of a process. Raises ConfigError where the engine is not what the trainer needs."""

    def _restore(self, instance: Member) -> None:
        """Give a process that has just started the policy that was pushed last, and prove it."""
        for message in self._push:
            self._restored = instance.call(message)
        self._prove(instance)
        if self._is_asleep:
            instance.call(Sleep(self._sleep_level))

    # A push is proved by the trainer's replay of the samples that follow it. All instances answer one call right after
    # it, and must agree; one that starts later answers it again.

    def _proved(self, message: Message) -> Any:  # Any: what `_read` gives
        """The first instance's answer; all must give the same. Raises WeightSyncError where one does not."""
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
        """Raise WeightSyncError where an instance that has just started does not sample as the others did."""
        if self._proof is not None:
            message, expected = self._proof
            found = self._read(instance.call(message))
            self._compare(found, expected, f"those that {instance.name} takes the place of")

    def _forget_proof(self) -> None:
        """What `_prove` compares with is of an older policy from now on."""
        self._proof = None

    @abstractmethod
    def _read(self, answer: Message) -> Any:  # Any: what `_compare` takes
        """What an answer holds. Raises ContractError for an answer to something else."""

    @abstractmethod
    def _compare(self, found: Any, expected: Any, others: str) -> None:  # Any: as `_read`
        """Raise WeightSyncError where two answers to one call differ by more than rounding. others: whose `expected`
        is, in words."""

    def ready(self) -> Any:  # Any: the engine's own message
        """What the first process said when it had loaded the model. The first call waits for all, and checks them."""
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
        """Ids of the engine's processes, each also the id of the group of all that it starts."""
        return self._pool.pids

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
        self._pool.heal()
        begin = BeginWeights(policy_version, list(specs))
        self._ask_all(begin)
        self._push = [begin]

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def receive_weights(self, bucket: WeightBucket) -> None:
        """Hand a bucket over, see WeightReceiver."""
        refuse_unkept(bucket)
        message = ReceiveWeights(bucket.policy_version, self._file_of(bucket), list(bucket.specs))
        self._ask_all(message)
        self._push.append(message)

    def _file_of(self, bucket: WeightBucket) -> str:
        """Where the processes read a bucket: the file that it came in, if their folder is of the same file system."""
        if bucket.file is not None and os.stat(bucket.file).st_dev == os.stat(self._folder).st_dev:
            return bucket.file
        return str(self._files.write(len(self._push) - 1, bucket.tensors))

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def finish_weights(self, policy_version: int, policy: str | None = None) -> WeightReceipt:
        """Load what was received, see WeightReceiver."""
        return self._finish([*self._push, FinishWeights(policy_version)], policy)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def load_adapter(self, bucket: WeightBucket, config: AdapterConfig, policy: str | None = None) -> WeightReceipt:
        """Swap the LoRA adapter, see WeightReceiver."""
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
        """Raise WeightSyncError where `policy` is not the one that was pushed last."""
        refuse_other(policy, self._policy)

    def _check_version(self, answered: int) -> None:
        """Raise WeightSyncError where samples are of another version than was pushed last."""
        check_version(answered, self._policy_version)

    def _finish(self, push: list[Message], policy: str | None) -> WeightReceipt:
        """Let all instances load what was sent. push: its messages, the last of which is still to be sent."""
        answers = self._ask_all(push[-1])
        self._push = push
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
        """What the living instances answer, perhaps none."""
        self.ready()
        return self._pool.broadcast(message)


def _version_of(policies: PolicyStore | None) -> int:
    return 0 if policies is None else policies.policy_version
