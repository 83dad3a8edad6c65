"""What `trainer check` says of a model that makes videos chunk by chunk. Engines: see `test_check_engines.py`."""

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe, run_findings
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of

NAME = "anyflow/cmgrpo"


@pytest.fixture(scope="module", autouse=True)
def resolvers():
    register_resolvers()


def test_the_recipe_trains_the_steps_of_a_consistency_sampler_but_the_last():
    run = check_recipe(resolve(compose(NAME, [])))
    pipeline = run.policy.pipeline
    assert pipeline.inner["strategy"].name == "ConsistencySDEStrategy"
    assert run.sampling.get("eta") == 1.0 and run.sampling.node["scheduler"]["exclude_last"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [
                "algorithm._target_=unirl.algorithms.diffusion_nft.DiffusionNFT",
                "~algorithm.clip_range",
                "~algorithm.old_logp_source",
            ],
            "DiffusionNFT trains the velocity at a noise level, given no earlier chunks, and AnyFlowFARPipeline",
        ),
        (
            ["sampling.branch_steps=[0]", "sampling.branch_factors=[16]", "sampling.init_same_noise=true"],
            "AnyFlowFARPipeline makes each video alone. Remove sampling.branch_steps and sampling.branch_factors.",
        ),
        (
            ["sampling.one_step=prompt"],
            "makes the same steps stochastic in all videos of a call, but sampling.one_step = prompt. Set it to null.",
        ),
        (
            ["eval.post_solver=unipc"],
            "eval.post_solver = unipc, but AnyFlowFARPipeline steps by average velocities down to the next level.",
        ),
        (["sampling.num_frames=80"], "sampling.num_frames = 80 is not 4 k + 1. Set sampling.num_frames: 77 or 81."),
    ],
)
def test_what_chunks_cannot_do_is_refused(overrides, message):
    found = list(run_findings(run_of(resolve(compose(NAME, overrides)))))
    assert any(message in each for each in found), found
