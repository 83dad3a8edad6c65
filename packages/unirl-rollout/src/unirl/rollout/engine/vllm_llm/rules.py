"""What vLLM needs of the rest of a recipe and of this machine. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.rollout.engine.child.rules import gpus_are_here, gpus_suffice
from unirl.rollout.engine.tensor_parallel import heads_divide

RULES = (gpus_suffice("tensor_parallel_size"),)
MACHINE_RULES = (gpus_are_here("tensor_parallel_size"), heads_divide)
