"""Rollouts of a unified model whose images vLLM-Omni draws, while its thoughts are written by the model that trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from unirl.rollout.engine.trainside.text import TrainsideTextEngine
from unirl.rollout.engine.unified.engine import ThinkingEngine, only_policy
from unirl.rollout.engine.vllm_omni.engine import VLLMOmniEngine
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.protocols.training import ShardedPolicyStore
from unirl.types.renamed import Renamed
from unirl.types.roles import Collect, Dispatch, distributed
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
    sleep_levels: ClassVar[tuple[int, ...]] = (1,)
    renamed_keywords: ClassVar[Renamed] = {"num_gpus": "num_devices"}
    environment: ClassVar[str] = "environments/vllm-omni-cpu"

    def __init__(
        self,
        pipelines: Mapping[str, Mapping[str, Any]],  # Any: pipelines of the recipe
        stores: Mapping[str, ShardedPolicyStore],
        *,
        text_batch_size: PositiveInt,
        forward_batch_size: PositiveInt,
        rank: int = 0,
        tracks: tuple[str, str] = ("text", "image"),
        **processes: Any,  # Any: see EngineProcesses
    ) -> None:
        policy, own = only_policy(pipelines, tracks, type(self).__name__)
        text, image = tracks
        store = stores[policy]
        writer = TrainsideTextEngine(own[text], store, forward_batch_size=text_batch_size, rank=rank, track=text)
        self._served = VLLMOmniEngine(
            own[image], store, forward_batch_size=forward_batch_size, rank=rank, track=image, **processes
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
