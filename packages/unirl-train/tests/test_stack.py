"""The training step: exact scaling over ragged micro-batches, anchors, metrics, and two ranks against one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import (
    CASES,
    PARTS,
    FieldBundle,
    FieldPipeline,
    Setup,
    rollout,
    setup,
    some_advantages,
    train_all,
    trained_in_parts,
)
from diffusion_fakes import trained as trained_alone
from ranks import results_of_ranks
from torch import Tensor

from unirl.algorithms.awm import AWM
from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics, StageAlgorithm
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.train.update import with_last_backward
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutResp, RolloutTrack

NUM_SAMPLES = 6
OPTIONS: dict[str, dict[str, Any]] = {
    "grpo": {"kind": DiffusionGRPO, "clip_range": 0.2, "kl_coef": 0.1, "keep_reference": True},
    "nft": {"kind": DiffusionNFT},
}


def response() -> RolloutResp:
    return rollout(FieldPipeline(FieldBundle().model))


def trained(name: str, *, updates: int, micro: int, rows: int | None = None) -> tuple[Setup, dict[str, float]]:
    made = setup(**OPTIONS[name], updates=updates, micro=micro, rows_per_forward=rows)
    result = made.stack.train(with_advantages(response(), some_advantages(NUM_SAMPLES)), progress=0.0)
    assert len(result.updates) == updates
    return made, result.metrics


def test_metrics_are_not_read_before_the_update_ends():
    """On the meta device there is nothing to read, so a copy to the host would raise."""
    record, micro = RowMetrics(), RowMetrics()
    for _ in range(2):
        micro.mean("a", torch.zeros(3, device="meta"))
        micro.max("b", torch.zeros(3, device="meta"))
    record.merge(micro)
    record.merge(micro)
    assert record.sums["a"][1] == 12
    assert record.sums["a"][0].is_meta and record.maxima["b"].is_meta


@pytest.mark.parametrize(("name", "updates"), [("grpo", 1), ("grpo", 3), ("nft", 2)])
def test_gradients_do_not_depend_on_the_sizes_of_micro_batches_and_forwards(name: str, updates: int):
    whole, whole_metrics = trained(name, updates=updates, micro=NUM_SAMPLES)
    for micro in range(1, NUM_SAMPLES + 1):
        for rows in (None, 1, 3, 7):
            parts, metrics = trained(name, updates=updates, micro=micro, rows=rows)
            for mine, theirs in zip(parts.backend.gradients, whole.backend.gradients, strict=True):
                assert mine.keys() == theirs.keys()
                for key, gradient in theirs.items():
                    # float32 sums of the same rows in another order.
                    torch.testing.assert_close(mine[key], gradient, rtol=1e-5, atol=1e-6)
            for key, value in whole_metrics.items():
                if not key.startswith(("timing_s/", "perf/")):
                    assert metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


def test_the_gradient_is_that_of_the_mean_over_all_rows():
    made, metrics = trained("grpo", updates=1, micro=4, rows=5)
    fresh = setup(**OPTIONS["grpo"])
    track = response().tracks["image"]
    advantages = some_advantages(NUM_SAMPLES)
    micro = MicroBatch(track=track.replace(advantages=advantages), anchor={}, update=0, progress=0.0)
    parts = list(fresh.algorithm.losses(micro))
    assert sum(part.num_terms for part in parts) == NUM_SAMPLES * 3
    (parts[0].loss / (NUM_SAMPLES * 3)).backward()
    for name, parameter in fresh.backend.parameters.items():
        torch.testing.assert_close(made.backend.gradients[0][name], parameter.grad, rtol=1e-5, atol=1e-7)
    # At ratio one the surrogate of a row is minus its advantage.
    assert metrics["policy/loss"] == pytest.approx(-float(advantages.mean()), rel=1e-5)


@pytest.mark.parametrize("micro", range(1, NUM_SAMPLES + 1))
@pytest.mark.parametrize("rows", [None, 1, 3, 7])
def test_the_first_ratio_is_exactly_one_with_a_replayed_anchor(micro: int, rows: int | None):
    made = setup(DiffusionGRPO, updates=2, micro=micro, rows_per_forward=rows)
    result = made.stack.train(with_advantages(response(), some_advantages(NUM_SAMPLES)), progress=0.0)
    assert result.updates[0]["policy/ratio_max_abs_dev"] == 0.0
    assert result.updates[0]["policy/ratio_mean"] == 1.0
    assert result.metrics["policy/first_ratio_max_abs_dev"] == 0.0
    assert result.updates[1]["policy/ratio_max_abs_dev"] > 0.0


# A fake algorithm that says what it was asked -----------------------------------------------------------------------


class Scripted(StageAlgorithm):
    """Loss of a sample: its number times the sum of all parameters. Two terms per sample, one part each."""

    uses_anchor = True

    def __init__(self, pipeline: FieldPipeline, policies: Any, *, announced: int = 2, poison: float = 1.0) -> None:
        self._policies = policies
        self._announced = announced
        self._poison = poison
        self.calls: list[tuple[str, int, list[str], int]] = []
        self.after: list[int] = []

    def anchor(self, micro: MicroBatch) -> dict[str, Tensor]:
        self.calls.append(("anchor", micro.update, list(micro.track.sample_ids), self._policies.policy_version))
        return {"version": torch.full((micro.track.batch_size,), float(self._policies.policy_version))}

    def num_terms(self, track: RolloutTrack) -> int:
        return self._announced * track.batch_size

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        self.calls.append(("losses", micro.update, list(micro.track.sample_ids), self._policies.policy_version))
        if micro.update > 0:
            assert torch.equal(micro.anchor["version"], torch.zeros(micro.track.batch_size))
        else:
            assert micro.anchor == {}
        for _ in range(2):
            metrics = RowMetrics()
            metrics.mean("policy/loss", numbers(micro.track))
            metrics.max("policy/ratio_max_abs_dev", numbers(micro.track))
            total = torch.stack([parameter.sum() for parameter in self._policies.parameters.values()]).sum()
            loss = total * numbers(micro.track).float().sum() * self._poison
            yield LossPart(loss, micro.track.batch_size, metrics)

    def after_update(self, metrics: dict[str, float], num_samples: int) -> None:
        self.after.append(num_samples)

    def after_rollout(self) -> dict[str, float]:
        return {"nft/old_policy_decay": 0.25}


def numbers(track: RolloutTrack) -> Tensor:
    """A number per sample that float32 loses when it is added to larger ones."""
    return torch.tensor([1.0 + 1e-9 * int(name[-1]) + int(name[8]) for name in track.sample_ids], dtype=torch.float64)


def test_updates_use_disjoint_samples_and_anchors_come_before_the_first_update():
    made = setup(Scripted, updates=3, micro=1)
    made.stack.train(with_advantages(response(), some_advantages(NUM_SAMPLES)), progress=0.0)
    calls = made.algorithm.calls
    assert [kind for kind, *_ in calls] == ["anchor"] * 4 + ["losses"] * 6
    assert [version for kind, _, _, version in calls if kind == "anchor"] == [0] * 4
    assert [version for kind, _, _, version in calls if kind == "losses"] == [0, 0, 1, 1, 2, 2]
    by_update = [[ids for kind, at, ids, _ in calls if kind == "losses" and at == update] for update in range(3)]
    flat = [sample for update in by_update for ids in update for sample in ids]
    assert sorted(flat) == sorted(response().tracks["image"].sample_ids)
    anchored = [(update, ids) for kind, update, ids, _ in calls if kind == "anchor"]
    assert anchored == [(update, ids) for kind, update, ids, _ in calls if kind == "losses" and update > 0]
    assert made.algorithm.after == [2, 2, 2]


def test_metrics_are_exact_means_and_maxima_over_ragged_micro_batches():
    made = setup(Scripted, micro=4)
    result = made.stack.train(with_advantages(response(), some_advantages(NUM_SAMPLES)), progress=0.0)
    values = numbers(response().tracks["image"])
    # Double precision throughout: the nanos survive.
    assert result.metrics["policy/loss"] == pytest.approx(float(values.mean()), rel=1e-14, abs=0)
    assert result.metrics["policy/ratio_max_abs_dev"] == float(values.max())
    assert result.metrics["train/loss"] == result.metrics["policy/loss"]
    assert result.metrics["nft/old_policy_decay"] == 0.25
    gradient = made.backend.gradients[0]["transformer.gain"]
    torch.testing.assert_close(gradient, torch.tensor([float(values.mean())]), rtol=1e-6, atol=0)


def test_a_maximum_over_updates_is_the_largest_of_theirs():
    made = setup(Scripted, updates=3, micro=1)
    result = made.stack.train(with_advantages(response(), some_advantages(NUM_SAMPLES)), progress=0.0)
    largest = [update["policy/ratio_max_abs_dev"] for update in result.updates]
    assert len(set(largest)) > 1
    assert result.metrics["policy/ratio_max_abs_dev"] == max(largest)


def test_a_wrong_number_of_terms_is_named():
    made = setup(Scripted, announced=3)
    with pytest.raises(ContractError, match="announced 18 loss terms and yielded 12"):
        made.stack.train(with_advantages(response(), some_advantages(NUM_SAMPLES)), progress=0.0)


def test_the_last_backward_is_known_from_the_number_of_terms():
    parts = [LossPart(torch.zeros(()), terms, RowMetrics()) for terms in (2, 3, 1)]
    assert [is_last for _, is_last in with_last_backward(parts, 6)] == [False, False, True]


def test_a_track_without_advantages_or_with_some_of_another_size_is_refused():
    made = setup(DiffusionGRPO)
    with pytest.raises(ContractError, match="track image has no advantages: attach them before training"):
        made.stack.train(response(), progress=0.0)
    with pytest.raises(ContractError, match="disagree on the number of samples.*'advantages': 5"):
        with_advantages(response(), some_advantages(5))


def test_sizes_that_do_not_divide_are_refused_before_anything_is_trained():
    made = setup(DiffusionGRPO, updates=4, micro=1)
    with pytest.raises(ConfigError, match="do not divide into 4 updates"):
        made.stack.train(with_advantages(response(), some_advantages(NUM_SAMPLES)), progress=0.0)
    assert made.backend.progress.num_optimizer_steps == 0
    with pytest.raises(ConfigError, match="micro_batch_size = 0"):
        setup(DiffusionGRPO, micro=0)


def test_a_step_with_a_non_finite_gradient_is_skipped_and_reported():
    made = setup(Scripted, poison=float("nan"), updates=2)
    before = {name: value.clone() for name, value in made.parameters.items()}
    result = made.stack.train(with_advantages(response(), some_advantages(NUM_SAMPLES)), progress=0.0)
    assert result.metrics["train/skipped_steps"] == 2
    assert [update["train/skipped_steps"] for update in result.updates] == [1, 1]
    assert all(torch.equal(value, before[name]) for name, value in made.parameters.items())


def test_state_of_the_algorithm_goes_through_the_stack():
    made = setup(DiffusionNFT)
    made.stack.load_state_dict({"num_rollouts": 5, "kl_coef": 0.5})
    assert made.stack.state_dict() == {"num_rollouts": 5, "kl_coef": 0.5}
    assert made.stack.rollout_policy() == "old"
    assert setup(DiffusionGRPO).stack.rollout_policy() is None


# Two ranks ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of_ranks(train_all, tmp_path_factory.mktemp("stack-ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_two_ranks_train_to_the_gradients_of_one(case: str, ranks: list[dict[str, Any]]):
    one = trained_alone(case)
    for rank in ranks:
        two = rank[case]
        assert len(two["gradients"]) == len(one["gradients"]) == 4
        for mine, theirs in zip(two["gradients"], one["gradients"], strict=True):
            scale = max(float(gradient.abs().max()) for gradient in theirs.values())
            for key, gradient in theirs.items():
                torch.testing.assert_close(mine[key], gradient, rtol=1e-5, atol=1e-5 * scale)
        for key, value in one["metrics"].items():
            if not key.startswith(("timing_s/", "perf/")):
                assert two["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


@pytest.mark.slow
@pytest.mark.parametrize("parts", list(PARTS))
def test_an_update_in_parts_has_the_gradient_of_the_whole_on_one_rank_and_on_two(
    parts: str, ranks: list[dict[str, Any]]
):
    whole = trained_in_parts(None)
    alone = trained_in_parts([2 * length for length in PARTS[parts]])
    for found in (alone, *(rank[f"parts-{parts}"] for rank in ranks)):
        [mine], [theirs] = found["gradients"], whole["gradients"]
        scale = max(float(gradient.abs().max()) for gradient in theirs.values())
        for key, gradient in theirs.items():
            torch.testing.assert_close(mine[key], gradient, rtol=1e-5, atol=1e-5 * scale)
        for key, value in whole["metrics"].items():
            if not key.startswith(("timing_s/", "perf/")):
                assert found["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


def test_parts_of_a_rollout_serve_one_update_of_one_track():
    resp = with_advantages(response(), some_advantages(NUM_SAMPLES))
    two = setup(DiffusionGRPO, updates=2)
    with pytest.raises(ContractError, match="serves one update of one track: there are 2 of 1"):
        two.stack.train_part(resp, progress=0.0, num_parts=2)


@pytest.mark.slow
def test_both_ranks_report_the_same(ranks: list[dict[str, Any]]):
    for case in CASES:
        first, second = (
            {k: v for k, v in r[case]["metrics"].items() if not k.startswith(("timing_s/", "perf/"))} for r in ranks
        )
        assert first == second


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DiffusionGRPO, {"advantage_clip": 2.0}),
        (DiffusionNFT, {"advantage_max": 2.0}),
        (AWM, {"advantage_clip": 2.0, "num_timesteps": 2}),
    ],
)
def test_the_fraction_of_clipped_advantages_has_one_name(kind: type[StageAlgorithm], options: dict[str, Any]):
    made = setup(kind, micro=4, **options)
    wide = torch.tensor([9.0, -9.0, 2.0, 1.0, -1.0, 0.0])
    metrics = made.stack.train(with_advantages(response(), wide), progress=0.0).metrics
    assert metrics["advantage/clipped_fraction"] == pytest.approx(1 / 3)
