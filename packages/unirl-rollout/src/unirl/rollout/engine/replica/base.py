"""What replicas of image and text models share: they sample directly, from weights that were pushed."""

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
from unirl.types.protocols.models import ModelBundle
from unirl.types.protocols.training import PolicyStore
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.sampling import Precision
from unirl.types.weights import AdapterConfig, WeightBucket, WeightReceipt, WeightSpec


class PushedWeights:
    """Takes pushes into weights of this process, the engine says which. Implements
    unirl.types.protocols.engines.WeightReceiver."""

    _weights: ReplicaWeights

    @property
    def policy_version(self) -> int:
        """Version of the policy that was pushed last."""
        return self._weights.pushes.policy_version

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
        """Load what was received, see WeightReceiver."""
        return self._weights.finish(policy_version, policy)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def load_adapter(self, bucket: WeightBucket, config: AdapterConfig, policy: str | None = None) -> WeightReceipt:
        """Swap the LoRA adapter, see WeightReceiver."""
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
    """Samples with a pipeline over a bundle of its own; the policy comes by pushes.

    Under the weights of one policy it gives, in float32, the bits of an engine that samples with the model that trains.
    """

    has_own_weights: ClassVar[bool] = True
    takes_partial_pushes: ClassVar[bool] = True
    has_own_model: ClassVar[bool] = True
    can_sleep: ClassVar[bool] = True
    has_trainer_logp: ClassVar[bool] = False
    announces_chunks: ClassVar[bool] = False  # the canary of a push would be announced too

    def _own(self, bundle: ModelBundle, dtype: Precision, device: str, policies: PolicyStore | None) -> None:
        """Take the modules of the bundle, which start as the policy of `policies`. Arguments: ReplicaRolloutEngine."""
        self._weights = ReplicaWeights(
            bundle.trainable_modules(),
            dtype_named(dtype, "engine.dtype"),
            torch.device(device),
            0 if policies is None else policies.policy_version,
        )

    def _policy(self, name: str | None) -> AbstractContextManager[None]:
        self._weights.pushes.require(name)
        self._weights.require_awake()
        return nullcontext()

    def announce_to(self, listener: ChunkListener) -> None:
        """Raise ConfigError: samples are had when all are there."""
        BaseRolloutEngine.announce_to(self, listener)

    def _versions(self, num_samples: int) -> torch.Tensor:
        return torch.full((num_samples,), self.policy_version, dtype=torch.long)
