"""What a block keeps for the backward pass, counted on blocks of true width, is about what estimates take it for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from unirl.app.memory import PRODUCTS
from unirl.models.allocations import Allocations
from unirl.models.hunyuan_image3.configuration import DecoderConfig, LayerConfig
from unirl.models.hunyuan_image3.transformer import HunyuanImage3DecoderLayer, rotary_table
from unirl.models.released import all_released
from unirl.models.sd3.bundle import SD3Bundle
from unirl.train.backend.recompute import selective
from unirl.train.backend.wrap import checkpoint_activations

IMAGE, TEXT = 48, 16
"""Tokens."""
LORA = LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"])


Inputs = dict[str, Any]  # Any: tensors, and what attention is made with
"""Inputs of a block, made outside of what is counted: they are what the block before it made."""


def tokens(num: int, width: int) -> Tensor:
    return torch.zeros(1, num, width, dtype=torch.bfloat16, device="cpu", requires_grad=True)


def sd3(
    *, is_dual: bool = True, is_last: bool = False, num_image: int = IMAGE, num_text: int = TEXT
) -> tuple[nn.Module, Inputs, int]:
    block = JointTransformerBlock(
        1536, 24, 64, qk_norm="rms_norm", use_dual_attention=is_dual, context_pre_only=is_last
    )
    inputs = {"hidden_states": tokens(num_image, 1536), "encoder_hidden_states": tokens(num_text, 1536)}
    return block, inputs | {"temb": tokens(1, 1536)[:, 0]}, 1536


def flux() -> tuple[nn.Module, Inputs, int]:
    return FluxTransformerBlock(3072, 24, 128), joint(3072), 3072


def flux_single() -> tuple[nn.Module, Inputs, int]:
    return FluxSingleTransformerBlock(3072, 24, 128), joint(3072), 3072


def qwen_image() -> tuple[nn.Module, Inputs, int]:
    more = {"encoder_hidden_states_mask": None, "image_rotary_emb": None}
    return QwenImageTransformerBlock(3072, 24, 128), joint(3072) | more, 3072


def wan() -> tuple[nn.Module, Inputs, int]:
    block = WanTransformerBlock(5120, 13824, 40, cross_attn_norm=True)
    inputs = {"hidden_states": tokens(IMAGE + TEXT, 5120), "encoder_hidden_states": tokens(TEXT, 5120)}
    return block, inputs | {"temb": tokens(6, 5120), "rotary_emb": None}, 5120


class WholeAttention:
    """Every token sees every other, instead of a `Layout` of rows."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: None) -> Tensor:
        del context
        query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
        return scaled_dot_product_attention(query, key, value, enable_gqa=True)[0].transpose(0, 1)


def test_a_block_of_experts_keeps_and_holds_about_what_is_estimated() -> None:
    """HunyuanImage3's, a quarter as wide with a quarter of the heads: the shares are the same."""
    sizes = all_released()["tencent/HunyuanImage-3.0-Instruct"]
    width, num = sizes.width // 4, 256
    layer = LayerConfig(expert_width=768, shared_width=768, top_k=8)
    config = DecoderConfig(
        vocab_size=2,
        hidden_size=width,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        num_experts=64,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=num,
        layers=(layer,),
    )
    block = HunyuanImage3DecoderLayer(config, layer).requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=8, target_modules=["qkv_proj", "o_proj"]), block)
    inputs = {
        "x": tokens(num, width)[0],
        "rotary": rotary_table(torch.zeros(num, 2), 128, 1e4),
        "layout": WholeAttention(),
        "context": None,
        "routes": None,
    }
    block, one = block.to(torch.bfloat16), num * width * 2
    assert kept_bytes(block, inputs) / one == pytest.approx(sizes.kept_per_token, rel=0.05)
    with torch.no_grad(), Allocations() as counted:
        block(**inputs)
    assert counted.peak_bytes / one == pytest.approx(sizes.held_per_token, rel=0.05)


def joint(width: int) -> Inputs:
    """Image and text tokens, and the embedded level."""
    names = {"hidden_states": tokens(IMAGE, width), "encoder_hidden_states": tokens(TEXT, width)}
    return names | {"temb": tokens(1, width)[:, 0]}


@pytest.mark.parametrize(
    ("make", "hub_id"),
    [
        (sd3, "stabilityai/stable-diffusion-3.5-medium"),  # one of the 13 blocks with two attentions; 11 have one
        (flux, "black-forest-labs/FLUX.1-dev"),
        (flux_single, "black-forest-labs/FLUX.1-dev"),
        (qwen_image, "Qwen/Qwen-Image"),
        (wan, "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers"),
    ],
)
def test_a_block_keeps_and_holds_about_what_is_estimated(make: Callable[[], Any], hub_id: str) -> None:
    block, inputs, width = adapted(make)
    sizes = all_released()[hub_id]
    assert width == sizes.width
    assert kept_bytes(block, inputs) / token_bytes(width) == pytest.approx(sizes.kept_per_token, rel=0.25)
    with torch.no_grad(), Allocations() as counted:
        block(**inputs)
    assert counted.peak_bytes / token_bytes(width) == pytest.approx(sizes.held_per_token, rel=0.4)


@pytest.mark.parametrize("make", [sd3, flux, flux_single, qwen_image, wan])
def test_products_and_attention_are_about_the_share_that_is_estimated(make: Callable[[], Any]) -> None:
    block, inputs, _ = adapted(make)
    whole = kept_bytes(block, inputs)
    checkpoint_activations([block], selective())
    assert kept_bytes(block, inputs) / whole == pytest.approx(PRODUCTS, rel=0.15)


def test_the_blocks_of_stable_diffusion_keep_what_its_guide_says() -> None:
    """13 blocks with two attentions, 10 with one, and the last, which makes no text."""
    kinds = ({"is_dual": True}, {"is_dual": False}, {"is_dual": False, "is_last": True})
    lora = LoraConfig(r=32, target_modules=list(SD3Bundle.lora_target_modules))
    made = [adapted(lambda kind=kind: sd3(**kind, num_image=256, num_text=83), lora) for kind in kinds]
    kept = [kept_bytes(block, inputs) for block, inputs, _ in made]
    # A quarter of the tokens; what is kept per row weighs four times as much.
    assert [each * 1357 / 339 / 1e6 for each in kept] == pytest.approx([127.4, 92.5, 83.3], rel=0.005)
    mean = (13 * kept[0] + 10 * kept[1] + kept[2]) / 24 / (339 * 1536 * 2)
    assert round(mean) == all_released()["stabilityai/stable-diffusion-3.5-medium"].kept_per_token


def adapted(make: Callable[[], Any], lora: LoraConfig = LORA) -> tuple[nn.Module, Inputs, int]:
    """A block with LoRA in bf16, its inputs and its width."""
    with torch.device("meta"):
        block, inputs, width = make()
        block.requires_grad_(False)
        inject_adapter_in_model(lora, block)
    # Values do not matter; on a CPU attention is fused as on a GPU, on the meta device it is not.
    return block.to(torch.bfloat16).to_empty(device="cpu"), inputs, width


def token_bytes(width: int) -> int:
    """Bytes of one tensor of all tokens."""
    return (IMAGE + TEXT) * width * 2


def kept_bytes(block: nn.Module, inputs: Inputs) -> int:
    """What is there between forward and backward."""
    with Allocations() as counted:
        out = block(**inputs)
        num_bytes = counted.num_bytes
    del out
    return num_bytes
