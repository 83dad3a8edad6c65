"""On-policy distillation: the gradient of the reverse KL, velocities on the student's trajectory, unfit teachers."""

from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import AffineField, FieldPipeline, TinyField, displace, rollout, setup
from diffusion_fakes import sampling as image_sampling
from token_fakes import LMBundle, LMPipeline, advantages_of, response, sampling
from token_fakes import setup as token_setup

from unirl.algorithms.ar_distillation import ARDistillation, distillation_advantages
from unirl.algorithms.base import MicroBatch
from unirl.algorithms.diffusion_distillation import DiffusionDistillation
from unirl.algorithms.tokens import text_segment
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Images

NUM_SAMPLES = 12
KEPT = {"eta": 0.0, "sde_indices": [], "keep_latents": "all"}


def judge(seed: int = 4) -> LMPipeline:
    """A language model like the student's, displaced."""
    model = LMBundle().model
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return LMPipeline(model)


def taught(teacher: Any = None, **options: Any) -> Any:
    """A student of tokens with its teacher."""
    made = token_setup(ARDistillation, teacher="judge", **options)
    made.algorithm.use_teacher(judge() if teacher is None else teacher, sampling())
    return made


def painted(teacher: Any, **options: Any) -> Any:
    """A student of latents with its teacher."""
    made = setup(DiffusionDistillation, teacher="judge", **options)
    made.algorithm.use_teacher(teacher, image_sampling(**KEPT))
    return made


def test_the_expected_gradient_is_that_of_the_reverse_kl():
    """Over all 7 words of one next token, in float64: what is sampled is the student's."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, generator=generator, requires_grad=True)
    teacher = torch.randn(7, dtype=torch.float64, generator=generator).log_softmax(0)
    logp = logits.log_softmax(0)
    exact = torch.autograd.grad((logp.exp() * (logp - teacher)).sum(), logits)[0]
    logp = logits.log_softmax(0)
    worth = distillation_advantages(teacher, logp.detach(), torch.zeros(7).double(), coef=1.0, reward_weight=0.0)
    sampled = torch.autograd.grad(-(logp.exp().detach() * worth * logp).sum(), logits)[0]
    torch.testing.assert_close(sampled, exact)


def test_what_a_token_is_worth_by_hand():
    found = distillation_advantages(
        torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -0.5]), torch.tensor([1.0, -1.0]), coef=2.0, reward_weight=0.5
    )
    assert found.tolist() == [2.5, -5.5]


@pytest.mark.parametrize("reward_weight", [0.0, 0.5])
def test_the_gradient_weighs_every_token_by_the_teachers_judgement(reward_weight: float):
    resp, advantages = response(), advantages_of(NUM_SAMPLES)
    made = taught(micro=5, reward_weight=reward_weight, coef=0.7)
    made.stack.train(with_advantages(resp, advantages), progress=0.0)
    track, model = resp.tracks["text"], LMBundle().model
    segment = text_segment(track)
    logp = LMPipeline(model).replay(track.conditions, segment, sampling()).logp_N
    with torch.no_grad():
        judged = judge().replay(track.conditions, segment, sampling()).logp_N
    worth = 0.7 * (judged - logp.detach()) + reward_weight * advantages.repeat_interleave(segment.lengths)
    (-(worth * logp)[segment.trained].sum() / segment.trained.sum()).backward()
    for name, parameter in model.named_parameters():
        found = made.backend.gradients[0][f"transformer.{name}"]
        torch.testing.assert_close(found, parameter.grad, rtol=2e-5, atol=1e-6)  # float32 sums in another order


def test_a_teacher_that_is_the_student_teaches_nothing():
    made = taught(LMPipeline(LMBundle().model))
    result = made.stack.train(with_advantages(response(), advantages_of(NUM_SAMPLES)), progress=0.0)
    assert abs(result.metrics["distillation/reverse_kl"]) < 1e-6
    assert result.metrics["train/grad_norm"] < 1e-6


def test_the_distance_to_the_teacher_is_frozen_before_the_first_update():
    made = taught(updates=2)
    result = made.stack.train(with_advantages(response(), advantages_of(NUM_SAMPLES)), progress=0.0)
    again = taught(updates=1)
    whole = again.stack.train(with_advantages(response(), advantages_of(NUM_SAMPLES)), progress=0.0)
    # Means over the same tokens, weighted by the updates' sizes instead of at once.
    assert result.metrics["distillation/logp_absdiff_max"] == pytest.approx(
        whole.metrics["distillation/logp_absdiff_max"], rel=1e-5
    )


def test_a_student_of_tokens_comes_nearer_to_its_teacher():
    teacher = judge()
    made = taught(teacher, lr=0.02)
    distances = []
    for seed in range(12):
        resp = response(params=sampling(seed=seed))
        own = made.pipeline.generate(
            resp.tracks["text"].conditions, sampling(seed=seed), noise_keys=resp.tracks["text"].sample_ids
        )
        resp = type(resp)(tracks={"text": resp.tracks["text"].replace(segment=own)})
        result = made.stack.train(with_advantages(resp, torch.zeros(NUM_SAMPLES)), progress=0.0)
        distances.append(result.metrics["distillation/reverse_kl"])
    assert sum(distances[-3:]) < 0.5 * sum(distances[:3]), distances


def test_the_loss_of_latents_is_the_distance_at_the_stored_latents():
    teacher = FieldPipeline(TinyField())
    made = painted(teacher, num_timesteps=2, rows_per_forward=5)
    displace(made.backend, 0.1)
    params = image_sampling(**KEPT)
    resp = rollout(made.pipeline, params, num_prompts=3)
    track = resp.tracks["image"].replace(advantages=torch.zeros(resp.batch_size))
    micro = MicroBatch(track=track, anchor={}, update=0, progress=0.0)
    sample_R, step_R = made.algorithm.rows(micro)
    assert sample_R.tolist() == [sample for sample in range(track.batch_size) for _ in range(2)]
    assert len({tuple(pair) for pair in step_R.view(-1, 2).tolist()}) > 1
    expected = []
    for sample, step in zip(sample_R.tolist(), step_R.tolist(), strict=True):
        rows = torch.tensor([sample])
        conditions = {name: item.select(rows) for name, item in track.conditions.items()}
        x = micro.segment.latents_at(step)[rows]
        sigma, at = micro.segment.sigmas[[step]], torch.tensor([step])
        with torch.no_grad():
            ours = made.pipeline.velocity(conditions, x, sigma, at, params)
            theirs = teacher.velocity(conditions, x, sigma, at, params)
        expected.append((ours - theirs).square().mean())
    parts = list(made.algorithm.losses(micro))
    assert sum(part.num_terms for part in parts) == 2 * track.batch_size == made.algorithm.num_terms(track)
    assert len(parts) == -(-2 * track.batch_size // 5)
    torch.testing.assert_close(sum(part.loss.detach() for part in parts), torch.stack(expected).sum())


def test_a_student_of_latents_becomes_its_teacher():
    field = AffineField()
    with torch.no_grad():
        for parameter in field.parameters():
            parameter.add_(0.3)
    teacher = FieldPipeline(field)
    made = painted(teacher, model=AffineField(), lr=0.05)
    for _ in range(60):
        resp = rollout(made.pipeline, image_sampling(**KEPT), num_prompts=2)
        result = made.stack.train(with_advantages(resp, torch.zeros(resp.batch_size)), progress=0.0)
    assert result.metrics["distillation/velocity_distance"] < 1e-3
    for name, parameter in field.named_parameters():
        torch.testing.assert_close(made.parameters[f"transformer.{name}"], parameter.detach(), rtol=0, atol=0.05)


def test_latents_that_were_not_kept_are_named():
    made = painted(FieldPipeline(TinyField()))
    resp = rollout(made.pipeline, image_sampling(eta=0.0, sde_indices=[]), num_prompts=3)
    with pytest.raises(ContractError, match=r"latents before the steps \[0, .*sampling.keep_latents: all"):
        made.stack.train(with_advantages(resp, torch.zeros(resp.batch_size)), progress=0.0)


def test_a_teacher_with_another_tokenizer_is_refused():
    class Spelled(LMPipeline):
        @property
        def vocabulary(self) -> dict[str, int]:
            return {**super().vocabulary, "6": 5, "5": 6, "x": 7}

    with pytest.raises(ConfigError, match="another tokenizer: 8 tokens against the student's 7, and 3 that only one"):
        taught(Spelled(LMBundle().model))


class Negative(FieldPipeline):
    """Decodes light where others decode dark."""

    def decode(self, latents: torch.Tensor, params: Any) -> Images:
        """The negative."""
        return Images(pixels=1 - latents.sigmoid())


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (FieldPipeline(TinyField(), shape=(1, 2, 2)), r"another latent space: a latent is \(1, 2, 2\), the student's"),
        (Negative(TinyField()), "another latent space: one latent decodes to images .* that differ by"),
    ],
)
def test_a_teacher_with_another_latent_space_is_refused(teacher: FieldPipeline, message: str):
    with pytest.raises(ConfigError, match=message):
        painted(teacher)


@pytest.mark.parametrize("kind", [ARDistillation, DiffusionDistillation])
def test_without_its_teacher_it_says_so(kind: Any):
    if kind is ARDistillation:
        made, resp = token_setup(kind, teacher="judge"), response()
    else:
        made = setup(kind, teacher="judge")
        resp = rollout(made.pipeline, image_sampling(**KEPT), num_prompts=3)
    with pytest.raises(ContractError, match="the teacher 'judge' was not handed over"):
        made.stack.train(with_advantages(resp, torch.zeros(resp.batch_size)), progress=0.0)
