"""The small Janus of the shapes: its codes are those of the library's encoder, and its base draws and errs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import unirl.worlds.shapes.world
from unirl.models.janus.bundle import JanusBundle
from unirl.models.janus.pipeline import JanusPipeline
from unirl.pretraining.autoencoding import signed
from unirl.pretraining.vector_quantisation import codes_of, train_vector_quantiser
from unirl.worlds.shapes import world
from unirl.worlds.shapes.codes import pretrain
from unirl.worlds.shapes.codes.evaluate import evaluate
from unirl.worlds.shapes.pretrain import draw

CHECKPOINT = Path(unirl.worlds.shapes.world.__file__).parent / "codes" / "checkpoint"


@pytest.fixture(scope="module")
def pipeline() -> JanusPipeline:
    """Read-only."""
    return JanusPipeline(JanusBundle(str(CHECKPOINT)))


def test_codes_are_those_of_the_librarys_encoder() -> None:
    model: Any = transformers.JanusForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32)
    pictures = signed(draw(world.all_layouts()[::97], np.random.default_rng(0), 1))
    with torch.no_grad():
        latents_ND, codes_N = codes_of(model.model.vqmodel, pictures)
        theirs_N = model.model.vqmodel.encode(pictures).image_tokens
    # The library compares distances, which are directions for codes of length 1; fp16 keeps lengths to 1e-3.
    assert float((codes_N == theirs_N).float().mean()) > 0.9
    torch.testing.assert_close(latents_ND.norm(dim=-1), torch.ones(len(latents_ND)))
    assert len(codes_N) == len(pictures) * pretrain.CODES_PER_SIDE**2


def test_an_autoencoder_of_codes_learns(tmp_path: Path) -> None:
    pretrain.save_random_model(tmp_path)
    vq = JanusBundle(str(tmp_path)).model.model.vqmodel.requires_grad_(True)
    drawings = draw(world.all_layouts()[:4], np.random.default_rng(0), 1)

    def error() -> float:
        with torch.no_grad():
            codes = codes_of(vq, signed(drawings))[1]
            return float((vq.decode(codes.view(len(drawings), -1)) - signed(drawings)).abs().mean())

    torch.manual_seed(0)
    before = error()
    train_vector_quantiser(vq, drawings, num_steps=30, batch_size=4)
    assert error() < 0.7 * before
    torch.testing.assert_close(vq.quantize.embedding.weight.norm(dim=-1), torch.ones(pretrain.NUM_CODES))


def test_the_base_draws_and_errs(pipeline: JanusPipeline) -> None:
    found = evaluate(pipeline, world.split_prompts()[1], num_samples=128)
    assert 0.1 < found["strict"] < 0.7
