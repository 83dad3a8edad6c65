"""Rules of vLLM about the recipe and this machine. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.rollout.engine.tensor_parallel import heads_divide

RULES = ()
MACHINE_RULES = (heads_divide,)
