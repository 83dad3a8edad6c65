"""CLIP and PickScore against transformers' own pipeline, on a tiny random model saved to a folder."""

import sys

import pytest
import torch
import transformers
from PIL import Image

from unirl.reward.base import LocalScorer
from unirl.reward.local.images.clip import CLIPRewardScorer
from unirl.reward.local.images.pickscore import PickScoreRewardScorer
from unirl.reward.service import RewardService
from unirl.types.errors import ConfigError, RewardError

PROMPTS = ["a red cat", "a dog", "a red cat", "x" * 200, "two blue birds on a roof", ""]
ATOL = 1e-6
"""Scores are near 1 and the reference multiplies and normalises in another order: a few units of the last place."""


@pytest.fixture(scope="module")
def folder(clip_folder):
    return clip_folder


def reference(folder, request):
    """logits_per_image of transformers' own classes, fed images one by one."""
    model = transformers.CLIPModel.from_pretrained(folder).eval()
    tokenizer = transformers.CLIPTokenizer.from_pretrained(folder)
    processor = transformers.CLIPImageProcessorPil.from_pretrained(folder)
    logits = []
    for pixels, prompt in zip(request.pixels, request.prompts, strict=True):
        picture = Image.fromarray((pixels * 255).round().byte().permute(1, 2, 0).numpy())
        inputs = tokenizer([prompt], truncation=True, max_length=24, return_tensors="pt")
        with torch.no_grad():
            found = model(**inputs, pixel_values=processor(images=picture, return_tensors="pt")["pixel_values"])
        logits.append(found.logits_per_image[0, 0])
    return torch.stack(logits)


@pytest.mark.parametrize("size", [16, 40])
@pytest.mark.parametrize(("scorer_class", "divisor"), [(CLIPRewardScorer, 30.0), (PickScoreRewardScorer, 26.0)])
def test_scores_equal_the_logits_of_transformers_over_the_divisor(folder, make_request, scorer_class, divisor, size):
    request = make_request(prompts=PROMPTS, size=size)
    scorer = scorer_class(model=folder, processor=folder)
    expected = reference(folder, request) / divisor
    assert expected.std() > 1e-3
    torch.testing.assert_close(scorer.score(request).rewards, expected, rtol=0, atol=ATOL)


def test_a_picture_that_is_not_square_is_resized_and_cropped_as_transformers_does(folder, make_request):
    request = make_request(prompts=PROMPTS, pixels=torch.rand(6, 3, 20, 31, generator=torch.Generator().manual_seed(1)))
    scorer = CLIPRewardScorer(model=folder, normalise=False)
    torch.testing.assert_close(scorer.score(request).rewards, reference(folder, request), rtol=1e-6, atol=1e-5)


def test_batch_size_and_order_do_not_change_a_score(folder, make_request):
    request = make_request(prompts=PROMPTS)
    three = CLIPRewardScorer(model=folder, batch_size=3).score(request).rewards
    one = CLIPRewardScorer(model=folder, batch_size=1).score(request).rewards
    torch.testing.assert_close(one, three, rtol=0, atol=ATOL)
    order = [4, 0, 5, 2, 1, 3]
    shuffled = CLIPRewardScorer(model=folder, batch_size=3).score(request.select(order)).rewards
    torch.testing.assert_close(shuffled, three[order], rtol=0, atol=ATOL)


def test_low_precision_towers_give_float32_scores_close_to_full_precision(folder, make_request):
    request = make_request(prompts=PROMPTS)
    full = CLIPRewardScorer(model=folder, normalise=False).score(request).rewards
    low = CLIPRewardScorer(model=folder, normalise=False, dtype="bf16").score(request).rewards
    assert low.dtype == torch.float32
    # bf16 keeps 8 bits: each cosine is off by up to about 1 %, times a logit scale of 14.
    torch.testing.assert_close(low, full, rtol=0, atol=0.15)
    assert not torch.equal(low, low.bfloat16().float())


def test_offload_and_onload_leave_the_score_as_it_was(folder, make_request):
    request = make_request(prompts=PROMPTS)
    service = RewardService([PickScoreRewardScorer(model=folder, processor=folder)])
    before = service.score(request).rewards
    service.offload()
    with pytest.raises(RewardError, match="scorer pickscore is offloaded"):
        service.score(request)
    service.onload()
    assert torch.equal(service.score(request).rewards, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offload_frees_device_memory_and_a_device_score_equals_the_cpu_score(folder, make_request):
    request = make_request(prompts=PROMPTS)
    scorer = CLIPRewardScorer(model=folder)
    expected = scorer.score(request).rewards
    service = RewardService([scorer], device="cuda")
    # fp32 products in another order, and TF32 is off by default.
    torch.testing.assert_close(service.score(request.to("cuda")).rewards, expected, rtol=0, atol=1e-5)
    assert torch.cuda.memory_allocated() > 0
    service.offload()
    assert all(parameter.device.type == "cpu" for parameter in scorer.modules()[0].parameters())
    service.onload()
    torch.testing.assert_close(service.score(request).rewards, expected, rtol=0, atol=1e-5)


def test_the_model_does_not_train(folder):
    module = CLIPRewardScorer(model=folder).modules()[0]
    assert not module.training and not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model": "/no/such/folder"}, "model = '/no/such/folder' is no folder"),
        ({"processor": "./nowhere/at/all"}, "processor = './nowhere/at/all' is no folder"),
        ({"dtype": "float8"}, "dtype = 'float8' must be one of"),
    ],
)
def test_impossible_arguments_say_what_to_change(folder, arguments, text):
    arguments.setdefault("model", folder)
    with pytest.raises(ConfigError, match=text):
        CLIPRewardScorer(**arguments)


def test_a_folder_without_a_model_is_named(folder, tmp_path):
    with pytest.raises(ConfigError, match=f"scorer clip: model = '{tmp_path}' cannot be loaded"):
        CLIPRewardScorer(model=str(tmp_path), processor=folder)
    with pytest.raises(ConfigError, match=f"scorer clip: cannot load processor '{tmp_path}'"):
        CLIPRewardScorer(model=folder, processor=str(tmp_path))


def test_weights_that_are_missing_are_not_left_at_random(folder, tmp_path):
    model = transformers.CLIPModel.from_pretrained(folder)
    kept = {key: value for key, value in model.state_dict().items() if key != "visual_projection.weight"}
    model.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(ConfigError, match="is no whole CLIPModel: 1 weights are missing, such as visual_projection"):
        PickScoreRewardScorer(model=str(tmp_path), processor=folder)


def test_without_transformers_the_message_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"scorer pickscore needs transformers.*unirl-reward\[clip\]"):
        PickScoreRewardScorer(model=folder, processor=folder)


def test_model_scorers_are_local_scorers(folder):
    assert isinstance(PickScoreRewardScorer(model=folder, processor=folder), LocalScorer)
