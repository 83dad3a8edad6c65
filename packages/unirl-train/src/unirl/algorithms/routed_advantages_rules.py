"""What routed advantages need of the reward and of the algorithms. See `unirl.types.recipe`."""

from __future__ import annotations

from collections.abc import Mapping

from unirl.types.recipe import Messages, Part, Run

Span = tuple[float, float]
"""A weight at the first rollout of a run and at the last."""


def problems_of_routes(at: str, routes: Mapping[str, Mapping[str, Span]]) -> Messages:
    """No routes, a weight below 0, and a route in which none is above it."""
    if not routes:
        yield (
            f"{at}.routes is empty. Name the components of each medium with their weights, as routes: {{video: "
            "{pickscore: 1.0}, audio: {clap: 1.0}}."
        )
    for medium, route in routes.items():
        below = {name: min(span) for name, span in route.items() if not min(span) >= 0}
        if below:
            yield (
                f"{at}.routes.{medium} has weights below 0: {below}. Set weights of at least 0, and the sign of a "
                "component in its scorer."
            )
        elif not any(max(span) > 0 for span in route.values()):
            named = ", ".join(route) if route else "nothing"
            yield (
                f"{at}.routes.{medium} names {named} and has no weight above 0, so nothing would be learnt there. "
                "Route a component to it."
            )


def weights_teach(own: Part, run: Run) -> Messages:
    """Every route has a weight above 0, and none below."""
    spans = {
        medium: {name: _span(weight) for name, weight in route.items()}
        for medium, route in (own.get("routes") or {}).items()
    }
    yield from problems_of_routes(own.at, spans)


def _span(weight: float | Mapping[str, float]) -> Span:
    return (weight["start"], weight["end"]) if isinstance(weight, Mapping) else (weight, weight)


def components_exist(own: Part, run: Run) -> Messages:
    """Every route names components that the reward has: its scorers, and their parts as `scorer/part`."""
    scorers = run.reward.node.get("scorers")
    if not isinstance(scorers, Mapping):  # named by the scorers themselves
        return
    for medium, route in (own.get("routes") or {}).items():
        unknown = [name for name in route if name.partition("/")[0] not in scorers]
        if unknown:
            yield (
                f"{own.at}.routes.{medium} names {', '.join(unknown)}, but the scorers of {run.reward.at} are "
                f"{', '.join(scorers)}. Name one of these, or add {run.reward.at}.scorers.{unknown[0]}."
            )


def algorithms_read_routes(own: Part, run: Run) -> Messages:
    """What trains on the track knows advantages of media."""
    for view in run.views():
        for policy in view.policies.values():
            for algorithm in policy.algorithms.values():
                if view.advantages is own and not algorithm.ability("takes_media_advantages"):
                    yield (
                        f"{own.at}.routes gives each medium its own advantage, and {algorithm.name} has one per "
                        f"sample. Set {algorithm.at}._target_: unirl.algorithms.omni_nft.OmniNFT, or "
                        f"{own.at}._target_: unirl.algorithms.advantages.AdvantageConfig."
                    )


RULES = (weights_teach, components_exist, algorithms_read_routes)
