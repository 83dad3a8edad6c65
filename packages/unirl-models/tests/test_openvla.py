"""OpenVLA-OFT against parts of transformers put together by hand, on random weights.

The towers are compared with transformers' DINOv2 with registers and SigLIP, whose weights are renamed; the language
model with LlamaForCausalLM over one unpadded sequence at a time. Float32 on a CPU: 1e-4 of numbers about 1.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from unirl.models.action.openvla.bundle import OpenVLABundle
from unirl.models.action.openvla.configuration import TIMM, OpenVLAShape
from unirl.models.action.openvla.pipeline import OpenVLAActionPipeline
from unirl.models.action.robot import Robot
from unirl.models.tiny import openvla as tiny
from unirl.types.actions import ActionSegment, Observations
from unirl.types.errors import CheckpointError, ConfigError
from unirl.types.sampling import ActionSamplingParams

N, H, D = 3, 2, 2
NUM_PATCHES = 16
TASKS = ["Push", "lift it", "go"]
PARAMS = ActionSamplingParams(temperature=1.6)
ROBOT = Robot(image_shape=(3, 24, 20), action_size=D, chunk=H, action_offset=[0.1, 0], action_scale=[0.5, 2.0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("openvla"))


@pytest.fixture(scope="module")
def pipeline(folder) -> OpenVLAActionPipeline:
    return made(folder)


def made(folder: Path, **options: Any) -> OpenVLAActionPipeline:
    return OpenVLAActionPipeline(OpenVLABundle(str(folder), ROBOT, num_moves=3, max_text_tokens=80, **options))


def seen(pipeline: OpenVLAActionPipeline) -> Observations:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (N, 3, 24, 20), generator=generator, dtype=torch.uint8)
    return Observations(images, prompts=pipeline.encode_prompts(TASKS))


def dinov2(weights: dict[str, torch.Tensor]) -> Any:
    """transformers' model with timm's weights."""
    model = transformers.Dinov2WithRegistersModel(
        transformers.Dinov2WithRegistersConfig(
            hidden_size=12,
            num_hidden_layers=3,
            num_attention_heads=2,
            mlp_ratio=2,
            image_size=32,
            patch_size=8,
            num_register_tokens=2,
        )
    ).eval()
    state = model.state_dict()
    prefix = "vision_backbone.featurizer."
    state["embeddings.cls_token"] = weights[prefix + "cls_token"]
    state["embeddings.register_tokens"] = weights[prefix + "reg_token"]
    state["embeddings.position_embeddings"] = torch.cat(
        [torch.zeros(1, 1, 12), weights[prefix + "pos_embed"]], dim=1
    )  # timm's has none for the class
    for part in ("weight", "bias"):
        state[f"embeddings.patch_embeddings.projection.{part}"] = weights[f"{prefix}patch_embed.proj.{part}"]
        for block in range(2):
            ours, theirs = f"{prefix}blocks.{block}.", f"encoder.layer.{block}."
            split = weights[f"{ours}attn.qkv.{part}"].chunk(3)
            for name, value in zip(("q_proj", "k_proj", "v_proj"), split, strict=True):
                state[f"{theirs}attention.{name}.{part}"] = value
            for own, name in (
                ("attn.proj", "attention.o_proj"),
                ("norm1", "norm1"),
                ("norm2", "norm2"),
                ("mlp.fc1", "mlp.fc1"),
                ("mlp.fc2", "mlp.fc2"),
            ):
                state[f"{theirs}{name}.{part}"] = weights[f"{ours}{own}.{part}"]
            for each in ("1", "2"):
                state[f"{theirs}layer_scale{each}.lambda1"] = weights[f"{ours}ls{each}.scale_factor"]
    model.load_state_dict(state)
    return model


def siglip(weights: dict[str, torch.Tensor]) -> Any:
    """transformers' model with timm's weights; timm's activation is the exact GELU."""
    model = transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig.from_dict(
            {
                **{"hidden_size": 8, "intermediate_size": 14, "num_hidden_layers": 3, "num_attention_heads": 2},
                **{"image_size": 32, "patch_size": 8, "hidden_act": "gelu", "vision_use_head": False},
            }
        )
    ).eval()
    state = model.state_dict()
    prefix = "vision_backbone.fused_featurizer."
    base = next(name for name in state if name.endswith("position_embedding.weight")).split("embeddings.")[0]
    state[base + "embeddings.position_embedding.weight"] = weights[prefix + "pos_embed"][0]
    for part in ("weight", "bias"):
        state[f"{base}embeddings.patch_embedding.{part}"] = weights[f"{prefix}patch_embed.proj.{part}"]
        for block in range(2):
            ours, theirs = f"{prefix}blocks.{block}.", f"{base}encoder.layers.{block}."
            split = weights[f"{ours}attn.qkv.{part}"].chunk(3)
            for name, value in zip(("q_proj", "k_proj", "v_proj"), split, strict=True):
                state[f"{theirs}self_attn.{name}.{part}"] = value
            for own, name in (
                ("attn.proj", "self_attn.out_proj"),
                ("norm1", "layer_norm1"),
                ("norm2", "layer_norm2"),
                ("mlp.fc1", "mlp.fc1"),
                ("mlp.fc2", "mlp.fc2"),
            ):
                state[f"{theirs}{name}.{part}"] = weights[f"{ours}{own}.{part}"]
    model.load_state_dict(state)
    return model


def patches_of(weights: dict[str, torch.Tensor], pixels: torch.Tensor) -> torch.Tensor:
    """The second last layer of both towers, as OpenVLA reads it, without class and registers."""
    first = dinov2(weights)(pixel_values=pixels[:, :3], output_hidden_states=True).hidden_states[2][:, 3:]
    second = siglip(weights)(pixel_values=pixels[:, 3:], output_hidden_states=True).hidden_states[2]
    return torch.cat([first, second], dim=2)


def test_patches_are_those_of_dinov2_and_siglip_of_transformers(pipeline, folder):
    pixels = torch.randn(N, 6, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = patches_of(load_file(folder / "model.safetensors"), pixels)
        found = pipeline._network.vision_backbone(pixels)
    assert found.shape == (N, NUM_PATCHES, 20) and expected.abs().mean() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_logits_are_those_of_a_llama_in_which_every_token_sees_every_other(pipeline, folder):
    """One sequence at a time, by the indices of OpenVLA-OFT's own code."""
    weights = load_file(folder / "model.safetensors")
    llama: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny.CONFIG["text_config"])).eval()
    name = "language_model."
    llama.load_state_dict({key.removeprefix(name): each for key, each in weights.items() if key.startswith(name)})
    observed = seen(pipeline)
    assert observed.images is not None and observed.prompts is not None
    num_tokens = 3 * D
    with torch.no_grad():
        x = patches_of(weights, pipeline._pixels(observed.images))
        for layer in ("fc1", "fc2", "fc3"):
            x = x @ weights[f"projector.{layer}.weight"].T + weights[f"projector.{layer}.bias"]
            x = x if layer == "fc3" else torch.nn.functional.gelu(x)
        features, found = pipeline._network(pipeline._pixels(observed.images), observed.prompts)
        embed = llama.get_input_embeddings()
        for row in range(N):
            ids = observed.prompts[row][observed.prompts[row] >= 0]
            texts, stop = embed(ids), embed(torch.tensor([2]))
            sequence = torch.cat([texts[:1], x[row], texts[1:], torch.zeros(num_tokens, 16), stop])[None]
            length = sequence.shape[1]
            everything = torch.zeros(1, 1, length, length)
            out = llama(inputs_embeds=sequence, attention_mask=everything, output_hidden_states=True)
            start = NUM_PATCHES + len(ids) - 1
            expected = out.logits[0, start : start + num_tokens, 256:512]
            torch.testing.assert_close(found[row], expected, atol=1e-4, rtol=1e-4)
            mean = out.hidden_states[-1][0, start : start + num_tokens].mean(dim=0)
            torch.testing.assert_close(features[row], mean, atol=1e-4, rtol=1e-4)


def test_tokens_are_openvla_s_bins(pipeline):
    """By numpy, as its ActionTokenizer has them: 256 edges, 255 centres, the vocabulary's end backwards."""
    edges = np.linspace(-1, 1, 256)
    centres = (edges[:-1] + edges[1:]) / 2
    actions = np.linspace(-1, 1, 41)
    ids = 512 - np.digitize(actions, edges)
    back = centres[np.clip(512 - ids - 1, 0, 254)]
    tokens = torch.from_numpy(ids - 256)
    moves = pipeline._moves(torch.stack([tokens, tokens], dim=1)[None])[0]
    assert tokens.min() == 0 and tokens.max() == 255
    expected = np.stack([0.1 + 0.5 * back, np.clip(2 * back, -1, 1)], axis=1)
    np.testing.assert_allclose(moves.numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(back, actions, atol=0.004)


def segment_of(pipeline: OpenVLAActionPipeline) -> Any:  # Any: its fields are there
    observed: Any = seen(pipeline)
    num_moves = torch.tensor([2, 1, 2])
    with pipeline.evaluating():
        drawn: Any = pipeline.draw(observed, PARAMS, noise_keys=["a", "b", "c"])
    each = list(torch.arange(N).split(1))
    return ActionSegment.pack(
        images=[observed.images[row] for row in each],
        tokens=[drawn.tokens[row] for row in each],
        log_probs=[pipeline.log_probs(drawn.densities, num_moves)[row] for row in each],
        rewards=[torch.zeros(1)] * N,
        num_moves=[num_moves[row] for row in each],
        prompts=observed.prompts,
        params=PARAMS,
    )


@pytest.mark.parametrize("freeze_vision", [True, False])
def test_a_replay_gives_the_log_probs_and_gradients_reach_what_trains(folder, freeze_vision):
    pipeline = made(folder, freeze_vision=freeze_vision)
    segment = segment_of(pipeline)
    assert segment.tokens.shape == (N, H, D) and segment.num_terms == H * D
    stats = pipeline.replay(segment, torch.arange(N), PARAMS)
    torch.testing.assert_close(stats.logp_NL, segment.log_probs, atol=1e-5, rtol=1e-5)
    assert float(stats.logp_NL[1, 2:].abs().sum()) == 0
    stats.logp_NL.sum().backward()
    for name, parameter in pipeline._network.named_parameters():
        moved = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert moved == parameter.requires_grad, name
        assert parameter.requires_grad or name.startswith("vision_backbone.")


def test_a_policy_survives_its_folder_with_what_it_does_not_read(pipeline, folder, tmp_path):
    state = {name: value.clone() for name, value in pipeline._network.state_dict().items()}
    state["projector.fc3.bias"] += 1
    pipeline._bundle.export_merged(str(tmp_path / "out"), {"policy": state})
    stored, base = load_file(tmp_path / "out" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert stored.keys() == base.keys() >= tiny.UNREAD.keys()
    changed = {name for name, value in stored.items() if not torch.equal(value, base[name])}
    assert changed == {"projector.fc3.bias"}
    again = made(tmp_path / "out")._network.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in state.items())


def test_prompts_are_openvla_s(pipeline):
    row = pipeline.encode_prompts(["Push"])[0]
    text = pipeline._bundle.tokenizer.decode(row[row >= 0][1:])
    assert text == "In: What action should the robot take to push?\nOut: " and int(row[0]) == 1


def test_the_released_configuration_is_read():
    config = {
        "model_type": "openvla",
        "text_config": {"model_type": "llama", "vocab_size": 32064, "pad_token_id": 32000},
        "timm_model_ids": list(TIMM),
        "image_sizes": [224, 224],
        "pad_to_multiple_of": 64,
        "n_action_bins": 256,
    }
    shape = OpenVLAShape.read(config, "here")
    assert shape.first_token == 31744 and [tower.depth for tower in shape.towers] == [24, 27]
    with pytest.raises(ConfigError, match="n_action_bins = 128"):
        OpenVLAShape.read({**config, "n_action_bins": 128}, "here")
    with pytest.raises(ConfigError, match="this bundle loads openvla on a llama"):
        OpenVLAShape.read({**config, "timm_model_ids": ["vit_small"]}, "here")


def test_what_does_not_fit_is_refused(pipeline, folder, tmp_path):
    with pytest.raises(ConfigError, match=r"bundle.max_text_tokens is 80"):
        pipeline.encode_prompts(["a long task " * 9])
    with pytest.raises(ConfigError, match=r"robot.chunk = 2 is more than bundle.num_moves = 1"):
        OpenVLABundle(str(folder), ROBOT, num_moves=1)
    with pytest.raises(ConfigError, match=r"robot.state_size = 1"):
        OpenVLABundle(str(folder), replace(ROBOT, state_size=1, state_offset=[0], state_scale=[1]))
    broken = tiny.save(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    del weights["projector.fc1.bias"]
    tiny.save_file(weights, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"does not hold all weights of OpenVLANetwork: missing_keys"):
        OpenVLABundle(str(broken), ROBOT)
