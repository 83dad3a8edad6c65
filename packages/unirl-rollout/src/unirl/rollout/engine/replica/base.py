"""Base of the replica engines for images and text: sample directly from pushed weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch

from unirl.rollout.engine.base import BaseRolloutEngine
from unirl.rollout.engine.replica.weights import ReplicaWeights
from unirl.rollout.engine.trainside.base import DirectSampling
from unirl.types.precision import dtype_named
from unirl.types.protocols.engines import ChunkListener
from unirl.types.protocols.models import ModelBundle, StacksWeights
from unirl.types.protocols.training import PolicyStore
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import Precision
from unirl.types.weights import AdapterConfig, WeightBucket, WeightReceipt, WeightSpec


class PushedWeights:
    """Receives pushes into modules of this process, chosen by the subclass. Implements
    unirl.types.protocols.engines.WeightReceiver."""

    _weights: ReplicaWeights

    @property
    def policy_version(self) -> int:
        """Version of the last pushed policy."""
        return self._weights.pushes.policy_version

    @property
    def bucket_device(self) -> torch.device:
        """The device of the modules."""
        return self._weights.device

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def wait_until_ready(self) -> None:
        """Return at once: the model was loaded with the engine."""

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def begin_weights(self, policy_version: int, specs: Sequence[WeightSpec]) -> None:
        """Announce a push of the whole model, see WeightReceiver."""
        self._weights.begin(policy_version, specs)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def receive_weights(self, bucket: WeightBucket) -> None:
        """Take a bucket, see WeightReceiver."""
        self._weights.receive(bucket)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def finish_weights(self, policy_version: int, policy: str | None = None) -> WeightReceipt:
        """Load the received tensors, see WeightReceiver."""
        return self._weights.finish(policy_version, policy)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def load_adapter(self, bucket: WeightBucket, config: AdapterConfig, policy: str | None = None) -> WeightReceipt:
        """Replace the LoRA adapter, see WeightReceiver."""
        return self._weights.load_adapter(bucket, config, policy)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def sleep(self) -> None:
        """Move the weights to host memory."""
        self._weights.sleep()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def wake_up(self) -> None:
        """Move the weights back."""
        self._weights.wake_up()


class PushedSampling(PushedWeights, DirectSampling):
    """Samples with a pipeline over a separate bundle, whose weights are pushed.

    With equal weights, float32 samples are bit-identical to those of an engine that samples with the trained model.
    """

    has_own_weights: ClassVar[bool] = True
    has_own_model: ClassVar[bool] = True
    can_sleep: ClassVar[bool] = True
    has_trainer_logp: ClassVar[bool] = False
    announces_chunks: ClassVar[bool] = False  # the canary of a push would be announced too

    def _own(self, bundle: ModelBundle, dtype: Precision, device: str, policies: PolicyStore | None) -> None:
        """Take over the bundle's modules, which start with the weights of `policies`. Arguments: see
        ReplicaRolloutEngine."""
        self._weights = ReplicaWeights(
            bundle.trainable_modules(),
            dtype_named(dtype, "engine.dtype"),
            torch.device(device),
            0 if policies is None else policies.policy_version,
            bundle.published_parts() if isinstance(bundle, StacksWeights) else {},
        )

    def _policy(self, name: str | None) -> AbstractContextManager[None]:
        self._weights.pushes.require(name)
        self._weights.require_awake()
        return nullcontext()

    def announce_to(self, listener: ChunkListener) -> None:
        """Raise ConfigError, since responses are only available whole."""
        BaseRolloutEngine.announce_to(self, listener)

    def _version(self) -> int:
        return self.policy_version


class ResumingSampling(PushedSampling):
    """Ends early what it samples, and continues it. Implements unirl.types.protocols.engines.ResumingEngine."""

    can_abort: ClassVar[bool] = True
    can_resume: ClassVar[bool] = True
    _is_ending = False

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None, begun: RolloutResp | None = None) -> RolloutResp:
        """See `ResumingEngine.generate` of unirl.types.protocols.engines."""
        self._is_ending = False
        return super().generate(req.continuing(begun), policy)

    @distributed(Dispatch.BROADCAST, Collect.FIRST, is_control=True)
    def abort(self) -> None:
        """End the `generate` that runs in another thread, see `BaseRolloutEngine`."""
        self._is_ending = True

    def _ends(self) -> bool:
        """True once `abort` was called."""
        return self._is_ending
