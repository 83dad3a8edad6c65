"""The arithmetic world: sums and differences of two-digit numbers for a small Qwen3, with its base checkpoint."""
