"""Every algorithm on every family: Flow-GRPO, MixGRPO, DiffusionNFT and DRTune take two steps on tiny models.

A step samples, takes advantages or a gradient of a reward, and updates; `algorithm_steps` says what is judged.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from algorithm_steps import ALGORITHMS, take_two_steps
from family_steps import kit

pytestmark = [pytest.mark.slow, pytest.mark.matrix]


@pytest.mark.parametrize("method", list(ALGORITHMS))
@pytest.mark.parametrize("name", sorted(kit.families()))
def test_an_algorithm_takes_two_steps_on_a_family(name: str, method: str, folders: Path) -> None:
    family, pipeline = kit.families()[name], kit.ours(name, folders / name)
    trained = pipeline.bundle.trainable_modules()
    frozen = [module for key, module in pipeline.bundle.modules.items() if key not in trained]
    take_two_steps(family, pipeline, frozen, method)
