"""What only the HunyuanVideo and HunyuanImage families have: words to draw, distilled guidance, refused settings."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock
from diffusers.pipelines.hunyuan_image.pipeline_hunyuanimage import extract_glyph_text
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts

from unirl.models.diffusers_pipeline.references import as_pil, covered
from unirl.models.hunyuan_image import text as image_text
from unirl.models.hunyuan_image.bundle import HunyuanImageBundle
from unirl.models.hunyuan_image.pipeline import HunyuanImagePipeline as OurImagePipeline
from unirl.models.hunyuan_video.bundle import HunyuanVideoImageBundle
from unirl.models.hunyuan_video15 import text as video15_text
from unirl.models.hunyuan_video15.bundle import HunyuanVideo15Bundle, causal_attention_mask
from unirl.models.hunyuan_video15.pipeline import HunyuanVideo15Pipeline as OurVideo15Pipeline
from unirl.sde.kernels import FlowSDEStrategy
from unirl.types.errors import ConfigError, DataError
from unirl.types.media import Texts

from .families.hunyuan_video15 import first_frames
from .families.kit import families, load, stock_of
from .families.kit import ours as our_pipeline

PROMPTS = [
    "a sign",
    'a sign that says "OPEN" and "CLOSED", "OPEN" twice',
    "a cat's toy and a dog's",
    "\N{LEFT DOUBLE QUOTATION MARK}caf\N{LATIN SMALL LETTER E WITH ACUTE}\N{RIGHT DOUBLE QUOTATION MARK} and 'tea'",
    '""',
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("hunyuan_video15_t2v", "hunyuan_image21")}
    for name, folder in made.items():
        families()[name].tiny().save_pretrained(folder)
    return made


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_words_to_draw_are_the_stock_pipelines(prompt: str) -> None:
    for ours, theirs in ((video15_text.quoted, extract_glyph_texts), (image_text.quoted, extract_glyph_text)):
        words = ours(prompt)
        assert "".join(f'Text "{word}". ' for word in words) == (theirs(prompt) or "")


@pytest.mark.parametrize(("frames", "size", "batch_size"), [(1, 4, None), (3, 5, 2), (4, 1, 1)])
def test_the_mask_of_the_vae_is_the_stock_blocks(frames: int, size: int, batch_size: int | None) -> None:
    stock: Any = HunyuanVideo15AttnBlock.prepare_causal_attention_mask  # says int where None is its default
    expected = stock(frames, size, torch.bfloat16, "cpu", batch_size)
    found = causal_attention_mask(frames, size, torch.bfloat16, torch.device("cpu"), batch_size)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_the_vae_decodes_as_the_stock_vae(folders: dict[str, Path]) -> None:
    folder = folders["hunyuan_video15_t2v"]
    own, stock = HunyuanVideo15Bundle(str(folder)).vae, stock_of(folder).vae
    blocks = [module for module in own.modules() if isinstance(module, HunyuanVideo15AttnBlock)]
    assert blocks
    assert all(block.prepare_causal_attention_mask is causal_attention_mask for block in blocks)
    latents = torch.randn(1, own.config.latent_channels, 3, 4, 4)
    with torch.no_grad():
        assert torch.equal(own.decode(latents).sample, stock.decode(latents).sample)


def test_texts_and_words_equal_the_stock_encoders(folders: dict[str, Path]) -> None:
    """1e-5: the stock pipeline pads to a fixed length, which changes the order of float32 sums."""
    for name, bundle_class in (("hunyuan_video15_t2v", HunyuanVideo15Bundle), ("hunyuan_image21", HunyuanImageBundle)):
        bundle = bundle_class(str(folders[name]))
        stock = stock_of(folders[name])
        stock.tokenizer_max_length, stock.tokenizer_2_max_length = 96, 64
        with torch.no_grad():
            embeds, mask, embeds_2, mask_2 = stock.encode_prompt(PROMPTS, batch_size=len(PROMPTS))
        found = bundle.text.encode_streams(PROMPTS, 96)
        for slot, states, counts in (("text", embeds, mask), ("text_2", embeds_2, mask_2)):
            for row in range(len(PROMPTS)):
                ours = found[slot].embeds[row][found[slot].mask[row].bool()]
                torch.testing.assert_close(ours, states[row][counts[row].bool()], rtol=1e-5, atol=1e-5)


def test_checkpoints_that_cannot_be_replayed_are_refused_before_weights_are_read(folders: dict[str, Path]) -> None:
    for name, bundle_class in (("hunyuan_video15_t2v", HunyuanVideo15Bundle), ("hunyuan_image21", HunyuanImageBundle)):
        config = folders[name] / "transformer" / "config.json"
        before = config.read_text()
        config.write_text(json.dumps({**json.loads(before), "use_meanflow": True}))
        with pytest.raises(ConfigError, match="is a mean-flow checkpoint"):
            bundle_class(str(folders[name]))
        config.write_text(before)


def test_the_guider_of_a_checkpoint_is_read(folders: dict[str, Path]) -> None:
    folder = folders["hunyuan_video15_t2v"]
    file = folder / "guider" / "guider_config.json"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), "guidance_rescale": 0.7}))
    with pytest.raises(ConfigError, match=r"the guider of .* is a .*guidance_rescale': 0.7"):
        HunyuanVideo15Bundle(str(folder))
    file.write_text(json.dumps({**json.loads(before), "enabled": False}))
    distilled = OurVideo15Pipeline(HunyuanVideo15Bundle(str(folder)), FlowSDEStrategy())
    with pytest.raises(ConfigError, match="was distilled to work without guidance. Set sampling.guidance_scale: 1"):
        distilled.latent_shape(families()["hunyuan_video15_t2v"].sampling())
    file.write_text(before)


def test_guidance_with_a_memory_is_refused_by_name(folders: dict[str, Path]) -> None:
    pipeline = OurImagePipeline(HunyuanImageBundle(str(folders["hunyuan_image21"])), FlowSDEStrategy())
    kwargs = {"adaptive_projected_guidance_momentum": -0.5}
    with pytest.raises(ConfigError, match=r"adaptive_projected_guidance_momentum'\]: this guidance averages over all"):
        pipeline.latent_shape(families()["hunyuan_image21"].sampling(sampler_kwargs=kwargs))


def test_a_picture_covers_the_size_as_the_stock_processor_makes_it() -> None:
    processor = HunyuanVideo15ImageProcessor(do_resize=False)
    pixels = torch.randint(0, 256, (3, 21, 34), generator=torch.Generator().manual_seed(0)) / 255
    for height, width in ((16, 16), (12, 40), (40, 12), (21, 34)):
        expected: Any = processor.resize(as_pil(pixels), height=height, width=width, resize_mode="crop")
        found = covered(pixels, height, width)
        assert found.shape == (3, height, width) and as_pil(found).tobytes() == expected.tobytes()


def test_a_video_without_its_first_frame_is_refused(tmp_path: Path) -> None:
    loaded = load("hunyuan_video15_i2v", tmp_path / "i2v")
    params = loaded.family.sampling()
    with pytest.raises(ConfigError, match=r"needs images in the slot 'image' of a request, which has none"):
        loaded.ours.encode({"text": Texts(texts=["a cat"])}, params)
    adapter: Any = loaded.ours.adapter
    before = adapter.embedding_cache.statistics.num_misses
    same = first_frames(1)["image"].select([0, 0])
    loaded.ours.encode({"text": Texts(texts=["a cat", "a cat"]), "image": same}, params)
    assert adapter.embedding_cache.statistics.num_misses - before == 1  # the image, once for both


# HunyuanVideo from images --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def i2v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of joined channels."""
    return tmp_path_factory.mktemp("i2v") / "hunyuan_video_i2v_concatenated"


def test_a_prompt_beside_an_image_is_read_as_the_stock_pipeline_reads_it_cut_or_whole(i2v: Path) -> None:
    loaded = load(i2v.name, i2v)
    adapter: Any = loaded.ours.adapter
    picture = torch.rand(3, 24, 20, generator=torch.Generator().manual_seed(0))
    for prompt, length in (("a cat runs", 40), ("a cat runs " * 10, 40)):
        found = adapter.bundle.text.encode_seen([prompt], [picture], length, every=2)
        with torch.no_grad():
            embeds, pooled, mask = loaded.stock.encode_prompt(
                image=as_pil(picture), prompt=[prompt], max_sequence_length=length, image_embed_interleave=2
            )
        counts = mask[0].bool()
        torch.testing.assert_close(found.embeds[0], embeds[0][counts], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.pooled, pooled, rtol=1e-4, atol=1e-5)


def test_hunyuan_video_from_images_refuses_what_it_cannot_make(i2v: Path, tmp_path: Path) -> None:
    pipeline = our_pipeline(i2v.name, i2v)
    adapter, params = pipeline.adapter, families()[i2v.name].sampling()
    with pytest.raises(ConfigError, match="makes 4 frames that are cut off before those of the video"):
        adapter.latent_shape(dataclasses.replace(params, num_frames=1))
    inputs = families()[i2v.name].inputs(1)
    with pytest.raises(DataError, match="holds the mark of an image, '<image>'"):
        adapter.encode({"text": Texts(texts=["an <image> of a cat"]), **inputs}, params)
    with pytest.raises(ConfigError, match="needs images in the slot 'image' of a request, which has none"):
        adapter.encode({"text": Texts(texts=["a cat"])}, params)
    for component in i2v.iterdir():
        (tmp_path / component.name).symlink_to(component)
    (tmp_path / "transformer").unlink()
    (tmp_path / "transformer").mkdir()
    settings = json.loads((i2v / "transformer" / "config.json").read_text())
    (tmp_path / "transformer" / "config.json").write_text(json.dumps({**settings, "image_condition_type": None}))
    # There are no weights in that folder: the message comes before they are read.
    with pytest.raises(ConfigError, match="image_condition_type = None and in_channels = 9"):
        HunyuanVideoImageBundle(str(tmp_path))
