"""The proof that an engine has the trainer's policy: both give the same tokens the same log-probs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unirl.types.errors import ConfigError, ContractError, WeightSyncError
from unirl.types.media import Texts
from unirl.types.protocols import AutoregressivePipeline, PushTarget
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

_PARAMS = ARSamplingParams(temperature=1.0, max_new_tokens=8, seed=0)


class LogProbCanary:
    """Lets the engine continue a few prompts and scores its tokens with the trainer's weights.

    Catches what checksums cannot: weights that arrived and were bound, but to the wrong place, in the wrong scale or
    beside stale cached keys. prompts: one sample each. tolerance: nats.
    """

    def __init__(self, pipeline: AutoregressivePipeline, prompts: Sequence[str], tolerance: float) -> None:
        if not prompts or not all(prompts):
            raise ConfigError(f"sync.canary_prompts = {list(prompts)} must hold at least one text, and none empty")
        self._pipeline = pipeline
        self._prompts = list(prompts)
        self._tolerance = tolerance

    def check(self, engine: PushTarget, version: int) -> tuple[float, float]:
        """Largest and mean |log-prob of the engine - of the trainer|, nats.

        Raises WeightSyncError above the tolerance, and where the samples are of another version.
        """
        resp = engine.generate(self._request(version))
        (track,) = resp.tracks.values()
        segment = track.segment
        if not isinstance(segment, TextSegment) or segment.log_probs is None or track.policy_versions is None:
            raise ContractError("the engine answered the canary without tokens, log-probs or policy versions")
        versions = sorted(set(track.policy_versions.tolist()))
        if versions != [version]:
            raise WeightSyncError(f"policy version {version} was pushed, but the engine samples with {versions}")
        with self._pipeline.evaluating():
            own = self._pipeline.replay(track.conditions, segment, _PARAMS).logp_N.detach().float().cpu()
        gap = (own - segment.log_probs.cpu()).abs()
        largest, mean = float(gap.max()), float(gap.mean())
        if not largest <= self._tolerance:  # NaN is above every tolerance
            row = int(torch.bucketize(gap.argmax(), segment.cu_seqlens[1:], right=True))
            prompt = self._prompts[row % len(self._prompts)]  # several engines answer one behind the other
            raise WeightSyncError(
                f"the engine does not have the trainer's policy of version {version}: log-probs of the same tokens "
                f"differ by up to {largest:.3g} nats ({mean:.3g} on average, {segment.tokens.numel()} tokens), most "
                f"behind {prompt!r}; sync.canary_tolerance is {self._tolerance:g}. Compare the engine's "
                "model, dtype and adapter scale with the trainer's."
            )
        return largest, mean

    def replay_only(self) -> None:
        """The forward of `check` on a rank without an engine: where weights are sharded, ranks run equally many."""
        conditions = self._pipeline.encode(self._request(0).primitives, _PARAMS)
        tokens = [torch.zeros(1, dtype=torch.long) for _ in self._prompts]
        with self._pipeline.evaluating():
            self._pipeline.replay(conditions, TextSegment.pack(tokens=tokens, params=_PARAMS), _PARAMS)

    def _request(self, version: int) -> RolloutReq:
        ids = [f"canary{row}" for row in range(len(self._prompts))]
        return RolloutReq(
            sample_ids=ids,
            group_ids=list(ids),
            primitives={"text": Texts(texts=list(self._prompts))},
            sampling_params=_PARAMS,
            rollout_id=version,
        )
