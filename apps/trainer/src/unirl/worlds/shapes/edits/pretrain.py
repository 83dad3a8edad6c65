"""Make the base checkpoint of the edits world: `python -m unirl.worlds.shapes.edits.pretrain --out DIR [--seed 0]`.

Four stages, each with a fixed number of steps: vision-language encoder, autoencoder, a bank of encoded tasks,
transformer. The result is a QwenImageEditPipeline folder. docs/worlds/edits.md has the time and the figures.

Shape letters: B samples, S sources, N tasks, C h w latent, T text tokens, D text width.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import diffusers
import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from unirl.models.diffusers_pipeline.normalisation import channel_moments
from unirl.models.patches import packed_2x2, unpacked_2x2
from unirl.models.qwen_image.one_frame import convolve_images_in_2d
from unirl.pretraining import autoencoding
from unirl.pretraining.autoencoding import signed
from unirl.pretraining.command_line import make_checkpoint
from unirl.pretraining.flow_matching import train_flow
from unirl.pretraining.saving import load_in_fp32, rounded
from unirl.pretraining.vision_language import make_image_processor
from unirl.reward.worlds.edits_grammar import CATEGORIES, prompt_of
from unirl.worlds.shapes.edits import text, world
from unirl.worlds.shapes.edits.evaluate import evaluate
from unirl.worlds.shapes.world import IMAGE_SIDE

logger = logging.getLogger(__name__)

SHIFT = 3.0
"""Shift of the noise schedule; the sampler uses the same."""
LATENT_CHANNELS = 8
WIDTH = 128
NUM_HEADS = 4
NUM_SOURCES = 4000
TASKS_PER_SOURCE = 4
CATEGORY_SHARES = {"color": 0.25, "shape": 0.25, "remove": 0.2, "move": 0.3}
"""Shares of the pretraining samples."""


@dataclass(frozen=True)
class Budget:
    """Optimiser steps of each stage."""

    encoder: int = 350
    autoencoder: int = 2500
    transformer: int = 5000


@dataclass(frozen=True)
class TaskBank:
    """Encoded sources and results, and what the transformer reads of the instructions."""

    source_SChw: Tensor
    """The mode, as the pipeline encodes an image that is given."""
    mean_NChw: Tensor
    """Latent mean of the result, which in some tasks is a near miss."""
    std_NChw: Tensor
    source_N: Tensor
    """Number of the source of each task."""
    text_NTD: Tensor


def main() -> None:
    """Read the command line and make the checkpoint."""
    make_checkpoint(pretrain, Budget, __doc__)


def pretrain(out: Path, *, seed: int, budget: Budget, snapshot_every: int = 0) -> None:
    """Run all stages and write the checkpoint to `out`. Seeds the global generator of torch."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    encoder = text.make_encoder()
    train_encoder(encoder, rng, num_steps=budget.encoder)
    vae = make_autoencoder()
    train_autoencoder(vae, rng, num_steps=budget.autoencoder)
    encoder, vae = rounded(encoder), rounded(vae)
    bank = fill_bank(encoder, vae, rng)
    transformer = make_transformer()

    def snapshot(averaged: QwenImageTransformer2DModel) -> None:
        save(out, averaged, vae, encoder)
        logger.info("held-out: %s", evaluate(out, num_samples=256))

    train_transformer(transformer, bank, num_steps=budget.transformer, snapshot=snapshot, every=snapshot_every)


def make_autoencoder() -> AutoencoderKLQwenImage:
    """Images [3, 1, 32, 32] to latents [8, 1, 4, 4], Qwen-Image's compression of 8; 0.66 M parameters."""
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )


def make_transformer() -> QwenImageTransformer2DModel:
    """The Qwen-Image transformer with four blocks of width 128; 2.4 M parameters."""
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=4,
        attention_head_dim=WIDTH // NUM_HEADS,
        num_attention_heads=NUM_HEADS,
        joint_attention_dim=text.WIDTH,
        axes_dims_rope=(8, 12, 12),
    )


def train_encoder(encoder: Qwen2_5_VLForConditionalGeneration, rng: np.random.Generator, *, num_steps: int) -> None:
    tasks = [world.draw_task(CATEGORIES[i % len(CATEGORIES)], rng, heldout=False) for i in range(4000)]
    pictures = np.stack([world.render(scene) for scene, _ in tasks])
    ids, patches = text.texts_and_patches([prompt_of(edit) for _, edit in tasks], pictures)
    text.pretrain_encoder(tasks, patches, ids, encoder, num_steps=num_steps)


def train_autoencoder(vae: AutoencoderKLQwenImage, rng: np.random.Generator, *, num_steps: int) -> None:
    """Train on drawings of random scenes, then set mean and deviation of the latents by channel."""
    convolve_images_in_2d(vae)
    drawings = torch.from_numpy(np.stack([world.render(world.draw_scene(rng, heldout=False)) for _ in range(6000)]))
    autoencoding.train_autoencoder(vae, drawings, _as_vae_input, num_steps=num_steps, batch_size=16)
    with torch.no_grad():
        latents = vae.encode(_as_vae_input(drawings[:1024])).latent_dist.sample()
    mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


@torch.no_grad()
def fill_bank(
    encoder: Qwen2_5_VLForConditionalGeneration, vae: AutoencoderKLQwenImage, rng: np.random.Generator
) -> TaskBank:
    """Draw and encode sources, and of each some tasks with their results."""
    shares = [CATEGORY_SHARES[category] for category in CATEGORIES]
    sources, prompts, results, source_N = [], [], [], []
    for number in range(NUM_SOURCES):
        scene = world.draw_scene(rng, heldout=False)
        sources.append(world.render(scene))
        options = world.possible_edits(scene)
        for index in rng.choice(len(CATEGORIES), size=TASKS_PER_SOURCE, p=shares):
            edits = options[CATEGORIES[index]]
            edit = edits[rng.integers(len(edits))]
            is_wrong = rng.random() < world.NEAR_MISS_FRACTION[edit.category]
            result = world.near_miss(scene, edit, rng) if is_wrong else world.applied(scene, edit)
            assert result is not None  # noqa: S101 - the edit is possible
            results.append(world.render(result))
            prompts.append(prompt_of(edit))
            source_N.append(number)
    source_mean, _ = _encoded(vae, sources)
    mean, std = _encoded(vae, results)
    texts = []
    for start in range(0, len(prompts), 200):
        part = slice(start, start + 200)
        ids, patches = text.texts_and_patches(prompts[part], np.stack([sources[n] for n in source_N[part]]))
        texts.append(text.hidden_states(encoder, ids, patches))
    logger.info("bank of %d tasks, posterior std %.3f", len(prompts), std.mean().item())
    return TaskBank(source_mean, mean, std, torch.tensor(source_N), torch.cat(texts))


def train_transformer(
    transformer: QwenImageTransformer2DModel,
    bank: TaskBank,
    *,
    num_steps: int,
    snapshot: Callable[[QwenImageTransformer2DModel], None],
    every: int,
) -> None:
    """Flow matching on the tasks; see `train_flow`."""
    # Nothing reads the text after the last block, so these get no gradient.
    last = f"transformer_blocks.{len(transformer.transformer_blocks) - 1}."
    ends = ("attn.to_add_out.weight", "txt_mlp.net.0.proj.weight", "txt_mlp.net.2.weight")
    unread = {last + end for end in ends}

    def draw(num: int) -> tuple[Tensor, Tensor]:
        task_B = torch.randint(len(bank.source_N), (num,))
        clean = bank.mean_NChw[task_B]
        return clean + bank.std_NChw[task_B] * torch.randn_like(clean), task_B

    def predict_velocity(noisy: Tensor, sigma_B: Tensor, task_B: Tensor) -> Tensor:
        tokens = packed_2x2(noisy)
        height, width = noisy.shape[-2:]
        grid = (1, height // 2, width // 2)
        out = transformer(
            hidden_states=torch.cat([tokens, packed_2x2(bank.source_SChw[bank.source_N[task_B]])], dim=1),
            timestep=sigma_B,
            encoder_hidden_states=bank.text_NTD[task_B],
            img_shapes=[[grid, grid]] * len(noisy),
            return_dict=False,
        )[0]
        return unpacked_2x2(out[:, : tokens.shape[1]], height, width)

    train_flow(
        transformer,
        draw,
        predict_velocity,
        num_steps=num_steps,
        shift=SHIFT,
        is_hidden=lambda name: (".attn." in name or "_mlp." in name) and name not in unread,
        snapshot=snapshot,
        every=every,
    )


def save(
    out: Path,
    transformer: QwenImageTransformer2DModel,
    vae: AutoencoderKLQwenImage,
    encoder: Qwen2_5_VLForConditionalGeneration,
) -> None:
    """Write the pipeline folder with all weights in fp16.

    Part by part, because the processor of the pipeline cannot be built without torchvision, whose videos it never sees.
    """
    for name, module in (("transformer", transformer), ("vae", vae), ("text_encoder", encoder)):
        copy.deepcopy(module).half().save_pretrained(out / name, safe_serialization=True)
    load_in_fp32(out / "text_encoder" / "config.json")
    FlowMatchEulerDiscreteScheduler(shift=SHIFT).save_pretrained(out / "scheduler")
    tokenizer = text.make_tokenizer()
    tokenizer.save_pretrained(out / "tokenizer")
    tokenizer.save_pretrained(out / "processor")
    make_image_processor(IMAGE_SIDE).save_pretrained(out / "processor")
    index = {
        "_class_name": "QwenImageEditPipeline",
        "_diffusers_version": diffusers.__version__,
        "processor": ["transformers", "Qwen2VLProcessor"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage"],
    }
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _encoded(vae: AutoencoderKLQwenImage, pictures: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the latents [B, C, h, w], normalised by the configuration."""
    means, stds = [], []
    for start in range(0, len(pictures), 128):
        batch = torch.from_numpy(np.stack(pictures[start : start + 128]))
        posterior = vae.encode(_as_vae_input(batch)).latent_dist
        mean, std = channel_moments(posterior.mean, vae.config)
        means.append(((posterior.mean - mean) / std)[:, :, 0])
        stds.append((posterior.std / std)[:, :, 0])
    return torch.cat(means), torch.cat(stds)


def _as_vae_input(pictures_BCHW: Tensor) -> Tensor:
    return signed(pictures_BCHW)[:, :, None]


if __name__ == "__main__":
    main()
