"""Embodied training from parts, without a recipe: `python examples/embodied_flow.py [ROLLOUTS]`.

The policy pushes a block on a table by a flow over its moves; GRPO compares eight episodes from one start.
"""

import sys
from pathlib import Path

from unirl.algorithms.action_grpo import ActionGRPO
from unirl.algorithms.advantages import AdvantageConfig
from unirl.data.data_source import MultimodalRLDataSource
from unirl.distributed.runtime import LocalRuntime
from unirl.models.action.bundle import ActionBundle
from unirl.models.action.pipeline import FlowActionPipeline
from unirl.reward.local.texts.episode_return import EpisodeReturnScorer
from unirl.reward.service import RewardService
from unirl.rollout.engine.episodes.engine import EpisodesEngine
from unirl.rollout.environments.gymnasium import GymnasiumEnvironment
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import OptimizerConfig
from unirl.train.stack import TrainStack
from unirl.trainer.request import repeated
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ActionSamplingParams
from unirl.worlds import tabletop

WORLD = Path(str(tabletop.__file__)).parent
SAMPLING, ADVANTAGES = ActionSamplingParams(samples_per_prompt=8), AdvantageConfig(preset="trl")


def groups(context):
    """The actor, which trains, the rollout with its environments, and the reward; all in this process."""
    bundle = ActionBundle(str(WORLD / "checkpoint/flow"), dtype="fp32", device=context.device)
    policy = FlowActionPipeline(bundle)
    backend = FSDPBackend(bundle, optimizer=OptimizerConfig(learning_rate=3e-4), device=context.device)
    algorithms = {"action": ActionGRPO(policy, backend)}
    table = GymnasiumEnvironment("unirl.worlds.tabletop.environment:unirl/TabletopPush-v0")
    return {
        "actor": TrainStack(backend, algorithms, micro_batch_size=128, num_updates_per_batch=2, num_epochs=3),
        "rollout": EpisodesEngine(policy, backend, environment=table, forward_batch_size=512),
        "reward": RewardService([EpisodeReturnScorer()]),
    }


def main(num_rollouts):
    starts = MultimodalRLDataSource(str(WORLD / "data/train.jsonl"))
    with LocalRuntime(groups) as cluster:
        actor, rollout, reward = (cluster.role(name) for name in ("actor", "rollout", "reward"))

        def update_rollout_weights():
            """Nothing: here the rollout acts with the model that trains. Elsewhere a weight sync pushes to it."""

        def generate_rollouts(number):
            rows = repeated(starts.next(16), SAMPLING.samples_per_prompt)
            return rollout.generate(RolloutReq(**rows, sampling_params=SAMPLING, rollout_id=number))

        def compute_advantages_and_returns(episodes):
            reward.score_track(episodes, "action")
            episodes.refresh()
            track = episodes.meta.track("action")
            episodes.attach("action", advantages=ADVANTAGES(track.scored_rewards, track.group_ids))
            return float(track.scored_rewards.mean())

        def run_training(episodes):
            actor.train(episodes, progress=0.0)
            episodes.release()

        actor.prepare()
        for number in range(num_rollouts):
            update_rollout_weights()
            episodes = generate_rollouts(number)
            success = compute_advantages_and_returns(episodes)
            run_training(episodes)
            print(f"rollout {number}: {success:.2f} of the episodes succeed", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
