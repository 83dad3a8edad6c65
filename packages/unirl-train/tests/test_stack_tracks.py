"""Several tracks on one backend: exact term counts per track, cadence, metrics and state by track, refusals."""

from typing import Any

import pytest
import torch
from diffusion_fakes import FieldPipeline, rollout, sampling, some_advantages
from diffusion_fakes import setup as field_setup
from test_stack import Scripted
from token_fakes import LMBundle, LMPipeline, RecordingBackend, response
from torch import Tensor

from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.base import StageAlgorithm
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.kl import AdaptiveKL
from unirl.train.configs import OptimizerConfig
from unirl.train.stack import TrainStack, TrainStepResult
from unirl.train.track_loss import TrackLoss
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutResp, RolloutTrack


def texts(num_prompts: int, seed: int) -> RolloutTrack:
    """Completions with advantages, three per prompt."""
    track = response(num_prompts).tracks["text"]
    return track.replace(advantages=torch.randn(3 * num_prompts, generator=torch.Generator().manual_seed(seed)))


QUESTIONS = texts(2, seed=1)
ANSWERS = texts(4, seed=2).replace(
    parent_track="question", parent_ids=[QUESTIONS.sample_ids[i // 2] for i in range(12)]
)
BOTH = RolloutResp(tracks={"question": QUESTIONS, "answer": ANSWERS})


class Made:
    """A stack of two tracks of text on one fresh model."""

    def __init__(self, losses: dict[str, TrackLoss] | None = None, *, micro: int = 5, **options: Any) -> None:
        bundle = LMBundle()
        self.backend = RecordingBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-2), keep_reference=True)
        pipeline = LMPipeline(bundle.model)
        self.algorithms: dict[str, Any] = {
            name: ARGRPO(pipeline, self.backend, **options.pop(name, {})) for name in ("question", "answer")
        }
        self.stack = TrainStack(
            self.backend, self.algorithms, micro_batch_size=micro, max_grad_norm=1e9, losses=losses, **options
        )
        self.stack.prepare()

    def train(self, resp: RolloutResp = BOTH) -> TrainStepResult:
        """One rollout."""
        return self.stack.train(resp, progress=0.0)


def alone(track: RolloutTrack, micro: int = 100) -> dict[str, Tensor]:
    """The gradient of one track."""
    bundle = LMBundle()
    backend = RecordingBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-2))
    algorithm = ARGRPO(LMPipeline(bundle.model), backend)
    stack = TrainStack(backend, {"text": algorithm}, micro_batch_size=micro, max_grad_norm=1e9)
    stack.train(RolloutResp(tracks={"text": track.replace(parent_track=None)}), progress=0.0)
    return backend.gradients[0]


@pytest.mark.parametrize("micro", [2, 5, 100])
def test_every_track_is_divided_by_its_own_terms_whatever_the_micro_batches(micro: int):
    made = Made({"question": TrackLoss(weight=0.25), "answer": TrackLoss(weight=2.0, micro_batch_size=4)}, micro=micro)
    made.train()
    question, answer = alone(QUESTIONS), alone(ANSWERS)
    (joint,) = made.backend.gradients
    for name, gradient in joint.items():
        # float32 sums of the same rows in another order.
        torch.testing.assert_close(gradient, 0.25 * question[name] + 2.0 * answer[name], rtol=1e-5, atol=1e-6)


def test_metrics_carry_the_name_of_their_track_and_the_optimizer_step_none():
    made = Made({"answer": TrackLoss(weight=3.0)})
    metrics = made.train().metrics
    assert metrics["question/policy/loss"] == pytest.approx(Made().train().metrics["question/policy/loss"])
    total = metrics["question/policy/loss"] + 3.0 * metrics["answer/policy/loss"]
    assert metrics["train/loss"] == pytest.approx(total, rel=1e-6)
    assert metrics["question/policy/first_ratio_max_abs_dev"] == metrics["answer/policy/first_ratio_max_abs_dev"] == 0
    plain = {name for name in metrics if not name.startswith(("question/", "answer/"))}
    assert plain == {"train/loss", "train/grad_norm", "train/lr", "train/skipped_steps", "timing_s/anchor"}


def test_the_balance_of_two_tracks_is_that_of_their_gradients():
    made = Made({"question": TrackLoss(weight=0.25), "answer": TrackLoss(weight=2.0)}, measures_balance=True)
    metrics = made.train().metrics
    flat = [
        weight * torch.cat([gradient.flatten() for gradient in alone(track).values()])
        for weight, track in ((0.25, QUESTIONS), (2.0, ANSWERS))
    ]
    assert metrics["question/train/grad_norm"] == pytest.approx(float(flat[0].norm()), rel=1e-5)
    assert metrics["answer/train/grad_norm"] == pytest.approx(float(flat[1].norm()), rel=1e-5)
    cosine = float(torch.cosine_similarity(flat[0], flat[1], dim=0))
    assert metrics["train/grad_cosine/question_answer"] == pytest.approx(cosine, abs=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(float((flat[0] + flat[1]).norm()), rel=1e-5)


def test_a_track_that_does_not_train_in_an_update_has_no_balance_there():
    made = Made({"answer": TrackLoss(every=2)}, num_updates_per_batch=2, measures_balance=True)
    both, alone_there = made.train().updates
    assert {name for name in both if "grad_" in name} - {name for name in alone_there if "grad_" in name} == {
        "answer/train/grad_norm",
        "train/grad_cosine/question_answer",
    }


def test_the_balance_of_one_track_is_refused():
    made = Made()
    with pytest.raises(ConfigError, match="compares the gradients of several tracks; there is one, image"):
        TrainStack(made.backend, made.algorithms["answer"], micro_batch_size=2, measures_balance=True)


def test_tracks_of_two_kinds_train_on_one_step():
    made = field_setup(DiffusionGRPO)
    resp = rollout(made.pipeline, sampling())
    track = resp.tracks["image"].replace(advantages=some_advantages(6))
    nft = DiffusionNFT(FieldPipeline(made.pipeline.model), made.backend)
    apart = TrainStack(made.backend, {"image": made.algorithm, "again": nft}, micro_batch_size=4)
    assert apart.rollout_policy() == {"again": "old"}  # what trains is not named
    scripted = Scripted(FieldPipeline(made.pipeline.model), made.backend)
    stack = TrainStack(made.backend, {"image": made.algorithm, "again": scripted}, micro_batch_size=4)
    metrics = stack.train(RolloutResp(tracks={"image": track, "again": track}), progress=0.0).metrics
    assert {"image/policy/approx_kl", "again/nft/old_policy_decay", "again/policy/loss"} <= set(metrics)
    assert len(made.backend.gradients) == 1 and scripted.after == [6]


def test_tracks_take_turns_by_update_each_on_all_of_its_samples():
    made = Made(
        {"question": TrackLoss(every=2), "answer": TrackLoss(every=2, turn=1)}, micro=2, num_updates_per_batch=2
    )
    result = made.train()
    first, second = result.updates
    assert "question/policy/loss" in first and "answer/policy/loss" not in first
    assert "answer/policy/loss" in second and "question/policy/loss" not in second
    expected = alone(QUESTIONS)
    for name, gradient in made.backend.gradients[0].items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)
    # The second update's track was anchored before the first, which has changed the weights since.
    assert second["answer/policy/ratio_max_abs_dev"] > 0


def test_tracks_take_turns_by_rollout_and_a_resumed_run_keeps_the_turn():
    losses = {"question": TrackLoss(every=3), "answer": TrackLoss()}
    made = Made(losses, answer={"kl_coef": 0.1, "adaptive_kl": AdaptiveKL(target=1e-9, horizon=10)})
    trained = ["question/policy/loss" in made.train().metrics for _ in range(4)]
    assert trained == [True, False, False, True]
    state = made.stack.state_dict()
    assert state["num_updates"] == 4 and state["question/num_rollouts"] == 2 and state["answer/num_rollouts"] == 4
    assert state["answer/kl_coef"] > 0.1 and state["question/kl_coef"] == 0
    again = Made(losses, answer={"kl_coef": 0.1, "adaptive_kl": AdaptiveKL(target=1e-9, horizon=10)})
    again.stack.load_state_dict(state)
    assert again.stack.state_dict() == state
    assert ["question/policy/loss" in again.train().metrics for _ in range(3)] == [False, False, True]


def test_what_cannot_train_is_refused_with_the_names():
    bundle = LMBundle()
    backend = RecordingBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-2))
    algorithm: StageAlgorithm = ARGRPO(LMPipeline(bundle.model), backend)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ({}, {}, "needs an algorithm for at least one track"),
        ({"text": algorithm}, {"track": "text"}, "stack.track = text names the track of a single algorithm"),
        ({"text": algorithm}, {"losses": {"image": TrackLoss()}}, r"stack.losses names tracks \['image'\], which no"),
        (
            {"text": algorithm},
            {"losses": {"text": {"weigt": 2.0}}},
            "stack.losses.text has no weigt; there are",
        ),
        ({"text": algorithm}, {"losses": {"text": {"every": 2}}}, "update 1 of every 2 would train no track"),
    ]
    for algorithms, options, message in cases:
        with pytest.raises(ConfigError, match=message):
            TrainStack(backend, algorithms, micro_batch_size=4, **options)
    with pytest.raises(ConfigError, match="turn = 2 must be below every = 2"):
        TrackLoss(every=2, turn=2)
    with pytest.raises(ConfigError, match="stack.losses.weight = 0.0 must be"):
        TrackLoss(weight=0.0)
    made = Made()
    with pytest.raises(ContractError, match=r"there is no track 'answer'; this response has \['question'\]"):
        made.train(RolloutResp(tracks={"question": QUESTIONS}))
    bare = {**BOTH.tracks, "answer": ANSWERS.replace(advantages=None)}
    with pytest.raises(ContractError, match="track answer has no advantages"):
        made.train(RolloutResp(tracks=bare))


def test_the_roles_say_what_concerns_all_tracks():
    made = Made()
    assert made.stack.trained_tracks() == ["question", "answer"] and made.stack.samples_per_unit() == 1
    said = made.stack.old_logp()
    assert said is not None and said.startswith("question: replay") and "; answer: replay" in said


class _Consuming(ARGRPO):
    """Turns what it measured into another metric, as value losses do with their sums."""

    def after_update(self, metrics: dict[str, float], num_samples: int) -> None:
        super().after_update(metrics, num_samples)
        metrics["policy/loss_twice"] = 2 * metrics.pop("policy/loss")


def test_an_algorithm_takes_its_own_metrics_away_also_among_several_tracks() -> None:
    made = Made()
    made.algorithms["question"].__class__ = _Consuming
    metrics = made.train().metrics
    assert "question/policy/loss" not in metrics and "question/policy/loss_twice" in metrics
    assert "answer/policy/loss" in metrics and "train/grad_norm" in metrics
