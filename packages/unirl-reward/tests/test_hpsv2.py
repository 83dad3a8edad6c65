"""HPSv2 against a plain implementation of open_clip's model on the published names."""

import pytest
import torch
import transformers
from torch import nn

from unirl.reward.local.images.hpsv2 import HPSv2RewardScorer, from_open_clip
from unirl.reward.local.preprocess import PadPreprocessing
from unirl.types.errors import ConfigError

from .model_folders import open_clip_state, write_hpsv2

PROMPTS = ["a red cat", "a dog", "x" * 200, "two blue birds on a roof"]


def block(x, state, name, heads, mask=None):
    """A residual attention block of open_clip through torch's own multi-head attention."""
    width = x.shape[-1]
    attention = nn.MultiheadAttention(width, heads, batch_first=True)
    own = {key.removeprefix(f"{name}.attn."): value for key, value in state.items() if key.startswith(f"{name}.attn.")}
    attention.load_state_dict(own)

    def norm(x, which):
        return nn.functional.layer_norm(x, (width,), state[f"{name}.{which}.weight"], state[f"{name}.{which}.bias"])

    def linear(x, which):
        return nn.functional.linear(x, state[f"{name}.mlp.{which}.weight"], state[f"{name}.mlp.{which}.bias"])

    normed = norm(x, "ln_1")
    x = x + attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
    return x + linear(nn.functional.gelu(linear(norm(x, "ln_2"), "c_fc")), "c_proj")


@torch.no_grad()
def cosine(state, input_bCHW, tokens_bT):
    """Cosine of the two towers of `state`, two blocks each, width 32, two heads."""
    width = state["ln_final.weight"].shape[0]

    def norm(x, which):
        return nn.functional.layer_norm(x, (width,), state[f"{which}.weight"], state[f"{which}.bias"])

    x = nn.functional.conv2d(input_bCHW, state["visual.conv1.weight"], stride=8).flatten(2).transpose(1, 2)
    x = torch.cat([state["visual.class_embedding"].expand(len(x), 1, -1), x], 1) + state["visual.positional_embedding"]
    x = norm(x, "visual.ln_pre")
    for i in range(2):
        x = block(x, state, f"visual.transformer.resblocks.{i}", 2)
    image = norm(x[:, 0], "visual.ln_post") @ state["visual.proj"]
    length = tokens_bT.shape[1]
    y = state["token_embedding.weight"][tokens_bT] + state["positional_embedding"]
    for i in range(2):
        y = block(y, state, f"transformer.resblocks.{i}", 2, torch.full((length, length), -torch.inf).triu(1))
    ends = tokens_bT.argmax(1)  # the end mark has the largest number
    text = norm(y, "ln_final")[torch.arange(len(y)), ends] @ state["text_projection"]
    return nn.functional.cosine_similarity(image, text)


@pytest.fixture
def vit_folder(clip_folder, tmp_path):
    """Configuration and tokenizer with the activation of ViT-H/14."""
    config = transformers.CLIPConfig.from_pretrained(clip_folder)
    for tower in (config.text_config, config.vision_config):
        tower.hidden_act = "gelu"  # ty: ignore[invalid-assignment]
    config.save_pretrained(tmp_path / "vit")
    transformers.CLIPTokenizer.from_pretrained(clip_folder).save_pretrained(tmp_path / "vit")
    return str(tmp_path / "vit")


@pytest.fixture
def checkpoint(tmp_path):
    write_hpsv2(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_score_is_the_cosine_of_the_published_model(vit_folder, checkpoint, make_request, scale):
    request = make_request(num_samples=4, prompts=PROMPTS, size=40)
    tokenizer = transformers.CLIPTokenizer.from_pretrained(vit_folder)
    tokens = tokenizer(PROMPTS, padding="max_length", truncation=True, max_length=24, return_tensors="pt")["input_ids"]
    rounded = (request.pixels * 255).round() / 255
    expected = cosine(open_clip_state(), PadPreprocessing(16)(rounded), tokens)
    assert expected.std() > 0.05
    found = HPSv2RewardScorer(checkpoint=checkpoint, model=vit_folder, scale=scale).score(request).rewards
    torch.testing.assert_close(found, scale * expected, rtol=0, atol=2e-6 * scale)


def test_every_published_name_has_a_place(clip_folder):
    model = transformers.CLIPModel(transformers.CLIPConfig.from_pretrained(clip_folder))
    assert set(from_open_clip(open_clip_state() | {"attn_mask": torch.zeros(1)})) == set(model.state_dict())


def test_weights_in_transformers_format_need_no_checkpoint(clip_folder, checkpoint, make_request, tmp_path):
    model = transformers.CLIPModel(transformers.CLIPConfig.from_pretrained(clip_folder))
    model.load_state_dict(from_open_clip(open_clip_state()))
    converted = tmp_path / "converted"
    model.save_pretrained(converted)
    transformers.CLIPTokenizer.from_pretrained(clip_folder).save_pretrained(converted)
    request = make_request(num_samples=4, prompts=PROMPTS)
    expected = HPSv2RewardScorer(checkpoint=checkpoint, model=clip_folder).score(request).rewards
    found = HPSv2RewardScorer(checkpoint=None, model=str(converted)).score(request).rewards
    assert torch.equal(found, expected)


def test_weights_that_are_missing_are_not_left_at_random(vit_folder, clip_folder):
    model = transformers.CLIPModel.from_pretrained(clip_folder)
    kept = {key: value for key, value in model.state_dict().items() if key != "visual_projection.weight"}
    model.save_pretrained(vit_folder, state_dict=kept)
    with pytest.raises(ConfigError, match="is no whole CLIPModel: 1 weights are missing, such as visual_projection"):
        HPSv2RewardScorer(checkpoint=None, model=vit_folder)


def test_a_checkpoint_that_does_not_fit_is_named(clip_folder, tmp_path):
    with pytest.raises(ConfigError, match="scorer hpsv2: checkpoint = .* has no file HPS_v2.1_compressed.pt"):
        HPSv2RewardScorer(checkpoint=str(tmp_path), model=clip_folder)
    torch.save({"state_dict": open_clip_state() | {"visual.extra.weight": torch.ones(1)}}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match="x.pt does not fit model .*visual.extra.weight"):
        HPSv2RewardScorer(checkpoint=str(tmp_path), file="x.pt", model=clip_folder)
    (tmp_path / "x.pt").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="x.pt is no file of weights"):
        HPSv2RewardScorer(checkpoint=str(tmp_path), file="x.pt", model=clip_folder)
    torch.save({"epoch": 3}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match="x.pt holds no tensors by name"):
        HPSv2RewardScorer(checkpoint=str(tmp_path), file="x.pt", model=clip_folder)
    with pytest.raises(ConfigError, match="scale = 0.0 must be"):
        HPSv2RewardScorer(checkpoint=str(tmp_path), model=clip_folder, scale=0.0)
