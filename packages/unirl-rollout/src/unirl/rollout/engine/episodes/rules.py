"""What the engine of episodes needs of the rest of a recipe. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run


def actions_are_sampled(own: Part, run: Run) -> Messages:
    """Episodes are played by the sampling of actions."""
    if not run.sampling.takes_any and not run.sampling.ability("samples_actions"):
        yield (
            f"{own.name} plays episodes, but {run.sampling.at}._target_ = {run.sampling.path}. Set it to "
            "unirl.types.sampling.ActionSamplingParams."
        )


def environment_is_named(own: Part, run: Run) -> Messages:
    """There is an environment, and it has a class."""
    if own.inner.get("environment") is None:
        yield (
            f"{own.at}.environment has no _target_. Set it to "
            "unirl.rollout.environments.gymnasium.GymnasiumEnvironment with an id, or to your own VectorEnvironment."
        )


RULES = (actions_are_sampled, environment_is_named)
