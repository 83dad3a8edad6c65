"""What makes a recipe on the shapes world, in two stages or of a unified model, small enough for a test."""

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
