"""BAGEL of our modules against vLLM-Omni's own, on the same random weights: trajectories and texts."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from served_engines import SERVED
from unified_folders import save_bagel

from unirl.models.bagel.bundle import BagelBundle
from unirl.models.bagel.pipeline import BagelPipeline, BagelTextPipeline
from unirl.sde.kernels import FlowSDEStrategy
from unirl.types.media import Texts
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams

pytestmark = [pytest.mark.vllm_omni, pytest.mark.slow]

PROMPT, SEED, STEPS, WORDS = "a cat", 7, 5, 8
KINDS: dict[str, tuple[dict[str, Any], float, dict[str, Any]]] = {
    "none": ({"cfg_text_scale": 1.0, "cfg_img_scale": 1.0}, 1.0, {}),
    "text": ({"cfg_text_scale": 4.0, "cfg_img_scale": 1.0}, 4.0, {}),
    "both": ({"cfg_text_scale": 4.0, "cfg_img_scale": 1.5}, 4.0, {"guidance_scale_image": 1.5}),
    "channel": (
        {"cfg_text_scale": 4.0, "cfg_img_scale": 1.5, "cfg_renorm_type": "channel"},
        4.0,
        {"guidance_scale_image": 1.5, "guidance_renorm": "channel"},
    ),
    "text_channel": (
        {"cfg_text_scale": 4.0, "cfg_img_scale": 1.5, "cfg_renorm_type": "text_channel"},
        4.0,
        {"guidance_scale_image": 1.5, "guidance_renorm": "text_channel"},
    ),
}
"""Kind of guidance -> vLLM-Omni's arguments, and our scale and sampler_kwargs."""
INTERVAL = {"guidance_interval": [0.4, 1.0]}
"""Its default."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bagel(tmp_path_factory.mktemp("omni") / "bagel")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> tuple[dict[str, torch.Tensor], str]:
    """Latents [T + 1, L, D] of each kind of guidance, and the text."""
    wanted = {
        "images": {name: extra for name, (extra, _, _) in KINDS.items()},
        "prompt": PROMPT,
        "height": 64,
        "width": 64,
        "seed": SEED,
        "num_levels": STEPS + 1,
        "num_words": WORDS,
    }
    requests, out = folder.parent / "requests.json", folder.parent / "found.safetensors"
    requests.write_text(json.dumps(wanted))
    words = [
        SERVED["vllm_omni"].python,
        str(Path(__file__).parent / "omni_bagel.py"),
        str(folder),
        str(requests),
        str(out),
    ]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    with safe_open(out, framework="pt") as file:
        return {name: file.get_tensor(name) for name in KINDS}, (file.metadata() or {})["text"]


@pytest.fixture(scope="module")
def bundle(folder: Path) -> BagelBundle:
    return BagelBundle(str(folder))


@pytest.mark.parametrize("kind", list(KINDS))
def test_whole_trajectories_agree(kind: str, theirs: Any, bundle: BagelBundle) -> None:
    _, scale, extra = KINDS[kind]
    params = DiffusionSamplingParams(
        height=64,
        width=64,
        num_inference_steps=STEPS,
        guidance_scale=scale,
        negative_prompt="" if scale > 1 else None,
        eta=0.0,
        sde_indices=[],
        keep_latents="all",
        autocast_precision="fp32",
        sampler_kwargs={**INTERVAL, **extra} if scale > 1 else {},
    )
    painter = BagelPipeline(bundle, FlowSDEStrategy())
    torch.manual_seed(SEED)
    noise = torch.randn(painter.latent_shape(params))[None]
    with painter.evaluating():
        conditions = painter.encode({"text": Texts(texts=[PROMPT])}, params)
        ours = painter.diffuse(conditions, noise, painter.sigmas(params), params, noise_keys=["0"]).latents[0]
    found = theirs[0][kind]
    assert found.shape == ours.shape and torch.equal(found[0], ours[0])
    # float32 over five steps, in another order of sums; the largest latent is about 7.
    torch.testing.assert_close(ours, found.float(), rtol=0, atol=2e-5)


def test_guidance_of_every_kind_is_another_trajectory(theirs: Any) -> None:
    """So that none of the comparisons above is of the same numbers."""
    ends = [latents[-1] for latents in theirs[0].values()]
    for place, end in enumerate(ends):
        assert all(float((end - other).abs().max()) > 1e-3 for other in ends[:place])


def test_greedy_texts_agree(theirs: Any, bundle: BagelBundle) -> None:
    writer = BagelTextPipeline(bundle)
    # Theirs counts the begin of the turn.
    params = ARSamplingParams(temperature=0.0, max_new_tokens=WORDS - 1)
    with writer.evaluating():
        segment = writer.generate(writer.encode({"text": Texts(texts=[PROMPT])}, params), params, noise_keys=["0"])
    (text,) = writer.decode(segment).texts
    assert text and text == json.loads(theirs[1])["text"]
