"""What `trainer check` finds in recipes whose images SGLang Diffusion or vLLM-Omni samples."""

import re

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.types.errors import ConfigError

from .changed_recipes import changed

SHAPES = {
    "SGLangDiffusionEngine": "worlds/shapes/sglang",
    "VLLMOmniEngine": "worlds/shapes/vllm_omni",
}
DANCE = {"pipeline.strategy": {"_target_": "unirl.sde.kernels.DanceSDEStrategy"}}
TRUSTING = {"algorithm.old_logp_source": "rollout"}


@pytest.fixture(scope="module", params=SHAPES)
def engine(request):
    """Class name of each engine."""
    return request.param


@pytest.fixture(scope="module")
def recipe(engine):
    """The recipe on the shapes world, resolved once."""
    register_resolvers()
    return resolve(compose(SHAPES[engine]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pipeline.strategy": {"_target_": "unirl.sde.kernels.FlowSDEStrategy", "reduction": "sum"}},
            "averages log-probs over the elements of a latent, but pipeline.strategy.reduction = sum",
        ),
        ({"sampling.trajectory_precision": "bf16"}, "sampling.trajectory_precision = bf16 is not served"),
        ({"eval.post_solver": "unipc"}, "eval.post_solver = unipc is not served by {engine}. Set it to euler"),
        (
            {"bundle._target_": "unirl.models.sana.bundle.SanaBundle", "bundle.pretrained_model": "a/b"},
            "the recipe has SanaBundle. Set engine._target_: unirl.rollout.engine.replica.engine.ReplicaRolloutEngine",
        ),
        (
            {"engine.max_lora_rank": 8},
            "FullWeightSync pushes whole weights, but engine.max_lora_rank = 8",
        ),
        (
            {**TRUSTING, "sampling.autocast_precision": "bf16"},
            "old_logp_source = rollout takes the log-probs of {engine}, whose weights or precision",
        ),
        ({**TRUSTING, "engine.dtype": "bf16", "sync.dtype": "bf16"}, "takes the log-probs of {engine}"),
        ({**TRUSTING, "algorithm.clip_range": 5e-6}, "takes the log-probs of {engine}"),
    ],
)
def test_what_is_not_served_is_named_with_a_fix(recipe, engine, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message.replace("{engine}", engine))):
        check_recipe(changed(recipe, changes))


@pytest.mark.parametrize("changes", [{}, TRUSTING])
def test_in_float32_its_log_probs_may_be_trusted(recipe, changes):
    check_recipe(changed(recipe, changes))


def test_kernels_are_those_of_the_engine(recipe, engine):
    if engine == "VLLMOmniEngine":
        check_recipe(changed(recipe, DANCE))
        return
    with pytest.raises(ConfigError, match="steps with FlowSDEStrategy or CPSSDEStrategy, but pipeline.strategy is Dan"):
        check_recipe(changed(recipe, DANCE))
