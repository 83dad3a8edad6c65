"""Recipes of real size evaluate as their model is used: with the steps and the guidance of its release."""

import pytest

from unirl.config.catalog import available

# Steps and guidance of the model card, or of the pipeline's defaults where the card has none.
RELEASED = {
    "./models/sd3-controlnet-canny": (40, 4.5),
    "ByteDance-Seed/BAGEL-7B-MoT": (50, 4.0),
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": (20, 4.5),
    "Lightricks/LTX-2": (30, 3.0),
    "diffusers/LTX-2.3-Diffusers": (30, 3.0),
    "MiniMaxAI/MiniMax-H3": (49, 1.0),  # 50 levels, as the library's blocks count
    "Qwen/Qwen-Image": (50, 4.0),
    "Qwen/Qwen-Image-Edit": (50, 4.0),
    "Qwen/Qwen-Image-Edit-2509": (40, 4.0),
    "Tongyi-MAI/Z-Image": (50, 4.0),
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": (40, 5.0),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (50, 5.0),
    "Wan-AI/Wan2.1-VACE-1.3B-diffusers": (50, 5.0),
    "Wan-AI/Wan2.2-Animate-14B-Diffusers": (20, 1.0),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": (40, 3.5),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": (40, 4.0),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (50, 5.0),
    # These take their guidance as an input, of which `distilled_guidance_scale` is the strength.
    "black-forest-labs/FLUX.1-Fill-dev": (50, 1.0),
    "black-forest-labs/FLUX.1-Kontext-dev": (28, 1.0),
    "black-forest-labs/FLUX.1-dev": (28, 1.0),
    "black-forest-labs/FLUX.2-dev": (50, 1.0),
    "hunyuanvideo-community/HunyuanVideo": (50, 1.0),
    "hunyuanvideo-community/HunyuanVideo-I2V": (50, 1.0),
    "black-forest-labs/FLUX.2-klein-4B": (4, 1.0),
    "black-forest-labs/FLUX.2-klein-base-4B": (50, 4.0),
    "black-forest-labs/FLUX.2-klein-base-9B": (50, 4.0),
    "hunyuanvideo-community/HunyuanImage-2.1-Diffusers": (50, 3.5),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v": (50, 6.0),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": (50, 6.0),
    "nvidia/AnyFlow-FAR-Wan2.1-1.3B-Diffusers": (4, 1.0),
    "stabilityai/stable-diffusion-3.5-medium": (40, 4.5),
    "stabilityai/stable-diffusion-xl-base-1.0": (50, 5.0),
    "tencent/HunyuanImage-3.0-Instruct": (50, 5.0),
    "zai-org/CogVideoX-2b": (50, 6.0),
}
TRAINED_FOR_STEPS = ("sd3/dmd2", "sd3/dmd2_reward", "sd3/tdm_r1")
"""These learn to sample with the steps of training, without guidance."""
DISTILLED = {
    "black-forest-labs/FLUX.1-Fill-dev": 30.0,
    "black-forest-labs/FLUX.1-Kontext-dev": 2.5,
    "black-forest-labs/FLUX.1-dev": 3.5,
    "black-forest-labs/FLUX.2-dev": 4.0,
    "hunyuanvideo-community/HunyuanVideo": 6.0,
    "hunyuanvideo-community/HunyuanVideo-I2V": 1.0,
}
# Of the released scheduler, where the engine has it.
SOLVERS = {"Wan-AI/": "unipc", "Efficient-Large-Model/": "dpmpp_2m"}
# Methods that are published without guidance in training and evaluation alike.
WITHOUT_GUIDANCE = ("nft", "awm", "crd", "dgpo", "flowdppo", "cppo", "flowgrpo_cps")


def drawn() -> list[str]:
    """Recipes of real size that denoise images or videos."""
    others = ("worlds/", "llm/", "vlm/", "vla/", "sft/", "janus/")
    return [name for name in available() if not name.startswith(others)]


@pytest.mark.parametrize("name", drawn())
def test_a_recipe_evaluates_as_its_model_is_used(recipes, name):
    recipe = recipes[name]
    part = recipe["policies"]["painter"] if "policies" in recipe else recipe
    hub_id = part["bundle"]["pretrained_model"]
    own = recipe.get("stages", {}).get("image", {})
    sampling = own.get("sampling") or part["sampling"]
    steps, guidance = RELEASED[hub_id]
    if any(word in name for word in WITHOUT_GUIDANCE):
        assert sampling["guidance_scale"] == 1.0
        guidance = 1.0
    if name in TRAINED_FOR_STEPS:
        steps, guidance = sampling["num_inference_steps"], 1.0
    evaluated = recipe["eval"]
    assert (evaluated.get("num_inference_steps"), evaluated.get("guidance_scale")) == (steps, guidance)
    solver = next((value for owner, value in SOLVERS.items() if hub_id.startswith(owner)), "euler")
    assert evaluated.get("post_solver", "euler") == solver
    given = evaluated.get("distilled_guidance_scale", sampling.get("distilled_guidance_scale"))
    assert given == DISTILLED.get(hub_id)


def test_both_experts_of_wan_have_their_guidance(recipes):
    assert recipes["wan22/t2v_14b"]["eval"]["guidance_scale_2"] == 3.0


def test_the_shift_is_the_one_of_the_resolution(recipes):
    for name in ("wan22/t2v_14b", "wan22/t2v_14b_dancegrpo", "wan22/t2v_14b_mixgrpo", "wan22/i2v", "wan21/t2v"):
        recipe = recipes[name]
        assert recipe["pipeline"]["schedule"]["shift"] == (5.0 if recipe["sampling"]["height"] >= 704 else 3.0)
