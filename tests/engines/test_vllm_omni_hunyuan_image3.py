"""HunyuanImage3 of our modules against vLLM-Omni's own, on the same random weights: words, velocities, trajectories."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from served_engines import SERVED
from unified_folders import save_hunyuan_image3

from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle
from unirl.models.hunyuan_image3.pipeline import HunyuanImage3Pipeline
from unirl.sde.kernels import FlowSDEStrategy
from unirl.types.media import Texts
from unirl.types.sampling import DiffusionSamplingParams

pytestmark = [pytest.mark.vllm_omni, pytest.mark.slow]

PROMPT, SEED, STEPS = "a cat", 7, 4
SYSTEM = "Draw what is asked."
THOUGHT = "<think>hm</think><recaption>a red cat</recaption>"
LINEAR = [1.0, 0.75, 0.5, 0.25]
"""Before the shift."""
TOLD = {"prompt": PROMPT, "use_system_prompt": "custom", "system_prompt": SYSTEM}
IMAGES: dict[str, dict[str, Any]] = {
    "plain": {"prompt": {"prompt": PROMPT}, "guidance": 1.0, "levels": LINEAR, "height": 64, "width": 64},
    "guided": {"prompt": {"prompt": PROMPT}, "guidance": 5.0, "levels": LINEAR, "height": 64, "width": 64},
    "wide": {"prompt": TOLD, "guidance": 2.5, "levels": LINEAR, "height": 32, "width": 96},
    # It puts back the mark that a text begins with, so it is sent without.
    "thought": {
        "prompt": {"prompt": PROMPT, "extra": {"ar_generated_text": THOUGHT.removeprefix("<think>")}},
        "guidance": 2.5,
        "levels": LINEAR,
        "height": 64,
        "width": 64,
    },
    "own_levels": {"prompt": {"prompt": PROMPT}, "guidance": 5.0, "levels": None, "height": 64, "width": 64},
    "whole_thought": {
        "prompt": {"prompt": PROMPT, "extra": {"ar_generated_text": THOUGHT}},
        "guidance": 2.5,
        "levels": LINEAR,
        "height": 64,
        "width": 64,
    },
}
AGREE = ("plain", "guided", "wide", "thought", "own_levels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hunyuan_image3(tmp_path_factory.mktemp("omni") / "hunyuan")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> HunyuanImage3Bundle:
    return HunyuanImage3Bundle(str(folder))


@pytest.fixture(scope="module")
def words(bundle: HunyuanImage3Bundle) -> list[int]:
    return bundle.tokenizer("A small red cat sits under the table.", add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def theirs(folder: Path, words: list[int]) -> dict[str, torch.Tensor]:
    wanted = {"images": IMAGES, "words": words, "seed": SEED, "num_steps": STEPS}
    requests, out = folder.parent / "requests.json", folder.parent / "found.safetensors"
    requests.write_text(json.dumps(wanted))
    script = Path(__file__).parent / "omni_hunyuan_image3.py"
    command = [SERVED["vllm_omni"].python, *map(str, (script, folder, folder / "stages.yaml", requests, out))]
    # The class of the configuration, which lies next to the weights, is copied to where modules of the hub are kept.
    variables = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_MODULES_CACHE": str(folder.parent / "modules"),
    }
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return load_file(out)


def ours(bundle: HunyuanImage3Bundle, name: str, found: dict[str, torch.Tensor]) -> Any:
    """Pipeline, conditions and parameters of a request."""
    asked = IMAGES[name]
    params = DiffusionSamplingParams(
        height=asked["height"],
        width=asked["width"],
        num_inference_steps=STEPS,
        guidance_scale=asked["guidance"],
        negative_prompt="" if asked["guidance"] > 1 else None,
        eta=0.0,
        sde_indices=[],
        keep_latents="all",
        autocast_precision="fp32",
    )
    painter = HunyuanImage3Pipeline(bundle, FlowSDEStrategy(), system_prompt=asked["prompt"].get("system_prompt"))
    given = {"text": Texts(texts=[PROMPT])}
    if "thought" in name:
        given["thought"] = Texts(texts=[THOUGHT])
    with torch.no_grad():
        return painter, painter.encode(given, params), params


@pytest.mark.parametrize("name", AGREE)
def test_prompts_agree_word_by_word(name: str, theirs: dict[str, torch.Tensor], bundle: HunyuanImage3Bundle) -> None:
    _, conditions, _ = ours(bundle, name, theirs)
    rows = [conditions[slot].input_ids[0] for slot in ("text", "negative_text") if slot in conditions]
    found = theirs[f"{name}.ids"]
    assert len(found) == len(rows)
    for theirs_N, ours_N in zip(found, rows, strict=True):
        assert theirs_N[: len(ours_N)].tolist() == ours_N.tolist()
        following = bundle.tokenizer.convert_ids_to_tokens(theirs_N[len(ours_N) :][:2].tolist())
        assert following == ["<timestep>", "<img>"]


@pytest.mark.parametrize("name", AGREE)
def test_velocities_and_whole_trajectories_agree(
    name: str, theirs: dict[str, torch.Tensor], bundle: HunyuanImage3Bundle
) -> None:
    painter, conditions, params = ours(bundle, name, theirs)
    latents, velocity, sigmas = (theirs[f"{name}.{part}"] for part in ("latents", "velocity", "sigmas"))
    assert tuple(latents.shape[1:]) == painter.latent_shape(params)
    with painter.evaluating():
        bound = painter.adapter.bind(conditions, params)
        rows = torch.zeros(STEPS, dtype=torch.long)
        repeated = {slot: condition.select(rows) for slot, condition in conditions.items()}
        at_once = painter.adapter.bind(repeated, params)(latents[:-1], sigmas[:-1], torch.arange(STEPS))
        one_by_one = [bound(latents[step][None], sigmas[step][None], torch.tensor([step]))[0] for step in range(STEPS)]
        drawn = painter.diffuse(conditions, latents[:1], sigmas, params, noise_keys=["0"]).latents[0]
    # float32, in another order of sums; a velocity is about 1, with guidance 5 about 5.
    for found in (at_once, torch.stack(one_by_one)):
        torch.testing.assert_close(found, velocity, rtol=0, atol=2e-5)
    torch.testing.assert_close(drawn, latents, rtol=0, atol=2e-5)


def test_requests_are_other_trajectories(theirs: dict[str, torch.Tensor]) -> None:
    """So that none of the comparisons above is of the same numbers."""
    ends = [theirs[f"{name}.latents"][-1] for name in IMAGES if name != "wide"]
    for place, end in enumerate(ends):
        assert all(float((end - other).abs().max()) > 1e-3 for other in ends[:place])


def test_scores_of_words_agree(theirs: dict[str, torch.Tensor], bundle: HunyuanImage3Bundle, words: list[int]) -> None:
    ids = torch.tensor([words])
    with torch.no_grad():
        cache = bundle.new_cache()
        rows = [
            bundle.model(
                input_ids=ids[:, place : place + 1],
                position_ids=torch.tensor([[place]]),
                attention_mask=torch.ones(1, place + 1, dtype=torch.long),
                use_cache=True,
                past_key_values=cache,
            ).logits[0, 0]
            for place in range(len(words))
        ]
    # The largest score is about 10.
    torch.testing.assert_close(torch.stack(rows), theirs["logits"], rtol=0, atol=1e-4)


# Where it departs from the published code, ours does not. -----------------------------------------------------------


def test_it_shifts_its_own_levels_twice_and_ours_once(theirs: dict[str, torch.Tensor], bundle: Any) -> None:
    painter, _, params = ours(bundle, "own_levels", theirs)
    once = [3 * level / (1 + 2 * level) for level in (*LINEAR, 0.0)]
    assert painter.sigmas(params).tolist() == pytest.approx(once, abs=1e-6)
    assert theirs["plain.sigmas"].tolist() == pytest.approx(once, abs=1e-6)
    found = theirs["own_levels.sigmas"]
    assert found[-2] < 0.01 < once[-2], "vLLM-Omni has changed its levels: send them again"


def test_it_adds_a_mark_to_a_whole_thought_and_ours_does_not(theirs: dict[str, torch.Tensor], bundle: Any) -> None:
    _, conditions, _ = ours(bundle, "whole_thought", theirs)
    mark = bundle.words.recaption
    assert conditions["text"].input_ids[0].tolist().count(mark) == 1
    assert theirs["whole_thought.ids"][0].tolist().count(mark) == 2
    assert theirs["thought.ids"][0].tolist().count(mark) == 1
