"""Counted FLOPs, and several recipes side by side: by hand."""

import pytest

from unirl.app.bench import bench_recipe, relative_to_first
from unirl.app.command_line import Command, parse
from unirl.app.recipe import composed, settled
from unirl.config.check import check_recipe
from unirl.types.errors import ConfigError


def report(name: str, device_s: float, flops: float, samples: int) -> dict[str, object]:
    phases = {"train": {"device_s": device_s, "flops": flops}}
    return {"recipe": name, "geometry": {"samples": samples}, "phases": phases}


def test_training_is_put_beside_its_flops():
    first, second = relative_to_first([report("a", 2.0, 8e9, 4), report("b", 3.0, 6e9, 2)])
    assert (first["ratio"], first["expected_ratio"], first["off_by"]) == (1, 1, 1)
    # 1.5 against 0.5 seconds per sample, 3 against 2 GFLOP.
    assert (second["train_device_s_per_sample"], second["train_gflop_per_sample"]) == (1.5, 3.0)
    assert (second["ratio"], second["expected_ratio"], second["off_by"]) == (3, 1.5, 2)


def test_bench_takes_several_recipes():
    assert parse(["bench", "a", "b", "--repeats", "2"]).recipes == ("a", "b")


def test_a_recipe_of_stages_is_planned_and_not_measured() -> None:
    run = check_recipe(settled(composed(Command("bench", "worlds/thoughts/nft"))))
    with pytest.raises(ConfigError, match="bench measures one engine, this recipe has stages. Plan it instead"):
        bench_recipe(run)
