"""HunyuanImage3: its parts against other libraries and a plain recomputation in float64, and the adapter contract.

Float32, one thread, tiny random weights in the published layout. Tolerances: float32 rounds by 6e-8 relative, and
values about 1 pass through some dozens of sums.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, inject_adapter_in_model
from safetensors.torch import load_file
from torch import Tensor

from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle
from unirl.models.hunyuan_image3.configuration import DecoderConfig, HunyuanImage3Config, LayerConfig, VAEConfig
from unirl.models.hunyuan_image3.layout import Layout, Segment
from unirl.models.hunyuan_image3.model import ImageParts
from unirl.models.hunyuan_image3.pictures import patched_size
from unirl.models.hunyuan_image3.pipeline import HunyuanImage3Pipeline
from unirl.models.hunyuan_image3.sizes import sizes
from unirl.models.hunyuan_image3.transformer import HunyuanImage3Decoder, expert_stacks
from unirl.models.hunyuan_image3.vae import folded, unfolded
from unirl.models.packed.contexts import rows_of_ids
from unirl.models.packed.given_images import GivenImage, given_images
from unirl.models.packed.vision import VisionConfig
from unirl.models.packed.weights import INDEX
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import initial_noise
from unirl.types.errors import CheckpointError, ConfigError, ContractError
from unirl.types.media import ImageLists, Images, Primitive, Texts
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.weights import in_published_parts

from .contract import CHECKS, KEYS, TEXTS, Case
from .hunyuan_image3_reference import Reference, TokenSequence
from .tiny_hunyuan_image3 import TINY, config_json, save_hunyuan_image3, weights

THOUGHTS = ["<think>a cat</think><recaption>a cat, red</recaption>", "", "<recaption>grey</recaption>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only: tests that change files write their own."""
    return save_hunyuan_image3(tmp_path_factory.mktemp("hunyuan_image3") / "model")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> HunyuanImage3Bundle:
    """Read-only: tests that change weights load their own."""
    return HunyuanImage3Bundle(str(folder))


@pytest.fixture(scope="module")
def pipeline(bundle: HunyuanImage3Bundle) -> HunyuanImage3Pipeline:
    return HunyuanImage3Pipeline(bundle, FlowSDEStrategy(), decode_batch_size=3)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(weights(), TINY)


def params(**changes: Any) -> DiffusionSamplingParams:
    """Five stochastic steps of 32 x 96 pixels, 2 x 6 latent tokens."""
    fields: dict[str, Any] = {
        "num_inference_steps": 5,
        "guidance_scale": 1.0,
        "height": 32,
        "width": 96,
        "eta": 0.7,
        "autocast_precision": "fp32",
    }
    return DiffusionSamplingParams(**{**fields, **changes})


def pictures(num_samples: int) -> dict[str, Primitive]:
    """One image, two, and none, of several sizes."""
    generator = torch.Generator().manual_seed(5)
    shapes = [[(40, 50)], [(64, 33), (32, 96)], []]
    samples = [[torch.rand(3, *size, generator=generator) for size in each] for each in shapes]
    return {"image": ImageLists(images=samples[:num_samples])}


def sample(
    pipeline: HunyuanImage3Pipeline, primitives: dict[str, Primitive], wanted: DiffusionSamplingParams
) -> Tensor:
    """Deterministic latents at every level, [B, T + 1, C, h, w]."""
    wanted = dataclasses.replace(wanted, eta=0.0, keep_latents="all")
    with pipeline.evaluating():
        conditions = pipeline.encode(primitives, wanted)
        noise = initial_noise(KEYS, wanted.seed, pipeline.latent_shape(wanted))
        return pipeline.diffuse(conditions, noise, pipeline.sigmas(wanted), wanted, noise_keys=KEYS).latents


# Parts ---------------------------------------------------------------------------------------------------------------


def test_the_vision_tower_is_siglip2(bundle: HunyuanImage3Bundle) -> None:
    """Two images of other grids than the table of positions, both padded."""
    vision, most = TINY.vision, TINY.most_patches
    config: Any = transformers.Siglip2VisionConfig(
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_hidden_layers=vision.num_hidden_layers,
        num_attention_heads=vision.num_attention_heads,
        num_patches=vision.patches_per_side**2,
        patch_size=vision.patch_size,
    )
    config.vision_use_head, config._attn_implementation = False, "sdpa"
    theirs = transformers.Siglip2VisionModel(config).eval()
    tower = bundle.images.vision_model
    begin = "vision_model." if next(iter(theirs.state_dict())).startswith("vision_model.") else ""
    found = theirs.load_state_dict({begin + n: t for n, t in tower.state_dict().items()}, strict=False)
    assert not found.unexpected_keys and not [name for name in found.missing_keys if ".head." not in name]
    grids = [(2, 3), (1, 4)]
    patches = torch.randn(10, vision.patch_width, generator=torch.Generator().manual_seed(0))
    padded, mask = torch.zeros(2, most, vision.patch_width), torch.zeros(2, most, dtype=torch.long)
    for row, part in enumerate(patches.split([6, 4])):
        padded[row, : len(part)], mask[row, : len(part)] = part, 1
    with torch.no_grad():
        expected = theirs(padded, mask, torch.tensor(grids)).last_hidden_state
        torch.testing.assert_close(tower(patches, grids), expected, rtol=1e-4, atol=1e-5)


def test_the_autoencoder_equals_a_plain_recomputation(bundle: HunyuanImage3Bundle, reference: Reference) -> None:
    pixels = torch.rand(1, 3, 32, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1
    vae = bundle.images.vae
    with torch.no_grad():
        latents = vae.encode(pixels)
        torch.testing.assert_close(latents[0].double(), reference.encoded(pixels[0]), rtol=1e-4, atol=1e-4)
        decoded = vae.decode(latents)[0].double()
        torch.testing.assert_close(decoded, reference.decoded(latents[0]), rtol=1e-4, atol=1e-4)


def test_cells_become_channels_before_the_channels() -> None:
    """For [1, 2, 2, 2, 2] counted through: the frame varies slowest, then row, column and channel."""
    x = torch.arange(16.0).view(1, 2, 2, 2, 2)
    assert folded(x, 2).flatten().tolist() == [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
    assert torch.equal(unfolded(folded(x, 2), 2), x)
    assert torch.equal(unfolded(folded(x, 1), 1), x)


def test_an_image_lies_around_the_middle_of_its_places() -> None:
    """Three words, an image of 2 x 3 once, a word, another of 1 x 2 with one token of padding, a word."""
    row = [Segment(3), Segment(6 + 1 + 3, ((2, 3), (1, 2))), Segment(1)]
    # 3 + (6 - 2) / 2 = 5, 3 + (6 - 3) / 2 = 4.5; 10 + (2 - 1) / 2 = 10.5, 10 + (2 - 2) / 2 = 10.
    image = [[5, 4], [5, 5], [5, 6], [6, 4], [6, 5], [6, 6]]
    seen = [[10, 10], [10, 11], [12, 12]]
    words = [[0, 0], [1, 1], [2, 2]]
    assert Layout.positions_of(row, 0).tolist() == [*words, *image, [9, 9], *seen, [13, 13]]


def test_sizes_are_counted_from_the_widest_to_the_tallest() -> None:
    known = sizes(1024)
    assert len(known) == 37
    assert (known[0], known[15], known[16], known[17], known[32]) == (
        (512, 2048),
        (960, 1088),
        (1024, 1024),
        (1088, 960),
        (2048, 512),
    )
    assert known[33:] == ((1024, 768), (1280, 720), (768, 1024), (720, 1280))
    ratios = [height / width for height, width in known[:33]]
    assert ratios == sorted(ratios)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((100, 100), (512, 512)), ((1080, 1920), (384, 672)), ((3000, 10), (8192, 32))],
)
def test_patched_sizes(size: tuple[int, int], expected: tuple[int, int]) -> None:
    """At most 1024 patches of 16: 32 x 32, 24 x 42 = 1008, and a strip of 512 x 2."""
    assert patched_size(*size, 16, 1024) == expected


# Sizes and layout ----------------------------------------------------------------------------------------------------

PUBLISHED = HunyuanImage3Config(
    decoder=DecoderConfig(
        vocab_size=133120,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_experts=64,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=12800,
        layers=(LayerConfig(expert_width=3072, shared_width=3072, top_k=8),) * 32,
    ),
    vision=VisionConfig(
        hidden_size=1152,
        intermediate_size=4304,
        num_hidden_layers=27,
        num_attention_heads=16,
        patch_size=16,
        num_channels=3,
        layer_norm_eps=1e-6,
        patches_per_side=16,
    ),
    vae=VAEConfig(
        channels=(128, 256, 512, 1024, 1024),
        blocks=2,
        latent_channels=32,
        factor=16,
        temporal_factor=4,
        scale=0.562679178327931,
        shift=0.0,
    ),
    patch_width=1024,
    base_size=1024,
    most_patches=1024,
)


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of tencent/HunyuanImage-3.0, all but the autoencoder's."""
    hidden, seen, inner = 4096, 1152, 3072
    shapes: dict[str, tuple[int, ...]] = {
        "model.wte.weight": (133120, hidden),
        "model.ln_f.weight": (hidden,),
        "lm_head.weight": (133120, hidden),
        "patch_embed.model.0.weight": (1024, 32, 3, 3),
        "patch_embed.model.0.bias": (1024,),
        "final_layer.model.1.0.weight": (1024,),
        "final_layer.model.1.0.bias": (1024,),
        "final_layer.model.1.2.weight": (32, 1024, 3, 3),
        "final_layer.model.1.2.bias": (32,),
    }

    def with_bias(name: str, *shape: int) -> None:
        shapes.update({f"{name}.weight": shape, f"{name}.bias": shape[:1]})

    for layer in range(32):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.{name}_layernorm.weight": (128,) for name in ("query", "key")}
        shapes[f"{at}.self_attn.qkv_proj.weight"] = ((32 + 2 * 8) * 128, hidden)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, 32 * 128)
        shapes[f"{at}.mlp.gate.wg.weight"] = (64, hidden)
        for expert in ("shared_mlp", *(f"experts.{number}" for number in range(64))):
            shapes[f"{at}.mlp.{expert}.gate_and_up_proj.weight"] = (2 * inner, hidden)
            shapes[f"{at}.mlp.{expert}.down_proj.weight"] = (hidden, inner)
    for name in ("timestep_emb", "time_embed", "time_embed_2"):
        with_bias(f"{name}.mlp.0", hidden, 256)
        with_bias(f"{name}.mlp.2", hidden, hidden)
    for name, width, out in (("patch_embed.model.1", 1024, hidden), ("final_layer.model.0", hidden, 1024)):
        with_bias(f"{name}.in_layers.0", width)
        with_bias(f"{name}.in_layers.2", out, width, 3, 3)
        with_bias(f"{name}.emb_layers.1", 2 * out, hidden)
        with_bias(f"{name}.out_layers.0", out)
        with_bias(f"{name}.out_layers.3", out, out, 3, 3)
        with_bias(f"{name}.skip_connection", out, width, 1, 1)
    with_bias("vision_model.embeddings.patch_embedding", seen, 768)
    shapes["vision_model.embeddings.position_embedding.weight"] = (256, seen)
    with_bias("vision_model.post_layernorm", seen)
    for layer in range(27):
        at = f"vision_model.encoder.layers.{layer}"
        with_bias(f"{at}.mlp.fc1", 4304, seen)
        with_bias(f"{at}.mlp.fc2", seen, 4304)
        for name in ("q", "k", "v", "out"):
            with_bias(f"{at}.self_attn.{name}_proj", seen, seen)
        for name in ("layer_norm1", "layer_norm2"):
            with_bias(f"{at}.{name}", seen)
    with_bias("vision_aligner.layers.0", hidden, seen)
    with_bias("vision_aligner.layers.2", hidden, hidden)
    return shapes


def test_the_published_size_is_built_on_the_meta_device(record_property: Callable[[str, object], None]) -> None:
    """The published model has 80 billion parameters, of which a token uses 13."""
    with torch.device("meta"):
        decoder, images = HunyuanImage3Decoder(PUBLISHED.decoder), ImageParts(PUBLISHED)
    parts = in_published_parts(decoder.state_dict(), expert_stacks(decoder))
    state = {**parts, **images.state_dict()}
    ours = {name: tuple(tensor.shape) for name, tensor in state.items() if not name.startswith("vae.")}
    assert ours == published_shapes()
    vae = {name.removeprefix("vae.") for name in state if name.startswith("vae.")}
    assert {
        "encoder.down.3.downsample.conv.weight",
        "decoder.up.0.upsample.conv.bias",
        "decoder.up.4.block.2.conv2.bias",
    } <= vae
    assert state["vae.encoder.conv_out.weight"].shape == (64, 1024, 3, 3, 3)
    assert not [name for name in vae if "nin_shortcut" in name]
    total = sum(parameter.numel() for parameter in decoder.parameters())
    idle = sum(
        part.numel()
        for name, part in parts.items()
        if ".experts." in name and int(name.split(".experts.")[1].split(".")[0]) >= 8
    )
    record_property("billions", total / 1e9)
    assert total / 1e9 == pytest.approx(80, rel=0.02)
    assert (total - idle) / 1e9 == pytest.approx(13, rel=0.03)
    blocks = [m for m in decoder.modules() if type(m).__name__ in HunyuanImage3Bundle.block_class_names]
    assert len(blocks) == 32


def test_the_configuration_of_a_folder_is_read(bundle: HunyuanImage3Bundle) -> None:
    assert bundle.config == TINY


@pytest.mark.parametrize("trains", ["attention", "all"])
def test_what_trains_and_what_lora_adapts(trains: Any, folder: Path) -> None:
    bundle = HunyuanImage3Bundle(str(folder), trains=trains)
    model = bundle.trainable_modules()["transformer"]
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (trains == "all" or ".self_attn." in name), name
    assert not any(parameter.requires_grad for parameter in bundle.images.parameters())
    inject_adapter_in_model(LoraConfig(r=2, target_modules=list(bundle.lora_target_modules)), model)
    assert len([name for name, _ in model.named_parameters() if "lora_A" in name]) == 2 * len(TINY.decoder.layers)


# The contract --------------------------------------------------------------------------------------------------------

GUIDED: dict[str, Any] = {"guidance_scale": 2.5, "negative_prompt": ""}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ["text", pytest.param("image", marks=pytest.mark.matrix)])
def test_adapter_contract(
    name: str, check: Callable[[Case], None], pipeline: HunyuanImage3Pipeline, bundle: HunyuanImage3Bundle
) -> None:
    """For prompts alone, and after given images."""
    inputs = (lambda num_samples: {}) if name == "text" else pictures
    check(Case(pipeline, params(**GUIDED), [bundle.images], inputs=inputs))


def test_the_decoder_may_stay_elsewhere_until_it_is_sharded(folder: Path) -> None:
    """The meta device stands for another one: the ways of images are where tokens are, the decoder is not."""
    bundle = HunyuanImage3Bundle(str(folder), decoder_device="meta")
    assert {parameter.device.type for parameter in bundle.decoder.parameters()} == {"meta"}
    assert {parameter.device.type for parameter in bundle.images.parameters()} == {"cpu"}
    assert bundle.device.type == "cpu"


def test_experts_get_a_gradient_where_they_train(folder: Path) -> None:
    """All of every block, those without a token of the batch too: ranks of a sharded model must agree on them."""
    bundle = HunyuanImage3Bundle(str(folder), trains="all")
    case = Case(HunyuanImage3Pipeline(bundle, FlowSDEStrategy()), params(), [bundle.images])
    conditions, segment = case.rollout()
    one = {name: condition.select([0]) for name, condition in conditions.items()}
    steps = torch.tensor([segment.sde_indices[0]])
    case.pipeline.replay(one, segment.select([0]), torch.arange(1), steps, case.params).logp_R.sum().backward()
    without = {name for name, parameter in bundle.decoder.named_parameters() if parameter.grad is None}
    # Words are not written here.
    assert without == {"model.ln_f.weight", "lm_head.weight"}


# The velocity against a plain recomputation --------------------------------------------------------------------------


def _context(
    reference: Reference,
    bundle: HunyuanImage3Bundle,
    text: str,
    thought: str,
    shown: list[GivenImage],
    *,
    is_masked: bool,
) -> TokenSequence:
    """What stands before the image that is made: each part tokenised by itself."""
    tokenizer, sequence = bundle.tokenizer, TokenSequence()
    masked, separator = bundle.words.masked, bundle.words.separator

    def say(words: str, *, is_prompt: bool = False) -> None:
        for number in tokenizer(words, add_special_tokens=False)["input_ids"]:
            sequence.word(reference.word(masked if is_prompt and is_masked else number))

    say("<|startoftext|>")
    say("User: ")
    for number, image in enumerate(shown):
        (rows, columns), patch_grid = image.grids
        height, width = rows * 16, columns * 16
        say(f"<boi><img_size_64><img_ratio_{sizes(64).index((height, width))}>")
        sequence.word(reference.time("timestep_emb", 0.0))
        latent = image.latents.T.unflatten(1, (rows, columns))
        sequence.image(reference.latent_tokens(latent, 0.0), rows, columns, block=number)
        sequence.word(reference.word(separator), block=number)
        with torch.no_grad():
            seen = bundle.images.visual_tokens(image.patches, [patch_grid])[0].double()
        count = patch_grid[0] * patch_grid[1]
        sequence.image(seen[:count], *patch_grid, block=number)
        for padding in seen[count:]:
            sequence.word(padding, block=number)
        say("<eoi>")
    say(text, is_prompt=True)
    say("\n\n")
    say("Assistant: ")
    for part in thought.replace("<", "\x00<").replace(">", ">\x00").split("\x00"):
        say(part, is_prompt=not part.startswith("<"))
    say("<answer>")
    say("<boi><img_size_64><img_ratio_8>")
    return sequence


@pytest.mark.parametrize("name", ["plain", "guided", "thought", "pictures"])
def test_trajectories_equal_a_plain_recomputation(
    name: str, pipeline: HunyuanImage3Pipeline, bundle: HunyuanImage3Bundle, reference: Reference
) -> None:
    """Whole sequences without a cache; every level of a guided trajectory starts from the sampled latents."""
    scale = 1.0 if name == "plain" else 2.5
    wanted = params(num_inference_steps=2, guidance_scale=scale, negative_prompt="")
    primitives: dict[str, Primitive] = {"text": Texts(texts=list(TEXTS))}
    primitives |= {"thought": Texts(texts=THOUGHTS)} if name == "thought" else {}
    primitives |= pictures(3) if name == "pictures" else {}
    assert sizes(64)[8] == (32, 96)
    latents, sigmas = sample(pipeline, primitives, wanted), pipeline.sigmas(wanted).tolist()
    with pipeline.evaluating():
        images = given_images(pipeline.encode(primitives, wanted), 3)
    for row in (0, 1) if name == "pictures" else range(3):
        thought = THOUGHTS[row] if name == "thought" else ""
        full, masked = (
            _context(reference, bundle, TEXTS[row], thought, images[row], is_masked=is_masked)
            for is_masked in (False, True)
        )
        for step in range(2):
            x = latents[row, step].double()
            velocity = reference.velocity(full, x, sigmas[step])
            if scale > 1:
                free = reference.velocity(masked, x, sigmas[step])
                velocity = free + scale * (velocity - free)
            expected = x + (sigmas[step + 1] - sigmas[step]) * velocity
            torch.testing.assert_close(latents[row, step + 1].double(), expected, rtol=1e-4, atol=1e-4)


def test_words_are_read_once_for_all_steps(pipeline: HunyuanImage3Pipeline) -> None:
    """Four samples of two prompts, guided: four contexts run in the first step, images alone in the others."""
    decoder, counts = pipeline.bundle.trainable_modules()["transformer"], []
    hook = decoder.register_forward_pre_hook(lambda module, args: counts.append(len(args[1].rows)))
    wanted = params(**GUIDED)
    keys = ["a", "b", "c", "d"]
    try:
        with pipeline.evaluating():
            conditions = pipeline.encode({"text": Texts(texts=["fog", "rain"] * 2)}, wanted)
            noise = initial_noise(keys, 0, pipeline.latent_shape(wanted))
            pipeline.diffuse(conditions, noise, pipeline.sigmas(wanted), wanted, noise_keys=keys)
    finally:
        hook.remove()
    assert counts == [4, *[8] * wanted.num_inference_steps]


def test_a_checkpoint_may_drop_thoughts_and_have_no_roles(tmp_path: Path) -> None:
    """The published base model is prompted without roles, and reads the caption alone."""
    own = HunyuanImage3Bundle(str(save_hunyuan_image3(tmp_path / "base", style="pretrain", drops_thoughts=True)))
    pipeline = HunyuanImage3Pipeline(own, FlowSDEStrategy(), system_prompt=" draw \n")
    conditions = pipeline.encode({"text": Texts(texts=["fog"]), "thought": Texts(texts=THOUGHTS[:1])}, params())
    said = own.tokenizer.decode(rows_of_ids(conditions, "text")[0])
    expected = "drawfog<recaption>a cat, red</recaption><boi><img_size_64><img_ratio_8>"
    assert said == f"<|startoftext|>{expected}"


def test_an_image_survives_the_way_to_the_latents_and_back(
    pipeline: HunyuanImage3Pipeline, bundle: HunyuanImage3Bundle
) -> None:
    pixels = torch.rand(2, 3, 32, 96, generator=torch.Generator().manual_seed(3))
    latents = pipeline.encode_media(Images(pixels=pixels))
    assert latents.shape == (2, *pipeline.latent_shape(params()))
    with torch.no_grad():
        expected = (bundle.images.vae.decode(bundle.images.vae.encode(pixels * 2 - 1)) / 2 + 0.5).clamp(0, 1)
        found = pipeline.decode(latents, params())
    assert isinstance(found, Images)
    torch.testing.assert_close(found.pixels, expected, rtol=1e-5, atol=1e-5)


# Exports -------------------------------------------------------------------------------------------------------------


def test_the_merged_export_is_a_checkpoint_of_the_trained_weights(folder: Path, tmp_path: Path) -> None:
    bundle = HunyuanImage3Bundle(str(folder))
    own = HunyuanImage3Pipeline(bundle, FlowSDEStrategy())
    primitives: dict[str, Primitive] = {"text": Texts(texts=list(TEXTS))}
    wanted = params(num_inference_steps=2)
    before = sample(own, primitives, wanted)
    with torch.no_grad():
        for parameter in bundle.decoder.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.1)
    state = {"transformer": dict(bundle.decoder.named_parameters())}
    bundle.export_merged(str(tmp_path / "merged"), state)
    again = HunyuanImage3Pipeline(HunyuanImage3Bundle(str(tmp_path / "merged")), FlowSDEStrategy())
    found = sample(again, primitives, wanted)
    assert torch.equal(found, sample(own, primitives, wanted))
    assert not torch.allclose(found, before, atol=1e-3)
    rounded = {"transformer": {name: value.detach().bfloat16() for name, value in state["transformer"].items()}}
    bundle.export_merged(str(tmp_path / "bf16"), rounded)
    for export, dtype in (("merged", torch.float32), ("bf16", torch.bfloat16)):
        written = {k: v for file in (tmp_path / export).glob("*.safetensors") for k, v in load_file(file).items()}
        ends = [name for name in written if any(name.endswith(each) for each in rounded["transformer"])]
        assert ends and {written[name].dtype for name in ends} == {dtype}
    with pytest.raises(ConfigError, match="Export elsewhere"):
        bundle.export_merged(str(folder), state)
    cut = {"transformer": {**state["transformer"], "model.ln_f.weight": torch.ones(3)}}
    with pytest.raises(CheckpointError, match=r"model\.ln_f\.weight"):
        bundle.export_merged(str(tmp_path / "cut"), cut)


def test_the_lora_export_is_loaded_by_peft_and_has_the_published_names(folder: Path, tmp_path: Path) -> None:
    bundle = HunyuanImage3Bundle(str(folder))
    model, targets = bundle.decoder, list(bundle.lora_target_modules)
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=8, target_modules=targets), model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    state = {"transformer": get_peft_model_state_dict(model)}
    bundle.export_lora(str(tmp_path), state, rank=2, alpha=8, target_modules=targets)
    again = HunyuanImage3Bundle(str(folder))
    PeftModel.from_pretrained(again.decoder, str(tmp_path))
    primitives: dict[str, Primitive] = {"text": Texts(texts=list(TEXTS))}
    ours, theirs = (
        sample(HunyuanImage3Pipeline(each, FlowSDEStrategy()), primitives, params(num_inference_steps=2))
        for each in (bundle, again)
    )
    assert torch.equal(ours, theirs)
    adapted = {
        name.removeprefix("base_model.model.").split(".lora_")[0] + ".weight"
        for name in load_file(tmp_path / "adapter_model.safetensors")
    }
    assert adapted and adapted <= set(weights())
    with pytest.raises(ContractError, match="rank 3 expected"):
        bundle.export_lora(str(tmp_path), state, rank=3, alpha=8, target_modules=targets)


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guidance_scale": 4.0}, "needs a negative prompt"),
        ({"guidance_scale": 4.0, "negative_prompt": "bad"}, "puts <cfg> instead of a prompt"),
        ({"height": 32, "width": 80}, "no word for 32 x 80 pixels. Of the same shape it makes 32 x 80|32 x 96"),
        ({"sampler_kwargs": {"use_taylor_cache": True}}, "a replay of single steps is not what was sampled"),
        ({"sampler_kwargs": {"cfg_scale": 2.0}}, "mean nothing to HunyuanImage3"),
        ({"num_frames": 5}, "num_frames = 5 means nothing to HunyuanImage3"),
    ],
)
def test_what_cannot_be_sampled_is_refused(
    changes: dict[str, Any], message: str, pipeline: HunyuanImage3Pipeline
) -> None:
    wanted = params(**changes)
    with pytest.raises(ConfigError, match=message):
        pipeline.latent_shape(wanted)
        pipeline.encode({"text": Texts(texts=["a"])}, wanted)


def _copy(folder: Path, target: Path, without: str) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        if file.name != without:
            (target / file.name).symlink_to(file)
    return target


@pytest.mark.parametrize("without", ["model-2-of-2.safetensors", "generation_config.json", "tokenizer.json"])
def test_an_incomplete_folder_is_refused(without: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tokenizer" if "tokenizer" in without else without):
        HunyuanImage3Bundle(str(_copy(folder, tmp_path / "model", without)))


def test_weights_that_are_missing_are_named(folder: Path, tmp_path: Path) -> None:
    copy = _copy(folder, tmp_path / "model", INDEX)
    (copy / INDEX).write_text(json.dumps({"weight_map": {"model.wte.weight": "model-1-of-2.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"'missing': \['final_layer\.model\.0\.emb"):
        HunyuanImage3Bundle(str(copy))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cfg_distilled": True}, ConfigError, r"\{'cfg_distilled': True\}; this bundle is written for"),
        ({"vocab_size": 300}, CheckpointError, "the model has 300 words"),
        ({"image_base_size": 1024}, CheckpointError, "lacks .'<img_size_1024>'"),
        ({"moe_topk": None}, CheckpointError, "config.json has no 'moe_topk'"),
    ],
)
def test_other_variants_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str, folder: Path, tmp_path: Path
) -> None:
    copy = _copy(folder, tmp_path / "model", "config.json")
    config = {name: value for name, value in {**config_json(), **changes}.items() if value is not None}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        HunyuanImage3Bundle(str(copy))
