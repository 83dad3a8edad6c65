"""Rollouts of a unified model whose images vLLM-Omni draws, while its thoughts are written by the model that trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from unirl.rollout.engine.trainside.text import TrainsideTextEngine
from unirl.rollout.engine.unified.engine import ThinkingEngine, only_policy
from unirl.rollout.engine.vllm_omni.engine import VLLMOmniEngine
from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.protocols.training import ShardedPolicyStore
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.sampling import Precision
from unirl.types.weights import AdapterConfig, WeightBucket, WeightReceipt, WeightSpec


@bounded("engine")
class VLLMOmniUnifiedEngine(ThinkingEngine):
    """Thoughts by `TrainsideTextEngine`, images by `VLLMOmniEngine`, to which the policy is pushed; see
    `ThinkingEngine`.

    vLLM-Omni's BAGEL and HunyuanImage3 do not give the log-probs of the words that they write, so words are written
    here, where nothing moves and a replay agrees.

    text_batch_size: see `TrainsideTextEngine`. tracks: names of the tracks of thoughts and images, which are those of
        the pipelines. The rest: see `VLLMOmniEngine`.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.engine.vllm_omni.unified_rules"
    has_own_weights: ClassVar[bool] = True
    can_sleep: ClassVar[bool] = True
    sleep_option: ClassVar[str | None] = "sleep_level"
    environment: ClassVar[str] = "environments/vllm-omni-cpu"

    def __init__(
        self,
        pipelines: Mapping[str, Mapping[str, Any]],  # Any: pipelines of the recipe
        stores: Mapping[str, ShardedPolicyStore],
        *,
        model: str,
        text_batch_size: PositiveInt,
        forward_batch_size: PositiveInt,
        device: str = "cpu",
        rank: int = 0,
        python: str | None = None,
        dtype: Precision = "bf16",
        num_gpus: PositiveInt = 1,
        num_instances: PositiveInt = 1,
        gpus: Sequence[int] | None = None,
        push_transport: Literal["files", "tensor"] = "files",
        num_threads: PositiveInt = 1,
        sleep_level: Literal[0, 1] = 0,
        transfer_dir: str = "/dev/shm",
        engine_args: Mapping[str, Any] | None = None,  # Any: values of vLLM-Omni's own options
        start_timeout_s: Positive = 900.0,
        timeout_s: Positive = 1800.0,
        tracks: tuple[str, str] = ("text", "image"),
    ) -> None:
        policy, own = only_policy(pipelines, tracks, type(self).__name__)
        text, image = tracks
        store = stores[policy]
        writer = TrainsideTextEngine(own[text], store, forward_batch_size=text_batch_size, rank=rank, track=text)
        self._served = VLLMOmniEngine(
            own[image],
            store,
            model=model,
            forward_batch_size=forward_batch_size,
            device=device,
            python=python,
            dtype=dtype,
            num_gpus=num_gpus,
            num_instances=num_instances,
            gpus=gpus,
            push_transport=push_transport,
            num_threads=num_threads,
            sleep_level=sleep_level,
            transfer_dir=transfer_dir,
            engine_args=engine_args,
            start_timeout_s=start_timeout_s,
            timeout_s=timeout_s,
            track=image,
        )
        super().__init__(writer, self._served, own[image], own[text])

    def _copies(self, policy: str | None) -> tuple[str | None, str | None]:
        """One copy of the weights for both."""
        return policy, policy

    # Pushes and residency are of what draws. WeightReceiver of unirl.types.protocols.engines.

    @property
    def policy_version(self) -> int:
        """Version of the policy that draws."""
        return self._served.policy_version

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def wait_until_ready(self) -> None:
        """Wait for vLLM-Omni to load the model."""
        self._served.wait_until_ready()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def begin_weights(self, policy_version: int, specs: Sequence[WeightSpec]) -> None:
        """Announce a push of the whole model, see WeightReceiver."""
        self._served.begin_weights(policy_version, specs)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def receive_weights(self, bucket: WeightBucket) -> None:
        """Hand a bucket over, see WeightReceiver."""
        self._served.receive_weights(bucket)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def finish_weights(self, policy_version: int, policy: str | None = None) -> WeightReceipt:
        """Load what was received, see WeightReceiver."""
        return self._served.finish_weights(policy_version, policy)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def load_adapter(self, bucket: WeightBucket, config: AdapterConfig, policy: str | None = None) -> WeightReceipt:
        """Raises ConfigError: adapters are pushed merged."""
        return self._served.load_adapter(bucket, config, policy)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def sleep(self) -> None:
        """Free device memory of vLLM-Omni, as `sleep_level` says."""
        self._served.sleep()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def wake_up(self) -> None:
        """Undo `sleep`."""
        self._served.wake_up()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def shutdown(self) -> None:
        """Stop vLLM-Omni and delete its files."""
        self._served.shutdown()
