"""Experts of HunyuanImage3's images that a rollout keeps and its replays use. Float32, one thread, random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle
from unirl.models.hunyuan_image3.image_experts import EXPERTS
from unirl.models.hunyuan_image3.pipeline import HunyuanImage3Pipeline
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import initial_noise
from unirl.types.conditions import Condition, ExpertCondition, TextTokenCondition
from unirl.types.errors import ContractError
from unirl.types.media import Texts
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

from .hunyuan_image3_reference import Reference, TokenSequence
from .tiny_hunyuan_image3 import TINY, save_hunyuan_image3, weights

TEXTS, KEYS, STEPS = ["fog", "rain", "a long night"], ["a", "b", "c"], [0, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hunyuan_image3(tmp_path_factory.mktemp("hunyuan_image3") / "model")


def keeping(folder: Path, **options: Any) -> HunyuanImage3Pipeline:
    """A pipeline over its own weights."""
    bundle = HunyuanImage3Bundle(str(folder), trains="all")
    return HunyuanImage3Pipeline(bundle, FlowSDEStrategy(), replays_experts=True, **options)


def params(**changes: Any) -> DiffusionSamplingParams:
    fields: dict[str, Any] = {
        "num_inference_steps": 4,
        "guidance_scale": 1.0,
        "height": 32,
        "width": 96,
        "eta": 0.7,
        "sde_indices": STEPS,
        "autocast_precision": "fp32",
    }
    return DiffusionSamplingParams(**{**fields, **changes})


GUIDED: dict[str, Any] = {"guidance_scale": 2.5, "negative_prompt": ""}
WITHIN: dict[str, Any] = {**GUIDED, "sampler_kwargs": {"guidance_interval": [0.8, 1.0]}}
"""Step 0 is guided, step 2 is not."""


def rollout(
    pipeline: HunyuanImage3Pipeline, wanted: DiffusionSamplingParams, texts: list[str] = TEXTS
) -> tuple[dict[str, Condition], LatentSegment]:
    with pipeline.evaluating():
        conditions = pipeline.encode({"text": Texts(texts=texts)}, wanted)
        noise = initial_noise(KEYS, 0, pipeline.latent_shape(wanted))
        return conditions, pipeline.diffuse(conditions, noise, pipeline.sigmas(wanted), wanted, noise_keys=KEYS)


def replay(
    pipeline: HunyuanImage3Pipeline, conditions: Any, segment: LatentSegment, wanted: DiffusionSamplingParams
) -> Tensor:
    """Log-probs [B, S]."""
    rows = torch.arange(3)
    with pipeline.evaluating():
        columns = [
            pipeline.replay(conditions, segment, rows, torch.full_like(rows, step), wanted).logp_R for step in STEPS
        ]
    return torch.stack(columns, dim=1)


def other_gates(pipeline: HunyuanImage3Pipeline) -> dict[str, Tensor]:
    """Changes the gates; the weights that the model has then."""
    generator, changed = torch.Generator().manual_seed(9), dict(weights())
    with torch.no_grad():
        for name, parameter in pipeline.adapter.bundle.decoder.named_parameters():
            if ".gate." in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
                changed[name] = parameter.double()
    return changed


@pytest.mark.parametrize("guidance", [{}, GUIDED, WITHIN], ids=["plain", "guided", "within"])
@pytest.mark.parametrize("size", [None, 2])
def test_a_replay_at_the_rollouts_weights_has_ratio_one(guidance: Any, size: int | None, folder: Path) -> None:
    """Bit for bit: the same experts in the same order. With rows of the rollout, whatever a forward holds."""
    pipeline, wanted = keeping(folder, forward_batch_size=size), params(**guidance)
    conditions, segment = rollout(pipeline, wanted)
    kept = conditions[EXPERTS]
    assert isinstance(kept, ExpertCondition) and kept.steps == STEPS and kept.experts.shape[1] == 4
    assert segment.sde_logp is not None
    assert torch.equal((replay(pipeline, conditions, segment, wanted) - segment.sde_logp).exp(), torch.ones(3, 2))


@pytest.mark.parametrize("guidance", [{}, GUIDED, WITHIN], ids=["plain", "guided", "within"])
def test_kept_experts_are_used_after_the_gates_have_changed(guidance: Any, folder: Path) -> None:
    """Velocities are those of a recomputation in float64 that is given the experts; the gates' own differ."""
    pipeline, wanted = keeping(folder), params(**guidance)
    conditions, segment = rollout(pipeline, wanted)
    reference = Reference(other_gates(pipeline), TINY)
    free = {slot: value for slot, value in conditions.items() if slot != EXPERTS}
    replayed = replay(pipeline, conditions, segment, wanted)
    assert float((replayed - replay(pipeline, free, segment, wanted)).abs().max()) > 1e-4
    kept, slots = conditions[EXPERTS], [slot for slot in ("text", "negative_text") if slot in conditions]
    assert isinstance(kept, ExpertCondition)
    rows = torch.arange(3)
    for number, step in enumerate(STEPS):
        x_R, _, sigma_R, _ = segment.transitions(rows, torch.full_like(rows, step))
        with pipeline.evaluating():
            found = pipeline.velocity(conditions, x_R, sigma_R, torch.full_like(rows, step), wanted)
        for row, experts in enumerate(kept.unpack("experts")):
            contexts = [words(reference, conditions[slot], row) for slot in slots]
            lengths = [len(context.tokens) for context in contexts]
            parts = experts.long().split([*lengths, *[13] * (len(slots) * len(STEPS))])
            own = parts[len(slots) * (1 + number) : len(slots) * (2 + number)]
            velocities = [
                reference.velocity(
                    context, x_R[row], float(sigma_R[row]), list(torch.cat([said, drawn]).split(2, dim=-1))
                )
                for context, said, drawn in zip(contexts, parts[: len(slots)], own, strict=True)
            ]
            expected = velocities[0]
            if len(slots) == 2 and not (guidance is WITHIN and step == 2):
                expected = velocities[1] + 2.5 * (velocities[0] - velocities[1])
            torch.testing.assert_close(found[row].double(), expected, rtol=1e-4, atol=1e-4)


def words(reference: Reference, condition: Condition, row: int) -> TokenSequence:
    assert isinstance(condition, TextTokenCondition)
    sequence = TokenSequence()
    for number in condition.input_ids[row][condition.attention_mask[row].bool()].tolist():
        sequence.word(reference.word(number))
    return sequence


def test_any_part_and_order_of_a_rollout_keeps_its_own(folder: Path) -> None:
    pipeline, wanted = keeping(folder), params(**GUIDED)
    conditions, segment = rollout(pipeline, wanted)
    other_gates(pipeline)
    whole = replay(pipeline, conditions, segment, wanted)
    samples, steps = torch.tensor([2, 0, 2, 1]), torch.tensor([0, 2, 2, 0])
    with pipeline.evaluating():
        found = pipeline.replay(conditions, segment, samples, steps, wanted).logp_R
    torch.testing.assert_close(found, whole[samples, (steps == 2).long()], rtol=1e-5, atol=1e-6)


def test_indices_of_another_batch_are_refused(folder: Path) -> None:
    """Another length, other words of the same length, and images where texts are replayed too."""
    pipeline, wanted = keeping(folder), params()
    conditions, segment = rollout(pipeline, wanted)
    kept = conditions[EXPERTS]
    with pytest.raises(ContractError, match=r"expert indices of another batch: rows \[0, 1, 2\]"):
        replay(pipeline, {**conditions, EXPERTS: kept.select([1, 2, 0])}, segment, wanted)
    others, _ = rollout(pipeline, wanted, ["fig", "rain", "a long night"])
    with pytest.raises(ContractError, match=r"expert indices of another batch: rows \[0\] of 3"):
        replay(pipeline, {**conditions, EXPERTS: others[EXPERTS]}, segment, wanted)


def test_steps_without_kept_experts_are_refused(folder: Path) -> None:
    pipeline, wanted = keeping(folder), params()
    conditions, segment = rollout(pipeline, wanted)
    x = segment.latents[:, 0]
    with pytest.raises(ContractError, match=r"kept of the steps \[0, 2\], and asked for at \[1\]"), torch.no_grad():
        pipeline.velocity(conditions, x, torch.full((3,), 0.5), torch.ones(3, dtype=torch.long), wanted)


def test_nothing_is_kept_where_no_step_is_stochastic(folder: Path) -> None:
    conditions, _ = rollout(keeping(folder), params(eta=0.0, sde_indices=None))
    assert EXPERTS not in conditions
