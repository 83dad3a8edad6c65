"""Every algorithm on every family: Flow-GRPO, MixGRPO, DiffusionNFT and DRTune take two steps on tiny models.

A step samples, takes advantages or a gradient of a reward, and updates; `algorithm_steps` says what is judged.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from algorithm_steps import ALGORITHMS, take_two_steps
from family_steps import kit

from unirl.sde.kernels import ConsistencySDEStrategy
from unirl.sde.windows import AllSteps

pytestmark = [pytest.mark.slow, pytest.mark.matrix]


@pytest.mark.parametrize("method", list(ALGORITHMS))
@pytest.mark.parametrize("name", sorted(kit.families()))
def test_an_algorithm_takes_two_steps_on_a_family(name: str, method: str, folders: Path) -> None:
    family = kit.families()[name]
    if family.makes_chunks and not method.endswith("grpo"):
        pytest.skip("chunks are trained on sampled steps alone, see unirl.models.anyflow.rules")
    pipeline = kit.ours(name, folders / name)
    trained = pipeline.bundle.trainable_modules()
    frozen = [module for key, module in pipeline.bundle.modules.items() if key not in trained]
    take_two_steps(family, pipeline, frozen, method)


def test_cm_grpo_takes_two_steps_on_chunks(folders: Path) -> None:
    """The consistency kernel asks for the average velocity down to 0; the last step has no noise."""
    family, bundle = kit.families()["anyflow_far"], kit.ours("anyflow_far", folders / "anyflow_far").bundle
    frozen = [module for key, module in bundle.modules.items() if key != "transformer"]
    steps = {"eta": 1.0, "scheduler": AllSteps(num_steps=4, exclude_last=True), "guidance_scale": 1.0}
    take_two_steps(family, family.pipeline(bundle, ConsistencySDEStrategy()), frozen, "flow_grpo", **steps)
