"""What makes a recipe on the shapes world small enough for a test."""

SMALL = [
    "batch_size=4",
    "sampling.samples_per_prompt=4",
    "stack.micro_batch_size=4",
    "engine.forward_batch_size=4",
    "num_rollouts=2",
    "eval.num_samples=8",
    "eval.batch_size=8",
    "eval.num_images=4",
    "guardrails.action=off",
    "save.interval=1",
]
