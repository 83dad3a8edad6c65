"""pi0 against the library's own forward and sampling loop, on random weights.

Float32 on a CPU: the library's full forward and the one over kept keys and values sum in the same order, so velocities
agree to 1e-5 of numbers about 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from unirl.models.action.pi0.bundle import PI0Bundle
from unirl.models.action.pi0.images import resized
from unirl.models.action.pi0.pipeline import PI0ActionPipeline
from unirl.models.action.robot import Robot
from unirl.models.tiny import pi0 as tiny
from unirl.types.actions import ActionSegment, Observations
from unirl.types.errors import CheckpointError, ConfigError
from unirl.types.sampling import ActionSamplingParams

N, H, D = 3, 3, 2
NUM_MOVES = torch.tensor([3, 1, 2])
TASKS = ["push", "lift it", "go"]
FLOW = ActionSamplingParams(eta=0, num_inference_steps=4)
SDE = ActionSamplingParams(eta=0.5, num_inference_steps=4)

ROBOT = Robot(
    image_shape=(3, 24, 24),
    action_size=2,
    chunk=3,
    action_offset=[0.1, -0.2],
    action_scale=[0.5, 0.25],
    state_size=5,
    state_offset=[0.0, 0.1, 0.2, 0.3, 0.4],
    state_scale=[1.0, 2.0, 0.5, 1.0, 1.0],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("pi0"))


@pytest.fixture(scope="module")
def pipeline(folder) -> PI0ActionPipeline:
    return made(folder)


def made(folder: Path, **options: Any) -> PI0ActionPipeline:
    return PI0ActionPipeline(PI0Bundle(str(folder), ROBOT, max_text_tokens=12, **options))


def seen(pipeline: PI0ActionPipeline) -> Observations:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (N, 3, 24, 24), generator=generator, dtype=torch.uint8)
    return Observations(images, torch.randn(N, 5, generator=generator), pipeline.encode_prompts(TASKS))


def of_the_library(pipeline: PI0ActionPipeline) -> dict[str, Any]:
    """What transformers' own forward takes for the same observations: placeholders, masks, padded numbers."""
    observed, robot = seen(pipeline), ROBOT
    assert observed.images is not None and observed.states is not None and observed.prompts is not None
    is_text = observed.prompts >= 0
    states = (observed.states - torch.tensor(robot.state_offset)) / torch.tensor(robot.state_scale)
    num_patches = (32 // 8) ** 2
    placeholders = torch.full((N, num_patches), tiny.IMAGE_TOKEN)
    return {
        "state": torch.cat([states, torch.zeros(N, 3)], dim=1),
        "input_ids": torch.cat([placeholders, torch.where(is_text, observed.prompts, 0)], dim=1),
        "attention_mask": torch.cat([torch.ones(N, num_patches, dtype=torch.long), is_text.long()], dim=1),
        "pixel_values": resized(observed.images, 32)[:, None],
        "pixel_attention_mask": torch.ones(N, 1, dtype=torch.bool),
    }


def segment_of(pipeline: PI0ActionPipeline, params: ActionSamplingParams = SDE) -> Any:  # Any: its fields are there
    with pipeline.evaluating():
        drawn = pipeline.draw(seen(pipeline), params, noise_keys=["a", "b", "c"])
    assert drawn.densities is not None and drawn.chains is not None
    observed: Any = seen(pipeline)
    each = list(torch.arange(N).split(1))
    return ActionSegment.pack(
        images=[observed.images[row] for row in each],
        states=[observed.states[row] for row in each],
        chains=[drawn.chains[row] for row in each],
        log_probs=[pipeline.log_probs(drawn.densities, NUM_MOVES)[row] for row in each],
        rewards=[torch.zeros(1)] * N,
        num_moves=[NUM_MOVES[row] for row in each],
        prompts=observed.prompts,
        params=params,
        **pipeline.segment_fields(params),
    )


def test_the_velocity_is_that_of_the_library(pipeline, folder):
    library = transformers.PI0ForConditionalGeneration.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(1)
    x, sigma = torch.randn(N, 4, 6, generator=generator), torch.tensor([1.0, 0.5, 0.25])
    with torch.no_grad():
        expected = library(noise=x, timestep=sigma, **of_the_library(pipeline)).logits
        _, prefix = pipeline._perceive(seen(pipeline))
        found = pipeline._velocity(prefix, None, x, sigma)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert expected.abs().mean() > 0.1
        # Rows of several steps over one prefix, in any order.
        row_R = torch.tensor([2, 0, 2, 1])
        rows = pipeline._velocity(prefix, row_R, x[row_R], sigma[row_R])
    torch.testing.assert_close(rows, expected[row_R], atol=1e-5, rtol=1e-5)


def test_a_chunk_is_that_of_the_library_s_own_sampling_loop(pipeline, folder):
    library = transformers.PI0ForConditionalGeneration.from_pretrained(folder).eval()
    with pipeline.evaluating():
        drawn = pipeline.draw(seen(pipeline), FLOW, noise_keys=["a", "b", "c"])
    assert drawn.chains is not None and drawn.densities is None
    expected = library.sample_actions(noise=drawn.chains[:, 0], num_steps=4, **of_the_library(pipeline))
    torch.testing.assert_close(drawn.chains[:, -1], expected, atol=1e-5, rtol=1e-5)
    moves = torch.tensor([0.1, -0.2]) + torch.tensor([0.5, 0.25]) * expected[:, :H, :D]
    torch.testing.assert_close(drawn.moves, moves.clamp(-1, 1), atol=1e-5, rtol=1e-5)


def test_a_replay_at_unchanged_weights_gives_the_log_probs_of_the_rollout(pipeline):
    segment = segment_of(pipeline)
    stats = pipeline.replay(segment, torch.arange(N), SDE)
    torch.testing.assert_close(stats.logp_NL, segment.log_probs, atol=1e-4, rtol=1e-5)
    some = pipeline.replay(segment, torch.tensor([2, 0]), SDE)
    torch.testing.assert_close(some.logp_NL, segment.log_probs[[2, 0]], atol=1e-4, rtol=1e-5)
    assert stats.features_NW.shape == (N, 16 + 8)


def test_padding_and_moves_that_were_not_executed_have_no_part_in_the_log_prob(pipeline):
    segment = segment_of(pipeline)
    chains = segment.chains.clone()
    chains[:, -1, :, D:] += 1  # numbers that the robot does not have
    chains[:, -1, H:] += 1  # moves that are drawn and never executed
    chains[1, -1, 1:] += 1  # moves after the end of an episode
    other = segment.replace(chains=chains)
    before, after = (pipeline.replay(each, torch.arange(N), SDE).logp_NL for each in (segment, other))
    assert torch.equal(before, after)
    chains[0, -1, 2, 1] += 0.1
    assert not torch.equal(pipeline.replay(segment.replace(chains=chains), torch.arange(N), SDE).logp_NL, before)


@pytest.mark.parametrize("trains_vlm", [False, True])
def test_gradients_reach_all_that_trains_and_nothing_else(folder, trains_vlm):
    pipeline = made(folder, trains_vlm=trains_vlm)
    pipeline.replay(segment_of(pipeline), torch.arange(N), SDE).logp_NL.sum().backward()
    for name, parameter in pipeline._network.named_parameters():
        moved = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert moved == parameter.requires_grad, name
    names = {name.split(".")[2] for name, each in pipeline._network.named_parameters() if each.requires_grad}
    assert ("vlm" in names) == trains_vlm


def test_an_export_has_the_released_names_and_loads_in_the_library(pipeline, folder, tmp_path):
    state = {name: value.clone() for name, value in pipeline._network.state_dict().items()}
    state["policy.action_out_proj.bias"] += 1
    pipeline._bundle.export_merged(str(tmp_path / "out"), {"policy": state})
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {
        "state_proj.weight",
        "action_in_proj.weight",
        "action_time_mlp_in.weight",
        "action_time_mlp_out.weight",
        "action_out_proj.bias",
        "paligemma_with_expert.gemma_expert.model.layers.0.self_attn.q_proj.weight",
        "paligemma_with_expert.paligemma.model.language_model.layers.1.mlp.up_proj.weight",
        "paligemma_with_expert.paligemma.model.multi_modal_projector.linear.weight",
        "paligemma_with_expert.paligemma.model.vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
        "paligemma_with_expert.paligemma.lm_head.weight",
    } <= names
    loaded = transformers.PI0ForConditionalGeneration.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(value, loaded[name.removeprefix("policy.")]) for name, value in state.items())
    again = made(tmp_path / "out")._network.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in state.items())
    with pytest.raises(ConfigError, match="is the checkpoint that was loaded"):
        pipeline._bundle.export_merged(str(folder), {"policy": state})


def test_a_folder_as_lerobot_publishes_it_loads_and_keeps_its_configuration(tmp_path, monkeypatch):
    """lerobot's config.json names no sizes of layers: those of the one released variant, here of the tiny one."""
    folder, small = tiny.save(tmp_path / "hub", as_lerobot=True), tiny.config()
    made_of: dict[str, Any] = {}

    def sizes(**given: Any) -> Any:
        made_of.update(given)
        return small

    # The module that the bundle has, which is another one where a test has imported transformers anew.
    monkeypatch.setattr(PI0Bundle._configuration.__globals__["transformers"], "PI0Config", sizes)
    pipeline = made(folder, tokenizer=str(folder / "words"))
    assert made_of == {"chunk_size": 4, "max_state_dim": 8, "max_action_dim": 6}
    assert pipeline.draw(seen(pipeline), FLOW, noise_keys=["a", "b", "c"]).moves.shape == (N, H, D)
    out = tmp_path / "out"
    pipeline._bundle.export_merged(str(out), {"policy": pipeline._network.state_dict()})
    assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_images_are_resized_at_their_aspect_ratio_in_the_middle_of_black():
    image = torch.full((1, 3, 10, 20), 255, dtype=torch.uint8)
    found = resized(image, 40)
    assert found.shape == (1, 3, 40, 40)
    assert bool((found[:, :, 10:30] == 1).all() and (found[:, :, :10] == -1).all() and (found[:, :, 30:] == -1).all())
    same = torch.randint(256, (1, 3, 8, 8), dtype=torch.uint8)
    assert torch.equal(resized(same, 8), same.float() / 127.5 - 1)


def test_what_does_not_fit_is_refused(pipeline, folder, tmp_path):
    with pytest.raises(ConfigError, match=r"has 16 tokens, bundle.max_text_tokens is 12"):
        pipeline.encode_prompts(["a longer task."])
    with pytest.raises(ConfigError, match=r"robot.chunk = 5 is more than the 4"):
        PI0Bundle(
            str(folder), Robot(image_shape=(3, 8, 8), action_size=1, chunk=5, action_offset=[0], action_scale=[1])
        )
    with pytest.raises(ConfigError, match=r"action_offset has 1 numbers, action_size is 2"):
        Robot(image_shape=(3, 8, 8), action_size=2, chunk=1, action_offset=[0], action_scale=[1, 1])
    with pytest.raises(ConfigError, match=r"action_scale = \[0.0\] must not be 0"):
        Robot(image_shape=(3, 8, 8), action_size=1, chunk=1, action_offset=[0], action_scale=[0])
    (tmp_path / "config.json").write_text('{"model_type": "gemma"}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="holds no pi0"):
        PI0Bundle(str(tmp_path), ROBOT)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        PI0Bundle(str(tmp_path), ROBOT)
