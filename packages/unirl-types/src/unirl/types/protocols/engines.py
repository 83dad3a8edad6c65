"""What a rollout engine offers, and what it takes where its policy is pushed to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from unirl.types.media import Primitive
from unirl.types.rollout import DiffusionPlan, RolloutReq, RolloutResp
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.weights import AdapterConfig, WeightBucket, WeightReceipt, WeightSpec

ChunkListener = Callable[[RolloutResp], None]
"""Called with samples that are ready."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Generates responses. `unirl.rollout.engine.base.BaseRolloutEngine` has defaults, and says what an engine can."""

    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """One sample for every row of the request, in its order.

        policy: name of a kept copy of the weights to sample from; None is the policy that trains.
        """
        ...

    def check_prompts(self, req: RolloutReq) -> None:
        """Raise ConfigError if a prompt cannot be sampled from. Generates nothing."""
        ...

    def announce_to(self, listener: ChunkListener) -> None:
        """From now on call `listener` with each chunk of a response as soon as it is made, in the order of the request.

        Raises ConfigError in an engine that makes whole responses only.
        """
        ...

    def abort(self) -> None:
        """End the `generate` that runs in another thread: it returns what it has, unfinished samples ABORTED.

        Raises ConfigError in an engine that always finishes.
        """
        ...

    def sleep(self) -> None:
        """Give device memory back until `wake_up`."""
        ...

    def wake_up(self) -> None:
        """Be ready to generate again, or to be pushed the weights that `sleep` dropped."""
        ...

    def shutdown(self) -> None:
        """Stop for good and release everything. Safe to call twice."""
        ...


class ResumingEngine(RolloutEngine, Protocol):
    """An engine that continues samples which `abort` ended early, with whatever weights it has then."""

    def generate(self, req: RolloutReq, policy: str | None = None, begun: RolloutResp | None = None) -> RolloutResp:
        """As `RolloutEngine.generate`. begun: what an earlier call made of the same request. Samples that it finished
        stay as they are; the others keep their tokens and get the rest of their budget."""
        ...


@runtime_checkable
class TextRolloutEngine(RolloutEngine, Protocol):
    """Generates completions: a track with a TextSegment, the conditions that replay takes, and texts."""


@runtime_checkable
class DiffusionRolloutEngine(RolloutEngine, Protocol):
    """Generates images or videos: a track with a LatentSegment, the conditions that replay takes, and media."""

    def plan(self, params: DiffusionSamplingParams) -> DiffusionPlan:
        """Sigmas, latent shape and kernel for these parameters, which the driver pins on requests."""
        ...

    def encodes_ahead(self) -> bool:
        """True if the driver gives it every prompt of the run by `encode_ahead` before the first rollout."""
        ...

    def encode_ahead(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> None:
        """Take some prompts of the run, with what they show, and what they will be sampled with."""
        ...

    def drop_text_encoders(self) -> None:
        """Called after the last `encode_ahead`."""
        ...


class WeightReceiver(Protocol):
    """An engine whose policy is pushed to it. All or nothing: until `finish_weights` returns, no weight has changed,
    except after `SharesMemory.share_memory`.

    Every method raises WeightSyncError with the list of what is wrong, and the engine keeps the policy it has.
    """

    @property
    def policy_version(self) -> int:
        """Version of the policy that it generates with."""
        ...

    @property
    def bucket_device(self) -> torch.device:
        """Where it reads the tensors of a bucket: its device, or the host's memory where others read them."""
        ...

    def wait_until_ready(self) -> None:
        """Return when it has loaded what it starts with. Raises ConfigError or WorkerError if it cannot."""
        ...

    def begin_weights(self, policy_version: int, specs: Sequence[WeightSpec]) -> None:
        """Announce all tensors of a push: names, shapes and dtypes (no checksums yet). Drops a push left unfinished."""
        ...

    def receive_weights(self, bucket: WeightBucket) -> None:
        """Take some of the announced tensors and compare them with their checksums; also those that it makes of the
        last push (`WeightBucket.kept`). The tensors stay as they are until the push ends."""
        ...

    def finish_weights(self, policy_version: int, policy: str | None = None) -> WeightReceipt:
        """Load what has arrived, forget what was cached for the old weights, and generate with the new version.

        policy: name of the policy that was sent, as `generate` will be asked for it; None is the one that trains.
        """
        ...

    def load_adapter(self, bucket: WeightBucket, config: AdapterConfig, policy: str | None = None) -> WeightReceipt:
        """Replace the last LoRA adapter by this one, all at once. Names as peft saves them, without
        `PEFT_PREFIX`. policy: see `finish_weights`."""
        ...


@runtime_checkable
class SharesMemory(Protocol):
    """An engine with what trains whose process can map memory of this one."""

    def share_memory(self, device: torch.device) -> None:
        """Load each bucket of later pushes as it comes, out of memory of this device. ConfigError if it cannot."""
        ...


class PushTarget(WeightReceiver, Protocol):
    """An engine with its own weights, or several that are pushed to as one."""

    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """One sample for every row of the request, in its order; of several engines, once each.

        policy: the one that was pushed last. Raises WeightSyncError for any other.
        """
        ...
