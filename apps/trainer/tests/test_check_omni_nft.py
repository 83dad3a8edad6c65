"""Recipes of OmniNFT: each mistake with its message before work starts."""

import re

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.types.errors import ConfigError

from .changed_recipes import changed

JOINT, ONE_MEDIUM = "ltx2/omni_nft", "hunyuan_video15/t2v_nft"
ROUTED = "unirl.algorithms.routed_advantages.RoutedAdvantages"
WEIGHTED = "unirl.algorithms.advantages.AdvantageConfig"
NO_REGIONS = {"pipeline.region_steps": None, "algorithm.region_weight": ..., "algorithm.region_warmup": ...}
REGIONS = {"pipeline.region_steps": [0.5, 0.9], "algorithm.region_weight": 1.5}
OMNI_NFT, NFT = "unirl.algorithms.omni_nft.OmniNFT", "unirl.algorithms.diffusion_nft.DiffusionNFT"


@pytest.fixture(scope="module")
def recipes():
    """The recipes of these tests, resolved once."""
    register_resolvers()
    return {name: resolve(compose(name)) for name in (JOINT, ONE_MEDIUM)}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            JOINT,
            {"advantages.routes.video": {"taste": 1.0}},
            "advantages.routes.video names taste, but the scorers of reward are video, clap. Name one of these, or add "
            "reward.scorers.taste.",
        ),
        (
            JOINT,
            {"advantages.routes": {"video": {"video": 1.0}}},
            "advantages.routes is for video, but a latent holds video, audio. Give each of these a route",
        ),
        (
            JOINT,
            {"advantages.routes.smell": {"clap": 1.0}},
            "advantages.routes is for video, audio, smell, but a latent holds video, audio.",
        ),
        (
            JOINT,
            {"advantages._target_": WEIGHTED, "advantages.routes": ...},
            f"OmniNFT needs advantages for each medium, which AdvantageConfig does not make. Set advantages._target_: "
            f"{ROUTED} with advantages.routes.",
        ),
        (
            JOINT,
            {"algorithm._target_": NFT, **NO_REGIONS},
            "advantages.routes gives each medium its own advantage, and DiffusionNFT has one per sample. Set "
            f"algorithm._target_: {OMNI_NFT}, or advantages._target_: {WEIGHTED}.",
        ),
        (
            ONE_MEDIUM,
            {"algorithm._target_": OMNI_NFT},
            "OmniNFT trains the media of a latent apart, and a latent of HunyuanVideo15Pipeline is one medium. Set "
            f"algorithm._target_: {NFT}, or a model of video with sound (LTX-2).",
        ),
        (
            JOINT,
            {"algorithm.media_weights": {"video": -1.0}},
            "algorithm.media_weights has weights below 0: {'video': -1.0}. Set weights of at least 0.",
        ),
        (
            JOINT,
            {"algorithm.media_weights": {"sound": 1.0}},
            "algorithm.media_weights names sound; media of the latent are video, audio. Use these names.",
        ),
        (
            JOINT,
            {"algorithm.media_weights": {"video": 0.0, "audio": 0.0}},
            "algorithm.media_weights = {'video': 0.0, 'audio': 0.0} leaves no medium to train. Set one above 0.",
        ),
        (
            JOINT,
            {"schedule": {"kind": "pipelined", "groups_per_request": 6}},
            "RoutedAdvantages may compare samples of all of a rollout",
        ),
        (
            JOINT,
            {"pipeline.audio_gradient": [[0, 10, 0.1], [40, 48, 0.3]]},
            "pipeline.audio_gradient names block 48 of 48, counted from 0. End at 47.",
        ),
        (
            JOINT,
            {"pipeline.audio_gradient": [[0, 10, -0.1]]},
            "pipeline.audio_gradient scales the gradient of blocks 0 to 10 by -0.1. Set a scale from 0 to 1.",
        ),
        (
            ONE_MEDIUM,
            {"pipeline.audio_gradient": [[0, 10, 0.1]]},
            "pipeline.audio_gradient",
        ),
        (
            JOINT,
            {"pipeline.region_steps": None, "algorithm.region_weight": 1.5},
            "algorithm.region_weight = 1.5 weighs places of the video by the attention of the sound, and nothing notes "
            "it. Set pipeline.region_steps: [0.5, 0.9].",
        ),
        (
            ONE_MEDIUM,
            {"algorithm._target_": OMNI_NFT, "algorithm.region_weight": 1.5},
            "algorithm.region_weight = 1.5 weighs places of the video by the attention of the sound, which "
            "HunyuanVideo15Pipeline does not note. Set algorithm.region_weight: 1, or a model whose sound",
        ),
        (
            JOINT,
            {"algorithm.region_weight": 0.9},
            "algorithm.region_weight = 0.9 must be at least 1",
        ),
        (
            JOINT,
            {"algorithm.region_weight": 1, "algorithm.region_warmup": 400, "pipeline.region_steps": None},
            "algorithm.region_warmup = 400 does nothing with algorithm.region_weight = 1. Set it to 0.",
        ),
        (
            JOINT,
            {**NO_REGIONS, "pipeline.region_steps": [0.5, 0.9]},
            "pipeline.region_steps = [0.5, 0.9] notes attention that algorithm does not use. Set "
            "pipeline.region_steps: null, or region_weight above 1",
        ),
        (
            JOINT,
            {**REGIONS, "pipeline.region_steps": [0.9, 0.5]},
            "pipeline.region_steps = [0.9, 0.5] is not the first and the last share of the steps. Set [0.5, 0.9].",
        ),
        (
            JOINT,
            {**REGIONS, "pipeline.region_blocks": [10, 48]},
            "pipeline.region_blocks names block 48 of 48, counted from 0. End at 47.",
        ),
        (
            JOINT,
            {**REGIONS, "sampling.branch_steps": [0], "sampling.branch_factors": [8]},
            "pipeline.region_steps = [0.5, 0.9] notes the attention of every sample, and sampling.branch_steps has",
        ),
    ],
)
def test_a_mistake_is_named_with_its_values_and_the_fix(recipes, name, changes, message):
    check_recipe(recipes[name])
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(changed(recipes[name], changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages.routes.video": {"video": -1.0}}, "advantages.routes.video has weights below 0: {'video': -1.0}"),
        ({"advantages.routes.audio": {"clap": 0.0}}, "advantages.routes.audio names clap and has no weight above 0"),
        ({"advantages.routes": ...}, "advantages.routes is empty. Name the components of each medium"),
    ],
)
def test_a_route_that_teaches_nothing_is_refused_before_weights_are_read(recipes, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(changed(recipes[JOINT], changes))


def test_a_component_of_a_scorer_may_be_routed_by_itself_and_one_component_to_both_media(recipes):
    routes = {"video": {"video/frames": 1.0, "clap": 0.5}, "audio": {"clap": 1.0}}
    check_recipe(changed(recipes[JOINT], {"advantages.routes": routes}))


def test_an_engine_that_samples_with_another_implementation_notes_no_regions():
    register_resolvers()
    served = resolve(compose(JOINT, ["parts/engine=vllm_omni", "parts/layout=colocated"]))
    message = (
        "pipeline.region_steps = [0.5, 0.9] notes attention of this pipeline, and VLLMOmniEngine samples with another "
        "implementation. Set engine._target_: unirl.rollout.engine.replica.engine.ReplicaRolloutEngine, or"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(served)
    check_recipe(changed(served, NO_REGIONS))
    check_recipe(resolve(compose(JOINT, ["parts/engine=replica", "parts/layout=colocated"])))
