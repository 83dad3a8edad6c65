"""The vLLM-Omni engine without vLLM-Omni: what crosses, and how its transformers are called."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from rollout_fakes import PARAMS

from unirl.rollout.engine.served_latents.tokens import as_tokens, from_tokens
from unirl.rollout.engine.vllm_omni.families import SERVED, family_of, text_tensors
from unirl.rollout.engine.vllm_omni.transformers import NATIVE, FirstFrame, Frames, Pictures, Text, VideoAndSound
from unirl.types.conditions import ImageEmbedCondition, ImageLatentCondition, ImagePatchCondition, TextEmbedCondition
from unirl.types.errors import ConfigError, ContractError

MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
TEXT = TextEmbedCondition(embeds=torch.ones(2, 3, 4), pooled=torch.ones(2, 5), attention_mask=MASK)
WITHOUT_MASK = TextEmbedCondition(embeds=torch.ones(2, 3, 4))


def test_texts_cross_with_all_that_they_have():
    tensors = text_tensors({"text": TEXT, "negative_text": WITHOUT_MASK}, SERVED["QwenImagePipeline"], PARAMS)
    assert set(tensors) == {"text.embeds", "text.mask", "text.pooled", "negative_text.embeds"}
    assert torch.equal(tensors["text.mask"], MASK)


def test_a_family_that_attends_to_padding_gets_zeros_and_no_mask():
    wan = SERVED["WanPipeline"]
    assert text_tensors({"text": TEXT}, wan, PARAMS)["text.embeds"].shape == (2, 512, 4)
    short = text_tensors({"text": TEXT}, wan, dataclasses.replace(PARAMS, max_sequence_length=7))
    assert short["text.embeds"].shape == (2, 7, 4) and not short["text.embeds"][:, 3:].any()
    assert "text.mask" not in short


def test_images_cross_as_tokens_with_their_sizes():
    grids = [((1, 1, 2), (1, 1, 1)), ((1, 2, 2),)]
    patches = [torch.arange(6.0).view(3, 2), torch.arange(8.0).view(4, 2)]
    condition = ImagePatchCondition.pack(patches=patches, grids=grids)
    tensors = text_tensors({"text": TEXT, "reference": condition}, SERVED["QwenImageEditPlusPipeline"], PARAMS)
    assert torch.equal(tensors["reference.patches"], torch.cat(patches))
    assert tensors["reference.grids"].tolist() == [[1, 1, 2], [1, 1, 1], [1, 2, 2]]
    assert tensors["reference.images"].tolist() == [2, 1]
    with pytest.raises(ContractError, match="the conditions hold 'reference'"):
        text_tensors({"reference": condition}, SERVED["QwenImagePipeline"], PARAMS)


def test_images_stand_after_the_tokens_of_the_latents_which_alone_come_back():
    native, x = NATIVE["QwenImageEditPipeline"], torch.randn(1, 2, 4, 4)
    text = Text(embeds=torch.zeros(1, 4, 8), mask=None, pooled=None)
    own = native.inputs(x, torch.tensor([0.5]), {"text": text}, None)
    shown = Pictures(torch.ones(1, 3, 8), ((1, 1, 3),)).beside(own)
    assert shown["hidden_states"].shape == (1, 7, 8) and shown["img_shapes"] == [[(1, 2, 2), (1, 1, 3)]]
    assert torch.equal(native.velocity(shown["hidden_states"], x.shape), x)


def test_conditions_that_are_no_text_are_refused():
    image = ImageLatentCondition(latents=torch.zeros(1, 1, 1, 1))
    with pytest.raises(ContractError, match=r"the conditions hold 'image' \(ImageLatentCondition\)"):
        text_tensors({"image": image}, SERVED["StableDiffusion3Pipeline"], PARAMS)


def test_a_checkpoint_that_is_not_served_is_named(tmp_path):
    index = tmp_path / "model_index.json"
    index.write_text('{"_class_name": "SanaPipeline"}')
    with pytest.raises(ConfigError, match=r"holds a SanaPipeline; the vLLM-Omni engine serves StableDiff.*Replica"):
        family_of(tmp_path)
    index.write_text('{"_class_name": "WanPipeline"}')
    assert family_of(tmp_path) is SERVED["WanPipeline"]
    (tmp_path / "transformer_2").mkdir()
    assert family_of(tmp_path) is SERVED["WanPipeline"]
    index.write_text('{"_class_name": "QwenImagePipeline"}')
    with pytest.raises(
        ConfigError, match="has two transformers; the vLLM-Omni engine serves a QwenImagePipeline of one"
    ):
        family_of(tmp_path)


def test_both_sides_know_the_same_families():
    assert list(NATIVE) == [name for name, family in SERVED.items() if family.topology is None]


def test_layers_of_adapters_have_the_names_of_vllm_omni():
    wan, sd3 = NATIVE["WanPipeline"], NATIVE["StableDiffusion3Pipeline"]
    own = wan.layer_name("base_model.model.blocks.1.attn2.to_out.0.lora_A.weight")
    assert own == "base_model.model.blocks.1.attn2.to_out.lora_A.weight"
    layers = ("attn1.to_q", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
    assert [wan.layer_name(name) for name in layers] == ["attn1.to_q", "to_out", "ffn.net_0.proj", "ffn.net_2"]
    assert [sd3.layer_name(name) for name in layers] == list(layers)


@pytest.mark.parametrize("side", [1, 2])
def test_tokens_are_rows_of_patches_whose_channel_comes_first(side):
    latents = torch.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6).float()
    tokens = as_tokens(latents, side)
    rows, columns = 4 // side, 6 // side
    assert tokens.shape == (2, rows * columns, 3 * side * side)
    patch = latents[1, :, side : 2 * side, 2 * side : 3 * side]  # of row 1, column 2
    assert torch.equal(tokens[1, columns + 2], patch.flatten())
    assert torch.equal(from_tokens(tokens, side, 4, 6), latents)


def test_positions_of_flux_2_count_rows_then_columns():
    x = torch.zeros(1, 8, 2, 3)
    text = Text(embeds=torch.zeros(1, 4, 8), mask=None, pooled=None)
    inputs = NATIVE["Flux2KleinPipeline"].inputs(x, torch.tensor([0.5]), {"text": text}, None)
    assert inputs["img_ids"].tolist() == [[0, row, column, 0] for row in range(2) for column in range(3)]
    assert inputs["txt_ids"].tolist() == [[0, 0, 0, token] for token in range(4)]
    assert inputs["timestep"].tolist() == [0.5]  # it multiplies by 1000 itself


def test_texts_of_z_image_go_together_if_they_fill_as_many_blocks():
    mask = torch.ones(4, 40)
    mask[0, 3:] = mask[2, 32:] = 0
    text = Text(embeds=torch.randn(4, 40, 8), mask=mask, pooled=None)
    without = Text(embeds=torch.randn(4, 5, 8), mask=None, pooled=None)
    native = NATIVE["ZImagePipeline"]
    assert native.rows_together({"text": text, "negative_text": without}) == [[0, 2], [1, 3]]
    assert NATIVE["QwenImagePipeline"].rows_together({"text": text}) == [[0, 1, 2, 3]]
    inputs = native.inputs(torch.zeros(4, 16, 2, 2), torch.full((4,), 0.25), {"text": text}, None)
    assert [len(row) for row in inputs["cap_feats"]] == [3, 40, 32, 40]
    assert torch.equal(inputs["cap_feats"][0], text.embeds[0, :3])
    assert inputs["t"].tolist() == [0.75] * 4
    assert [tuple(row.shape) for row in inputs["x"]] == [(16, 1, 2, 2)] * 4


def test_z_image_points_from_noise_to_image():
    out = torch.randn(3, 16, 1, 2, 2)
    velocity = NATIVE["ZImagePipeline"].forward(lambda **inputs: (list(out), {}), {})
    assert torch.equal(velocity, -out[:, :, 0])


def test_guidance_that_flux_takes_as_an_input_is_in_the_layout_of_a_call():
    assert SERVED["FluxPipeline"].served == {"distilled_guidance_scale"}
    inputs = NATIVE["FluxPipeline"].inputs(
        torch.zeros(2, 16, 4, 6), torch.full((2,), 0.5), {"text": Text(TEXT.embeds, None, TEXT.pooled)}, None
    )
    assert inputs["img_ids"].tolist() == [[0, row, column] for row in range(2) for column in range(3)]
    assert inputs["txt_ids"].shape == (3, 3) and not inputs["txt_ids"].any()
    assert inputs["hidden_states"].shape == (2, 6, 64)


def test_given_frames_are_channels_and_their_images_features():
    frames, features = torch.ones(2, 3, 1, 2, 2), torch.arange(2.0 * 10 * 4).view(2, 10, 4)
    conditions = {
        "text": TEXT,
        "image": ImageLatentCondition(latents=frames),
        "image_embeds": ImageEmbedCondition(embeds=features),
    }
    family = SERVED["WanImageToVideoPipeline"]
    tensors = text_tensors(conditions, family, dataclasses.replace(PARAMS, max_sequence_length=7))
    assert set(tensors) == {"text.embeds", "text.pooled", "image.latents", "image_embeds.features"}
    own = {"hidden_states": torch.zeros(2, 4, 1, 2, 2)}
    one = Frames(frames, features, 1).beside(own)
    assert one["hidden_states"].shape == (2, 7, 1, 2, 2)
    assert torch.equal(one["encoder_hidden_states_image"], features)
    two = Frames(frames, features, 2).beside(own)
    assert torch.equal(two["encoder_hidden_states_image"], features.reshape(4, 5, 4))
    assert "encoder_hidden_states_image" not in Frames(frames, None, 1).beside(own)
    with pytest.raises(ContractError, match="the conditions hold 'image'"):
        text_tensors(conditions, SERVED["StableDiffusion3Pipeline"], PARAMS)


def test_given_frames_are_told_apart_by_their_channels():
    transformer = SimpleNamespace(config=SimpleNamespace(in_channels=4, pos_embed_seq_len=None))
    wan, first = NATIVE["WanPipeline"], torch.ones(2, 4, 1, 2, 2)
    assert isinstance(wan.given_frames(first, None, transformer), FirstFrame)
    assert isinstance(wan.given_frames(first[:, :3], None, transformer), Frames)
    with pytest.raises(ContractError, match="has no given frames"):
        NATIVE["FluxPipeline"].given_frames(first, None, transformer)
    with pytest.raises(ContractError, match="the request has none"):
        NATIVE["HunyuanVideo15ImageToVideoPipeline"].given_frames(first, None, transformer)


def test_the_frame_of_hunyuan_video_is_in_the_channels_behind_the_latents():
    first, features = torch.full((1, 2, 1, 2, 2), 3.0), torch.ones(1, 5, 4)
    x = torch.cat([torch.full((1, 2, 3, 2, 2), 7.0), torch.zeros(1, 3, 3, 2, 2)], dim=1)
    given = NATIVE["HunyuanVideo15ImageToVideoPipeline"].given_frames(first, features, None)
    own = given.beside({"hidden_states": x, "image_embeds": torch.zeros(1, 0, 4)})
    assert own["hidden_states"][0, :, 0, 0, 0].tolist() == [7, 7, 3, 3, 1]
    assert own["hidden_states"][0, :, 1, 0, 0].tolist() == [7, 7, 0, 0, 0]
    assert torch.equal(own["image_embeds"], features)
    assert not x[:, 2:].any()


@pytest.mark.parametrize(
    ("name", "axes", "times"), [("FluxKontextPipeline", 3, [1, 2]), ("Flux2KleinPipeline", 4, [10, 20])]
)
def test_each_reference_has_its_own_time(name, axes, times):
    tokens = torch.ones(2, 3, 5)
    own = {"hidden_states": torch.zeros(2, 4, 5), "img_ids": torch.zeros(4, axes, dtype=torch.int64)}
    placed = NATIVE[name].pictures(tokens, ((1, 1, 1), (1, 1, 2))).beside(own)
    assert placed["hidden_states"].shape == (2, 7, 5)
    assert placed["img_ids"][:, 0].tolist() == [0] * 4 + [times[0]] + [times[1]] * 2
    assert placed["img_ids"][-1].tolist() == [times[1], 0, 1, *[0] * (axes - 3)]


def test_what_surrounds_a_hole_is_next_to_each_token():
    own = (
        NATIVE["FluxFillPipeline"]
        .given_frames(torch.ones(1, 3, 4, 4), None, None)
        .beside({"hidden_states": torch.zeros(1, 4, 8)})
    )
    assert own["hidden_states"].shape == (1, 4, 20)
    assert own["hidden_states"][0, 0].tolist() == [0.0] * 8 + [1.0] * 12


def test_a_latent_of_video_and_sound_is_put_together_as_it_was():
    latents = torch.arange(2.0 * (12 + 12)).view(2, 24)
    both = VideoAndSound(video=(3, 1, 2, 2), sound=(2, 3, 2), text_width=4)
    own = both.beside({"hidden_states": latents, "encoder_hidden_states": torch.arange(6.0).expand(2, 1, 6)})
    assert own["hidden_states"].shape == (2, 4, 3)  # a token per place, of three channels
    assert own["audio_hidden_states"].shape == (2, 3, 4)  # a token per step, of two channels and two bins
    assert own["encoder_hidden_states"][0, 0].tolist() == [0, 1, 2, 3]
    assert own["audio_encoder_hidden_states"][0, 0].tolist() == [4, 5]

    def transformer(hidden_states, audio_hidden_states, **others):
        return hidden_states, audio_hidden_states

    assert torch.equal(NATIVE["LTX2Pipeline"].forward(transformer, own), latents)


def test_a_first_frame_stays_in_its_place():
    generator = torch.Generator().manual_seed(0)
    given, x = torch.randn(2, 4, 1, 4, 6, generator=generator), torch.randn(2, 4, 3, 4, 6, generator=generator)
    sigma = torch.tensor([0.8, 0.5])
    transformer = SimpleNamespace(config=SimpleNamespace(patch_size=(1, 2, 2)))
    first = FirstFrame(given)
    own = first.beside({"transformer": transformer, "hidden_states": x, "timestep": sigma * 1000})
    assert torch.equal(own["hidden_states"], torch.cat([given, x[:, :, 1:]], dim=2))
    assert own["timestep"].tolist() == [[0.0] * 6 + [800.0] * 12, [0.0] * 6 + [500.0] * 12]
    velocity = first.kept(torch.ones_like(x), x, sigma)
    assert torch.equal(velocity[:, :, 1:], torch.ones_like(x[:, :, 1:]))
    torch.testing.assert_close(x[:, :, :1] - sigma.view(-1, 1, 1, 1, 1) * velocity[:, :, :1], given)


def test_what_differs_in_vllm_omni_is_corrected():
    norms = SimpleNamespace(norm1=torch.nn.LayerNorm(4, eps=1e-6), norm2=torch.nn.LayerNorm(4, eps=1e-6))
    wan = SimpleNamespace(condition_embedder=SimpleNamespace(image_embedder=norms))
    NATIVE["WanImageToVideoPipeline"].mend(wan)
    assert norms.norm1.eps == norms.norm2.eps == 1e-5
    NATIVE["WanPipeline"].mend(SimpleNamespace(condition_embedder=SimpleNamespace(image_embedder=None)))
    flux = SimpleNamespace(packed_modules_mapping={"to_qkv": ["to_q", "to_k"]})
    NATIVE["FluxPipeline"].mend(flux)
    assert flux.stacked_params_mapping == [(".to_qkv", ".to_q", 0), (".to_qkv", ".to_k", 1)]
