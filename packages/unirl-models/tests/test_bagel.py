"""BAGEL: its parts against other libraries, its velocity and log-probs against a plain recomputation, the contract.

Float32, one thread, tiny random weights in the published layout.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from unirl.models.bagel.bundle import BagelBundle
from unirl.models.bagel.configuration import (
    MODEL_FILE,
    VAE_FILE,
    VISION_CONFIG,
)
from unirl.models.bagel.guidance import ContextGuidance, shrunk
from unirl.models.bagel.images import Sides
from unirl.models.bagel.model import Bagel
from unirl.models.bagel.pipeline import BagelPipeline, BagelTextPipeline
from unirl.models.bagel.vae import AutoEncoder
from unirl.models.packed.patches import image_of, patches_of
from unirl.models.releases.unified import BAGEL
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import initial_noise
from unirl.types.conditions import ImagePatchCondition
from unirl.types.errors import CheckpointError, ConfigError, ContractError
from unirl.types.media import ImageLists, Images, Primitive, Texts
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams

from .bagel_reference import Reference, TokenSequence
from .contract import CHECKS, KEYS, TEXTS, Case
from .tiny_bagel import TINY, save_bagel

GUIDED: dict[str, dict[str, Any]] = {
    "plain": {"guidance_scale": 1.0},
    "text": {"guidance_scale": 4.0, "negative_prompt": ""},
    "negative": {"guidance_scale": 4.0, "negative_prompt": "bad"},
    "image": {
        "guidance_scale": 4.0,
        "negative_prompt": "",
        "sampler_kwargs": {"guidance_scale_image": 1.5, "guidance_interval": [0.4, 1.0]},
    },
    "channel": {
        "guidance_scale": 4.0,
        "negative_prompt": "",
        "sampler_kwargs": {"guidance_interval": [0.0, 0.8], "guidance_renorm": "channel", "guidance_renorm_min": 0.3},
    },
    "text_channel": {
        "guidance_scale": 3.0,
        "negative_prompt": "bad",
        "sampler_kwargs": {"guidance_scale_image": 2.0, "guidance_renorm": "text_channel"},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only: tests that change files write their own."""
    return save_bagel(tmp_path_factory.mktemp("bagel") / "model")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> BagelBundle:
    """Read-only: tests that change weights load their own."""
    return BagelBundle(str(folder))


@pytest.fixture(scope="module")
def pipeline(bundle: BagelBundle) -> BagelPipeline:
    return BagelPipeline(bundle, FlowSDEStrategy(), reference_sides=(32, 64))


@pytest.fixture(scope="module")
def writer(bundle: BagelBundle) -> BagelTextPipeline:
    return BagelTextPipeline(bundle)


@pytest.fixture(scope="module")
def reference(folder: Path, bundle: BagelBundle) -> Reference:
    marks = bundle.marks
    return Reference(load_file(folder / MODEL_FILE), TINY, (marks.image_start, marks.image_end))


def params(**changes: Any) -> DiffusionSamplingParams:
    """Five stochastic steps of 32 x 48 pixels, 2 x 3 latent tokens."""
    fields: dict[str, Any] = {
        "num_inference_steps": 5,
        "guidance_scale": 1.0,
        "height": 32,
        "width": 48,
        "eta": 0.7,
        "autocast_precision": "fp32",
    }
    return DiffusionSamplingParams(**{**fields, **changes})


def pictures(num_samples: int) -> dict[str, Primitive]:
    """One image, two, and none, of several sizes."""
    generator = torch.Generator().manual_seed(5)
    sizes = [[(40, 50)], [(64, 33), (32, 32)], []]
    samples = [[torch.rand(3, *size, generator=generator) for size in each] for each in sizes]
    return {"image": ImageLists(images=samples[:num_samples])}


def sample(pipeline: BagelPipeline, primitives: dict[str, Primitive], wanted: DiffusionSamplingParams) -> Tensor:
    """Deterministic latents at every level, [B, T + 1, L, D]."""
    wanted = dataclasses.replace(wanted, eta=0.0, keep_latents="all")
    with pipeline.evaluating():
        conditions = pipeline.encode(primitives, wanted)
        noise = initial_noise(KEYS, wanted.seed, pipeline.latent_shape(wanted))
        return pipeline.diffuse(conditions, noise, pipeline.sigmas(wanted), wanted, noise_keys=KEYS).latents


# Parts against other libraries --------------------------------------------------------------------------------------


def test_the_autoencoder_is_the_one_of_diffusers(folder: Path, bundle: BagelBundle) -> None:
    weights = load_file(folder / VAE_FILE)
    theirs: Any = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32,) * 4,
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=32,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.1159,
        scaling_factor=0.3611,
    )
    theirs.load_state_dict(convert_ldm_vae_checkpoint(weights, theirs.config))
    pixels = torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        latents = bundle.vae.encode(pixels)
        expected = (theirs.encode(pixels).latent_dist.mode() - 0.1159) * 0.3611
        torch.testing.assert_close(latents, expected, rtol=1e-5, atol=1e-5)
        decoded = theirs.decode(latents / 0.3611 + 0.1159).sample
        torch.testing.assert_close(bundle.vae.decode(latents), decoded, rtol=1e-5, atol=1e-5)


def test_the_vision_tower_is_siglip(folder: Path, bundle: BagelBundle) -> None:
    """At the full grid, where SigLIP's own places are those of the table; after the final norm, without its head."""
    vision = TINY.vision
    config: Any = transformers.SiglipVisionConfig(
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_hidden_layers=vision.num_hidden_layers,
        num_attention_heads=vision.num_attention_heads,
        image_size=vision.patches_per_side * vision.patch_size,
        patch_size=vision.patch_size,
    )
    config.vision_use_head = False
    theirs = transformers.SiglipVisionModel(config).eval()
    prefix = "vit_model.vision_model."
    weights = {n.removeprefix(prefix): t for n, t in load_file(folder / MODEL_FILE).items() if n.startswith(prefix)}
    name = "embeddings.patch_embedding.weight"
    # A patch is flattened with its channels last.
    weights[name] = weights[name].unflatten(1, (vision.patch_size, vision.patch_size, 3)).permute(0, 3, 1, 2)
    expected_names = set(theirs.state_dict())
    begin = "vision_model." if any(each.startswith("vision_model.") for each in expected_names) else ""
    missing = theirs.load_state_dict({begin + n: t for n, t in weights.items()}, strict=False)
    assert not missing.missing_keys and not missing.unexpected_keys
    side = vision.patches_per_side
    images = torch.rand(2, 3, side * 14, side * 14, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        expected = theirs(pixel_values=images).last_hidden_state.flatten(0, 1)
        patches = torch.cat([patches_of(image, vision.patch_size) for image in images])
        places = torch.arange(side * side).repeat(2)
        found = bundle.bagel.vit_model(patches, places, [side * side] * 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_patches_and_images_are_inverses() -> None:
    """For [C, 2, 4] and a patch of 2: the channel is last in a patch, the column before it."""
    image = torch.arange(16.0).view(2, 2, 4)
    patches = patches_of(image, 2)
    assert patches[0].tolist() == [0, 8, 1, 9, 4, 12, 5, 13]
    assert torch.equal(image_of(patches[None], (1, 2), 2)[0], image)


# Sizes and layout ---------------------------------------------------------------------------------------------------


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of `ema.safetensors` as ByteDance-Seed/BAGEL-7B-MoT publishes them, H = 3584."""
    hidden, kv, inner, seen = 3584, 512, 18944, 1152
    shapes: dict[str, tuple[int, ...]] = {
        "language_model.model.embed_tokens.weight": (152064, hidden),
        "language_model.lm_head.weight": (152064, hidden),
        "time_embedder.mlp.0.weight": (hidden, 256),
        "time_embedder.mlp.0.bias": (hidden,),
        "time_embedder.mlp.2.weight": (hidden, hidden),
        "time_embedder.mlp.2.bias": (hidden,),
        "vae2llm.weight": (hidden, 64),
        "vae2llm.bias": (hidden,),
        "llm2vae.weight": (64, hidden),
        "llm2vae.bias": (64,),
        "latent_pos_embed.pos_embed": (4096, hidden),
        "vit_pos_embed.pos_embed": (4900, hidden),
        "connector.fc1.weight": (hidden, seen),
        "connector.fc1.bias": (hidden,),
        "connector.fc2.weight": (hidden, hidden),
        "connector.fc2.bias": (hidden,),
        "vit_model.vision_model.embeddings.patch_embedding.weight": (seen, 588),
        "vit_model.vision_model.embeddings.patch_embedding.bias": (seen,),
        "vit_model.vision_model.embeddings.position_embedding.weight": (4900, seen),
        "vit_model.vision_model.post_layernorm.weight": (seen,),
        "vit_model.vision_model.post_layernorm.bias": (seen,),
    }
    for expert in ("", "_moe_gen"):
        shapes[f"language_model.model.norm{expert}.weight"] = (hidden,)
        for layer in range(28):
            at = f"language_model.model.layers.{layer}."
            for name, width in (("q", hidden), ("k", kv), ("v", kv)):
                shapes[f"{at}self_attn.{name}_proj{expert}.weight"] = (width, hidden)
                shapes[f"{at}self_attn.{name}_proj{expert}.bias"] = (width,)
            shapes[f"{at}self_attn.o_proj{expert}.weight"] = (hidden, hidden)
            shapes |= {f"{at}self_attn.{name}_norm{expert}.weight": (128,) for name in ("q", "k")}
            shapes |= {f"{at}mlp{expert}.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
            shapes[f"{at}mlp{expert}.down_proj.weight"] = (hidden, inner)
            for name in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{at}{name}{expert}.weight"] = (hidden,)
    for layer in range(26):
        at = f"vit_model.vision_model.encoder.layers.{layer}."
        for name, shape in (("fc1", (4304, seen)), ("fc2", (seen, 4304))):
            shapes |= {f"{at}mlp.{name}.weight": shape, f"{at}mlp.{name}.bias": shape[:1]}
        for name in ("q", "k", "v", "out"):
            shapes |= {f"{at}self_attn.{name}_proj.weight": (seen, seen), f"{at}self_attn.{name}_proj.bias": (seen,)}
        for name in ("layer_norm1", "layer_norm2"):
            shapes |= {f"{at}{name}.weight": (seen,), f"{at}{name}.bias": (seen,)}
    return shapes


def test_the_published_size_is_built_on_the_meta_device(record_property: Callable[[str, object], None]) -> None:
    """The published file is 29.2 GB of bfloat16; the autoencoder is FLUX.1's, of 83.8 million parameters."""
    with torch.device("meta"):
        model, vae = Bagel(BAGEL), AutoEncoder(BAGEL.vae)
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == published_shapes()
    total = sum(tensor.numel() for tensor in model.state_dict().values())
    record_property("billions", total / 1e9)
    assert total * 2 / 1e9 == pytest.approx(29.2, rel=0.01)
    assert sum(parameter.numel() for parameter in vae.parameters()) / 1e6 == pytest.approx(83.8, rel=0.01)
    blocks = [m for m in model.language_model.modules() if type(m).__name__ in BagelBundle.block_class_names]
    assert len(blocks) == 28


@pytest.mark.parametrize("trains", ["generation", "understanding", "both"])
def test_lora_goes_to_the_experts_that_train(folder: Path, trains: Any) -> None:
    bundle = BagelBundle(str(folder), trains=trains)
    model = bundle.trainable_modules()["language_model"]
    is_chosen = {name: p.requires_grad for name, p in model.named_parameters()}
    for name, requires_grad in is_chosen.items():
        assert requires_grad == (trains == "both" or ("_moe_gen" in name) == (trains == "generation")), name
    inject_adapter_in_model(LoraConfig(r=2, target_modules=list(bundle.lora_target_modules)), model)
    adapted = [name for name, _ in model.named_parameters() if "lora_A" in name]
    assert len(adapted) == TINY.language.num_hidden_layers * 7 * (2 if trains == "both" else 1)
    assert all(("_moe_gen" in name) == (trains == "generation") for name in adapted) or trains == "both"
    others = [p for module in (bundle.bagel.vit_model, bundle.bagel.connector, bundle.vae) for p in module.parameters()]
    assert not any(p.requires_grad for p in others)


# The contract -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", [pytest.param("text", marks=pytest.mark.matrix), "image"])
def test_adapter_contract(
    name: str, check: Callable[[Case], None], pipeline: BagelPipeline, bundle: BagelBundle
) -> None:
    """For prompts alone, and after given images with all three contexts."""
    frozen: list[torch.nn.Module] = [
        bundle.vae,
        bundle.bagel.vit_model,
        bundle.bagel.connector,
        bundle.bagel.time_embedder,
    ]
    inputs = (lambda num_samples: {}) if name == "text" else pictures
    wanted = params(**GUIDED["text_channel" if name == "image" else "negative"])
    unguided = {"guidance_scale": 1.0, "sampler_kwargs": {}}
    check(Case(pipeline, wanted, frozen, inputs=inputs, unguided=unguided))


def test_the_text_expert_gets_no_gradient_where_latents_alone_train(
    pipeline: BagelPipeline, bundle: BagelBundle
) -> None:
    model = bundle.bagel.language_model
    case = Case(pipeline, params(**GUIDED["text"]), [])
    conditions, segment = case.rollout()
    steps = torch.full((3,), segment.sde_indices[0])
    pipeline.replay(conditions, segment, torch.arange(3), steps, case.params).logp_R.sum().backward()
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    assert reached == {name for name, _ in model.named_parameters() if "_moe_gen" in name}


def test_equal_contexts_run_once(pipeline: BagelPipeline) -> None:
    """Four samples of two prompts, guided by text and image: two contexts, of which the empty one is a beginning."""
    wanted = params(**GUIDED["image"])
    conditions = pipeline.encode({"text": Texts(texts=["a", "b", "a", "b"])}, wanted)
    bound: Any = pipeline.adapter.bind(conditions, wanted)
    with torch.no_grad():
        contexts = bound.contexts
    assert len(contexts.known.prefixes) == 2
    assert [prefix.row for prefix in contexts.full] == [0, 1, 0, 1] and contexts.free[1] == contexts.full
    assert [prefix.length for prefix in contexts.free[0]] == [0] * 4


# Against a recomputation --------------------------------------------------------------------------------------------


def _guided(wanted: DiffusionSamplingParams, sigma: float, v: Tensor, text_free: Tensor, image_free: Tensor) -> Tensor:
    """By the formula, of one row."""
    extra = wanted.sampler_kwargs
    low, high = extra.get("guidance_interval", (0.0, 1.0))
    scale, image_scale = wanted.guidance_scale, extra.get("guidance_scale_image", 1.0)
    kind, smallest = extra.get("guidance_renorm", "global"), extra.get("guidance_renorm_min", 0.0)
    if scale <= 1 or not low < sigma <= high:
        return v
    dim = None if kind == "global" else -1

    def renormed(g: Tensor) -> Tensor:
        ratio = v.norm(dim=dim, keepdim=True) / (g.norm(dim=dim, keepdim=True) + 1e-8)
        return g * ratio.clamp(smallest, 1.0)

    g = text_free + scale * (v - text_free)
    if kind == "text_channel":
        g = renormed(g)
    if image_scale > 1:
        g = image_free + image_scale * (g - image_free)
    return g if kind == "text_channel" else renormed(g)


def _check_trajectory(
    reference: Reference,
    pipeline: BagelPipeline,
    primitives: dict[str, Primitive],
    wanted: DiffusionSamplingParams,
    contexts: Callable[[int], tuple[TokenSequence, TokenSequence, TokenSequence]],
) -> None:
    """Latents at every level against Euler steps with recomputed velocities; 2e-5 after five steps."""
    found = sample(pipeline, primitives, wanted)
    sigmas = pipeline.sigmas(wanted).tolist()
    rows, columns = wanted.height // 16, wanted.width // 16
    for row in range(len(found)):
        x = found[row, 0]
        full, text_free, image_free = contexts(row)
        for step, (sigma, following) in enumerate(zip(sigmas, sigmas[1:], strict=False)):
            v, *others = (reference.velocity(each, x, sigma, rows, columns) for each in (full, text_free, image_free))
            x = x + (following - sigma) * _guided(wanted, sigma, v, *others)
            torch.testing.assert_close(found[row, step + 1], x, rtol=2e-5, atol=2e-5)


def _turn(bundle: BagelBundle, text: str) -> list[int]:
    return bundle.tokenizer(f"<|im_start|>{text}<|im_end|>", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if "sampler_kwargs" in GUIDED[kind] else pytest.mark.matrix) for kind in GUIDED],
)
def test_sampling_equals_a_plain_recomputation(
    kind: str, reference: Reference, pipeline: BagelPipeline, bundle: BagelBundle
) -> None:
    """Prompts of several lengths; the text-free context is empty, or the negative prompt."""
    wanted = params(**GUIDED[kind])

    def contexts(row: int) -> tuple[TokenSequence, TokenSequence, TokenSequence]:
        full, text_free = TokenSequence(), TokenSequence()
        reference.words(full, _turn(bundle, TEXTS[row]))
        if wanted.negative_prompt:
            reference.words(text_free, _turn(bundle, wanted.negative_prompt))
        return full, text_free, full

    _check_trajectory(reference, pipeline, {"text": Texts(texts=list(TEXTS))}, wanted, contexts)


def test_a_thought_and_a_system_turn_stand_where_they_are_published(reference: Reference, bundle: BagelBundle) -> None:
    pipeline = BagelPipeline(bundle, FlowSDEStrategy(), system_prompt="plan")
    wanted = params(**GUIDED["text_channel"] | {"negative_prompt": ""})
    thoughts = ["one thing", "", "mist over a lake"]

    def contexts(row: int) -> tuple[TokenSequence, TokenSequence, TokenSequence]:
        sequences = TokenSequence(), TokenSequence(), TokenSequence()
        full, _, image_free = sequences
        for each in sequences:
            reference.words(each, _turn(bundle, "plan"))
        for each in (full, image_free):
            reference.words(each, _turn(bundle, TEXTS[row]))
        reference.words(full, _turn(bundle, thoughts[row]))
        return sequences

    primitives: dict[str, Primitive] = {"text": Texts(texts=list(TEXTS)), "thought": Texts(texts=thoughts)}
    _check_trajectory(reference, pipeline, primitives, wanted, contexts)


def test_given_images_stand_as_latents_and_as_patches(
    reference: Reference, pipeline: BagelPipeline, bundle: BagelBundle
) -> None:
    wanted = params(**GUIDED["text_channel"] | {"negative_prompt": ""})
    primitives: dict[str, Primitive] = {"text": Texts(texts=list(TEXTS)), **pictures(3)}
    conditions = pipeline.encode(primitives, wanted)
    latents, patches = conditions["latents"], conditions["patches"]
    assert isinstance(latents, ImagePatchCondition) and isinstance(patches, ImagePatchCondition)
    bagel = bundle.bagel

    def contexts(row: int) -> tuple[TokenSequence, TokenSequence, TokenSequence]:
        full, text_free, image_free = TokenSequence(), TokenSequence(), TokenSequence()
        shown, seen = latents.unpack("patches")[row], patches.unpack("patches")[row]
        for (_, *grid), (_, *patch_grid) in zip(latents.grids[row], patches.grids[row], strict=True):
            own, shown = shown.split([grid[0] * grid[1], len(shown) - grid[0] * grid[1]])
            count = patch_grid[0] * patch_grid[1]
            visible, seen = seen.split([count, len(seen) - count])
            with torch.no_grad():
                visual = bagel.visual_tokens(visible, [(patch_grid[0], patch_grid[1])])
            for each in (full, text_free):
                reference.image(each, reference.latent_tokens(own, 0.0, *grid), draws=True)
                reference.image(each, visual, draws=False)
        for each in (full, image_free):
            reference.words(each, _turn(bundle, TEXTS[row]))
        return full, text_free, image_free

    _check_trajectory(reference, pipeline, primitives, wanted, contexts)


def test_an_image_survives_the_way_to_the_latents_and_back(pipeline: BagelPipeline, bundle: BagelBundle) -> None:
    """Tokens hold what the autoencoder makes of an image, in the order that decoding reads."""
    pixels = torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(3))
    latents = pipeline.encode_media(Images(pixels=pixels))
    assert latents.shape == (2, *pipeline.latent_shape(params()))
    vae = bundle.vae
    with torch.no_grad():
        expected = (vae.decode(vae.encode(pixels * 2 - 1)) / 2 + 0.5).clamp(0, 1)
        found = pipeline.decode(latents, params())
    assert isinstance(found, Images)
    torch.testing.assert_close(found.pixels, expected, rtol=1e-5, atol=1e-5)


# Text ---------------------------------------------------------------------------------------------------------------


def _written(writer: BagelTextPipeline, text: str) -> list[int]:
    """A prompt without images: its turn, and the begin of the next."""
    return writer.bundle.tokenizer(f"<|im_start|>{text}<|im_end|><|im_start|>", add_special_tokens=False)["input_ids"]


WRITING = ARSamplingParams(temperature=1.0, max_new_tokens=9)


def _qwen3_of(folder: Path) -> Any:
    """The text expert as a Qwen3 of transformers, which has norms of queries and keys, with biases switched on."""
    language = TINY.language
    config = transformers.Qwen3Config(
        vocab_size=language.vocab_size,
        hidden_size=language.hidden_size,
        intermediate_size=language.intermediate_size,
        num_hidden_layers=language.num_hidden_layers,
        num_attention_heads=language.num_attention_heads,
        num_key_value_heads=language.num_key_value_heads,
        head_dim=language.head_dim,
        rms_norm_eps=language.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": language.rope_theta},
        attention_bias=True,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    prefix = "language_model."
    weights = {
        name.removeprefix(prefix): tensor
        for name, tensor in load_file(folder / MODEL_FILE).items()
        if name.startswith(prefix) and "_moe_gen" not in name
    }
    result = model.load_state_dict(weights, strict=False)
    assert not result.unexpected_keys and all(name.endswith("o_proj.bias") for name in result.missing_keys)
    for name in result.missing_keys:
        torch.nn.init.zeros_(model.get_parameter(name))
    return model


def test_log_probs_of_texts_are_those_of_qwen3(folder: Path, writer: BagelTextPipeline) -> None:
    """Sampled with a cache and replayed in one packed forward; 1e-5 nats against transformers' own forward."""
    model = _qwen3_of(folder)
    primitives: dict[str, Primitive] = {"text": Texts(texts=list(TEXTS))}
    conditions = writer.encode(primitives, WRITING)
    with writer.evaluating():
        segment = writer.generate(conditions, WRITING, noise_keys=KEYS)
    replayed = writer.replay(conditions, segment, WRITING)
    torch.testing.assert_close(replayed.logp_N.detach(), segment.log_probs, rtol=1e-5, atol=1e-5)
    expected = []
    for text, tokens in zip(TEXTS, segment.unpack("tokens"), strict=True):
        prompt = _written(writer, text)
        with torch.no_grad():
            logits = model(torch.cat([torch.tensor(prompt), tokens])[None]).logits[0]
        logp = logits[len(prompt) - 1 : -1].log_softmax(-1)
        expected.append(logp.gather(1, tokens[:, None]).squeeze(1))
    torch.testing.assert_close(replayed.logp_N.detach(), torch.cat(expected), rtol=1e-5, atol=1e-5)
    assert torch.equal(replayed.logp_N, writer.replay(conditions, segment, WRITING).logp_N)


def test_a_text_does_not_depend_on_its_neighbours(writer: BagelTextPipeline) -> None:
    """Samples that end early leave the cache, prompts that repeat are run once; each draws what it draws alone."""
    texts, keys = ["fog", "a red cat", "fog", "b"], ["a", "b", "c", "d"]
    stop = dataclasses.replace(WRITING, max_new_tokens=24, stop_token_ids=tuple(range(0, 256, 9)))
    with writer.evaluating():
        together = writer.generate(writer.encode({"text": Texts(texts=texts)}, stop), stop, noise_keys=keys)
        for row, (text, key) in enumerate(zip(texts, keys, strict=True)):
            alone = writer.generate(writer.encode({"text": Texts(texts=[text])}, stop), stop, noise_keys=[key])
            assert alone.tokens.tolist() == together.unpack("tokens")[row].tolist()
    assert len(set(together.lengths.tolist())) > 1


def test_answers_about_images_equal_a_plain_recomputation(
    reference: Reference, writer: BagelTextPipeline, bundle: BagelBundle
) -> None:
    """Any number of images per prompt, before its text; rollout, replay and recomputation agree to 1e-5 nats."""
    primitives: dict[str, Primitive] = {"text": Texts(texts=list(TEXTS)), **pictures(3)}
    conditions = writer.encode(primitives, WRITING)
    with writer.evaluating():
        segment = writer.generate(conditions, WRITING, noise_keys=KEYS)
    replayed = writer.replay(conditions, segment, WRITING)
    torch.testing.assert_close(replayed.logp_N.detach(), segment.log_probs, rtol=1e-5, atol=1e-5)
    images = conditions["images"]
    assert isinstance(images, ImagePatchCondition)
    assert [len(sample) for sample in images.grids] == [1, 2, 0]
    expected = []
    for row, tokens in enumerate(segment.unpack("tokens")):
        sequence, patches = TokenSequence(), images.unpack("patches")[row]
        for _, rows, columns in images.grids[row]:
            own, patches = patches.split([rows * columns, len(patches) - rows * columns])
            with torch.no_grad():
                visual = bundle.bagel.visual_tokens(own, [(rows, columns)])
            reference.image(sequence, visual, draws=False)
        reference.words(sequence, _written(writer, TEXTS[row]))
        length = len(sequence.tokens)
        one = {name: condition.select([row]) for name, condition in conditions.items()}
        assert writer.adapter.positions(one, [length])[0].tolist() == sequence.positions
        reference.words(sequence, tokens.tolist())
        logits = reference.linear("language_model.lm_head", reference.hidden(sequence))[length - 1 : -1]
        expected.append(logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1))
    torch.testing.assert_close(replayed.logp_N.detach(), torch.cat(expected), rtol=1e-5, atol=1e-5)
    without = writer.encode({"text": Texts(texts=list(TEXTS))}, WRITING)
    blind = writer.replay(without, segment, WRITING).logp_N
    assert float((blind - replayed.logp_N).detach().abs().max()) > 0.01


def test_texts_train_the_text_expert_alone(folder: Path) -> None:
    writer = BagelTextPipeline(BagelBundle(str(folder), trains="both"))
    conditions = writer.encode({"text": Texts(texts=list(TEXTS))}, WRITING)
    with writer.evaluating():
        segment = writer.generate(conditions, WRITING, noise_keys=KEYS)
    writer.replay(conditions, segment, WRITING).logp_N.sum().backward()
    model = writer.bundle.trainable_modules()["language_model"]
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert reached == {name for name, _ in model.named_parameters() if "_moe_gen" not in name}


# Exports --------------------------------------------------------------------------------------------------------------


def test_the_merged_export_is_a_checkpoint_of_the_trained_weights(folder: Path, tmp_path: Path) -> None:
    bundle = BagelBundle(str(folder))
    own = BagelPipeline(bundle, FlowSDEStrategy())
    before = sample(own, {"text": Texts(texts=list(TEXTS))}, params())
    with torch.no_grad():
        for parameter in bundle.trainable_modules()["language_model"].parameters():
            if parameter.requires_grad:
                parameter.mul_(1.1)
    state = {"language_model": dict(bundle.trainable_modules()["language_model"].named_parameters())}
    bundle.export_merged(str(tmp_path / "merged"), state)
    again = BagelPipeline(BagelBundle(str(tmp_path / "merged")), FlowSDEStrategy())
    found = sample(again, {"text": Texts(texts=list(TEXTS))}, params())
    assert torch.equal(found, sample(own, {"text": Texts(texts=list(TEXTS))}, params()))
    assert not torch.allclose(found, before, atol=1e-3)
    rounded = {"language_model": {name: value.detach().bfloat16() for name, value in state["language_model"].items()}}
    bundle.export_merged(str(tmp_path / "bf16"), rounded)
    for export, dtype in (("merged", torch.float32), ("bf16", torch.bfloat16)):
        written = {k: v for file in (tmp_path / export).glob("*.safetensors") for k, v in load_file(file).items()}
        ends = [name for name in written if any(name.endswith(each) for each in rounded["language_model"])]
        assert ends and {written[name].dtype for name in ends} == {dtype}
    with pytest.raises(ConfigError, match="Export elsewhere"):
        bundle.export_merged(str(folder), state)
    name = "model.norm_moe_gen.weight"
    with pytest.raises(CheckpointError, match=f"language_model.{name}"):
        bundle.export_merged(
            str(tmp_path / "cut"), {"language_model": {**state["language_model"], name: torch.ones(3)}}
        )


def test_the_lora_export_is_loaded_by_peft_and_has_the_published_names(folder: Path, tmp_path: Path) -> None:
    bundle = BagelBundle(str(folder))
    model = bundle.trainable_modules()["language_model"]
    targets = list(bundle.lora_target_modules)
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=8, target_modules=targets), model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    state = {"language_model": get_peft_model_state_dict(model)}
    bundle.export_lora(str(tmp_path), state, rank=2, alpha=8, target_modules=targets)
    again = BagelBundle(str(folder))
    PeftModel.from_pretrained(again.bagel, str(tmp_path))
    primitives: dict[str, Primitive] = {"text": Texts(texts=list(TEXTS))}
    ours, theirs = (sample(BagelPipeline(each, FlowSDEStrategy()), primitives, params()) for each in (bundle, again))
    assert torch.equal(ours, theirs)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    published = load_file(folder / MODEL_FILE)
    adapted = {name.removeprefix("base_model.model.").split(".lora_")[0] + ".weight" for name in weights}
    assert adapted and adapted <= set(published)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"] == 8
    with pytest.raises(ContractError, match="rank 3 expected"):
        bundle.export_lora(str(tmp_path), state, rank=3, alpha=8, target_modules=targets)


# Sizes of images ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((200, 300), (512, 768)),  # the shorter side grows to 512
        ((2000, 1000), (1024, 512)),  # the longer one shrinks to 1024
        ((700, 900), (704, 896)),  # both are rounded to 16
        ((400, 2000), (208, 1024)),  # what the shorter side wants is more than the longer one allows
    ],
)
def test_sides_of_given_images(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert Sides(512, 1024, multiple=16).of(*size) == expected


# Guidance -------------------------------------------------------------------------------------------------------------


def test_a_velocity_shrinks_by_row_or_by_token() -> None:
    v = torch.tensor([[[3.0, 4.0], [0.0, 1.0]]])
    g = torch.tensor([[[6.0, 8.0], [0.0, 0.5]]])
    torch.testing.assert_close(shrunk(g, v, "channel", 0.0), torch.tensor([[[3.0, 4.0], [0.0, 0.5]]]))
    torch.testing.assert_close(shrunk(g, v, "channel", 0.8), torch.tensor([[[4.8, 6.4], [0.0, 0.5]]]))
    factor = (26 / 100.25) ** 0.5
    torch.testing.assert_close(shrunk(g, v, "global", 0.0), g * factor)


def test_rows_above_the_lower_level_are_guided() -> None:
    guidance = ContextGuidance(scale=2.0, interval=(0.4, 0.8))
    assert guidance.guided_rows(torch.tensor([0.4, 0.5, 0.8, 0.9])) == [1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guidance_scale": 4.0}, "needs a negative prompt"),
        ({"height": 40}, "height = 40 is not a multiple of 16"),
        ({"height": 160}, "positions for 8 x 8.*at most 128 pixels"),
        ({"sampler_kwargs": {"guidance_scale_image": 2.0}}, "guidance_scale = 1.0. Raise sampling.guidance_scale"),
        ({"sampler_kwargs": {"guidance_renorm": "row"}}, "'row' must be one of global, channel, text_channel"),
        ({"sampler_kwargs": {"cfg_text_scale": 2.0}}, "mean nothing to BAGEL"),
        ({"num_frames": 5}, "num_frames = 5 means nothing to BAGEL"),
    ],
)
def test_what_bagel_cannot_sample_is_refused(changes: dict[str, Any], message: str, pipeline: BagelPipeline) -> None:
    wanted = params(**changes)
    with pytest.raises(ConfigError, match=message):
        pipeline.latent_shape(wanted)
        pipeline.encode({"text": Texts(texts=["a"])}, wanted)


# Folders that are refused ---------------------------------------------------------------------------------------------


def _copy(folder: Path, target: Path, without: str) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        if file.name != without:
            (target / file.name).symlink_to(file)
    return target


@pytest.mark.parametrize("without", [MODEL_FILE, VAE_FILE, VISION_CONFIG, "tokenizer.json"])
def test_an_incomplete_folder_is_refused(without: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tokenizer" if "tokenizer" in without else without):
        BagelBundle(str(_copy(folder, tmp_path / "model", without)))


def test_weights_that_are_missing_or_of_another_shape_are_named(folder: Path, tmp_path: Path) -> None:
    copy = _copy(folder, tmp_path / "model", MODEL_FILE)
    weights = load_file(folder / MODEL_FILE)
    del weights["llm2vae.bias"]
    weights["vae2llm.weight"] = torch.zeros(64, 16)
    save_file(weights, copy / MODEL_FILE)
    with pytest.raises(CheckpointError, match=r"'missing': \['llm2vae.bias'\], 'shape': \['vae2llm.weight'\]"):
        BagelBundle(str(copy))


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    small = dataclasses.replace(TINY, language=dataclasses.replace(TINY.language, vocab_size=200))
    with pytest.raises(CheckpointError, match="the model has 200 words"):
        BagelBundle(str(save_bagel(tmp_path / "model", config=small)))
