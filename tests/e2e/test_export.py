"""What is exported is what was evaluated: stock diffusers pipelines reproduce the trainer's own images."""

import functools
import threading

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from unirl.app.environment import packaged_path
from unirl.config.runs import run_of
from unirl.sde.noise import initial_noise
from unirl.tracking.gallery import sheet
from unirl.trainer.build.assembly import make_evaluator
from unirl.trainer.commands import evaluate_recipe, export_recipe, run_recipe
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.held_out import EVAL_ROLLOUT_ID
from unirl.trainer.request import build_request

pytestmark = pytest.mark.slow
LORA = [
    "+backend.lora._target_=unirl.train.configs.LoraConfig",
    "+backend.lora.rank=4",
    "+backend.lora.alpha=8",
    "backend.optimizer.learning_rate=0.01",
    "num_rollouts=1",
    "eval.before=false",
]


def stock_images(pipeline, recipe, labels):
    """The images that a stock pipeline draws from the evaluation's prompts, noise and noise levels."""
    evaluator = make_evaluator(run_of(recipe))
    assert isinstance(evaluator, Evaluator)
    params = evaluator.params
    steps = params.num_inference_steps
    req = build_request(
        evaluator.rows,
        params,
        sigmas=torch.zeros(steps + 1),
        latent_shape=(4, 8, 8),
        rollout_id=EVAL_ROLLOUT_ID,
    )
    noise = initial_noise(req.init_noise_group_ids, params.seed, (4, 8, 8))[: len(labels)]
    assert [row.prompt for row in evaluator.rows][: len(labels)] == labels
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompt=labels,
        latents=noise,
        num_inference_steps=steps,
        sigmas=np.linspace(1.0, 1.0 / steps, steps).tolist(),
        guidance_scale=1.0,
        max_sequence_length=params.max_sequence_length,
        height=params.height,
        width=params.width,
        output_type="pt",
    ).images


def trained(recipe, run_dir):
    run_recipe(run_of(recipe), run_dir, [], threading.Event())
    result = evaluate_recipe(run_of(recipe), run_dir, checkpoint="newest")
    return sheet(result.records), [record.prompt for record in result.records]


def test_a_stock_pipeline_with_the_exported_lora_reproduces_the_evaluation(recipe, tmp_path):
    small = recipe("worlds/shapes/nft", *LORA)
    images, prompts = trained(small, tmp_path)
    export_recipe(run_of(small), tmp_path, tmp_path / "lora", merged=False)
    load = functools.partial(StableDiffusion3Pipeline.from_pretrained, packaged_path("shapes", "checkpoint"))
    plain = load(torch_dtype=torch.float32)
    before = stock_images(plain, small, prompts)
    plain.load_lora_weights(str(tmp_path / "lora"))
    after = stock_images(plain, small, prompts)
    assert "A LoRA (rank 4, alpha 8) of `shapes/checkpoint`" in (tmp_path / "lora" / "README.md").read_text()
    assert float((before - images).abs().max()) > 0.05, "training changed nothing"
    torch.testing.assert_close(after, images, rtol=0, atol=0.5 / 255 + 1e-4)  # recorded in bytes


def test_a_stock_pipeline_loads_the_merged_export(recipe, tmp_path):
    small = recipe("worlds/shapes/nft", "num_rollouts=1", "eval.before=false", "backend.optimizer.learning_rate=0.001")
    images, prompts = trained(small, tmp_path)
    export_recipe(run_of(small), tmp_path, tmp_path / "merged", merged=True)
    pipeline = StableDiffusion3Pipeline.from_pretrained(tmp_path / "merged", torch_dtype=torch.float32)
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "library_name: diffusers" in card and "| shapes/strict | " in card
    torch.testing.assert_close(stock_images(pipeline, small, prompts), images, rtol=0, atol=0.5 / 255 + 1e-4)
