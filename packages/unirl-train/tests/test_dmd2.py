"""DMD2: the student's gradient and the fake score's steps by hand, a known optimum, guidance, resuming."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import KEPT, AffineField, FieldPipeline, Setup, TinyField, displace, rollout, sampling, setup
from test_known_optimum import GaussianField
from torch import Tensor
from train_fakes import snapshot

from unirl.algorithms.base import MicroBatch
from unirl.algorithms.dmd2 import DMD2, FAKE, matching_direction, matching_loss
from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.train.configs import LoraConfig
from unirl.types.conditions import NEGATIVE, TextEmbedCondition
from unirl.types.errors import CheckpointError, ConfigError, ContractError
from unirl.types.training import OptimizerConfig

FAKE_LR = 3e-2
PARAMS = sampling(**KEPT)


def student(model: Any = None, **options: Any) -> Setup:
    """A student with its teacher and fake score."""
    given: dict[str, Any] = {
        "fake_optimizer": OptimizerConfig(learning_rate=FAKE_LR),
        "fake_max_grad_norm": 1e9,
        **options,
    }
    given.setdefault("keep_reference", "lora" not in given)
    return setup(DMD2, model=model, **given)


def trained(made: Setup, number: int = 0, **options: Any) -> dict[str, float]:
    """One rollout of the student, trained on."""
    resp = rollout(made.pipeline, options.pop("params", PARAMS), num_prompts=2, rollout_id=number)
    return made.stack.train(with_advantages(resp, torch.zeros(resp.batch_size)), progress=0.0).metrics


def micro_of(made: Setup) -> MicroBatch:
    resp = rollout(made.pipeline, PARAMS, num_prompts=2)
    track = resp.tracks["image"].replace(advantages=torch.zeros(resp.batch_size))
    return MicroBatch(track=track, anchor={}, update=0, progress=0.0)


def test_the_gradient_at_an_image_is_the_normalised_difference_of_the_scores_over_its_size():
    x = torch.tensor([[1.0, 3.0], [0.0, -2.0]], dtype=torch.float64, requires_grad=True)
    x_fake = torch.tensor([[2.0, 1.0], [4.0, 4.0]], dtype=torch.float64)
    x_real = torch.tensor([[0.0, 2.0], [0.0, -2.0]], dtype=torch.float64)
    g = matching_direction(x.detach(), x_fake, x_real)
    # Row 0: distances 1 and 1, mean 1. Row 1: the student makes what the teacher would, mean 0, so 1e-6.
    expected = torch.tensor([[2.0, -1.0], [4e6, 6e6]], dtype=torch.float64)
    torch.testing.assert_close(g, expected, rtol=1e-12, atol=0)
    loss_R = matching_loss(x, g)
    torch.testing.assert_close(loss_R.detach(), 0.25 * expected.square().sum(dim=1), rtol=1e-9, atol=0)
    loss_R.sum().backward()
    torch.testing.assert_close(x.grad, expected / 2, rtol=1e-9, atol=0)


def images_by_hand(made: Setup, micro: MicroBatch, scale: float, shift: float) -> tuple[Tensor, Tensor, Tensor]:
    """Images, and their derivatives by scale and shift, of an affine field: x = x_n - sigma (scale x_n + shift)."""
    sample_R, step_R = made.algorithm.rows(micro)
    before = torch.stack([micro.segment.latents_at(int(n))[b] for b, n in zip(sample_R, step_R, strict=True)])
    sigma = micro.segment.sigmas[step_R].view(-1, 1, 1, 1)
    return before - sigma * (scale * before + shift), -sigma * before, -sigma.expand_as(before)


MATCHINGS: dict[str, dict[str, Any]] = {
    "samples": {},
    "step": {"matching": "trajectory"},
    "above": {"matching": "trajectory", "trajectory_levels": "above"},
}


@pytest.mark.parametrize("matching", list(MATCHINGS))
@pytest.mark.parametrize("rows_per_forward", [None, 4])
@pytest.mark.parametrize("num_timesteps", [1, 3])
def test_the_students_gradient_by_hand(num_timesteps: int, rows_per_forward: int | None, matching: str):
    made = student(
        AffineField(), num_timesteps=num_timesteps, rows_per_forward=rows_per_forward, micro=3, **MATCHINGS[matching]
    )
    displace(made.backend, 0.2)  # the teacher stays where it was
    own = {name.split(".")[1]: float(value) for name, value in made.parameters.items()}
    whole = micro_of(made)
    metrics = trained(made)
    fake = {name.split(".")[1]: float(v) for name, v in made.backend.policies.values(FAKE).items()}
    made.algorithm.num_rollouts -= 1  # the draws of the rollout that was trained on
    x, by_scale, by_shift = images_by_hand(made, whole, own["scale"], own["shift"])
    at = made.algorithm.noised(whole, slice(None), x, "student")
    level = at.level_R.view(-1, 1, 1, 1)
    x_fake = at.x_s - level * (fake["scale"] * at.x_s + fake["shift"])
    x_real = at.x_s - level * (0.7 * at.x_s + 0.1)
    g = (x_fake - x_real) / (x - x_real).abs().mean(dim=(1, 2, 3), keepdim=True)
    [found] = made.backend.gradients
    for name, derivative in (("scale", by_scale), ("shift", by_shift)):
        torch.testing.assert_close(found[f"transformer.{name}"][0], (g * derivative).mean(), rtol=2e-4, atol=1e-6)
    assert metrics["policy/loss"] == pytest.approx(float(0.5 * g.square().mean()), rel=1e-4)
    assert metrics["dmd2/teacher_distance"] == pytest.approx(float((x - x_real).abs().mean()), rel=1e-4)


@pytest.mark.parametrize("levels", ["step", "above"])
def test_next_latents_are_noised_further_from_where_the_students_step_ends(levels: str):
    """By DDIM's step of the student, in float64, and the marginal noise that a latent of this level has."""
    made = student(AffineField(), num_timesteps=3, matching="trajectory", trajectory_levels=levels, min_level=0.1)
    displace(made.backend, 0.2)
    own = {name.split(".")[1]: float(value) for name, value in made.parameters.items()}
    micro = micro_of(made)
    sample_R, step_R = made.algorithm.rows(micro)
    x = images_by_hand(made, micro, own["scale"], own["shift"])[0]
    at = made.algorithm.noised(micro, slice(None), x, "student")
    before = torch.stack([micro.segment.latents_at(int(n))[b] for b, n in zip(sample_R, step_R, strict=True)]).double()
    s_n, s_m = (micro.segment.sigmas.double()[step_R + k].view(-1, 1, 1, 1) for k in (0, 1))
    after = before - (s_n - s_m) * (own["scale"] * before + own["shift"])
    s = at.level_R.double().view(-1, 1, 1, 1)
    assert ((s > s_m) & (s >= 0.1) & (s <= (s_n if levels == "step" else 0.98))).all()
    kept = (1 - s) / (1 - s_m)
    noise = (at.x_s - kept * after) / (s.square() - (kept * s_m).square()).sqrt()
    plain = student(AffineField(), num_timesteps=3, min_level=0.1).algorithm.noised(micro, slice(None), x, "student")
    drawn = plain.target + x  # the same noise, of the other matching
    torch.testing.assert_close(noise.float(), drawn, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(at.target, ((at.x_s - x) / s).float(), rtol=1e-5, atol=1e-5)


def test_the_fake_score_takes_two_steps_of_flow_matching_before_each_step_of_the_student():
    made = student(AffineField(), micro=4)
    displace(made.backend, 0.2)
    own = {name.split(".")[1]: float(value) for name, value in made.parameters.items()}
    whole = micro_of(made)
    x = images_by_hand(made, whole, own["scale"], own["shift"])[0]
    field = AffineField()  # the fake score starts as the student did
    optimizer = torch.optim.AdamW(field.parameters(), lr=FAKE_LR, weight_decay=0.0)
    losses = []
    for number in range(2):
        at = made.algorithm.noised(whole, slice(None), x, f"fake{number}")
        level = at.level_R.view(-1, 1, 1, 1)
        noise = (at.x_s - (1 - level) * x) / level
        loss = (field.scale * at.x_s + field.shift - (noise - x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    metrics = trained(made)
    for name, value in made.backend.policies.values(FAKE).items():
        torch.testing.assert_close(value, getattr(field, name.split(".")[1]).detach(), rtol=1e-4, atol=1e-5)
    assert metrics["dmd2/fake_loss"] == pytest.approx(sum(losses) / 2, rel=1e-4)
    assert losses[0] != losses[1]
    state = made.backend.state_dict()
    assert state["copy_optimizer/fake/transformer.scale/step"] == 2
    assert state["optimizer/transformer.scale/step"] == 1


def test_both_scores_are_asked_between_the_levels_and_each_time_at_others():
    made = student(num_timesteps=2, min_level=0.3, max_level=0.6)
    micro = micro_of(made)
    x = torch.zeros(12, 3, 2, 2)
    drawn = [made.algorithm.noised(micro, slice(None), x, name).level_R for name in ("student", "fake0", "fake1")]
    both = torch.stack(drawn)
    assert both.min() > 0.3 and both.max() < 0.6 and both.unique().numel() == both.numel()


@pytest.mark.parametrize("matching", ["samples", "step"])
def test_a_student_that_was_moved_away_makes_the_teachers_images_again(matching: str):
    """The world of `test_known_optimum`: images are N(mean, 0.3^2), here at 0 for the teacher."""
    fake = OptimizerConfig(learning_rate=0.1)
    made = student(
        GaussianField(), shape=(1, 2, 2), lr=0.02, num_timesteps=2, fake_optimizer=fake, **MATCHINGS[matching]
    )
    with torch.no_grad():
        next(iter(made.backend.parameters.values())).fill_(0.8)
    params = sampling(**KEPT, samples_per_prompt=32)
    for number in range(60):
        trained(made, number, params=params)
    assert abs(float(next(iter(made.parameters.values())))) < 0.1
    assert abs(float(next(iter(made.backend.policies.values(FAKE).values())))) < 0.15


def test_the_teacher_stays_and_a_student_that_is_it_with_a_fake_score_that_does_not_learn_is_taught_nothing():
    made = student(fake_optimizer=OptimizerConfig(learning_rate=0.0))
    metrics = trained(made)
    assert metrics["train/grad_norm"] == 0.0 and metrics["dmd2/score_distance"] == 0.0
    made = student()
    start = {name: value.clone() for name, value in made.parameters.items()}
    for number in range(3):
        trained(made, number)
    with made.backend.reference_policy():
        assert all(torch.equal(value, start[name]) for name, value in made.parameters.items())


class Guided(FieldPipeline):
    """Guides as its parameters say: a negative text is one more number. `seen`: the scale of each velocity."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[float] = []

    def encode_texts(self, primitives: Any, params: Any) -> dict[str, Any]:
        """Both texts, the negative one only where guidance is on."""
        count = len(primitives["text"].texts)
        negative = TextEmbedCondition(embeds=torch.full((count, 1, 1), -2.0))
        return {**self.encode(primitives, params), **({NEGATIVE + "text": negative} if params.uses_guidance else {})}

    def velocity(self, conditions: Any, x_R: Tensor, sigma_R: Tensor, step_R: Tensor, params: Any) -> Tensor:
        """uncond + scale (cond - uncond)."""
        self.seen.append(params.guidance_scale)
        with_text = self._bound(conditions)(x_R, sigma_R, step_R)
        if params.guidance_scale == 1:
            return with_text
        without = self._bound({"text": conditions[NEGATIVE + "text"]})(x_R, sigma_R, step_R)
        return without + params.guidance_scale * (with_text - without)


def test_only_the_teacher_is_guided_by_a_negative_text_that_the_student_never_read():
    made = student(teacher_guidance=4.0)
    pipeline = Guided(made.pipeline.model)
    made.algorithm._pipeline = pipeline
    trained(made)
    # Images for the fake score, its two steps, the direction (fake, teacher), the student.
    assert pipeline.seen == [1.0, 1.0, 1.0, 1.0, 4.0, 1.0]


MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": LoraConfig(rank=2, alpha=4)},
}


def resumed_as_whole(make: Callable[[], Setup], train: Callable[[Setup, int], Any], folder: Path) -> dict[str, Any]:
    """What is trained after two rollouts, a resume and two rollouts, which are the bits of four. make: called twice."""
    made = make()
    for number in range(2):
        train(made, number)
    Checkpointer(made.backend, str(folder)).save(2, {"stack": made.stack.state_dict()})
    for number in range(2, 4):
        train(made, number)
    expected = snapshot(made.backend)
    resumed = make()
    displace(resumed.backend, 0.1)
    saved = Checkpointer(resumed.backend, str(folder)).load()
    assert saved is not None
    resumed.stack.load_state_dict(saved["stack"])
    for number in range(2, 4):
        train(resumed, number)
    found = snapshot(resumed.backend)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    return found


@pytest.mark.parametrize("mode", list(MODES))
def test_two_rollouts_a_resume_and_two_rollouts_equal_four_bit_for_bit(mode: str, tmp_path: Path):
    found = resumed_as_whole(lambda: student(updates=2, micro=2, **MODES[mode]), trained, tmp_path)
    assert {name.split("/")[0] for name in found} >= {"policies", "copy_optimizer"}


def test_a_checkpoint_without_a_fake_score_is_refused_by_name(tmp_path: Path):
    made = student()
    plain = setup(DMD2, fake_optimizer=OptimizerConfig(learning_rate=FAKE_LR), keep_reference=True)
    plain.backend.policies._copies.clear()
    plain.backend._optimizer.trained_copies.clear()
    with pytest.raises(CheckpointError, match="copy_optimizer/fake"):
        made.backend.load_state_dict(plain.backend.state_dict())


def test_what_cannot_be_trained_on_is_named():
    made = student()
    with pytest.raises(ContractError, match=r"latents before the steps \[0, .*sampling.keep_latents: all"):
        trained(made, params=sampling(eta=0.0, sde_indices=[]))
    with pytest.raises(ConfigError, match="num_timesteps = 5 exceeds the 4 steps of the rollout"):
        trained(student(num_timesteps=5))
    with pytest.raises(ConfigError, match=r"min_level = 0.5 must be below algorithm.max_level = 0.5"):
        student(TinyField(), min_level=0.5, max_level=0.5)
    with pytest.raises(ConfigError, match="matching = 'latents' must be one of samples, trajectory"):
        student(TinyField(), matching="latents")
    with pytest.raises(ContractError, match="call before_update first"):
        list(made.algorithm.losses(micro_of(made)))
    resp = rollout(made.pipeline, PARAMS, num_prompts=2)
    with pytest.raises(ContractError, match="needs whole updates: True"):
        made.stack.train_part(with_advantages(resp, torch.zeros(resp.batch_size)), progress=0.0, num_parts=2)
