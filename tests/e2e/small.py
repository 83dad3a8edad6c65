"""What makes a recipe on the shapes world, in two stages or of a unified model, small enough for a test."""

from typing import Any

SMALL = [
    "batch_size=4",
    "sampling.samples_per_prompt=4",
    "sampling.num_inference_steps=4",
    "stack.micro_batch_size=4",
    "engine.forward_batch_size=4",
    "num_rollouts=2",
    "eval.num_samples=8",
    "eval.batch_size=8",
    "eval.num_inference_steps=4",
    "samples.per_evaluation=4",
    "guardrails.action=off",
    "save.interval=1",
]

SMALL_STAGES = [
    "batch_size=2",
    "num_rollouts=2",
    "policies.writer.sampling.samples_per_prompt=2",
    "policies.painter.sampling.samples_per_prompt=2",
    "policies.painter.sampling.num_inference_steps=2",
    "policies.painter.algorithm.num_timesteps=1",
    "policies.painter.stack.num_updates_per_batch=2",
    "eval.num_samples=4",
    "eval.num_inference_steps=2",
    "eval.interval=0",
    "save.interval=1",
    "media_interval=1",
    "guardrails.action=off",
]

SMALL_REDRAW = [
    *(word.replace("algorithm.num_timesteps", "algorithms.image.num_timesteps") for word in SMALL_STAGES),
    "stages.redraw.sampling.num_inference_steps=2",
    "eval=null",
    "save.best_metric=reward",
]

SMALL_UNIFIED = [
    "batch_size=2",
    "num_rollouts=2",
    "stages.text.sampling.samples_per_prompt=2",
    "stages.image.sampling.samples_per_prompt=4",
    "stages.image.sampling.num_inference_steps=2",
    "algorithms.image.num_timesteps=1",
    "stack.num_updates_per_batch=2",
    "stages.text.engine.forward_batch_size=4",
    "stages.image.engine.forward_batch_size=4",
    "eval.num_samples=4",
    "eval.num_inference_steps=2",
    "eval.interval=0",
    "save.interval=1",
    "media_interval=1",
    "guardrails.action=off",
]

COPIES = {
    "writer": ("unirl.rollout.engine.replica.text.ReplicaTextEngine", ["a crimson box =", "two of the dots ="]),
    "painter": ("unirl.rollout.engine.replica.engine.ReplicaRolloutEngine", ["a red circle", "two blue squares"]),
}
"""Policy of the phrases world -> engine with a copy of its model, and prompts that prove a push to it."""


def push_to_copies(recipe: dict[str, Any]) -> None:
    """Let both policies of the phrases world be sampled from copies in float32 that they are pushed to."""
    for policy, (path, prompts) in COPIES.items():
        own = recipe["policies"][policy]
        own["engine"] |= {"_target_": path, "dtype": "fp32"}
        own["sync"] = {
            "_target_": "unirl.distributed.weight_sync.full.FullWeightSync",
            "dtype": "fp32",
            "canary_prompts": prompts,
        }
