"""Make the small BAGEL that thinks, then draws: `python -m unirl.worlds.shapes.thoughts.pretrain --out DIR [--seed 0]`.

The autoencoder is the shipped one of SD3 under BAGEL's names. The expert of words learns to plan, then the expert of
latents to draw plans, each with a fixed number of steps. The result is a folder in BAGEL's published layout.
docs/worlds/thoughts.md has the time and the figures.

Shape letters: B samples, N tokens of all rows, L layouts, J drawings of one, P prompts, M choices, D numbers of a
latent token.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from unirl.models.bagel.configuration import (
    LANGUAGE_CONFIG,
    MODEL_FILE,
    VAE_FILE,
    VISION_CONFIG,
    BagelConfig,
    LanguageConfig,
    VAEConfig,
    VisionConfig,
)
from unirl.models.bagel.language import MarkIds
from unirl.models.bagel.layout import Kind, Layout, Segment
from unirl.models.bagel.model import Bagel
from unirl.models.bagel.transformer import GENERATION
from unirl.models.bagel.vae import AutoEncoder
from unirl.models.packed.patches import patches_of
from unirl.models.packed.rows import KeyValues
from unirl.pretraining.autoencoding import signed
from unirl.pretraining.command_line import make_checkpoint
from unirl.pretraining.fit import fit
from unirl.pretraining.flow_matching import train_flow
from unirl.reward.worlds.shapes_grammar import parse_prompt
from unirl.worlds.shapes import world
from unirl.worlds.shapes.pretrain import CATEGORY_SHARES, SHIFT, draw
from unirl.worlds.shapes.thoughts.evaluate import evaluate, load
from unirl.worlds.shapes.thoughts.plans import drawn, plan_of, planned
from unirl.worlds.shapes.thoughts.text import plan_tokenizer

logger = logging.getLogger(__name__)

WIDTH = 128
GRID = (4, 4)
"""Latent tokens of an image."""
DRAWINGS_PER_LAYOUT = 16
CHOICES = 48
"""Plans drawn for each prompt, and images for each plan."""
PICTURES_PER_PLAN = 4
"""In a batch: they share a context."""
SHIPPED_VAE = Path(__file__).parent.parent / "checkpoint" / "vae"


@dataclass(frozen=True)
class Budget:
    """Optimiser steps of each stage."""

    planner: int = 400
    painter: int = 700


def main() -> None:
    """Read the command line and make the checkpoint."""
    make_checkpoint(pretrain, Budget, __doc__)


def pretrain(out: Path, *, seed: int, budget: Budget, snapshot_every: int = 0) -> None:
    """Run both stages and write the checkpoint to `out`. Seeds the global generator of torch."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    prompts, layouts = world.all_prompts(), world.all_layouts()
    plans = [plan_of(layout) for layout in layouts]
    tokenizer = plan_tokenizer([*prompts, *plans])
    config = make_config(len(tokenizer))
    bagel, vae = make_bagel(config), adopt_autoencoder(config.vae)
    marks = MarkIds.of(tokenizer, config.language.vocab_size, out)
    lessons = Lessons.of_world(tokenizer, marks, prompts, layouts, rng)
    train_planner(bagel, lessons, num_steps=budget.planner)
    clean_LJ, std_LJ = encoded(vae, layouts, rng)

    def snapshot(averaged: Bagel) -> None:
        save_checkpoint(out, averaged, vae, tokenizer)
        found = evaluate(load(out), world.split_prompts()[1], num_samples=256, num_steps=10)
        logger.info("held-out: %s", found)

    train_painter(bagel, lessons, clean_LJ, std_LJ, num_steps=budget.painter, snapshot=snapshot, every=snapshot_every)


# Parts ---------------------------------------------------------------------------------------------------------------


def make_config(vocab_size: int) -> BagelConfig:
    """Three layers of width 128, every block twice; a vision tower of one layer, which stays random: nothing is shown
    to this model."""
    return BagelConfig(
        language=LanguageConfig(
            vocab_size=vocab_size,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-6,
            # Rows are below a hundred positions; at the usual base most frequencies would not tell them apart.
            rope_theta=1000.0,
            max_position_embeddings=256,
        ),
        vision=VisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            patch_size=14,
            num_channels=3,
            layer_norm_eps=1e-6,
            patches_per_side=16,
        ),
        vae=VAEConfig(channels=16, multipliers=(1, 1, 2), blocks=1, latent_channels=4, groups=4),
        max_latent_size=GRID[0],
    )


def make_bagel(config: BagelConfig) -> Bagel:
    """A model with random weights and tables of sines and cosines."""
    bagel = Bagel(config)
    for table in (bagel.latent_pos_embed, bagel.vit_pos_embed):
        table.pos_embed.data = sine_table(table.side, WIDTH)
    return bagel


def sine_table(side: int, width: int) -> Tensor:
    """[side * side, width] of places row by row: sines and cosines of the column, then those of the row."""
    frequencies = 1 / 10000 ** (torch.arange(width // 4) / (width / 4))
    angles = torch.arange(side)[:, None] * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.cat([waves.repeat(side, 1), waves.repeat_interleave(side, dim=0)], dim=1)


def adopt_autoencoder(config: VAEConfig) -> AutoEncoder:
    """The shipped autoencoder of SD3 under BAGEL's names, which decodes as before.

    BAGEL's scale and shift of latents are fixed, so the latents themselves are made larger; its attention in the
    middle, which the source has not, adds nothing.
    """
    source = AutoencoderKL.from_pretrained(SHIPPED_VAE)
    vae = AutoEncoder(config)
    state = {_renamed(name): tensor for name, tensor in source.state_dict().items()}
    growth = source.config["scaling_factor"] / config.scale
    state["decoder.conv_in.weight"] = state["decoder.conv_in.weight"] / growth
    mean, spread = slice(None, config.latent_channels), slice(config.latent_channels, None)
    for name in ("encoder.conv_out.weight", "encoder.conv_out.bias"):
        state[name][mean] *= growth
    state["encoder.conv_out.bias"][spread] += 2 * math.log(growth)
    attention = {name: torch.zeros_like(tensor) for name, tensor in vae.state_dict().items() if "attn_1" in name}
    vae.load_state_dict({**state, **attention})
    return vae.requires_grad_(False).eval()


def _renamed(name: str) -> str:
    """BAGEL's name of a weight of diffusers' autoencoder of three levels."""
    for theirs, ours in (
        ("mid_block.resnets.0", "mid.block_1"),
        ("mid_block.resnets.1", "mid.block_2"),
        ("down_blocks.", "down."),
        # The decoder counts its levels from the largest images.
        ("up_blocks.0", "up.2"),
        ("up_blocks.1", "up.1"),
        ("up_blocks.2", "up.0"),
        ("downsamplers.0", "downsample"),
        ("upsamplers.0", "upsample"),
        ("resnets.", "block."),
        ("conv_shortcut", "nin_shortcut"),
        ("conv_norm_out", "norm_out"),
    ):
        name = name.replace(theirs, ours)
    return name


@torch.no_grad()
def encoded(vae: AutoEncoder, layouts: list[world.Layout], rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the latent tokens [L, J, tokens, D] of J drawings of each layout."""
    config, found = vae.config, []
    for part in draw(layouts, rng, DRAWINGS_PER_LAYOUT).split(256):
        mean, log_variance = vae.encoder(signed(part)).chunk(2, dim=1)
        latents = config.scale * (mean - config.shift), config.scale * (log_variance / 2).exp()
        found.append([torch.stack([patches_of(each, 2) for each in kind]) for kind in latents])
    means, stds = (torch.cat(parts).unflatten(0, (len(layouts), -1)) for parts in zip(*found, strict=True))
    logger.info("%d drawings, latents %.3f +- %.3f", len(layouts) * DRAWINGS_PER_LAYOUT, means.mean(), means.std())
    return means, stds


# Lessons -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lessons:
    """Prompts with plans, and plans with what is drawn of them."""

    marks: MarkIds
    prompts: list[list[int]]
    """The turn of each prompt."""
    plans: list[list[int]]
    """The turn of each layout's plan."""
    weights_P: Tensor
    plans_PM: Tensor
    """Layouts that are planned for each prompt, wrong ones included."""
    pictures_LM: Tensor
    """Layouts that are drawn of each plan, wrong ones included."""

    @classmethod
    def of_world(
        cls,
        tokenizer: PreTrainedTokenizerFast,
        marks: MarkIds,
        prompts: list[str],
        layouts: list[world.Layout],
        rng: np.random.Generator,
    ) -> Lessons:
        """CHOICES plans of every prompt and CHOICES images of every plan."""
        index = {layout: number for number, layout in enumerate(layouts)}
        specs = [parse_prompt(prompt) for prompt in prompts]
        sizes = {category: sum(spec.category == category for spec in specs) for category in CATEGORY_SHARES}

        def turn(text: str) -> list[int]:
            return marks.turn(tokenizer(text, add_special_tokens=False)["input_ids"])

        return cls(
            marks=marks,
            prompts=[turn(prompt) for prompt in prompts],
            plans=[turn(plan_of(layout)) for layout in layouts],
            weights_P=torch.tensor([CATEGORY_SHARES[spec.category] / sizes[spec.category] for spec in specs]),
            plans_PM=torch.tensor([[index[planned(spec, rng)] for _ in range(CHOICES)] for spec in specs]),
            pictures_LM=torch.tensor([[index[drawn(layout, rng)] for _ in range(CHOICES)] for layout in layouts]),
        )

    def contexts(self, num: int) -> tuple[list[list[int]], list[int], Tensor]:
        """Words of `num` prompts with their plans, where each plan begins, and the layouts [num] of the plans."""
        prompt_B = torch.multinomial(self.weights_P, num, replacement=True)
        layout_B = self.plans_PM[prompt_B, torch.randint(CHOICES, (num,))]
        asked = [self.prompts[prompt] for prompt in prompt_B.tolist()]
        rows = [a + self.plans[layout] for a, layout in zip(asked, layout_B.tolist(), strict=True)]
        return rows, [len(each) for each in asked], layout_B


def train_planner(bagel: Bagel, lessons: Lessons, *, num_steps: int, batch_size: int = 64) -> None:
    """Teach the expert of words to write plans, each until its end mark."""
    model = bagel.language_model
    for name, parameter in bagel.named_parameters():
        parameter.requires_grad_(name.startswith("language_model.") and GENERATION not in name)

    def batch_loss() -> Tensor:
        rows, begins, _ = lessons.contexts(batch_size)
        # The begin of the plan's turn is given; every later token of it is learnt from the one before.
        starts = np.cumsum([0, *(len(row) for row in rows)])
        places = [
            torch.arange(start + begin, start + len(row) - 1)
            for start, begin, row in zip(starts, begins, rows, strict=False)
        ]
        ids_N, place_n = torch.tensor([token for row in rows for token in row]), torch.cat(places)
        layout = Layout.of([[Segment(Kind.WORDS, len(row))] for row in rows], ids_N.device)
        logits = model(ids_N, None, None, layout, logit_places=place_n).logits
        return nn.functional.cross_entropy(logits[0], ids_N[place_n + 1])

    fit(
        model,
        batch_loss,
        num_steps=num_steps,
        muon_rate=0.02,
        adam_rate=3e-3,
        is_hidden=lambda name: ".layers." in name,
    )


def train_painter(
    bagel: Bagel,
    lessons: Lessons,
    clean_LJ: Tensor,
    std_LJ: Tensor,
    *,
    num_steps: int,
    snapshot: Callable[[Bagel], None],
    every: int,
) -> None:
    """Teach the expert of latents to draw plans by flow matching; the expert of words stays as it is."""
    frozen = ("vit_model.", "connector.", "latent_pos_embed.", "vit_pos_embed.")
    for name, parameter in bagel.named_parameters():
        is_words = name.startswith("language_model.") and GENERATION not in name
        parameter.requires_grad_(not is_words and not name.startswith(frozen))
    contexts: list[KeyValues] = []

    def draw_batch(num: int) -> tuple[Tensor, Tensor]:
        rows, _, layout_B = lessons.contexts(num // PICTURES_PER_PLAN)
        contexts[:] = [_contexts(bagel, rows)]
        context_B = torch.arange(len(rows)).repeat_interleave(PICTURES_PER_PLAN)
        picture_B = lessons.pictures_LM[layout_B[context_B], torch.randint(CHOICES, (num,))]
        drawing_B = torch.randint(DRAWINGS_PER_LAYOUT, (num,))
        clean = clean_LJ[picture_B, drawing_B]
        return clean + std_LJ[picture_B, drawing_B] * torch.randn_like(clean), context_B

    def predict_velocity(noisy_B: Tensor, sigma_B: Tensor, context_B: Tensor) -> Tensor:
        known = contexts[0]
        prefixes = [known.prefixes[row] for row in context_B.tolist()]
        image = [Segment(Kind.LATENTS, GRID[0] * GRID[1] + 2)]
        layout = Layout.of([image] * len(prefixes), noisy_B.device, contexts=prefixes, known=known)
        ids = torch.tensor([lessons.marks.image_start, lessons.marks.image_end]).repeat(len(prefixes))
        tokens = bagel.latent_tokens(noisy_B.flatten(0, 1), sigma_B, [GRID] * len(prefixes))
        out = bagel.language_model(ids, None, tokens, layout, known)
        return bagel.llm2vae(out.images).view_as(noisy_B)

    train_flow(
        bagel,
        draw_batch,
        predict_velocity,
        num_steps=num_steps,
        shift=SHIFT,
        is_hidden=lambda name: ".layers." in name,
        snapshot=snapshot,
        every=every,
    )


@torch.no_grad()
def _contexts(bagel: Bagel, rows: list[list[int]]) -> KeyValues:
    """Keys and values of rows of words."""
    ids = torch.tensor([token for row in rows for token in row])
    layout = Layout.of([[Segment(Kind.WORDS, len(row))] for row in rows], ids.device)
    return layout.extended(None, bagel.language_model(ids, None, None, layout, keeps_keys=True).layers)


def save_checkpoint(out: Path, bagel: Bagel, vae: AutoEncoder, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a folder as published, with weights in fp16."""
    out.mkdir(parents=True, exist_ok=True)
    for module, file in ((bagel, MODEL_FILE), (vae, VAE_FILE)):
        state = {name: tensor.half().contiguous() for name, tensor in module.state_dict().items()}
        save_file(state, out / file, metadata={"format": "pt"})
    language, vision = bagel.config.language, bagel.config.vision
    vision_config = {
        "model_type": "siglip_vision_model",
        **asdict(vision),
        # The published code drops the last one, which the file lacks.
        "num_hidden_layers": vision.num_hidden_layers + 1,
        "image_size": vision.patches_per_side * vision.patch_size,
    }
    whole = {
        "model_type": "bagel",
        "latent_patch_size": bagel.config.latent_patch,
        "max_latent_size": bagel.config.max_latent_size,
        "vae_config": {"groups": vae.config.groups},
    }
    for file, values in (
        (LANGUAGE_CONFIG, {"model_type": "qwen2", **asdict(language)}),
        (VISION_CONFIG, vision_config),
        ("config.json", whole),
    ):
        (out / file).write_text(json.dumps(values, indent=2) + "\n")
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
