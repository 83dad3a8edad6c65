"""ImageReward against a plain implementation on the published names."""

import pytest
import torch
import transformers
from torch import nn

from unirl.reward.local.images.image_reward import NUM_TOKENS, REWARD_MEAN, REWARD_STD, ImageRewardScorer
from unirl.types.errors import ConfigError

from .model_folders import TEXT_SETTINGS, image_reward_state, write_image_reward

PROMPTS = ["a red cat", "dog", "x y z " * 30, "two blue birds on a roof"]


@torch.no_grad()
def reward(state, input_bCHW, tokens_bT, mask_bT):
    """The published forward pass for two blocks a tower."""

    def linear(x, name):
        return nn.functional.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(x, name, eps):
        return nn.functional.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps)

    def attend(q, k, v, heads, bias=None):
        q, k, v = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (q, k, v))
        found = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return found.transpose(1, 2).flatten(2)

    vision, text = "blip.visual_encoder", "blip.text_encoder"
    patches = state[f"{vision}.patch_embed.proj.weight"], state[f"{vision}.patch_embed.proj.bias"]
    x = nn.functional.conv2d(input_bCHW, *patches, stride=8).flatten(2).transpose(1, 2)
    x = torch.cat([state[f"{vision}.cls_token"].expand(len(x), -1, -1), x], 1) + state[f"{vision}.pos_embed"]
    for name in (f"{vision}.blocks.{i}" for i in range(2)):
        q, k, v = linear(norm(x, f"{name}.norm1", 1e-6), f"{name}.attn.qkv").chunk(3, dim=-1)
        x = x + linear(attend(q, k, v, 1), f"{name}.attn.proj")
        hidden = nn.functional.gelu(linear(norm(x, f"{name}.norm2", 1e-6), f"{name}.mlp.fc1"))
        x = x + linear(hidden, f"{name}.mlp.fc2")
    seen = norm(x, f"{vision}.norm", 1e-6)

    words = state[f"{text}.embeddings.word_embeddings.weight"][tokens_bT]
    places = state[f"{text}.embeddings.position_embeddings.weight"][: tokens_bT.shape[1]]
    y = norm(words + places, f"{text}.embeddings.LayerNorm", 1e-12)
    heads = TEXT_SETTINGS["num_attention_heads"]
    bias = torch.where(mask_bT[:, None, None] > 0, 0.0, -torch.inf)
    for name in (f"{text}.encoder.layer.{i}" for i in range(2)):
        for attention, source, mask in (("attention", None, bias), ("crossattention", seen, None)):
            keys = y if source is None else source
            part = f"{name}.{attention}"
            q = linear(y, f"{part}.self.query")
            found = attend(q, linear(keys, f"{part}.self.key"), linear(keys, f"{part}.self.value"), heads, mask)
            y = norm(linear(found, f"{part}.output.dense") + y, f"{part}.output.LayerNorm", 1e-12)
        hidden = nn.functional.gelu(linear(y, f"{name}.intermediate.dense"))
        y = norm(linear(hidden, f"{name}.output.dense") + y, f"{name}.output.LayerNorm", 1e-12)
    z = y[:, 0]
    for place in (0, 2, 4, 6, 7):
        z = linear(z, f"mlp.layers.{place}")
    return (z[:, 0] - 0.16717362830052426) / 1.0333394966054072


@pytest.fixture
def folder(tmp_path):
    write_image_reward(tmp_path)
    return str(tmp_path)


def test_the_score_is_that_of_the_published_forward_pass(folder, make_request):
    request = make_request(num_samples=4, prompts=PROMPTS, size=16)
    tokens = transformers.BertTokenizer.from_pretrained(folder)(
        PROMPTS, padding="max_length", truncation=True, max_length=35, return_tensors="pt"
    )
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    pictures = list((request.pixels * 255).round().byte())
    ready = processor(images=pictures, return_tensors="pt")["pixel_values"]
    expected = reward(image_reward_state(), ready, tokens["input_ids"], tokens["attention_mask"])
    assert expected.std() > 0.1
    scorer = ImageRewardScorer(model=folder, tokenizer=folder)
    torch.testing.assert_close(scorer.score(request).rewards, expected, rtol=1e-5, atol=1e-5)


def test_the_published_constants():
    assert (REWARD_MEAN, REWARD_STD, NUM_TOKENS) == (0.16717362830052426, 1.0333394966054072, 35)


def test_offloading_moves_towers_and_head(folder):
    scorer = ImageRewardScorer(model=folder, tokenizer=folder, dtype="bf16")
    vision, text, head = scorer.modules()
    assert next(vision.parameters()).dtype == next(text.parameters()).dtype == torch.bfloat16
    assert next(head.parameters()).dtype == torch.float32
    scorer.offload()
    assert scorer.is_offloaded


def test_what_cannot_be_loaded_is_named(folder, tmp_path):
    with pytest.raises(ConfigError, match="scorer image_reward: tokenizer = './none/at/all' is no folder"):
        ImageRewardScorer(model=folder, tokenizer="./none/at/all")
    state = image_reward_state()
    torch.save(state | {"blip.visual_encoder.extra.weight": torch.ones(1)}, tmp_path / "ImageReward.pt")
    with pytest.raises(ConfigError, match="holds other weights than ImageReward's: .*extra.weight"):
        ImageRewardScorer(model=folder, tokenizer=folder)
    del state["blip.visual_encoder.patch_embed.proj.weight"]
    torch.save(state, tmp_path / "ImageReward.pt")
    with pytest.raises(ConfigError, match="holds other weights than ImageReward's: .*patch_embedding.weight"):
        ImageRewardScorer(model=folder, tokenizer=folder)
    (tmp_path / "med_config.json").unlink()
    with pytest.raises(ConfigError, match="has no file med_config.json"):
        ImageRewardScorer(model=folder, tokenizer=folder)
