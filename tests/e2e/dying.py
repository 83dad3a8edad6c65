"""An engine whose process dies once, for tests of restarts."""

import os
import signal
from pathlib import Path

from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.types.errors import WorkerError
from unirl.types.roles import Collect, Dispatch, distributed


class DyingEngine(ReplicaRolloutEngine):
    """Dies once at the beginning of each rollout of `UNIRL_TEST_DIES_AT` (numbers with commas), and leaves a file then.

    With `UNIRL_TEST_KILLS` its process is killed; else WorkerError is raised, as at the death of a child process.
    """

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req, policy=None):
        mark = Path(os.environ["UNIRL_TEST_MARKS"]) / str(req.rollout_id)
        if str(req.rollout_id) in os.environ["UNIRL_TEST_DIES_AT"].split(",") and not mark.exists():
            mark.touch()
            if os.environ.get("UNIRL_TEST_KILLS"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise WorkerError("engine", "it died")
        return super().generate(req, policy)
