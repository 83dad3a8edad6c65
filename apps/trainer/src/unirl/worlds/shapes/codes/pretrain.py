"""Make the base of the codes: `python -m unirl.worlds.shapes.codes.pretrain --out DIR [--seed 0]`.

Two stages, each with a fixed number of steps: the codes of images, then the language model that draws them, some of its
captions wrong in one respect. The result is a folder for `JanusForConditionalGeneration.from_pretrained`.
docs/worlds/codes.md has time and figures.

Shape letters: B samples, J drawings of one layout, S layouts, L codes of an image, P prompts, N layouts of a prompt.
"""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import JanusConfig, JanusForConditionalGeneration, JanusProcessor, PreTrainedTokenizerFast
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil
from transformers.models.janus.modeling_janus import JanusVQVAE

from unirl.models.janus.bundle import JanusBundle
from unirl.models.janus.pipeline import JanusPipeline
from unirl.pretraining.autoencoding import signed
from unirl.pretraining.command_line import make_checkpoint
from unirl.pretraining.fit import fit
from unirl.pretraining.probing import word_tokenizer
from unirl.pretraining.saving import load_in_fp32
from unirl.pretraining.vector_quantisation import codes_of, train_vector_quantiser
from unirl.reward.worlds.shapes import score_shapes
from unirl.reward.worlds.shapes_grammar import parse_prompt
from unirl.types.conditions import PromptCondition
from unirl.types.media import Texts
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment
from unirl.worlds.shapes import text, world
from unirl.worlds.shapes.codes.evaluate import evaluate
from unirl.worlds.shapes.pretrain import CAPTIONED_LAYOUTS, CATEGORY_SHARES, NULL_PROMPT_FRACTION, draw

logger = logging.getLogger(__name__)

IMAGE_WORDS = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
NUM_CODES = 512
CODES_PER_SIDE = 4
WIDTH = 160
NUM_LAYERS = 3
DRAWINGS_PER_LAYOUT = 16
PARAMS = ARSamplingParams(temperature=1.0, max_new_tokens=CODES_PER_SIDE**2)


@dataclass(frozen=True)
class Budget:
    """Optimiser steps of each stage."""

    codes: int = 1000
    drawing: int = 1200


def main() -> None:
    """Read the command line and make the checkpoint."""
    make_checkpoint(pretrain, Budget, __doc__, has_snapshots=False)


def pretrain(out: Path, *, seed: int, budget: Budget) -> None:
    """Run both stages and write the checkpoint to `out`. Seeds torch's generator."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(Path(folder))
        pipeline = JanusPipeline(JanusBundle(folder))
        model = pipeline.bundle.model
        layouts = world.all_layouts()
        vq = model.model.vqmodel.requires_grad_(True)
        train_vector_quantiser(vq, draw(layouts, rng, 6), num_steps=budget.codes)
        vq.requires_grad_(False)
        logger.info("restored drawings that are right: %.3f", share_restored(vq, rng))
        codes_SJL = codes_of_layouts(pipeline, layouts, rng)
        learn_to_draw(pipeline, codes_SJL, rng, num_steps=budget.drawing)
        logger.info("held-out: %s", evaluate(pipeline, world.split_prompts()[1], num_samples=512))
        pipeline.bundle.export_merged(str(out), {"model": {name: t.half() for name, t in model.state_dict().items()}})
        load_in_fp32(out / "config.json")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The words of the world after the mark of the beginning, and the marks of images."""
    tokenizer = word_tokenizer(text.VOCABULARY, joined=("left of", "right of"), has_start=True, max_length=64)
    start = ("<s>", text.VOCABULARY["<s>"])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[start])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=IMAGE_WORDS,
    )


def save_random_model(folder: Path) -> None:
    """A Janus of three layers of width 160 that draws 4 x 4 of 512 codes, as a checkpoint."""
    tokenizer = make_tokenizer()
    language: dict[str, Any] = {  # Any: values of several types
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "initializer_range": 0.05,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = JanusForConditionalGeneration(
        JanusConfig(
            text_config=language,
            vision_config={
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": world.IMAGE_SIDE,
                "patch_size": world.IMAGE_SIDE // CODES_PER_SIDE,
                "mlp_ratio": 2.0,
                "projection_dim": WIDTH,
                "num_image_tokens": CODES_PER_SIDE**2,
            },
            vq_config={
                "embed_dim": 8,
                "num_embeddings": NUM_CODES,
                "latent_channels": 32,
                "base_channels": 32,
                "channel_multiplier": [1, 1, 1, 2],
                "num_res_blocks": 1,
                "projection_dim": WIDTH,
                "image_token_embed_dim": WIDTH,
            },
            image_token_id=len(text.VOCABULARY) + list(IMAGE_WORDS).index("image_token"),
            tie_word_embeddings=False,
        )
    )
    generation: Any = model.generation_config
    generation.bos_token_id, generation.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    generation.pad_token_id, generation.guidance_scale = tokenizer.pad_token_id, 5
    generation.boi_token_id = tokenizer.convert_tokens_to_ids(IMAGE_WORDS["boi_token"])
    model.save_pretrained(folder)
    side = {"height": world.IMAGE_SIDE, "width": world.IMAGE_SIDE}
    JanusProcessor(
        image_processor=JanusImageProcessorPil(image_mean=[0.5] * 3, image_std=[0.5] * 3, size=side),
        tokenizer=tokenizer,
        chat_template="{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}",
        num_image_tokens=CODES_PER_SIDE**2,
    ).save_pretrained(folder)


@torch.no_grad()
def share_restored(vq: JanusVQVAE, rng: np.random.Generator) -> float:
    """Share of right drawings of all prompts that are right when they are made of codes again."""
    prompts = world.all_prompts()
    layouts = [world.sample_layout(parse_prompt(prompt), rng, 0.0) for prompt in prompts]
    codes_N = codes_of(vq, signed(draw(layouts, rng, 1)))[1]
    restored = vq.decode(codes_N.view(len(prompts), -1))  # ty: ignore[invalid-argument-type] - any tensor of integers
    return score_shapes((restored / 2 + 0.5).clamp(0, 1), prompts)[0].float().mean().item()


@torch.no_grad()
def codes_of_layouts(pipeline: JanusPipeline, layouts: list[world.Layout], rng: np.random.Generator) -> Tensor:
    """int64 [S, J, L], the codes of DRAWINGS_PER_LAYOUT drawings of each layout."""
    vq = pipeline.bundle.model.model.vqmodel
    parts = [codes_of(vq, signed(part))[1] for part in draw(layouts, rng, DRAWINGS_PER_LAYOUT).split(256)]
    return torch.cat(parts).view(len(layouts), DRAWINGS_PER_LAYOUT, -1)


def learn_to_draw(
    pipeline: JanusPipeline, codes_SJL: Tensor, rng: np.random.Generator, *, num_steps: int, batch_size: int = 96
) -> list[float]:
    """Cross entropy of the codes of captioned drawings, a few of them after an empty prompt; the loss of each step."""
    prompts = world.all_prompts()
    specs = [parse_prompt(prompt) for prompt in prompts]
    index = {layout: number for number, layout in enumerate(world.all_layouts())}
    layouts_PN = torch.tensor(
        [
            [
                index[world.sample_layout(spec, rng, world.NEAR_MISS_FRACTION[spec.category])]
                for _ in range(CAPTIONED_LAYOUTS)
            ]
            for spec in specs
        ]
    )
    sizes = {category: sum(each.category == category for each in specs) for category in CATEGORY_SHARES}
    weights_P = torch.tensor([CATEGORY_SHARES[each.category] / sizes[each.category] for each in specs])
    conditions = pipeline.adapter.with_empty(pipeline.encode({"text": Texts(texts=prompts)}, PARAMS))
    read = conditions["prompt"]
    assert isinstance(read, PromptCondition)  # noqa: S101 - as encoded

    def batch_loss() -> Tensor:
        prompt_B = torch.multinomial(weights_P, batch_size, replacement=True)
        layout_B = layouts_PN[prompt_B, torch.randint(layouts_PN.shape[1], (batch_size,))]
        codes_BL = codes_SJL[layout_B, torch.randint(codes_SJL.shape[1], (batch_size,))]
        is_empty = torch.rand(batch_size) < NULL_PROMPT_FRACTION
        chosen = read.select((prompt_B + is_empty * len(prompts)).tolist())
        segment = TextSegment.pack(tokens=list(codes_BL))
        return -pipeline.replay({"prompt": chosen}, segment, PARAMS).logp_N.mean()

    return fit(
        pipeline.bundle.model,
        batch_loss,
        num_steps=num_steps,
        muon_rate=0.02,
        adam_rate=1.5e-3,
        is_hidden=lambda name: ".layers." in name,
    )


if __name__ == "__main__":
    main()
