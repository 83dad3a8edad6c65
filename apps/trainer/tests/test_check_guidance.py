"""Rules about guidance that a checkpoint does not take, or lacks: said before weights are read, without torch."""

import json

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import run_findings
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of

FLUX1, FILL = "flux1/flowgrpo", "flux1/fill_pickscore"
HUNYUAN, HUNYUAN_I2V = "hunyuan_video/t2v_grpo", "hunyuan_video/i2v_nft"
KLEIN, DEV, Z_IMAGE = "flux2_klein/grpo", "flux2_dev/grpo", "z_image/nft"
SCHNELL = "bundle.pretrained_model=black-forest-labs/FLUX.1-schnell"
TURBO = "bundle.pretrained_model=Tongyi-MAI/Z-Image-Turbo"
NO_INPUT = "sampling.distilled_guidance_scale=null"
GUIDED = ["sampling.guidance_scale=3", "+sampling.negative_prompt=blurred"]


def findings(name, *overrides):
    register_resolvers()
    return list(run_findings(run_of(resolve(compose(name, list(overrides))))))


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (
            FLUX1,
            [NO_INPUT],
            "FLUX.1-dev takes its guidance as an input. Set sampling.distilled_guidance_scale (released",
        ),
        (FLUX1, [SCHNELL], "distilled_guidance_scale = 3.5 means nothing to black-forest-labs/FLUX.1-schnell"),
        (
            FLUX1,
            [SCHNELL, NO_INPUT, *GUIDED],
            "FLUX.1-schnell is distilled to sample without guidance; got guidance_scale",
        ),
        (FLUX1, ["+sampling.negative_prompt=blurred"], "negative_prompt = 'blurred' is read by guidance alone"),
        (FLUX1, [SCHNELL, NO_INPUT, "eval.guidance_scale=4"], "eval: black-forest-labs/FLUX.1-schnell is distilled"),
        (FILL, GUIDED, "FLUX.1-Fill-dev is distilled to sample without guidance"),
        (
            HUNYUAN,
            [NO_INPUT],
            "HunyuanVideo takes its guidance as an input. Set sampling.distilled_guidance_scale (released",
        ),
        (HUNYUAN, ["+sampling.negative_prompt=blurred"], "negative_prompt = 'blurred' is read by guidance alone"),
        (
            HUNYUAN_I2V,
            ["bundle.pretrained_model=hunyuanvideo-community/HunyuanVideo-I2V-33ch"],
            "distilled_guidance_scale = 1.0 means nothing to hunyuanvideo-community/HunyuanVideo-I2V-33ch",
        ),
        (
            KLEIN,
            ["bundle.pretrained_model=black-forest-labs/FLUX.2-klein-9B", "sampling.guidance_scale=4"],
            "FLUX.2-klein-9B is distilled to sample without guidance; got guidance_scale = 4",
        ),
        (
            DEV,
            [NO_INPUT],
            "FLUX.2-dev takes its guidance as an input. Set sampling.distilled_guidance_scale (released with",
        ),
        (DEV, GUIDED, "FLUX.2-dev is distilled to sample without guidance; got guidance_scale = 3"),
        (Z_IMAGE, [TURBO], "bundle.is_distilled = false, but Tongyi-MAI/Z-Image-Turbo is distilled"),
        (
            Z_IMAGE,
            [TURBO, "+bundle.is_distilled=true", "sampling.guidance_scale=4", "sampling.negative_prompt=blurred"],
            "Z-Image-Turbo is distilled to sample without guidance",
        ),
    ],
)
def test_guidance_that_a_checkpoint_does_not_take_is_refused(name, overrides, message):
    found = findings(name, *overrides)
    assert [each for each in found if message in each], found


@pytest.mark.parametrize("name", [FLUX1, FILL, HUNYUAN, HUNYUAN_I2V, KLEIN, DEV, Z_IMAGE])
def test_recipes_say_the_guidance_that_their_checkpoints_take(name):
    assert not findings(name)


def test_turbo_is_accepted_without_guidance():
    assert not findings(Z_IMAGE, TURBO, "+bundle.is_distilled=true")


@pytest.mark.parametrize(
    ("name", "file", "settings", "overrides"),
    [
        (FLUX1, "transformer/config.json", {"guidance_embeds": False}, [NO_INPUT, *GUIDED]),
        (KLEIN, "model_index.json", {"is_distilled": True}, ["sampling.guidance_scale=3"]),
    ],
)
def test_a_folder_says_itself_that_it_is_distilled(tmp_path, name, file, settings, overrides):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(settings))
    found = findings(name, f"bundle.pretrained_model={tmp_path}", *overrides)
    assert any(f"{tmp_path} is distilled to sample without guidance" in each for each in found), found
