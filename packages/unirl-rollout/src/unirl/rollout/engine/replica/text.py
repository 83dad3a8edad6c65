"""Direct sampling of text with a copy of the model, on the trainer's devices or on separate ones."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from unirl.rollout.checks import step_noise_keys
from unirl.rollout.engine.begun_texts import BegunTexts
from unirl.rollout.engine.replica.base import ResumingSampling
from unirl.rollout.engine.trainside.text import TrainsideTextEngine
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.conditions import Condition
from unirl.types.kept_texts import KeptTexts
from unirl.types.protocols.models import ModelBundle, ResumingPipeline
from unirl.types.protocols.training import PolicyStore
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import ARSamplingParams, Precision
from unirl.types.segments import TextSegment


@bounded("engine")
class ReplicaTextEngine(ResumingSampling, TrainsideTextEngine):
    """Samples completions with a copy of the pipeline. Arguments: see `ReplicaRolloutEngine`.

    `abort` ends them after the present token. What was begun is continued with the draws that it would have had.
    keeps_cache: what `abort` ended keeps its keys and values, and goes on with the present weights without another
        prefill. One batch of `forward_batch_size` samples is kept, the last; others are read anew.
    """

    _continued: Mapping[str, Tensor] = {}
    """Counts of the present chunk."""

    def __init__(
        self,
        pipeline: ResumingPipeline,
        policies: PolicyStore | None = None,
        *,
        bundle: ModelBundle,
        dtype: Precision = "bf16",
        forward_batch_size: PositiveInt,
        device: str = "cpu",
        rank: int = 0,
        dump_dir: str | None = None,
        track: str = "text",
        keeps_cache: bool = False,
    ) -> None:
        super().__init__(
            pipeline, None, forward_batch_size=forward_batch_size, rank=rank, dump_dir=dump_dir, track=track
        )
        self._resuming = pipeline
        self._kept = KeptTexts() if keeps_cache else None
        self._own(bundle, dtype, device, policies)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def sleep(self) -> None:
        """Move the weights to host memory, and free what was kept of texts."""
        if self._kept is not None:
            self._kept.forget()
        super().sleep()

    def _generate_chunk(self, req: RolloutReq) -> RolloutResp:
        resp = super()._generate_chunk(req)
        if self._kept is not None:
            track = resp.root_track()
            track.counts = {**track.counts, **self._continued}
        return resp

    def _segment(self, req: RolloutReq, conditions: dict[str, Condition], params: ARSamplingParams) -> TextSegment:
        begun, more = BegunTexts.of(req, self._pipeline.media_tokens), None
        self._continued = begun.continued(req.batch_size, ())
        if begun.rows:
            all_keys = step_noise_keys(req)
            own, keys = begun.prompts(conditions), [all_keys[row] for row in begun.rows]
            more = self._resuming.generate(
                own,
                params,
                noise_keys=keys,
                num_begun=begun.lengths if begun.segment is not None else None,
                is_ending=self._ends,
                kept=self._kept,
            )
            if self._kept is not None and self._kept.was_held:
                self._continued = begun.continued(req.batch_size, begun.rows)
            if begun.segment is None:  # the pipeline may have added what replays need
                conditions.update(own)
        return begun.whole(more, self._version())
