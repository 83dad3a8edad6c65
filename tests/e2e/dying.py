"""An engine whose process dies once, for tests of restarts."""

import os
import signal
from pathlib import Path

from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.types.errors import WorkerError
from unirl.types.roles import Collect, Dispatch, distributed


class DyingEngine(ReplicaRolloutEngine):
    """Dies once at the beginning of each rollout of `dies_at` (numbers with commas), and leaves a file in `marks` then.

    kills: its process is killed; otherwise WorkerError is raised, as at the death of a child process. All three are
    keywords, since the processes of a Ray that runs already have the environment from its start.
    """

    def __init__(
        self,
        pipeline,
        policies=None,
        *,
        bundle,
        forward_batch_size,
        dtype="bf16",
        device="cpu",
        rank=0,
        dies_at="",
        marks="",
        kills=False,
    ):
        super().__init__(
            pipeline,
            policies,
            bundle=bundle,
            forward_batch_size=forward_batch_size,
            dtype=dtype,
            device=device,
            rank=rank,
        )
        self._dies_at, self._marks, self._kills = dies_at.split(","), Path(marks), kills

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req, policy=None, begun=None):
        mark = self._marks / str(req.rollout_id)
        if str(req.rollout_id) in self._dies_at and not mark.exists():
            mark.touch()
            if self._kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise WorkerError("engine", "it died")
        return super().generate(req, policy, begun)
