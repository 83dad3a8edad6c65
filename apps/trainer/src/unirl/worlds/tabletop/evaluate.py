"""Judge a base of the tabletop: `python -m unirl.worlds.tabletop.evaluate --checkpoint DIR`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from unirl.data.datasets import read_rows
from unirl.models.action.bundle import ActionBundle
from unirl.models.action.config import Head
from unirl.models.action.noise_pipeline import FlowNoiseActionPipeline
from unirl.models.action.pipeline import BinsActionPipeline, FlowActionPipeline
from unirl.pretraining.judging import print_shares
from unirl.rollout.engine.episodes.engine import EpisodesEngine
from unirl.rollout.environments.gymnasium import GymnasiumEnvironment
from unirl.trainer.request import repeated
from unirl.types.episodes import EPISODE
from unirl.types.protocols.models import ActionPipeline
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ActionSamplingParams
from unirl.worlds.tabletop.environment import ENV_ID

HELDOUT = Path(__file__).parent / "data" / "heldout.jsonl"
ENVIRONMENT = f"unirl.worlds.tabletop.environment:{ENV_ID}"
PIPELINES: dict[tuple[Head, bool], Callable[[ActionBundle], ActionPipeline]] = {
    ("flow", False): FlowActionPipeline,
    ("flow", True): FlowNoiseActionPipeline,
    ("bins", False): BinsActionPipeline,
}
"""By the head, and by whether it learns its noise."""
WAYS = {"greedy": ActionSamplingParams(eta=0, temperature=0), "sampled": ActionSamplingParams()}


def evaluate(checkpoint: Path, prompts: Path = HELDOUT) -> dict[str, float]:
    """Share of held-out starts from which the block comes home, with the most probable actions and with drawn ones."""
    bundle = ActionBundle(str(checkpoint))
    pipeline = PIPELINES[bundle.config.head, bundle.config.noise_range is not None](bundle)
    engine = EpisodesEngine(pipeline, environment=GymnasiumEnvironment(ENVIRONMENT), forward_batch_size=512)
    rows = read_rows(prompts)
    found = {}
    for name, params in WAYS.items():
        resp = engine.generate(RolloutReq(**repeated(rows, 1), sampling_params=params))
        said = [(row or {})[EPISODE]["reward"] for row in resp.track("action").metadata]
        found[name] = sum(said) / len(said)
    engine.shutdown()
    return found


if __name__ == "__main__":
    print_shares(evaluate, HELDOUT, __doc__)
