"""DMD2 with a learnt reward: the student's gradient and the surrogate's step by hand, what it learns, resuming."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import KEPT, AffineField, Setup, displace, rollout, sampling, setup, some_advantages
from test_dmd2 import MODES, Guided, images_by_hand, resumed_as_whole
from test_known_optimum import GaussianField
from torch import Tensor

from unirl.algorithms.base import MicroBatch
from unirl.algorithms.dmd2 import DMD2, FAKE
from unirl.algorithms.dmd2_reward import SURROGATE, DMD2WithReward, reward_share
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutResp
from unirl.types.segments import LatentSegment
from unirl.types.training import OptimizerConfig

GROUP, NUM_PROMPTS = 4, 3
PARAMS = sampling(**KEPT, samples_per_prompt=GROUP)
ADVANTAGES = some_advantages(GROUP * NUM_PROMPTS)


def optimizer(learning_rate: float = 3e-2) -> OptimizerConfig:
    return OptimizerConfig(learning_rate=learning_rate)


def student(model: Any = None, *, kind: Any = DMD2WithReward, **options: Any) -> Setup:
    """A student with its teacher, fake score and surrogate."""
    given: dict[str, Any] = {"fake_optimizer": optimizer(), "fake_max_grad_norm": 1e9, "micro": GROUP * NUM_PROMPTS}
    if kind is DMD2WithReward:
        given |= {"surrogate_optimizer": optimizer(), "surrogate_max_grad_norm": 1e9, "samples_per_group": GROUP}
    given |= options
    given.setdefault("keep_reference", "lora" not in given)
    return setup(kind, model=model, **given)


def samples(made: Setup, number: int = 0) -> RolloutResp:
    return with_advantages(rollout(made.pipeline, PARAMS, num_prompts=NUM_PROMPTS, rollout_id=number), ADVANTAGES)


def trained(made: Setup, number: int = 0) -> dict[str, float]:
    """One rollout of the student, trained on."""
    return made.stack.train(samples(made, number), progress=0.0).metrics


def micro_of(made: Setup) -> MicroBatch:
    return MicroBatch(track=samples(made).tracks["image"], anchor={}, update=0, progress=0.0)


def values(made: Setup, policy: str) -> dict[str, float]:
    return {name.split(".")[1]: float(value) for name, value in made.backend.policies.values(policy).items()}


TDM_R1 = {"matching": "trajectory", "trajectory_levels": "above", "surrogate_latents": "trajectory"}


@pytest.mark.parametrize("options", [{}, TDM_R1], ids=["dmd2", "tdm_r1"])
@pytest.mark.parametrize("rows_per_forward", [None, GROUP])
@pytest.mark.parametrize("num_timesteps", [1, 3])
def test_the_students_gradient_by_hand(num_timesteps: int, rows_per_forward: int | None, options: dict[str, Any]):
    shared: dict[str, Any] = {"num_timesteps": num_timesteps, "rows_per_forward": rows_per_forward, **options}
    made = student(AffineField(), micro=GROUP, reward_weight=0.6, **shared)
    displace(made.backend, 0.2)  # the teacher stays where it was
    own, whole = values(made, "default"), micro_of(made)
    metrics = trained(made)
    fake, surrogate = values(made, FAKE), values(made, SURROGATE)
    assert surrogate != {"scale": pytest.approx(0.7), "shift": pytest.approx(0.1)}
    made.algorithm.num_rollouts -= 1  # the draws of the rollout that was trained on
    x, by_scale, by_shift = images_by_hand(made, whole, own["scale"], own["shift"])

    def direction(purpose: str, minus: dict[str, float], plus: dict[str, float], **levels: float) -> Tensor:
        at = made.algorithm.noised(whole, slice(None), x, purpose, **levels)
        level = at.level_R.view(-1, 1, 1, 1)
        x_minus, x_plus = (at.x_s - level * (f["scale"] * at.x_s + f["shift"]) for f in (minus, plus))
        return (x_minus - x_plus) / (x - x_plus).abs().mean(dim=(1, 2, 3), keepdim=True)

    teacher = {"scale": 0.7, "shift": 0.1}
    matching = direction("student", fake, teacher)
    reward = 0.6 * direction("reward", teacher, surrogate, min_level=0.3)
    g = matching + reward
    [found] = made.backend.gradients
    for name, derivative in (("scale", by_scale), ("shift", by_shift)):
        torch.testing.assert_close(found[f"transformer.{name}"][0], (g * derivative).mean(), rtol=2e-4, atol=1e-6)
    assert metrics["policy/loss"] == pytest.approx(float(0.5 * g.square().mean()), rel=1e-4)
    sizes = [each.abs().mean(dim=(1, 2, 3)) for each in (matching, reward)]
    share = (sizes[1] / (sizes[0] + sizes[1])).mean()
    assert 0.01 < share < 0.99 and metrics["dmd2/reward_share"] == pytest.approx(float(share), rel=1e-4)


def test_the_surrogate_takes_a_step_of_dgpo_on_the_samples_that_were_rewarded():
    made = student(
        AffineField(), micro=GROUP, surrogate_beta=5.0, surrogate_radius=None, surrogate_kl=0.2, surrogate_levels=3
    )
    displace(made.backend, 0.2)
    whole = micro_of(made)
    field = AffineField(*values(made, SURROGATE).values())  # the surrogate starts as the student did
    steps = torch.optim.AdamW(field.parameters(), lr=3e-2, weight_decay=0.0)
    [(_, rows)] = made.algorithm._surrogate.forward_rows(whole)
    x_s, target = rows.x_t.double(), rows.target.double()

    def errors(velocity: Tensor, wanted: Tensor) -> Tensor:
        return (velocity - wanted).square().flatten(1).mean(dim=1)

    field = field.double()
    v, v_teacher = field.scale * x_s + field.shift, 0.7 * x_s + 0.1
    margin = (errors(v, target) - errors(v_teacher, target)) * ADVANTAGES[rows.sample_R].double()
    loss = (1 / 5.0 * (1 + (5.0 * margin.view(-1, GROUP).mean(dim=1)).exp()).log()).mean()
    loss = loss + 0.2 * errors(v, v_teacher).mean()
    loss.backward()
    norm = torch.stack(
        [parameter.grad.abs().squeeze() for parameter in field.parameters() if parameter.grad is not None]
    )
    steps.step()
    metrics = trained(made)
    for name, value in values(made, SURROGATE).items():
        assert value == pytest.approx(float(getattr(field, name).detach()), rel=1e-4)
    assert metrics["dmd2/surrogate_grad_norm"] == pytest.approx(float(norm.norm()), rel=1e-4)
    state = made.backend.state_dict()
    assert state["copy_optimizer/surrogate/transformer.scale/step"] == 1
    assert state["copy_optimizer/fake/transformer.scale/step"] == 2


def test_the_surrogate_learns_from_latents_on_the_way_by_hand():
    """In float64, each latent, noise and target by the formulas of a Gaussian; later steps count more."""
    options: dict[str, Any] = {"surrogate_levels": 3, "surrogate_latents": "trajectory", "reward_min_level": 0.2}
    made = student(AffineField(), micro=GROUP, surrogate_beta=5.0, surrogate_radius=None, surrogate_kl=0.2, **options)
    displace(made.backend, 0.2)
    whole = micro_of(made)
    segment = whole.segment
    field = AffineField(*values(made, SURROGATE).values()).double()  # the surrogate starts as the student did
    steps = torch.optim.AdamW(field.parameters(), lr=3e-2, weight_decay=0.0)
    [(_, rows)] = made.algorithm._surrogate.forward_rows(whole)
    number_R = (rows.weight_R * segment.num_steps).round().long() - 1  # steps that were drawn
    assert len(set(number_R.tolist())) > 1 and (number_R.view(-1, GROUP) == number_R.view(-1, GROUP)[:, :1]).all()
    latents = torch.stack([segment.latents_at(int(n) + 1)[b] for b, n in zip(rows.sample_R, number_R, strict=True)])
    s_m, s = (each.double().view(-1, 1, 1, 1) for each in (segment.sigmas[number_R + 1], rows.sigma_R))
    assert ((s > s_m) & (s >= 0.2) & (s <= 1)).all()
    mean, variance = (1 - s) / (1 - s_m) * latents.double(), s.square() - ((1 - s) / (1 - s_m) * s_m).square()
    noise = (rows.x_t - mean) / variance.sqrt()
    in_units = noise.view(-1, GROUP, *noise.shape[1:])
    torch.testing.assert_close(in_units, in_units[:, :1].expand_as(in_units), rtol=1e-3, atol=1e-3)
    # The velocity at x_s of which (mean - x_s) / variance is the score, its clean latent by Tweedie's formula.
    clean = (rows.x_t + s.square() * (mean - rows.x_t) / variance) / (1 - s)
    target = (rows.x_t - clean) / s
    torch.testing.assert_close(rows.target.double(), target, rtol=1e-3, atol=1e-3)

    def errors(velocity: Tensor, wanted: Tensor) -> Tensor:
        return (velocity - wanted).square().flatten(1).mean(dim=1)

    x_s, weight_R = rows.x_t.double(), (number_R + 1).double() / segment.num_steps
    v, v_teacher = field.scale * x_s + field.shift, 0.7 * x_s + 0.1
    margin = (errors(v, target) - errors(v_teacher, target)) * ADVANTAGES[rows.sample_R].double()
    loss_U = 1 / 5.0 * (1 + (5.0 * margin.view(-1, GROUP).mean(dim=1)).exp()).log()
    loss = (weight_R[::GROUP] * loss_U).mean() + 0.2 * (weight_R * errors(v, v_teacher)).mean()
    loss.backward()
    norm = torch.stack(
        [parameter.grad.abs().squeeze() for parameter in field.parameters() if parameter.grad is not None]
    )
    steps.step()
    metrics = trained(made)
    for name, value in values(made, SURROGATE).items():
        assert value == pytest.approx(float(getattr(field, name).detach()), rel=1e-4)
    assert metrics["dmd2/surrogate_grad_norm"] == pytest.approx(float(norm.norm()), rel=1e-3)


def test_a_surrogate_that_learns_nothing_leaves_dmd2_as_it_is():
    made = [student(kind=DMD2), student(surrogate_optimizer=optimizer(0.0))]
    for each in made:
        displace(each.backend, 0.2)
    plain, rewarded = (trained(each) for each in made)
    assert made[0].backend.gradients[0].keys() == made[1].backend.gradients[0].keys()
    for name, expected in made[0].backend.gradients[0].items():
        assert torch.equal(made[1].backend.gradients[0][name], expected)
    assert rewarded["dmd2/reward_share"] == 0.0 and rewarded["dmd2/reward_distance"] == 0.0
    assert plain.keys() < rewarded.keys()


def test_the_share_of_the_reward_is_of_sizes_and_0_where_there_is_neither():
    matching = torch.tensor([[1.0, -3.0], [0.0, 0.0], [0.0, 0.0]])
    reward = torch.tensor([[0.5, 0.5], [0.0, 2.0], [0.0, 0.0]])
    assert reward_share(matching, reward).tolist() == pytest.approx([0.2, 1.0, 0.0])


@pytest.mark.parametrize("options", [{}, TDM_R1], ids=["dmd2", "tdm_r1"])
def test_micro_batches_and_rows_per_forward_change_nothing(options: dict[str, Any]):
    made = [
        student(num_timesteps=2, micro=GROUP * NUM_PROMPTS, **options),
        student(num_timesteps=2, micro=GROUP, rows_per_forward=GROUP, **options),
    ]
    for each in made:
        displace(each.backend, 0.1)
    whole, parts = (
        {name: value for name, value in trained(each).items() if not name.startswith("timing_s/")} for each in made
    )
    assert whole == pytest.approx(parts, rel=1e-3, abs=1e-6)
    for name, expected in made[0].backend.gradients[0].items():
        torch.testing.assert_close(made[1].backend.gradients[0][name], expected, rtol=1e-4, atol=1e-6)


def test_a_student_goes_from_the_teacher_to_where_the_reward_is():
    """The world of `test_known_optimum`: images are N(mean, 0.3^2), the teacher's mean is 0; brighter earns more."""
    ends = {}
    for kind in (DMD2, DMD2WithReward):
        made = student(GaussianField(), kind=kind, shape=(1, 2, 2), lr=0.02, num_timesteps=2, micro=100)
        for number in range(40):
            resp = rollout(made.pipeline, sampling(**KEPT, samples_per_prompt=GROUP), num_prompts=8, rollout_id=number)
            segment = resp.tracks["image"].segment
            assert isinstance(segment, LatentSegment)
            bright = segment.clean_latents.mean(dim=(1, 2, 3)).view(-1, GROUP)
            spread = bright.std().clamp(min=1e-4)
            advantages = ((bright - bright.mean(dim=1, keepdim=True)) / spread).flatten()
            made.stack.train(with_advantages(resp, advantages), progress=0.0)
        ends[kind] = float(next(iter(made.parameters.values())))
    assert abs(ends[DMD2]) < 0.1 and ends[DMD2WithReward] > 0.2


def test_only_the_teacher_and_the_surrogate_are_guided():
    made = student(teacher_guidance=4.0, surrogate_guidance=2.5)
    pipeline = Guided(made.pipeline.model)
    made.algorithm._pipeline = made.algorithm._surrogate._pipeline = pipeline
    trained(made)
    # Images for the fake score, its two steps, the surrogate's teacher and step; the direction of the matching (fake,
    # teacher) and of the reward (surrogate, teacher), the student.
    assert pipeline.seen == [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 2.5, 1.0, 1.0]


@pytest.mark.parametrize("mode", list(MODES))
def test_two_rollouts_a_resume_and_two_rollouts_equal_four_bit_for_bit(mode: str, tmp_path: Path):
    def make() -> Setup:
        return student(updates=NUM_PROMPTS, micro=GROUP, **copy.deepcopy(MODES[mode]))

    found = resumed_as_whole(make, trained, tmp_path)
    assert {name.split("/")[1] for name in found if name.startswith("copy_optimizer")} == {FAKE, SURROGATE}


def test_what_cannot_be_trained_on_is_named():
    with pytest.raises(ConfigError, match=r"reward_min_level = 0.98 must be below algorithm.max_level = 0.98"):
        student(reward_min_level=0.98)
    with pytest.raises(ConfigError, match="surrogate_latents = 'all' must be one of clean, trajectory"):
        student(surrogate_latents="all")
    with pytest.raises(ConfigError, match="rows_per_forward = 6 must be a multiple of 4"):
        student(rows_per_forward=6)
    made = student()
    resp = rollout(made.pipeline, PARAMS, num_prompts=2)
    with pytest.raises(ContractError, match="no advantages"):
        made.stack.train(resp, progress=0.0)
