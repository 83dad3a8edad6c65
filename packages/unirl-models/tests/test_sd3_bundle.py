"""Loading, dropping and exporting SD3, and the messages of common mistakes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from unirl.models.embedding_cache import EmbeddingCache
from unirl.models.sd3.bundle import SD3Bundle
from unirl.models.sd3.pipeline import SD3Pipeline
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.schedule import SigmaSchedule
from unirl.types.errors import CheckpointError, ConfigError, ContractError
from unirl.types.media import Texts
from unirl.types.sampling import DiffusionSamplingParams

from .tiny import load_reference


def _params(**changes: Any) -> DiffusionSamplingParams:
    fields: dict[str, Any] = {"guidance_scale": 1.0, "height": 32, "width": 32, "max_sequence_length": 16}
    return DiffusionSamplingParams(**{**fields, **changes})


def _copy(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "copy"))


def test_only_the_transformer_trains(sd3_bundle: SD3Bundle) -> None:
    bundle = sd3_bundle
    assert set(bundle.trainable_modules()) == {"transformer"}
    assert all(p.requires_grad for p in bundle.transformer.parameters())
    assert set(bundle.text.encoders) == {"text_encoder", "text_encoder_2", "text_encoder_3"}
    for module in (bundle.vae, *bundle.text.encoders.values()):
        assert not module.training
        assert not any(p.requires_grad for p in module.parameters())
    classes = {type(module).__name__ for module in bundle.transformer.modules()}
    assert set(bundle.block_class_names) <= classes
    names = [name for name, _ in bundle.transformer.named_modules()]
    for target in bundle.lora_target_modules:
        assert any(name.endswith(f".{target}") for name in names)
    assert set(bundle.text.tokenizers) == {"tokenizer", "tokenizer_2", "tokenizer_3"}


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere' is not there.*model_index.json"):
        SD3Bundle(str(tmp_path / "nowhere"))


def test_a_hub_id_that_cannot_be_fetched_says_so() -> None:
    with pytest.raises(CheckpointError, match=r"'owner/name' is no local folder.*Check the name"):
        SD3Bundle("owner/name")


def test_a_hub_error_of_several_lines_becomes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("Got: ConnectError\nPlease try again.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"hub id: Got: ConnectError Please try again\. Check the name"):
        SD3Bundle("owner/name")


def test_a_component_folder_is_not_a_pipeline_folder(sd3_folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a diffusers pipeline folder.*config.json"):
        SD3Bundle(str(sd3_folder / "transformer"))


def test_another_pipeline_class_is_refused(sd3_folder: Path, tmp_path: Path) -> None:
    folder = _copy(sd3_folder, tmp_path)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxPipeline"}))
    with pytest.raises(ConfigError, match="holds a FluxPipeline; this model needs a StableDiffusion3Pipeline"):
        SD3Bundle(str(folder))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("transformer/diffusion_pytorch_model.safetensors", "holds no weights"),
        ("vae/config.json", "config.json is missing"),
        ("scheduler/scheduler_config.json", "scheduler_config.json is missing"),
    ],
)
def test_a_missing_file_is_named(sd3_folder: Path, tmp_path: Path, file: str, message: str) -> None:
    folder = _copy(sd3_folder, tmp_path)
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=message):
        SD3Bundle(str(folder))


def test_truncated_weights_are_refused(sd3_folder: Path, tmp_path: Path) -> None:
    file = _copy(sd3_folder, tmp_path) / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        SD3Bundle(str(file.parent.parent))


def test_weights_that_the_file_lacks_are_not_made_up(sd3_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = _copy(sd3_folder, tmp_path) / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights.pop("proj_out.bias")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"does not hold all weights.*proj_out.bias"):
        SD3Bundle(str(file.parent.parent))


def test_an_unknown_dtype_is_refused_before_loading() -> None:
    with pytest.raises(ConfigError, match="vae_dtype = 'int8' must be one of fp32, bf16, fp16"):
        SD3Bundle("nowhere", vae_dtype="int8")


def test_a_checkpoint_without_t5_loads_and_t5_can_be_left_out(sd3_folder: Path, sd3_without_t5: Path) -> None:
    for bundle in (SD3Bundle(str(sd3_without_t5)), SD3Bundle(str(sd3_folder), load_t5=False)):
        assert set(bundle.text.encoders) == {"text_encoder", "text_encoder_2"}
        assert set(bundle.text.tokenizers) == {"tokenizer", "tokenizer_2"}
        embeds = bundle.text.encode(["a cat"], 16).embeds
        assert embeds.shape == (1, 77 + 16, 48) and bool((embeds[:, 77:] == 0).all())


# Geometry and parameters ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipeline(sd3_bundle: SD3Bundle) -> SD3Pipeline:
    return SD3Pipeline(sd3_bundle, FlowSDEStrategy())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"height": 30}, r"height = 30 is not a multiple of 4 \(VAE 2 x patch 2\). Use height = 28 or 32"),
        ({"width": 2}, "Use width = 4"),
        ({"width": 128}, r"width = 128 is 32 patches.*has 16. Use at most 64"),
        ({"num_frames": 5}, r"num_frames = 5 means nothing to SD3. Set sampling.num_frames: 1\."),
        (
            {"guidance_scale_2": 2.0},
            r"guidance_scale_2 = 2.0 means nothing to SD3. Set .*guidance_scale_2: null",
        ),
        ({"sampler_kwargs": {"skip_layers": [7]}}, r"\['skip_layers'\] mean nothing to SD3"),
        ({"max_sequence_length": 1000}, r"max_sequence_length = 1000 must lie in 1\.\.512"),
    ],
)
def test_parameters_that_sd3_cannot_honour_are_refused(
    pipeline: SD3Pipeline, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        pipeline.latent_shape(_params(**changes))


def test_latent_shape_and_sequence_length(pipeline: SD3Pipeline) -> None:
    assert pipeline.latent_shape(_params(height=32, width=24)) == (4, 16, 12)
    assert pipeline.adapter.image_seq_len(_params(height=32, width=24)) == 48


def test_the_tokens_that_no_encoder_reads_are_counted(pipeline: SD3Pipeline, sd3_bundle: SD3Bundle) -> None:
    tokenizers = sd3_bundle.text.tokenizers
    texts = ["cat", " ".join(["cat"] * 200), " ".join(["cat"] * 20)]
    lengths = [[len(tokenizers[name](text).input_ids) for text in texts] for name in ("tokenizer", "tokenizer_3")]
    clip, t5 = tokenizers["tokenizer"].model_max_length, 60
    expected = [min(max(0, a - clip), max(0, b - t5)) for a, b in zip(*lengths, strict=True)]
    assert pipeline.cut_tokens(texts, _params(max_sequence_length=t5)) == expected
    assert expected[0] == 0 and expected[1] > 0


def test_guidance_without_a_negative_prompt_is_an_error(pipeline: SD3Pipeline) -> None:
    with pytest.raises(ConfigError, match=r"guidance_scale = 4.5 needs a negative prompt.*empty string"):
        pipeline.encode({"text": Texts(texts=["a cat"])}, _params(guidance_scale=4.5))


def test_prompts_are_required(pipeline: SD3Pipeline) -> None:
    with pytest.raises(ContractError, match="need 'text': Texts of B prompts"):
        pipeline.encode({}, _params())


def test_the_schedule_comes_from_the_checkpoint_unless_given(sd3_bundle: SD3Bundle, pipeline: SD3Pipeline) -> None:
    assert pipeline.schedule == SigmaSchedule("linear", shift=3.0)
    schedule = SD3Pipeline(sd3_bundle, FlowSDEStrategy(), "diffusers").schedule
    assert isinstance(schedule, SigmaSchedule) and schedule.convention == "diffusers"
    given = SigmaSchedule("linear", shift=5.0)
    assert SD3Pipeline(sd3_bundle, FlowSDEStrategy(), given).schedule is given


def test_a_request_for_another_kernel_is_refused(pipeline: SD3Pipeline) -> None:
    params = _params(sde_strategy="cps", num_inference_steps=4)
    conditions = pipeline.encode({"text": Texts(texts=["a cat"])}, params)
    with pytest.raises(ConfigError, match="asks for the kernel 'cps', this pipeline has 'flow'"):
        pipeline.diffuse(conditions, torch.zeros(1, 4, 16, 16), pipeline.sigmas(params), params, noise_keys=["a"])


def test_a_deterministic_step_between_stochastic_ones_has_no_density(pipeline: SD3Pipeline) -> None:
    """Both ends of step 1 are stored here, as ends of steps 0 and 2; it was an Euler step all the same."""
    params = _params(num_inference_steps=4, sde_indices=[0, 2], eta=0.5, autocast_precision="fp32")
    with pipeline.evaluating():
        conditions = pipeline.encode({"text": Texts(texts=["a cat"])}, params)
        start = torch.zeros(1, 4, 16, 16)
        segment = pipeline.diffuse(conditions, start, pipeline.sigmas(params), params, noise_keys=["a"])
    assert segment.indices == [0, 1, 2, 3, 4]
    with pytest.raises(ContractError, match=r"steps \[1\] were not stochastic"):
        pipeline.replay(conditions, segment, torch.tensor([0]), torch.tensor([1]), params)


# Prompts and encoders ------------------------------------------------------------------------------------------------


def test_each_prompt_is_encoded_once(sd3_bundle: SD3Bundle) -> None:
    cache = EmbeddingCache()
    pipeline = SD3Pipeline(sd3_bundle, FlowSDEStrategy(), embedding_cache=cache)
    params = _params(guidance_scale=3.0, negative_prompt="")
    first = pipeline.encode({"text": Texts(texts=["a cat", "a dog", "a cat"])}, params)
    assert cache.statistics.num_misses == 3  # two prompts and the negative one
    again = pipeline.encode({"text": Texts(texts=["a dog", "a cat"])}, params)
    assert cache.statistics.num_misses == 3 and cache.statistics.num_memory_hits == 3
    assert again["text"].equals(first["text"].select([1, 2]))


def test_dropped_encoders_still_serve_known_prompts(sd3_folder: Path, tmp_path: Path) -> None:
    pipeline = SD3Pipeline(SD3Bundle(str(sd3_folder)), FlowSDEStrategy(), embedding_cache=tmp_path)
    assert isinstance(pipeline.bundle, SD3Bundle)
    before = pipeline.encode({"text": Texts(texts=["a cat"])}, _params())
    pipeline.bundle.drop_text_encoders()
    assert pipeline.bundle.text.is_dropped
    assert pipeline.encode({"text": Texts(texts=["a cat"])}, _params())["text"].equals(before["text"])
    with pytest.raises(ConfigError, match=r"text encoders were dropped; the first is 'a dog'.*before drop_text"):
        pipeline.encode({"text": Texts(texts=["a cat", "a dog"])}, _params())
    with pytest.raises(ConfigError, match="same max_sequence_length"):
        pipeline.encode({"text": Texts(texts=["a cat"])}, _params(max_sequence_length=20))


def test_a_shared_cache_folder_never_serves_another_model(
    sd3_bundle: SD3Bundle, sd3_folder: Path, tmp_path: Path
) -> None:
    first = sd3_bundle
    other = SD3Bundle(str(sd3_folder), text_encoder_dtype="bf16")
    same = SD3Bundle(str(sd3_folder))
    assert first.text.fingerprint == same.text.fingerprint
    assert first.text.fingerprint != other.text.fingerprint
    for bundle, hits in ((first, 0), (other, 0), (same, 1)):
        cache = EmbeddingCache(tmp_path)
        pipeline = SD3Pipeline(bundle, FlowSDEStrategy(), embedding_cache=cache)
        pipeline.encode({"text": Texts(texts=["a cat"])}, _params())
        assert cache.statistics.num_disk_hits == hits


# Exports -------------------------------------------------------------------------------------------------------------


def _inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(2, 4, 8, 8, generator=generator),
        "timestep": torch.tensor([900.0, 321.5]),
        "encoder_hidden_states": torch.randn(2, 5, 48, generator=generator),
        "pooled_projections": torch.randn(2, 32, generator=generator),
        "return_dict": False,
    }


@pytest.mark.parametrize("alpha", [4, 8, 3])
def test_diffusers_loads_the_exported_lora_with_its_alpha(sd3_folder: Path, tmp_path: Path, alpha: int) -> None:
    """rank 4 and alpha 4, 8, 3: scales 1, 2, 0.75. 1e-5 relative in float32."""
    from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model

    bundle = SD3Bundle(str(sd3_folder))
    targets = list(bundle.lora_target_modules)
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=alpha, target_modules=targets, init_lora_weights=False)
    inject_adapter_in_model(config, bundle.transformer)
    with torch.no_grad():
        adapted = bundle.transformer(**_inputs())[0]
    state = get_peft_model_state_dict(bundle.transformer)
    bundle.export_lora(str(tmp_path), {"transformer": state}, rank=4, alpha=alpha, target_modules=targets)

    loaded = load_reference(sd3_folder)
    with torch.no_grad():
        plain = loaded.transformer(**_inputs())[0]
        loaded.load_lora_weights(str(tmp_path))
        found = loaded.transformer(**_inputs())[0]
    scale = float(adapted.abs().max())
    assert float((adapted - plain).abs().max()) > 1e-2 * scale
    assert float((adapted - found).abs().max()) < 1e-5 * scale


def test_the_lora_header_holds_what_every_diffusers_reads(sd3_bundle: SD3Bundle, tmp_path: Path) -> None:
    """0.37 fails on a header without rank_pattern, later versions do not ask for it."""
    from safetensors import safe_open

    state = {"transformer": {"transformer_blocks.0.attn.to_q.lora_A.weight": torch.ones(2, 32)}}
    sd3_bundle.export_lora(str(tmp_path), state, rank=2, alpha=6, target_modules=["attn.to_q"])
    with safe_open(tmp_path / "pytorch_lora_weights.safetensors", framework="pt") as file:
        header = json.loads(file.metadata()["lora_adapter_metadata"])
    assert header == {
        "transformer.r": 2,
        "transformer.lora_alpha": 6,
        "transformer.target_modules": ["attn.to_q"],
        "transformer.rank_pattern": {},
        "transformer.alpha_pattern": {},
    }


def test_lora_keys_may_carry_the_adapter_name(sd3_bundle: SD3Bundle, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    bundle = sd3_bundle
    state = {
        "base_model.model.transformer_blocks.0.attn.to_q.lora_A.default.weight": torch.ones(2, 32),
        "transformer_blocks.0.attn.to_q.lora_B.weight": torch.ones(32, 2),
    }
    bundle.export_lora(str(tmp_path), {"transformer": state}, rank=2, alpha=2, target_modules=["attn.to_q"])
    assert set(load_file(tmp_path / "pytorch_lora_weights.safetensors")) == {
        "transformer.transformer_blocks.0.attn.to_q.lora_A.weight",
        "transformer.transformer_blocks.0.attn.to_q.lora_B.weight",
    }
    with pytest.raises(ContractError, match="has rank 2; the export says rank = 4"):
        bundle.export_lora(str(tmp_path), {"transformer": state}, rank=4, alpha=4, target_modules=["attn.to_q"])
    with pytest.raises(ContractError, match=r"SD3 trains \['transformer'\]; got the components \['vae'\]"):
        bundle.export_lora(str(tmp_path), {"vae": state}, rank=2, alpha=2, target_modules=["attn.to_q"])
    with pytest.raises(ContractError, match="is no LoRA weight"):
        wrong = {"transformer": {"proj_out.weight": torch.ones(2, 2)}}
        bundle.export_lora(str(tmp_path), wrong, rank=2, alpha=2, target_modules=["attn.to_q"])


def test_a_merged_export_is_a_whole_pipeline(sd3_folder: Path, tmp_path: Path) -> None:
    bundle = SD3Bundle(str(sd3_folder))
    bundle.drop_text_encoders()
    with torch.no_grad():
        for parameter in bundle.transformer.parameters():
            parameter.add_(0.01)
    state = {name: parameter.detach() for name, parameter in bundle.transformer.named_parameters()}
    bundle.export_merged(str(tmp_path / "merged"), {"transformer": state})
    found, source = load_reference(tmp_path / "merged"), load_reference(sd3_folder)
    for name, parameter in found.transformer.named_parameters():
        assert torch.equal(parameter, state[name])
    assert torch.equal(found.transformer.pos_embed.pos_embed, source.transformer.pos_embed.pos_embed)
    for ours, theirs in zip(found.text_encoder_3.parameters(), source.text_encoder_3.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    SD3Bundle(str(tmp_path / "merged"))


def test_a_merged_state_must_fit(sd3_bundle: SD3Bundle, sd3_folder: Path, tmp_path: Path) -> None:
    bundle = sd3_bundle
    with pytest.raises(CheckpointError, match=r"does not fit.*missing.*unexpected': \['lora'\]"):
        bundle.export_merged(str(tmp_path), {"transformer": {"lora": torch.ones(1)}})
    with pytest.raises(ConfigError, match="is the checkpoint that was loaded"):
        bundle.export_merged(str(sd3_folder), {"transformer": {}})
