"""What every adapter must satisfy, as functions of a `Case`. A new model adds its case to `test_contract.py`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unirl.models.pipeline import DiffusionPipeline
from unirl.sde.loop import Velocity, transition_rows
from unirl.sde.noise import initial_noise
from unirl.types.batch import same_value
from unirl.types.conditions import Condition, ImageLatentCondition
from unirl.types.errors import ContractError
from unirl.types.media import Images, Primitive, Texts
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

TEXTS = ["a red cat", 'two blue dogs on a "hill"', "fog"]
KEYS = ["r0:a", "r0:b", "r0:c"]


@dataclass
class Case:
    """One adapter under test: three prompts, guidance on, every step stochastic, float32."""

    pipeline: DiffusionPipeline
    params: DiffusionSamplingParams
    frozen: list[nn.Module]
    """Modules that must never receive a gradient."""
    inputs: Callable[[int], dict[str, Primitive]] = lambda num_samples: {}
    """What a request brings besides its texts."""
    unguided: Mapping[str, Any] = field(default_factory=lambda: {"guidance_scale": 1.0})
    """What switches guidance off."""
    cut_frames: int = 0
    """Sampled frames that are not decoded."""
    has_history: bool = False
    """True if a velocity needs the clean latents of earlier chunks, in the slot "history"."""
    _rollout: tuple[dict[str, Condition], LatentSegment] | None = field(default=None, init=False)

    @property
    def primitives(self) -> dict[str, Primitive]:
        return {"text": Texts(texts=list(TEXTS)), **self.inputs(len(TEXTS))}

    def rollout(self) -> tuple[dict[str, Condition], LatentSegment]:
        """Conditions and trajectory of the three prompts: sampled once, and read-only."""
        if self._rollout is None:
            with self.pipeline.evaluating():
                conditions = self.pipeline.encode(self.primitives, self.params)
                segment = self.sample(conditions, KEYS)
            if self.has_history:
                conditions["history"] = ImageLatentCondition(latents=segment.clean_latents)
            self._rollout = conditions, segment
        return self._rollout

    def sample(self, conditions: dict[str, Condition], keys: list[str]) -> LatentSegment:
        """Trajectories of given conditions."""
        noise = initial_noise(keys, self.params.seed, self.pipeline.latent_shape(self.params))
        sigmas = self.pipeline.sigmas(self.params)
        with self.pipeline.evaluating():
            return self.pipeline.diffuse(conditions, noise, sigmas, self.params, noise_keys=keys)

    def without_guidance(self) -> DiffusionSamplingParams:
        """The same sampling with guidance off."""
        return dataclasses.replace(self.params, **self.unguided)


def latent_shape_is_what_diffuse_returns(case: Case) -> None:
    conditions, segment = case.rollout()
    shape = case.pipeline.latent_shape(case.params)
    assert segment.clean_latents.shape == (3, *shape)
    assert segment.modality is case.pipeline.adapter.modality
    assert all(condition.batch_size == 3 for condition in conditions.values())
    assert case.pipeline.adapter.image_seq_len(case.params) > 0
    assert torch.equal(segment.sigmas, case.pipeline.sigmas(case.params))


def replay_of_the_rollout_rows_is_bit_equal(case: Case) -> None:
    conditions, segment = case.rollout()
    assert segment.sde_logp is not None
    for slot, step in enumerate(segment.sde_indices):
        steps = torch.full((3,), step)
        replayed = case.pipeline.replay(conditions, segment, torch.arange(3), steps, case.params)
        assert torch.equal(replayed.logp_R.detach(), segment.sde_logp[:, slot])
        assert replayed.logp_R.requires_grad and replayed.logp_R.dtype == torch.float32


def replay_of_all_steps_at_once_agrees(case: Case) -> None:
    """1e-6 relative: another batch size changes the order of float32 sums, nothing else."""
    conditions, segment = case.rollout()
    assert segment.sde_logp is not None
    samples, steps = transition_rows(3, segment.sde_indices)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
    replayed = case.pipeline.replay(conditions, segment, samples[order], steps[order], case.params)
    expected = segment.sde_logp.flatten()[order]
    torch.testing.assert_close(replayed.logp_R.detach(), expected, rtol=1e-6, atol=1e-6)
    assert replayed.mean.shape[0] == replayed.std_R.shape[0] == len(samples)


def guidance_one_is_no_guidance(case: Case) -> None:
    """A negative condition that is there but not asked for has no influence, bit for bit."""
    conditions, segment = case.rollout()
    off = case.without_guidance()
    alone = case.pipeline.encode(case.primitives, off)
    if case.has_history:
        alone["history"] = conditions["history"]
    assert set(alone) == {name for name in conditions if not name.startswith("negative_")}
    x, sigma, step = _mixed_rows(segment)
    with case.pipeline.evaluating():
        plain = case.pipeline.velocity(alone, x, sigma, step, off)
        ignored = case.pipeline.velocity(conditions, x, sigma, step, off)
        guided = case.pipeline.velocity(conditions, x, sigma, step, case.params)
    assert torch.equal(plain, ignored)
    assert not torch.allclose(plain, guided, atol=1e-4)


def rounding(velocity: torch.Tensor) -> float:
    """How far two forwards of one row in batches of different sizes may lie apart in float32.

    A velocity may be a small difference of large numbers, so its size is what rounding is measured by; guidance of 4
    weighs the rounding of its forwards by up to 7, and how products are summed differs between kinds of CPUs.
    """
    return 3e-6 * max(1.0, float(velocity.abs().max()))


def per_row_sigmas_equal_per_step_calls(case: Case) -> None:
    conditions, segment = case.rollout()
    x, sigma, step = _mixed_rows(segment)
    assert len(set(sigma.tolist())) == 3
    with case.pipeline.evaluating():
        mixed = case.pipeline.velocity(conditions, x, sigma, step, case.params)
        for row in range(3):
            one = {name: condition.select([row]) for name, condition in conditions.items()}
            cut = slice(row, row + 1)
            alone = case.pipeline.velocity(one, x[cut], sigma[cut], step[cut], case.params)
            torch.testing.assert_close(mixed[cut], alone, rtol=1e-5, atol=rounding(mixed))
    assert mixed.dtype == torch.float32


def a_forward_batch_size_changes_nothing(case: Case) -> None:
    conditions, segment = case.rollout()
    x, sigma, step = _mixed_rows(segment)
    pipeline = case.pipeline
    with case.pipeline.evaluating():
        whole = case.pipeline.velocity(conditions, x, sigma, step, case.params)
        pipeline.forward_batch_size = 2
        parts = case.pipeline.velocity(conditions, x, sigma, step, case.params)
    pipeline.forward_batch_size = None
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=rounding(whole))


def a_sample_does_not_depend_on_its_neighbours(case: Case) -> None:
    """The trajectory of one key alone and in a batch; 1e-4 after five steps that add up rounding."""
    conditions, segment = case.rollout()
    one = {name: condition.select([1]) for name, condition in conditions.items()}
    alone = case.sample(one, KEYS[1:2])
    torch.testing.assert_close(alone.clean_latents[0], segment.clean_latents[1], rtol=1e-4, atol=1e-4)


def samples_with_one_start_take_their_first_steps_together(case: Case) -> None:
    """Two prompts, two samples each, stochastic steps 2 and 3: steps 0 and 1 run on two rows instead of four."""
    params = dataclasses.replace(case.params, sde_indices=[2, 3])
    pipeline, keys = case.pipeline, ["a:0", "b:0", "a:1", "b:1"]
    starts = ["a", "b", "a", "b"]
    with pipeline.evaluating():
        inputs = {name: value.select([0, 1, 0, 1]) for name, value in case.inputs(2).items()}
        conditions = pipeline.encode({"text": Texts(texts=[TEXTS[0], TEXTS[1]] * 2), **inputs}, params)
        noise = initial_noise(starts, params.seed, pipeline.latent_shape(params))
        sigmas = pipeline.sigmas(params)
        apart = pipeline.diffuse(conditions, noise, sigmas, params, noise_keys=keys)
        num_rows: list[int] = []
        velocity = pipeline.bound

        def counted(conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
            bound = velocity(conditions, params)

            def run(x: Tensor, sigma: Tensor, step: Tensor) -> Tensor:
                num_rows.append(len(x))
                return bound(x, sigma, step)

            return run

        pipeline.bound = counted
        try:
            together = pipeline.diffuse(conditions, noise, sigmas, params, noise_keys=keys, start_keys=starts)
        finally:
            del pipeline.bound
    assert num_rows == [2, 2, *[4] * (params.num_inference_steps - 2)]
    assert (together.indices, together.sde_indices) == (apart.indices, apart.sde_indices)
    torch.testing.assert_close(together.latents, apart.latents, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together.sde_logp, apart.sde_logp, rtol=1e-4, atol=1e-4)


def shared_steps_are_taken_once_and_replay_bit_equal(case: Case) -> None:
    """A tree of two by two from step 1 of each of two prompts: a shared step has as many rows as there are nodes."""
    tree = {"branch_steps": [1, 2], "branch_factors": [2, 2]}
    params = dataclasses.replace(
        case.params, sde_indices=[1, 2], samples_per_prompt=4, init_same_noise=True, keep_latents="transitions", **tree
    )
    pipeline, starts, keys = (
        case.pipeline,
        ["a"] * 4 + ["b"] * 4,
        [f"{prompt}:{leaf}" for prompt in "ab" for leaf in range(4)],
    )
    with pipeline.evaluating():
        inputs = {name: value.select([0] * 4 + [1] * 4) for name, value in case.inputs(2).items()}
        conditions = pipeline.encode({"text": Texts(texts=[TEXTS[0]] * 4 + [TEXTS[1]] * 4), **inputs}, params)
        noise = initial_noise(starts, params.seed, pipeline.latent_shape(params))
        segment = pipeline.diffuse(
            conditions, noise, pipeline.sigmas(params), params, noise_keys=keys, start_keys=starts
        ).replace(params=params)
        assert segment.sde_logp is not None
        for step, size in ((1, 2), (2, 1)):
            first = torch.arange(0, 8, size)
            replayed = pipeline.replay(conditions, segment, first, torch.full_like(first, step), params)
            column = segment.sde_indices.index(step)
            assert torch.equal(replayed.logp_R, segment.sde_logp[first, column])
            assert torch.equal(segment.sde_logp[:, column], segment.sde_logp[first, column].repeat_interleave(size))
    assert segment.latents_at(1).unique(dim=0).shape[0] == 2
    assert segment.latents_at(2).unique(dim=0).shape[0] == 4
    assert segment.clean_latents.unique(dim=0).shape[0] == 8


def samples_with_their_own_step_are_those_of_that_step_alone(case: Case) -> None:
    """Three samples of one start, which part at their own steps, as if only that step were stochastic in each."""
    params = dataclasses.replace(
        case.params, sde_indices=[1, 2, 3], one_step="branch", samples_per_prompt=3, init_same_noise=True
    )
    pipeline, starts, keys, own = case.pipeline, ["a"] * 3, ["a:0", "a:1", "a:2"], [2, 1, 3]
    with pipeline.evaluating():
        inputs = {name: value.select([0] * 3) for name, value in case.inputs(1).items()}
        conditions = pipeline.encode({"text": Texts(texts=[TEXTS[0]] * 3), **inputs}, params)
        noise = initial_noise(starts, params.seed, pipeline.latent_shape(params))
        sigmas = pipeline.sigmas(params)
        segment = pipeline.diffuse(
            conditions, noise, sigmas, params, noise_keys=keys, start_keys=starts, own_steps=own
        ).replace(params=params)
        assert segment.sde_logp is not None and segment.own_steps is not None
        replayed = pipeline.replay(conditions, segment, torch.arange(3), torch.tensor(own), params)
        for row, step in enumerate(own):
            alone = pipeline.diffuse(
                {name: value.select([row]) for name, value in conditions.items()},
                noise[row : row + 1],
                sigmas,
                dataclasses.replace(params, sde_indices=[step], one_step=None),
                noise_keys=[keys[row]],
            )
            assert alone.sde_logp is not None
            for position in (step, step + 1, segment.num_steps):
                torch.testing.assert_close(
                    segment.latents_at(position)[row], alone.latents_at(position)[0], rtol=1e-4, atol=1e-4
                )
            column = segment.sde_indices.index(step)
            torch.testing.assert_close(segment.sde_logp[row, column], alone.sde_logp[0, 0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(replayed.logp_R[row], alone.sde_logp[0, 0], rtol=1e-4, atol=1e-4)
    assert segment.sde_logp.isfinite().sum() == 3
    with pytest.raises(ContractError, match="not their samples' own"):
        pipeline.replay(conditions, segment, torch.tensor([0]), torch.tensor([1]), params)


def in_parts(sample: Callable[..., LatentSegment], cuts: Sequence[int]) -> LatentSegment:
    """What `sample` gives whose walk is ended at each of these steps, and goes on. No step of it is taken twice."""
    segment: LatentSegment | None = None
    for cut in cuts:
        asked = iter([*[False] * (cut - (0 if segment is None else int(segment.reached[0]))), True])
        segment = sample(begun=segment, is_ending=lambda asked=asked: next(asked))
        assert segment.reached.tolist() == [cut] * segment.batch_size and segment.unfinished is not None
    return sample(begun=segment)


def ended_early_and_continued_it_has_the_bits_of_the_whole(case: Case) -> None:
    """At each step, at several, and before the first; also where samples share steps, and where a solver remembers."""
    pipeline, starts, keys = case.pipeline, ["a"] * 4 + ["b"] * 4, [f"{at}:{leaf}" for at in "ab" for leaf in range(4)]
    tree = {"branch_steps": [1, 2], "branch_factors": [2, 2]}
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"sde_indices": [2], "init_same_noise": True}, {"start_keys": starts}),
        ({"sde_indices": [1], "post_solver": "dpmpp_2m", "keep_latents": "all"}, {}),
        ({"sde_indices": [0], "post_solver": "unipc"}, {}),
        ({"eta": 0.0, "sde_indices": [], "post_solver": "unipc", "keep_latents": "last"}, {}),
        ({"sde_indices": [1, 2], "init_same_noise": True, **tree}, {"start_keys": starts}),
        (
            {"sde_indices": [1, 2], "init_same_noise": True, "one_step": "branch"},
            {"start_keys": starts, "own_steps": [2, 1, 2, 1] * 2},
        ),
    ]
    for changes, options in ways:
        params = dataclasses.replace(case.params, samples_per_prompt=4, **changes)
        with pipeline.evaluating():
            inputs = {name: value.select([0] * 4 + [1] * 4) for name, value in case.inputs(2).items()}
            conditions = pipeline.encode({"text": Texts(texts=[TEXTS[0]] * 4 + [TEXTS[1]] * 4), **inputs}, params)
            noise = initial_noise(starts if options else keys, params.seed, pipeline.latent_shape(params))
            sample = functools.partial(
                pipeline.diffuse, conditions, noise, pipeline.sigmas(params), params, noise_keys=keys, **options
            )
            whole, steps = sample(), range(1, params.num_inference_steps)
            singles = steps if not changes or params.eta == 0 else [2]  # each way at each step takes minutes
            for cuts in (*([step] for step in singles), list(steps), [0, 2, 2, 4]):
                found = in_parts(sample, cuts)
                assert found.unfinished is None and found.indices == whole.indices
                assert same_value(found, whole), (changes, cuts)


def gradients_reach_what_trains_and_nothing_else(case: Case) -> None:
    conditions, segment = case.rollout()
    samples, steps = transition_rows(3, segment.sde_indices)
    trainable = case.pipeline.bundle.trainable_modules()
    case.pipeline.replay(conditions, segment, samples, steps, case.params).logp_R.sum().backward()
    for name, module in trainable.items():
        total = sum(float(p.grad.abs().sum()) for p in module.parameters() if p.grad is not None)
        assert total > 0, f"no gradient reached {name}"
        module.zero_grad()
    for module in case.frozen:
        assert all(p.grad is None and not p.requires_grad for p in module.parameters())


def conditions_survive_select_and_concat(case: Case) -> None:
    conditions, _ = case.rollout()
    for condition in conditions.values():
        shards = [condition.select([0]), condition.select([1, 2])]
        assert same_value(type(condition).concat(shards), condition)


def decode_gives_pixels(case: Case) -> None:
    _, segment = case.rollout()
    with case.pipeline.evaluating():
        media = case.pipeline.decode(segment.clean_latents, case.params)
    params = case.params
    pixels = media.pixels if isinstance(media, Images) else media.frames
    num_frames = 1 if isinstance(media, Images) else params.num_frames - case.cut_frames
    assert media.batch_size == 3
    assert pixels.shape == (3 * num_frames, 3, params.height, params.width)
    assert pixels.dtype == torch.float32 and 0 <= float(pixels.min()) and float(pixels.max()) <= 1


def evaluating_restores_every_mode(case: Case) -> None:
    modules = list(case.pipeline.bundle.trainable_modules().values())
    for module in modules:
        module.train()
        next(module.children()).eval()
    before = [part.training for module in modules for part in module.modules()]
    with case.pipeline.evaluating():
        assert not any(part.training for module in modules for part in module.modules())
        assert not torch.is_grad_enabled()
    assert [part.training for module in modules for part in module.modules()] == before
    assert torch.is_grad_enabled()
    for module in modules:
        module.eval()


def _mixed_rows(segment: LatentSegment) -> tuple[Tensor, Tensor, Tensor]:
    """Three rows at the first, a middle and the last stochastic step."""
    chosen = [segment.sde_indices[0], segment.sde_indices[len(segment.sde_indices) // 2], segment.sde_indices[-1]]
    steps = torch.tensor(chosen)
    x, _, sigma, _ = segment.transitions(torch.arange(3), steps)
    return x, sigma, steps


CHECKS = [
    latent_shape_is_what_diffuse_returns,
    replay_of_the_rollout_rows_is_bit_equal,
    replay_of_all_steps_at_once_agrees,
    guidance_one_is_no_guidance,
    per_row_sigmas_equal_per_step_calls,
    a_forward_batch_size_changes_nothing,
    a_sample_does_not_depend_on_its_neighbours,
    samples_with_one_start_take_their_first_steps_together,
    shared_steps_are_taken_once_and_replay_bit_equal,
    samples_with_their_own_step_are_those_of_that_step_alone,
    ended_early_and_continued_it_has_the_bits_of_the_whole,
    gradients_reach_what_trains_and_nothing_else,
    conditions_survive_select_and_concat,
    decode_gives_pixels,
    evaluating_restores_every_mode,
]

ALONE = (
    samples_with_one_start_take_their_first_steps_together,
    shared_steps_are_taken_once_and_replay_bit_equal,
    samples_with_their_own_step_are_those_of_that_step_alone,
    ended_early_and_continued_it_has_the_bits_of_the_whole,
)
"""What needs samples that share steps or end early, which a model that makes chunks refuses or leaves out."""
