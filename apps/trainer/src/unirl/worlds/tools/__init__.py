"""The tools world: sums that a small Qwen3 knows, and sums for which it needs a tool, with its base checkpoint."""
