"""What diffusion engines in other processes are asked and what is believed of their answers: no engine needed."""

import dataclasses

import pytest
import torch
from rollout_fakes import PARAMS, SHAPE, LinearPipeline, request
from safetensors.torch import save_file

from unirl.rollout.engine.served_latents.call import (
    ECHOED_SIGMAS,
    LATENTS,
    LOG_PROBS,
    latent_segment,
    latents_call,
    noise_log_prob,
    sampling_of,
    stored_positions,
)
from unirl.rollout.engine.served_latents.folder import boundary_of, pushed_shapes, transformers
from unirl.rollout.engine.sglang_diffusion.families import SERVED, family_of
from unirl.rollout.engine.sglang_diffusion.worker_ext import own_tensors
from unirl.sde import loop
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, DDIMStrategy, FlowSDEStrategy
from unirl.sde.noise import step_noise
from unirl.types.conditions import ImageLatentCondition, TextEmbedCondition
from unirl.types.errors import ConfigError, ContractError

KERNELS = (FlowSDEStrategy, CPSSDEStrategy, DanceSDEStrategy, DDIMStrategy)


def answered(params=PARAMS, kernel="flow"):
    """A call, its start, and the answer of an engine that does what it is asked."""
    call, start = latents_call(request(params=params), params, kernel, "path")
    pipeline = LinearPipeline()
    found = loop.sample(
        lambda x, sigma, step: pipeline.a * x + pipeline.b,
        start,
        torch.tensor(call.sigmas),
        strategy={each.name: each for each in KERNELS}[kernel](),
        eta=call.eta,
        sde_indices=call.sde_indices,
        step_noise=lambda step: step_noise(call.noise_keys, step, call.noise_seed, call.noise_shape),
        keep="all",
    )
    log_probs = torch.zeros(len(start), params.num_inference_steps)
    if found.sde_logp is not None:
        log_probs[:, call.sde_indices] = found.sde_logp
    tensors = {LATENTS: found.at(call.positions), LOG_PROBS: log_probs, ECHOED_SIGMAS: torch.tensor(call.sigmas)}
    return call, start, tensors, found


def segment_of(call, start, tensors, params=PARAMS):
    return latent_segment(tensors, call, params, start, dtype=torch.float32)


@pytest.mark.parametrize("keep", ["transitions", "all", "last"])
def test_an_honest_answer_becomes_the_segment_of_direct_sampling(keep):
    params = dataclasses.replace(PARAMS, keep_latents=keep)
    call, start, tensors, found = answered(params)
    segment = segment_of(call, start, tensors, params)
    assert segment.indices == stored_positions(params, [0, 2])
    assert torch.equal(segment.latents, found.at(segment.indices))
    assert segment.sde_logp is not None and torch.equal(segment.sde_logp, found.sde_logp)
    assert segment.sde_indices == [0, 2] and segment.params == params


@pytest.mark.parametrize("kernel", ["flow", "cps", "dance", "ddim"])
def test_the_log_prob_of_the_noise_is_that_of_the_kernel(kernel):
    call, _, _, found = answered(kernel=kernel)
    expected = noise_log_prob(call)
    assert expected is not None
    torch.testing.assert_close(expected, found.sde_logp, atol=1e-6, rtol=0)


def test_a_deterministic_trajectory_has_no_log_probs():
    params = dataclasses.replace(PARAMS, eta=0.0)
    call, start, tensors, _ = answered(params)
    assert segment_of(call, start, tensors, params).sde_logp is None


def test_an_engine_that_did_something_else_is_refused():
    call, start, tensors, _ = answered()
    for name, wrong, text in (
        (LATENTS, tensors[LATENTS][:, 1:], r"gave latents \(4, 4, 2, 3, 3\), expected .* \(4, 5, 2, 3, 3\)"),
        (LATENTS, tensors[LATENTS] + 1e-6, "began from other initial latents than it was given"),
        (
            LOG_PROBS,
            tensors[LOG_PROBS] + 2e-4,
            "stepped with other noise than it was given: at step [02] sample [0-3] has",
        ),
        (LOG_PROBS, tensors[LOG_PROBS] * torch.nan, "stepped with other noise"),
        (ECHOED_SIGMAS, tensors[ECHOED_SIGMAS] * 0.99, "the engine used sigmas"),
    ):
        with pytest.raises(ContractError, match=text):
            segment_of(call, start, {**tensors, name: wrong})


def test_an_engine_in_half_precision_may_round_its_start():
    call, start, tensors, _ = answered()
    rounded = {**tensors, LATENTS: tensors[LATENTS].bfloat16().float()}
    latent_segment(rounded, call, PARAMS, start, dtype=torch.bfloat16)
    with pytest.raises(ContractError, match="other initial latents"):
        latent_segment(rounded, call, PARAMS, start, dtype=torch.float32)


def test_what_an_engine_elsewhere_cannot_honour_is_named():
    for change, text in (
        ({"post_solver": "dpmpp_2m", "sde_indices": [0]}, r"sampling.post_solver = dpmpp_2m .* Set it to euler"),
        ({"trajectory_precision": "bf16"}, "sampling.trajectory_precision = bf16"),
        ({"guidance_scale_2": 3.0}, r"sampling.guidance_scale_2 = 3.0 .* Set it to null"),
        ({"sampler_kwargs": {"x": 1}}, r"sampler_kwargs \['x'\] mean nothing to the engine"),
    ):
        req = request(params=dataclasses.replace(PARAMS, **change))
        with pytest.raises(ConfigError, match=text):
            sampling_of(req, "flow", ["flow"], "the engine")
    with pytest.raises(ConfigError, match=r"steps with the kernels \['flow'\], the trainer replays with 'dance'"):
        sampling_of(request(), "dance", ["flow"], "the engine")


# Families


SD3 = SERVED["StableDiffusion3Pipeline"]
TEXT = TextEmbedCondition(
    embeds=torch.ones(2, 3, 4), pooled=torch.ones(2, 5), attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1]])
)


def test_a_family_names_its_tensors_as_sglang_does():
    fields = SD3.inputs({"text": TEXT, "negative_text": TEXT}, PARAMS)
    assert set(fields) == {"prompt_embeds", "pooled_embeds", "negative_prompt_embeds", "neg_pooled_embeds"}


def test_two_encoders_give_a_field_a_tensor_each():
    fields = SERVED["FluxPipeline"].inputs({"text": TEXT, "negative_text": TEXT}, PARAMS)
    for before in ("", "negative_"):
        assert torch.equal(fields[f"{before}prompt_embeds"], torch.ones(2, 5))
        assert torch.equal(fields[f"{before}prompt_embeds.1"], TEXT.embeds)
        assert fields[f"{before}prompt_seq_lens"].tolist() == [1, 1]
        assert fields[f"{before}prompt_seq_lens.1"].tolist() == [3, 3]
    assert torch.equal(fields["pooled_embeds"], fields["neg_pooled_embeds"])


def test_text_has_the_length_that_the_family_attends_to():
    fixed = SERVED["Flux2KleinPipeline"].inputs({"text": TEXT, "negative_text": TEXT}, PARAMS)
    assert fixed["prompt_seq_lens"].tolist() == fixed["negative_prompt_seq_lens"].tolist() == [3, 3]
    assert SERVED["WanPipeline"].inputs({"text": TEXT}, PARAMS)["prompt_embeds"].shape == (2, 512, 4)
    short = SERVED["WanPipeline"].inputs({"text": TEXT}, dataclasses.replace(PARAMS, max_sequence_length=7))
    assert short["prompt_embeds"].shape == (2, 7, 4) and not short["prompt_embeds"][:, 3:].any()


def test_hunyuan_video_has_the_mask_of_its_texts():
    fields = SERVED["HunyuanVideoPipeline"].inputs({"text": TEXT, "negative_text": ragged(1, 5, pooled=5)}, PARAMS)
    assert fields["prompt_attention_mask"].tolist() == [[True, True, False], [True, True, True]]
    assert fields["negative_attention_mask"].sum(dim=1).tolist() == [1, 5]
    assert fields["negative_prompt_embeds"].shape == (2, 5, 4) and fields["neg_pooled_embeds"].shape == (2, 5)


def test_an_adapter_has_factors_of_all_layers_that_sglang_joins():
    shapes = {f"{layer}.weight": (3, 4) for layer in ("a.attn.to_q", "a.attn.to_v", "b.attn.to_q", "a.attn.to_out.0")}
    shapes["b.proj_mlp.weight"] = (6, 4)
    factors = {"lora_A.weight": torch.ones(2, 4), "lora_B.weight": torch.ones(3, 2)}
    given = {
        f"{layer}.{name}": factor
        for layer in ("a.attn.to_q", "b.attn.to_q", "a.attn.to_out.0")
        for name, factor in factors.items()
    }
    whole = SERVED["HunyuanVideoPipeline"].completed(given, shapes)
    assert {name: whole[name] for name in given} == given
    added = {name: (tuple(whole[name].shape), bool(whole[name].any())) for name in sorted(set(whole) - set(given))}
    assert added == {
        "a.attn.to_v.lora_A.weight": ((2, 4), False),
        "a.attn.to_v.lora_B.weight": ((3, 2), False),
        "b.proj_mlp.lora_A.weight": ((2, 4), False),
        "b.proj_mlp.lora_B.weight": ((6, 2), False),
    }
    assert SD3.completed(given, shapes) == given


def test_latents_that_are_tokens_come_back_in_the_trainers_layout():
    latents = torch.randn(2, 3, *SHAPE, generator=torch.Generator().manual_seed(0))
    as_tokens = latents.flatten(3).transpose(2, 3)
    assert torch.equal(SERVED["Flux2KleinPipeline"].stored(as_tokens, SHAPE), latents)
    assert torch.equal(SD3.stored(latents, SHAPE), latents)
    shape = (2, 4, 6)
    latents = torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(0))
    patches = latents.unflatten(4, (3, 2)).unflatten(3, (2, 2)).permute(0, 1, 3, 5, 2, 4, 6).reshape(2, 3, 6, 8)
    assert torch.equal(SERVED["QwenImagePipeline"].stored(patches, shape), latents)


def test_an_image_may_start_as_a_video_of_one_frame():
    start = torch.zeros(2, *SHAPE)
    assert SD3.initial(start) is start
    assert SERVED["QwenImagePipeline"].initial(start).shape == (2, 1, *SHAPE)
    assert SERVED["ZImagePipeline"].initial(start).shape == (2, SHAPE[0], 1, *SHAPE[1:])


def test_z_image_has_no_guidance_at_scale_zero():
    z_image = SERVED["ZImagePipeline"]
    for scale, theirs in ((1.0, 0.0), (0.0, 0.0), (4.0, 4.0)):
        assert z_image.guidance_scale(dataclasses.replace(PARAMS, guidance_scale=scale)) == theirs
    assert SD3.guidance_scale(dataclasses.replace(PARAMS, guidance_scale=1.0)) == 1.0


def test_sd3_is_split_by_tensors_or_branches_alone():
    assert SD3.split(1, {}) == {}
    assert SD3.split(4, {}) == {"sp_degree": 1, "tp_size": 4}
    assert SD3.split(4, {"enable_cfg_parallel": True}) == {"sp_degree": 1, "tp_size": 2}
    assert SD3.split(2, {"cfg_parallel_degree": 2, "sp_degree": 1}) == {"sp_degree": 1, "tp_size": 1}
    with pytest.raises(ConfigError, match=r"sets \['ulysses_degree'\]. SGLang's SD3 samples another image where its"):
        SD3.split(2, {"ulysses_degree": 2, "ring_degree": 1})
    assert SERVED["Flux2KleinPipeline"].split(2, {"sp_degree": 2}) == {}
    with pytest.raises(ConfigError, match="SGLang's HunyuanVideo samples another video where its tokens are split"):
        SERVED["HunyuanVideoPipeline"].split(2, {"sp_degree": 2})


def ragged(*lengths, pooled=None):
    mask = torch.arange(90) < torch.tensor(lengths)[:, None]
    vectors = None if pooled is None else torch.ones(len(lengths), pooled)
    return TextEmbedCondition(embeds=torch.ones(len(lengths), 90, 4), attention_mask=mask.long(), pooled=vectors)


def test_texts_of_several_lengths_come_with_them():
    for name in ("ZImagePipeline", "QwenImagePipeline"):
        fields = SERVED[name].inputs({"text": ragged(1, 32, 33, 5, 64)}, PARAMS)
        assert fields["prompt_seq_lens"].tolist() == [1, 32, 33, 5, 64] and fields["prompt_embeds"].shape == (5, 64, 4)


def test_conditions_that_are_no_text_are_refused():
    with pytest.raises(ContractError, match=r"the conditions hold 'image' \(ImageLatentCondition\)"):
        SERVED["StableDiffusion3Pipeline"].inputs(
            {"image": ImageLatentCondition(latents=torch.zeros(1, 1, 1, 1))}, PARAMS
        )
    with pytest.raises(ContractError, match="without pooled vectors"):
        SD3.inputs({"text": TextEmbedCondition(embeds=torch.zeros(1, 2, 3))}, PARAMS)


def test_a_family_that_is_not_served_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"is no folder of a diffusers pipeline"):
        family_of(tmp_path)
    index = tmp_path / "model_index.json"
    index.write_text('{"_class_name": "SanaPipeline"}')
    with pytest.raises(ConfigError, match=r"holds a SanaPipeline; .* serves StableDiffusion3Pipeline.*Replica"):
        family_of(tmp_path)
    index.write_text('{"_class_name": "WanPipeline"}')
    assert family_of(tmp_path) is SERVED["WanPipeline"]
    (tmp_path / "transformer_2").mkdir()
    assert family_of(tmp_path).model_id == "Wan2.2-T2V-A14B-Diffusers"
    index.write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(ConfigError, match=r"has two transformers; the SGLang Diffusion engine .* of one. .*Replica"):
        family_of(tmp_path)


def test_two_experts_are_pushed_by_the_names_of_both_and_share_the_levels_of_the_index(tmp_path):
    index = tmp_path / "model_index.json"
    index.write_text('{"_class_name": "WanPipeline", "boundary_ratio": 0.875}')
    for number, name in enumerate(("transformer", "transformer_2"), start=1):
        assert transformers(tmp_path) == ("transformer", "transformer_2")[: max(1, number - 1)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file({"proj.weight": torch.zeros(number, 2)}, tmp_path / name / "model.safetensors")
        if number == 1:
            assert pushed_shapes(tmp_path) == {"proj.weight": (1, 2)} and boundary_of(tmp_path) is None
    assert pushed_shapes(tmp_path) == {"transformer/proj.weight": (1, 2), "transformer_2/proj.weight": (2, 2)}
    assert boundary_of(tmp_path) == 0.875
    index.write_text('{"_class_name": "WanPipeline"}')
    with pytest.raises(ConfigError, match="has two transformers and no boundary_ratio in its model_index.json"):
        boundary_of(tmp_path)


def test_each_expert_takes_its_own_tensors_of_the_files_of_both():
    sent = {"transformer/proj.weight": torch.zeros(1), "transformer_2/proj.weight": torch.ones(1)}
    for component, value in (("transformer", 0.0), ("transformer_2", 1.0)):
        found = dict(own_tensors(lambda folder: iter(sent.items()), f"/push/{component}"))
        assert list(found) == ["proj.weight"] and float(found["proj.weight"]) == value
    alone = {"transformer_blocks.0.weight": torch.zeros(1)}
    assert dict(own_tensors(lambda folder: iter(alone.items()), "/push/transformer")) == alone
