"""The training loop: `build` makes workers and what joins them, `base` is the loop, `commands` what users ask for."""
