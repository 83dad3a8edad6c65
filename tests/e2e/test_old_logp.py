"""Where the old log-probs of a recipe come from is decided once its components are built."""

from typing import Any  # components by section

import pytest

from unirl.config.runs import run_of
from unirl.distributed.worker import WorkerContext
from unirl.trainer.build.worker import build_components

BF16 = "sampling.autocast_precision=bf16"


@pytest.mark.parametrize(
    ("name", "override", "expected"),
    [
        ("worlds/shapes/flowgrpo", "seed=0", "the rollout's (auto"),
        ("worlds/shapes/flowgrpo", BF16, "replay (auto"),
        ("worlds/shapes/flowgrpo", "algorithm.old_logp_source=replay", "replay (the first"),
        ("worlds/shapes/guard", "seed=0", "replay (auto"),
        ("worlds/shapes/nft", "seed=0", None),
    ],
)
def test_a_rollout_is_trusted_in_float32_alone(recipe, tmp_path, name, override, expected):
    components: dict[str, Any] = build_components(
        run_of(recipe(name, override)), str(tmp_path), WorkerContext(0, 1, "cpu")
    )
    found = components["stack"].old_logp()
    assert found is None if expected is None else found.startswith(expected)
