"""Advantages by medium: a hand-worked batch, what a route leaves alone, and the mistakes of routes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from unirl.algorithms.advantages import AdvantageConfig
from unirl.algorithms.routed_advantages import RoutedAdvantages
from unirl.algorithms.schedules import LinearWeight
from unirl.types.errors import ConfigError

GROUPS = ["a", "a", "b", "b"]
COMPONENTS = {
    "look": torch.tensor([1.0, 3.0, 2.0, 6.0]),
    "sound": torch.tensor([0.5, 0.1, 0.2, 0.2]),
    "sync": torch.tensor([0.0, 1.0, 1.0, 0.0]),
}
ROUTES: dict[str, dict[str, Any]] = {"video": {"look": 1.5, "sync": 1.0}, "audio": {"sound": 0.5, "sync": 1.0}}


def routed(routes: Any = ROUTES, components: dict[str, Tensor] = COMPONENTS, **options: Any) -> dict[str, Tensor]:
    return RoutedAdvantages(routes=routes, **options).by_medium(GROUPS, components)


def by_hand(values: list[float]) -> list[float]:
    """(value - mean of its pair) / (standard deviation of all four + 1e-4)."""
    mean = sum(values) / 4
    std = (sum((value - mean) ** 2 for value in values) / 4) ** 0.5
    centres = [(values[0] + values[1]) / 2] * 2 + [(values[2] + values[3]) / 2] * 2
    return [(value - centre) / (std + 1e-4) for value, centre in zip(values, centres, strict=True)]


def test_components_are_centred_by_group_divided_by_the_batch_and_weighed_by_route():
    look, sound, sync = (by_hand([float(value) for value in values]) for values in COMPONENTS.values())
    found = routed()
    # Float32 results of float64 statistics.
    expected = {
        "video": [1.5 * a + c for a, c in zip(look, sync, strict=True)],
        "audio": [0.5 * b + c for b, c in zip(sound, sync, strict=True)],
    }
    for medium, values in expected.items():
        torch.testing.assert_close(found[medium], torch.tensor(values), rtol=1e-6, atol=1e-6)
    total = RoutedAdvantages(routes=ROUTES)(torch.zeros(4), GROUPS, COMPONENTS)
    torch.testing.assert_close(total, (found["video"] + found["audio"]) / 2)


def test_a_component_moves_only_the_media_that_it_is_routed_to():
    before, after = routed(), routed(components={**COMPONENTS, "sound": torch.tensor([0.0, 9.0, 3.0, 1.0])})
    assert torch.equal(before["video"], after["video"]) and not torch.equal(before["audio"], after["audio"])


def test_one_component_of_weight_one_is_the_preset_to_the_last_bit():
    alone = AdvantageConfig(preset="flow_grpo_global_std")(COMPONENTS["look"], GROUPS)
    one = RoutedAdvantages(routes={"video": {"look": 1.0}})
    assert torch.equal(one.by_medium(GROUPS, COMPONENTS)["video"], alone)
    assert torch.equal(one(torch.zeros(4), GROUPS, COMPONENTS), alone)


def test_gdpo_scales_each_route_over_the_batch_again():
    found = routed(multi_reward="gdpo")
    for medium, route in ROUTES.items():
        own = AdvantageConfig(preset="flow_grpo_global_std", multi_reward="gdpo", component_weights=route)
        names = {name: COMPONENTS[name] for name in route}
        assert torch.equal(found[medium], own(torch.zeros(4), GROUPS, names))


def test_a_weight_may_change_over_the_run_and_is_reported():
    config = RoutedAdvantages(routes={"video": {"look": LinearWeight(1.0, 0.0)}, "audio": {"sound": 1.0}})
    start, end = (config.by_medium(GROUPS, COMPONENTS, progress=progress) for progress in (0.0, 1.0))
    assert float(start["video"].abs().max()) > 0 and not end["video"].any()
    assert torch.equal(start["audio"], end["audio"])
    assert config.metrics(0.25) == {"advantage/weight/video/look": 0.75}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"routes": None}, "advantages.routes is empty. Name the components of each medium"),
        ({"routes": {"video": {"look": -1.0}}}, r"routes.video has weights below 0: {'look': -1.0}. Set weights"),
        ({"routes": {"video": {"look": LinearWeight(1.0, -0.5)}}}, r"weights below 0: {'look': -0.5}"),
        (
            {"routes": {"video": {"look": 1.0}, "audio": {"sound": 0.0}}},
            "routes.audio names sound and has no weight",
        ),
        ({"routes": {"video": {}}}, "routes.video names nothing and has no weight above 0"),
        (
            {"routes": ROUTES, "multi_reward": "weighted_sum"},
            "multi_reward = weighted_sum and component_weights",
        ),
        ({"routes": ROUTES, "component_weights": {"look": 1.0}}, "component_weights = {'look': 1.0}. Set"),
    ],
)
def test_routes_that_cannot_work_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        RoutedAdvantages(**options)


def test_a_route_to_a_component_that_the_reward_does_not_have_is_named():
    with pytest.raises(ConfigError, match=r"routes.video names \['taste'\]; components of the reward are \['look'"):
        routed({"video": {"taste": 1.0}})
