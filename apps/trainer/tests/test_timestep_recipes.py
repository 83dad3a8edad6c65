"""Recipes of models that know integer timesteps: what only they can get wrong has messages."""

import re

import pytest

from unirl.config.check import check_recipe
from unirl.types.errors import ConfigError

from .changed_recipes import changed
from .test_policy_gradient_recipes import resolved

NFT = {
    "_target_": "unirl.algorithms.diffusion_nft.DiffusionNFT",
    "num_timesteps": 2,
    "timestep_sampler": "uniform",
}


@pytest.mark.parametrize("name", ["sdxl/ddpo", "cogvideox/t2v"])
def test_the_kernel_is_ddpos_own_with_all_of_its_noise(name):
    recipe = resolved(name)
    assert recipe["pipeline"]["strategy"]["_target_"] == "unirl.sde.kernels.DDIMStrategy"
    assert recipe["sampling"]["eta"] == 1.0


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "sdxl/ddpo",
            {"algorithm": NFT},
            "algorithm.timestep_sampler = uniform draws any noise level, but SDXLPipeline knows those of its timesteps",
        ),
        ("sdxl/ddpo", {"sampling.scheduler": None}, "the ddim kernel adds no noise on the last step"),
        ("sdxl/ddpo", {"sampling.eta": 1.2}, "sampling.eta = 1.2 must lie in [0, 1] for the ddim kernel"),
        ("sdxl/ddpo", {"sampling.height": 1020}, "sampling.height = 1020 is not divisible by 8"),
        ("sana/flowgrpo", {"sampling.width": 1000}, "sampling.width = 1000 is not divisible by 32"),
        ("cogvideox/t2v", {"sampling.num_frames": 13}, "sampling.num_frames = 13 is not 8 k + 1"),
    ],
)
def test_a_mistake_is_named_before_work_starts(name, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(changed(resolved(name), changes))
