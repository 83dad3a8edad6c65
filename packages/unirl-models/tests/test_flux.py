"""FLUX and FLUX.2: what the table of families does not ask."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from unirl.models.flux2.bundle import Flux2DevBundle
from unirl.models.flux2_klein.bundle import Flux2KleinBundle
from unirl.models.flux2_klein.pipeline import Flux2KleinPipeline
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Texts

from .families.kit import families, stock_of


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only."""
    folder = tmp_path_factory.mktemp("flux") / "dev"
    families()["flux2_dev"].tiny().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def klein(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only."""
    folder = tmp_path_factory.mktemp("flux") / "klein"
    families()["flux2_klein"].tiny().save_pretrained(folder)
    return folder


def test_texts_of_flux2_equal_the_stock_encoders_bit_for_bit(klein: Path) -> None:
    family, texts = families()["flux2_klein"], ["a red cat", "fog"]
    pipeline = family.pipeline(family.bundle(str(klein)), FlowSDEStrategy())
    found = pipeline.encode({"text": Texts(texts=texts)}, family.sampling(guidance_scale=1.0))["text"]
    with torch.no_grad():
        expected, _ = stock_of(klein).encode_prompt(texts, max_sequence_length=64)
    assert isinstance(found, TextEmbedCondition)
    assert torch.equal(found.embeds, expected) and found.attention_mask is None


def test_texts_of_flux2_dev_equal_the_stock_encoders_bit_for_bit(dev: Path) -> None:
    """Images that a text names are taken out, and long texts are cut, the system message counted."""
    family, texts = families()["flux2_dev"], ["a red cat", "fo[IMG]g", "long " * 40]
    pipeline = family.pipeline(family.bundle(str(dev)), FlowSDEStrategy())
    found = pipeline.encode({"text": Texts(texts=texts)}, family.sampling())["text"]
    with torch.no_grad():
        expected, _ = stock_of(dev).encode_prompt(texts, max_sequence_length=288)
    assert isinstance(found, TextEmbedCondition) and found.attention_mask is None
    assert found.embeds.shape == (3, 288, 48) and torch.equal(found.embeds, expected)


def test_the_tokenizer_of_flux2_dev_is_the_one_of_its_file(dev: Path, tmp_path: Path) -> None:
    """Whatever class its configuration names; of Llama's the words would lose their spaces."""
    family, texts = families()["flux2_dev"], ["a  red cat"]
    folder = Path(shutil.copytree(dev, tmp_path / "llama"))
    path = folder / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "LlamaTokenizerFast"}))
    found, expected = (family.bundle(str(each)).processors["tokenizer"] for each in (folder, dev))
    ids = found(texts).input_ids
    assert ids == expected(texts).input_ids and found.decode(ids[0]) == "<s>a  red cat"
    assert found.padding_side == "left" and found.chat_template == expected.chat_template


def test_flux2_dev_takes_its_guidance_as_an_input_and_no_other(dev: Path) -> None:
    family = families()["flux2_dev"]
    pipeline = family.pipeline(family.bundle(str(dev)), FlowSDEStrategy())
    with pytest.raises(ConfigError, match=r"takes its guidance as an input.*\(released with 4;"):
        pipeline.latent_shape(family.sampling(distilled_guidance_scale=None))
    with pytest.raises(ConfigError, match="guidance_scale"):
        pipeline.latent_shape(family.sampling(guidance_scale=4.0, negative_prompt=""))
    params = family.sampling()
    noise = torch.randn(1, *pipeline.latent_shape(params), generator=torch.Generator().manual_seed(0))
    sigma, step = torch.tensor([0.5]), torch.tensor([0])
    with pipeline.evaluating():
        conditions = pipeline.encode({"text": Texts(texts=["fog"])}, params)
        weak, strong = (
            pipeline.velocity(conditions, noise, sigma, step, family.sampling(distilled_guidance_scale=scale))
            for scale in (1.0, 4.0)
        )
    assert not torch.allclose(weak, strong, atol=1e-4)


def test_a_text_encoder_too_shallow_for_flux2_dev_is_refused(dev: Path, tmp_path: Path) -> None:
    from .families.flux2 import mistral3

    folder = Path(shutil.copytree(dev, tmp_path / "shallow"))
    mistral3(num_hidden_layers=2).save_pretrained(folder / "text_encoder")
    with pytest.raises(ConfigError, match=r"text_encoder has 2 layers; FLUX.2 dev reads .*\(10, 20, 30\)"):
        Flux2DevBundle(str(folder))


def test_a_distilled_flux2_refuses_guidance_and_negative_prompts(klein: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(klein, tmp_path / "distilled"))
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "is_distilled": True}))
    family = families()["flux2_klein"]
    pipeline = family.pipeline(family.bundle(str(folder)), FlowSDEStrategy())
    pipeline.latent_shape(family.sampling(guidance_scale=1.0, negative_prompt=None))
    for changes in ({"guidance_scale": 4.0}, {"guidance_scale": 1.0, "negative_prompt": "bad"}):
        with pytest.raises(ConfigError, match=r"is distilled to sample without guidance.*negative_prompt: null"):
            pipeline.latent_shape(family.sampling(**changes))


def test_a_flux2_of_static_shift_keeps_it(klein: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(klein, tmp_path / "static"))
    path = folder / "scheduler" / "scheduler_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "use_dynamic_shifting": False, "shift": 3.0}))
    pipeline = Flux2KleinPipeline(Flux2KleinBundle(str(folder)), FlowSDEStrategy())
    assert torch.equal(
        pipeline.sigmas(families()["flux2_klein"].sampling(num_inference_steps=7)), SigmaSchedule(shift=3.0).sigmas(7)
    )


def test_a_text_encoder_too_shallow_for_flux2_is_refused(klein: Path, tmp_path: Path) -> None:
    from .tiny_text import qwen3

    folder = Path(shutil.copytree(klein, tmp_path / "shallow"))
    qwen3().save_pretrained(folder / "text_encoder")
    with pytest.raises(ConfigError, match=r"text_encoder has 2 layers; FLUX.2 Klein reads .*\(9, 18, 27\)"):
        Flux2KleinBundle(str(folder))
