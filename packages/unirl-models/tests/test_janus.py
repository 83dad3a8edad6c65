"""Janus against transformers' own class on the same files: prompts, greedy tokens, log-probs, pixels and exports.

Float32 on a CPU. Log-probs are compared with a forward of the stock modules in float64 over whole sequences; guidance
multiplies rounding by its scale.
"""

import copy
import json
import shutil
from typing import Any

import peft
import pytest
import torch
import transformers

from unirl.models.janus.bundle import JanusBundle
from unirl.models.janus.pipeline import JanusPipeline
from unirl.models.qwen3.bundle import Qwen3Bundle
from unirl.models.qwen3.pipeline import Qwen3Pipeline
from unirl.types.conditions import PromptCondition
from unirl.types.errors import CheckpointError, ConfigError, ContractError
from unirl.types.media import Images, Texts
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment

from .tiny_janus import janus, save_janus

ROUNDING = 1e-5
TEXTS = ["a red circle", "two blue squares", "a cat", "a red circle"]
LENGTH = 16
PLAIN = ARSamplingParams(temperature=0.9, max_new_tokens=LENGTH, seed=1)
GUIDED = ARSamplingParams(temperature=0.9, max_new_tokens=LENGTH, seed=1, guidance_scale=3.0)
EITHER = pytest.mark.parametrize("params", [PLAIN, GUIDED], ids=["plain", "guided"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_janus(janus(), tmp_path_factory.mktemp("janus"))


@pytest.fixture(scope="module")
def pipeline(folder):
    """Read-only."""
    return JanusPipeline(JanusBundle(str(folder)))


@pytest.fixture(scope="module")
def stock(folder, processor) -> Any:
    model = transformers.JanusForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    generation: Any = model.generation_config
    # `generate` of images asks for these, and loading a folder sets none of them.
    generation.generation_kwargs = {"boi_token_id": processor.tokenizer.boi_token_id}
    generation.num_return_sequences, generation.max_length = 1, 64
    return model


@pytest.fixture(scope="module")
def processor(folder) -> Any:
    return transformers.JanusProcessor.from_pretrained(folder)


def sampled(pipeline, params, texts=TEXTS, keys=None) -> tuple[Any, TextSegment]:
    conditions = pipeline.encode({"text": Texts(texts=list(texts))}, params)
    with pipeline.evaluating():
        keys = [f"k{i}" for i in range(len(texts))] if keys is None else keys
        return conditions, pipeline.generate(conditions, params, noise_keys=keys)


def stock_inputs(processor, text: str) -> Any:
    message = {"role": "user", "content": [{"type": "text", "text": text}]}
    prompt = processor.apply_chat_template([message], add_generation_prompt=True)
    return processor(text=[prompt], generation_mode="image", return_tensors="pt")


def stock_logp(stock, prompt: torch.Tensor, codes: torch.Tensor, params: ARSamplingParams) -> torch.Tensor:
    """Log-probs of an image by the modules of the stock model, in float64, without cache or packing."""
    model = copy.deepcopy(stock).double()
    logits = []
    for read in (prompt, emptied(model, prompt)):
        with torch.no_grad():
            words = model.get_input_embeddings()(read[None])
            embedded = torch.cat([words, model.prepare_embeddings_for_image_generation(codes[None])], dim=1)
            hidden = model.model.language_model(inputs_embeds=embedded).last_hidden_state
            logits.append(model.model.generation_head(hidden[0, len(prompt) - 1 : -1]))
    conditional, unconditional = logits
    guided = unconditional + params.guidance_scale * (conditional - unconditional)
    return (guided / params.temperature).log_softmax(-1).gather(-1, codes[:, None]).squeeze(-1).float()


def emptied(model, prompt: torch.Tensor) -> torch.Tensor:
    generation = model.generation_config
    kept = (prompt == generation.bos_token_id) | (prompt == generation.generation_kwargs["boi_token_id"])
    return torch.where(kept, prompt, generation.pad_token_id)


def test_prompts_are_the_processors(pipeline, processor):
    prompts = pipeline.encode({"text": Texts(texts=TEXTS)}, PLAIN)["prompt"].unpack("tokens")
    for text, prompt in zip(TEXTS, prompts, strict=True):
        assert prompt.tolist() == stock_inputs(processor, text)["input_ids"][0].tolist()


def test_greedy_tokens_are_those_of_the_librarys_generation(pipeline, processor, stock):
    greedy = ARSamplingParams(temperature=0, max_new_tokens=LENGTH, guidance_scale=3.0)
    _, segment = sampled(pipeline, greedy, TEXTS[:3])
    for text, codes in zip(TEXTS, segment.unpack("tokens"), strict=False):
        inputs = stock_inputs(processor, text)
        expected = stock.generate(**inputs, generation_mode="image", do_sample=False, guidance_scale=3.0)
        assert expected[0].tolist() == codes.tolist()


@EITHER
def test_log_probs_are_those_of_the_librarys_modules(pipeline, stock, params):
    conditions, segment = sampled(pipeline, params)
    replayed = pipeline.replay(conditions, segment, params).logp_N.detach().split(segment.lengths.tolist())
    prompts = conditions["prompt"].unpack("tokens")
    for row, codes in enumerate(segment.unpack("tokens")):
        expected = stock_logp(stock, prompts[row], codes, params)
        torch.testing.assert_close(replayed[row], expected, rtol=0, atol=ROUNDING)
        torch.testing.assert_close(segment.unpack("log_probs")[row], expected, rtol=0, atol=ROUNDING)
    assert segment.log_probs is not None and float(segment.log_probs.std()) > 0.5  # else nothing was compared


def test_pixels_are_those_of_the_librarys_decoder(pipeline, processor, stock):
    _, segment = sampled(pipeline, PLAIN)
    made = pipeline.images(segment)
    assert isinstance(made, Images) and made.pixels.shape == (4, 3, 16, 16)
    with torch.no_grad():
        decoded = stock.decode_image_tokens(torch.stack(segment.unpack("tokens")))
    expected = decoded.permute(0, 3, 1, 2) / 2 + 0.5
    assert torch.equal(made.pixels, expected.clamp(0, 1))
    shown = processor.postprocess([each.numpy() for each in decoded.permute(0, 3, 1, 2)])["pixel_values"]
    theirs = torch.stack([torch.from_numpy(each) for each in shown])  # uint8, cut and not rounded
    assert torch.equal((made.pixels * 255).to(torch.uint8).int().sub(theirs.int()).abs() <= 1, theirs >= 0)
    small = JanusPipeline(pipeline.bundle, decode_batch_size=3).images(segment)
    torch.testing.assert_close(small.pixels, made.pixels, rtol=0, atol=1e-5)


def test_images_are_complete(pipeline):
    _, segment = sampled(pipeline, GUIDED)
    assert segment.lengths.tolist() == [LENGTH] * 4
    assert segment.status is not None and segment.status.tolist() == [int(SegmentStatus.COMPLETED)] * 4
    assert pipeline.sample_length == LENGTH and pipeline.stop_token_ids(GUIDED) == ()
    assert pipeline.decode(segment).texts[0] == " ".join(map(str, segment.tokens[:LENGTH].tolist()))


@EITHER
def test_replay_has_the_same_bits_again_and_agrees_with_padding(pipeline, params):
    conditions, segment = sampled(pipeline, params)
    assert pipeline.is_packed
    first, again = (pipeline.replay(conditions, segment, params) for _ in range(2))
    assert torch.equal(first.logp_N, again.logp_N) and torch.equal(first.entropy_N, again.entropy_N)
    padded = JanusPipeline(pipeline.bundle, packed=False).replay(conditions, segment, params)
    torch.testing.assert_close(first.logp_N, padded.logp_N, rtol=0, atol=ROUNDING)
    assert first.hidden_N.shape == (4 * LENGTH, 64)


@EITHER
def test_a_sample_draws_the_same_codes_in_any_batch(pipeline, params):
    _, together = sampled(pipeline, params)
    _, alone = sampled(pipeline, params, [TEXTS[2]], ["k2"])
    assert together.unpack("tokens")[2].tolist() == alone.tokens.tolist()
    assert together.unpack("tokens")[0].tolist() != together.unpack("tokens")[3].tolist()  # one prompt, two keys


def test_guidance_leads_away_from_the_empty_prompt(pipeline):
    conditions, segment = sampled(pipeline, PLAIN)
    plain = pipeline.replay(conditions, segment, PLAIN).logp_N
    own = segment.replace(params=GUIDED)
    guided = pipeline.replay(conditions, own, GUIDED).logp_N
    assert float((plain - guided).detach().abs().max()) > 0.1
    both = pipeline.adapter.with_empty(conditions)["prompt"]
    assert isinstance(both, PromptCondition) and both.batch_size == 8
    assert len({tuple(row.tolist()) for row, text in zip(both.unpack("tokens")[4:], TEXTS, strict=True)}) == 3


@EITHER
def test_gradients_reach_what_draws_and_nothing_else(folder, params):
    pipeline = JanusPipeline(JanusBundle(str(folder)))
    conditions, segment = sampled(pipeline, params)
    pipeline.replay(conditions, segment, params).logp_N.sum().backward()
    trained = {name for name, each in pipeline.bundle.model.named_parameters() if each.requires_grad}
    reached = {name for name, each in pipeline.bundle.model.named_parameters() if each.grad is not None}
    assert trained == reached
    ends = {name.split(".")[1] for name in trained}
    assert ends == {"language_model", "generation_embeddings", "generation_aligner", "generation_head"}


def test_a_merged_export_is_the_librarys_model(folder, stock, tmp_path):
    bundle = JanusBundle(str(folder))
    with torch.no_grad():
        for parameter in bundle.model.parameters():
            parameter.mul_(1.1)
    bundle.export_merged(str(tmp_path / "out"), {"model": dict(bundle.model.named_parameters())})
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["JanusForConditionalGeneration"]
    auto: Any = transformers.AutoModelForImageTextToText
    loaded, info = auto.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert type(loaded) is type(stock) and not any(info[kind] for kind in ("missing_keys", "unexpected_keys"))
    for name, value in bundle.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    transformers.JanusProcessor.from_pretrained(tmp_path / "out")


def test_a_lora_export_loads_in_peft(folder, stock, tmp_path):
    bundle = JanusBundle(str(folder))
    targets = bundle.lora_target_modules
    assert len(targets) == 8 and all("language_model" in name for name in targets)
    adapted: Any = peft.inject_adapter_in_model(
        peft.LoraConfig(r=3, lora_alpha=5, target_modules=list(targets)), bundle.model
    )
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3
    state = peft.get_peft_model_state_dict(adapted)
    bundle.export_lora(str(tmp_path), {"model": state}, rank=3, alpha=5.0, target_modules=targets)
    base = transformers.JanusForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    loaded: Any = peft.PeftModel.from_pretrained(base, tmp_path)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        ours = adapted.model.language_model(input_ids=ids).last_hidden_state
        theirs = loaded.base_model.model.model.language_model(input_ids=ids).last_hidden_state
        before = stock.model.language_model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    assert float((ours - before).abs().max()) > 0.1


@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_that_are_read_in_parts_are_those_of_the_folder(is_tied, tmp_path):
    folder = save_janus(janus(is_tied=is_tied), tmp_path)
    bundle = JanusBundle(str(folder), defers_weights=True)
    assert bundle.defers_weights
    whole = JanusBundle(str(folder)).model.state_dict()
    sources = bundle.stored_weights()["model"]
    assert sources.keys() == whole.keys()
    for name, source in sources.items():
        assert torch.equal(source.read(tuple(slice(0, size) for size in source.shape)), whole[name]), name


def test_a_template_beside_the_processor_is_found(folder, tmp_path):
    changed = shutil.copytree(folder, tmp_path / "changed")
    template = (changed / "chat_template.jinja").read_text()
    (changed / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="no chat template"):
        JanusBundle(str(changed))
    (changed / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert JanusPipeline(JanusBundle(str(changed))).adapter.prompt_tokens("a")


def test_what_does_not_fit_is_named(pipeline, qwen3_folder, folder, tmp_path):
    text = {"text": Texts(texts=["a"])}
    short = ARSamplingParams(temperature=1.0, max_new_tokens=12)
    with pytest.raises(ConfigError, match=r"max_new_tokens = 12, but an image of .* has 16 tokens. Set it to 16"):
        pipeline.encode(text, short)
    with pytest.raises(ConfigError, match=r"stop_token_ids = \[3\] would end an image early"):
        sampled(pipeline, ARSamplingParams(temperature=1.0, max_new_tokens=LENGTH, stop_token_ids=(3,)), ["a"])
    conditions, segment = sampled(pipeline, GUIDED)
    with pytest.raises(ContractError, match=r"guidance_scale = 3.0 and are to be replayed with 1.0"):
        pipeline.replay(conditions, segment, PLAIN)
    with pytest.raises(ContractError, match="none can be continued"):
        pipeline.generate(conditions, GUIDED, noise_keys=["a"] * 4, num_begun=[0] * 4)
    with pytest.raises(ConfigError, match="draws tokens without guidance. Set sampling.guidance_scale: 1"):
        Qwen3Pipeline(Qwen3Bundle(str(qwen3_folder))).encode(text, GUIDED)
    with pytest.raises(ConfigError, match="guidance_scale = 0.5 must be at least 1"):
        ARSamplingParams(temperature=1.0, guidance_scale=0.5)
    changed = shutil.copytree(folder, tmp_path / "changed")
    settings = json.loads((changed / "tokenizer_config.json").read_text())
    (changed / "tokenizer_config.json").write_text(
        json.dumps(
            {name: value for name, value in settings.items() if name not in ("boi_token", "extra_special_tokens")}
        )
    )
    with pytest.raises(CheckpointError, match="the tokenizer has no boi_token"):
        JanusBundle(str(changed))
    shutil.copy(folder / "tokenizer_config.json", changed)
    config = json.loads((changed / "config.json").read_text())
    config["vision_config"]["num_image_tokens"] = 9
    (changed / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="num_image_tokens = 9 tokens, and its decoder takes 4 x 4"):
        JanusBundle(str(changed))
