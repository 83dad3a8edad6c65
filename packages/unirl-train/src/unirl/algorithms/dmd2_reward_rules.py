"""What DMD2 with a learnt reward needs in addition to DMD2. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.algorithms.dmd2_rules import is_below_max_level, negative_prompt_is_there
from unirl.types.recipe import Messages, Part, Run
from unirl.types.sampling_rules import no_stochastic_steps


def reward_levels_are_in_order(own: Part, run: Run) -> Messages:
    """Noise levels of the learnt reward are drawn from an interval."""
    yield from is_below_max_level(own, "reward_min_level")


def surrogate_can_be_guided(own: Part, run: Run) -> Messages:
    """A guided surrogate reads a negative prompt."""
    yield from negative_prompt_is_there(own, run, "surrogate_guidance")


def latents_lead_to_one_sample(own: Part, run: Run) -> Messages:
    """A latent has the reward of the sample that it leads to, by deterministic steps."""
    if own.get("surrogate_latents", "clean") == "trajectory" and no_stochastic_steps(run.sampling) is None:
        yield (
            f"{own.at}.surrogate_latents = trajectory gives latents the reward of the sample that they lead to, which "
            f"a stochastic step leaves open. Set sampling.eta: 0 (and scheduler: null), or {own.at}.surrogate_latents: "
            "clean."
        )


RULES = (reward_levels_are_in_order, surrogate_can_be_guided, latents_lead_to_one_sample)
