"""Combines the engines of several stages: P prompts become P x N texts and P x N x M images, or any such tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor

from unirl.rollout.checks import diffusion_params, noise_recipe, pinned_sigmas, starting_latents
from unirl.rollout.engine.base import BaseRolloutEngine
from unirl.rollout.stages.reading import texts_of
from unirl.types.batch import rows_by
from unirl.types.conditions import ImageLatentCondition
from unirl.types.copies import Copies, copy_of
from unirl.types.errors import ConfigError, ContractError
from unirl.types.noise import noise_keys
from unirl.types.protocols.engines import DiffusionRolloutEngine, ResumingEngine, RolloutEngine
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import DiffusionPlan, RolloutReq, RolloutResp, RolloutTrack
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams, StagedSamplingParams
from unirl.types.stages import Above, BuiltStage, Reading, Size, staged_params

StageParams = ARSamplingParams | DiffusionSamplingParams


class StagesEngine(BaseRolloutEngine):
    """Runs the engine of each stage in turn. A stage makes a track that grows from its parent's (`RolloutTrack.fork`),
    with `samples_per_prompt` samples per sample of the parent.

    The first track holds the user's request, which scorers see. A request may name only some stages: a stage whose
    parent is not among them reads the request itself, for example to draw images without a prompt writer.
    `abort` reaches the engines of all stages that can resume. The stage that runs returns what it has, or runs to its
    end; later ones do not begin.
    Metric per latent sample: `cut_tokens`, the tokens of its prompt that the model does not read.

    stages: by track name, each after its parent.
    """

    can_abort: ClassVar[bool] = True
    can_resume: ClassVar[bool] = True
    _is_ending = False
    _uncut: RolloutEngine | None = None
    """What runs and is not to be cut."""

    def __init__(self, stages: Mapping[str, BuiltStage]) -> None:
        self._stages = dict(stages)
        above = {stage.grows_from: stage.parent_pipeline for stage in stages.values() if stage.grows_from is not None}
        self._pipelines = {**above, **{track: stage.pipeline for track, stage in stages.items()}}
        self._engines = list({id(stage.engine): stage.engine for stage in stages.values()}.values())
        """Each once: stages of a policy may share one."""
        self._resuming = list(
            {id(stage.engine): stage.engine for stage in stages.values() if stage.can_resume}.values()
        )

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def plans(self, params: StagedSamplingParams) -> dict[str, DiffusionPlan]:
        """Sigmas, latent shape and kernel of every diffusion stage.

        Raises ConfigError if noise levels depend on a size that a parent stage may choose.
        """
        found = {}
        for track, own in params.stages.items():
            if isinstance(own, DiffusionSamplingParams):
                stage = self._stage(track)
                plan = cast("DiffusionRolloutEngine", stage.engine).plan(own)
                self._check_sizes(track, own, plan)
                grows = stage.grows_from in params.stages
                found[track] = dataclasses.replace(plan, sigmas=stage.reader.levels(plan.sigmas)) if grows else plan
        return found

    def _check_sizes(self, track: str, params: DiffusionSamplingParams, plan: DiffusionPlan) -> None:
        stage = self._stages[track]
        parent = None if stage.grows_from is None else self._pipelines[stage.grows_from]
        if parent is None:
            return  # it reads no sizes
        for height, width in stage.reader.possible_sizes(parent):
            sized = dataclasses.replace(params, height=height, width=width)
            if not torch.equal(stage.pipeline.sigmas(sized), plan.sigmas):
                raise ConfigError(
                    f"the stage {stage.grows_from} chooses the size of what {track} draws, and the noise levels of "
                    f"{height} x {width} pixels are not those of {params.height} x {params.width}, while a rollout has "
                    f"one schedule. Set chooses_size: false in the pipeline of {stage.grows_from}, or a schedule that "
                    "does not depend on the resolution."
                )

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def check_prompts(self, req: RolloutReq) -> None:
        """Raise ConfigError if the first stage cannot read a prompt."""
        track, params = next(iter(staged_params(req).stages.items()))
        stage = self._stage(track)
        stage.engine.check_prompts(_of_prompt(req, params, stage.reader.of_prompt(req.primitives)))

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: Copies = None, begun: RolloutResp | None = None) -> RolloutResp:
        """Sample the tracks of the stages that the request names, for every row of this rank's request.

        policy: named copies of the weights, by track or policy. begun: what engines of other stages, or earlier calls,
        have made of this rank's request; its tracks are included in the response, finished ones as they are.
        Raises what the engines raise, ConfigError for an unknown stage, and ContractError for a request of one stage.
        """
        self._is_ending, self._uncut = False, None
        resp, has_run = RolloutResp() if begun is None else begun, False
        for track, params in staged_params(req).stages.items():
            stage = self._stage(track)
            if resp.has_all_of(track):
                continue
            if has_run and self._is_ending:
                break
            copy, tracks, has_run = copy_of(policy, track, stage.policy), dict(resp.tracks), True
            if stage.grows_from in tracks:
                self._grow(tracks, track, req, params, copy)
            else:
                tracks[track] = self._root(track, req, params, copy, tracks.get(track))
            resp = dataclasses.replace(resp, tracks=tracks)
            if not tracks[track].is_whole:
                break
        return resp

    @distributed(Dispatch.BROADCAST, Collect.FIRST, is_control=True)
    def abort(self) -> None:
        """End the `generate` that runs in another thread. A stage whose engine cannot resume runs to its end."""
        self._is_ending = True
        for engine in self._resuming:
            if engine is not self._uncut:
                engine.abort()

    def _stage(self, track: str) -> BuiltStage:
        if track not in self._stages:
            raise ConfigError(f"the request names a stage {track!r}; there are {', '.join(self._stages)}.")
        return self._stages[track]

    def _root(
        self, track: str, req: RolloutReq, params: StageParams, copy: str | None, begun: RolloutTrack | None
    ) -> RolloutTrack:
        """The track of a stage that reads the request itself."""
        stage = self._stages[track]
        is_first = stage.grows_from is None
        reading = stage.reader.of_prompt(req.primitives) if is_first else Reading(inputs=dict(req.primitives))
        asked = _pinned(_of_prompt(req, params, reading), req.plans.get(track), params)
        made = self._made(track, asked, copy, begun)
        return self._counted(made, track, asked).replace(primitives=dict(req.primitives))

    def _made(self, track: str, req: RolloutReq, copy: str | None, begun: RolloutTrack | None) -> RolloutTrack:
        """What the engine of a stage makes of its request."""
        engine = self._stages[track].engine
        if begun is None:
            return engine.generate(req, copy).root_track()
        alone = dataclasses.replace(begun, parent_track=None)
        return cast("ResumingEngine", engine).generate(req, copy, RolloutResp(tracks={track: alone})).root_track()

    def _grow(
        self, tracks: dict[str, RolloutTrack], track: str, req: RolloutReq, params: StageParams, copy: str | None
    ) -> None:
        """Add the track of a stage that grows from another, and add the counts of reading to that other track."""
        stage = self._stages[track]
        parent = stage.grows_from or ""
        reading = stage.reader.of_tracks(self._above(tracks, parent, req))
        tracks[parent] = tracks[parent].replace(counts={**tracks[parent].counts, **reading.counts})
        branch = params.samples_per_prompt
        children = tracks[parent].fork(parent, track, branch)
        asked = RolloutReq(
            sample_ids=children.sample_ids,
            group_ids=children.group_ids,
            primitives={slot: value.repeat_interleave(branch) for slot, value in reading.inputs.items()},
            sampling_params=params,
            rollout_id=req.rollout_id,
        )
        asked = _pinned(asked, req.plans.get(track), params)
        if reading.start is not None:
            asked = _begun(asked, reading.start.repeat_interleave(branch, dim=0))
        sizes = None
        if reading.sizes is not None and isinstance(params, DiffusionSamplingParams):
            sizes = [size or (params.height, params.width) for size in reading.sizes for _ in range(branch)]
        grown = [
            (rows, dataclasses.replace(own, parent_track=parent, parent_ids=[children.group_ids[row] for row in rows]))
            for rows, own in self._rows_made(track, asked, copy, tracks.get(track), sizes)
        ]
        tracks[track] = grown[0][1] if len(grown) == 1 else RolloutTrack.concat_rows(grown)

    def _rows_made(
        self, track: str, req: RolloutReq, copy: str | None, begun: RolloutTrack | None, sizes: Sequence[Size] | None
    ) -> list[tuple[list[int], RolloutTrack]]:
        """Rows of a stage's request with their samples: those that were begun, whole or continued, and then the others,
        unless `abort` comes first. begun: for some of the rows; None: for none."""
        places = {} if begun is None else {name: row for row, name in enumerate(begun.sample_ids)}
        parts, params = list[tuple[list[int], RolloutTrack]](), req.sampling_params
        if begun is not None and places:
            rows = [row for row, name in enumerate(req.sample_ids) if name in places]
            own = begun.select([places[req.sample_ids[row]] for row in rows])
            if not own.is_whole:
                asked = req.select(rows)
                own = self._counted(self._made(track, asked, copy, own), track, asked)
            parts.append((rows, own))
        rows = [row for row, name in enumerate(req.sample_ids) if name not in places]
        if not rows or not all(own.is_whole for _, own in parts):
            return parts
        asked = req.select(rows) if places else req
        if sizes is not None and isinstance(params, DiffusionSamplingParams):
            made, own = self._made_by_size(track, asked, params, [sizes[row] for row in rows], copy)
            rows, asked = [rows[row] for row in made], asked.select(made)
        else:
            own = self._made(track, asked, copy, None)
        return [*parts, (rows, self._counted(own, track, asked))]

    def _above(self, tracks: Mapping[str, RolloutTrack], parent: str, req: RolloutReq) -> Above:
        """Inputs of a stage that grows from `parent`; rows of earlier tracks and of the request are those of each
        sample's ancestors."""
        lineage = RolloutResp(tracks=dict(tracks)).lineage(parent)
        above = {name: tracks[name] if name == parent else tracks[name].select(rows) for name, rows in lineage.items()}
        of_root = next(reversed(lineage.values()))
        asked = {slot: value.select(of_root) for slot, value in req.primitives.items()}
        return Above(asked=asked, tracks=above, pipelines=self._pipelines)

    def _made_by_size(
        self,
        track: str,
        req: RolloutReq,
        params: DiffusionSamplingParams,
        sizes: Sequence[Size],
        copy: str | None,
    ) -> tuple[list[int], RolloutTrack]:
        """Images of these sizes per row, and their rows: all, or those of the sizes that were begun before `abort`.

        The engine is called once per size, in order of first appearance, and not cut within one.
        """
        stage, made = self._stages[track], list[tuple[list[int], RolloutTrack]]()
        self._uncut = stage.engine
        for (height, width), own in rows_by(sizes).items():
            if made and self._is_ending:
                break
            of_size = dataclasses.replace(params, height=height, width=width)
            shape = list(stage.pipeline.latent_shape(of_size))
            asked = req.select(own).replace(sampling_params=of_size, init_noise_latent_shape=shape)
            made.append((own, stage.engine.generate(asked, copy).root_track().sized(params)))
        self._uncut = None
        return sorted(row for own, _ in made for row in own), RolloutTrack.concat_rows(made)

    def _counted(self, made: RolloutTrack, track: str, req: RolloutReq) -> RolloutTrack:
        params = req.sampling_params
        if not isinstance(params, DiffusionSamplingParams):
            return made
        texts = texts_of(req.primitives)
        distinct = list(dict.fromkeys(texts))
        cut = dict(zip(distinct, self._pipelines[track].cut_tokens(distinct, params), strict=True))
        return made.replace(counts={**made.counts, "cut_tokens": torch.tensor([float(cut[text]) for text in texts])})

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def sleep(self) -> None:
        """All engines."""
        for engine in self._engines:
            engine.sleep()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def wake_up(self) -> None:
        """All engines."""
        for engine in self._engines:
            engine.wake_up()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def shutdown(self) -> None:
        """All engines."""
        for engine in self._engines:
            engine.shutdown()


def _of_prompt(req: RolloutReq, params: StageParams, reading: Reading) -> RolloutReq:
    return req.replace(primitives=dict(reading.inputs), sampling_params=params, plans={})


def _pinned(req: RolloutReq, plan: DiffusionPlan | None, params: StageParams) -> RolloutReq:
    """The request of one stage; for a diffusion stage with its sigmas and noise ids."""
    if not isinstance(params, DiffusionSamplingParams):
        return req
    if plan is None:
        raise ContractError("a request for a stage of latents needs its plan")
    return req.replace(
        sigmas=plan.sigmas,
        init_noise_group_ids=noise_keys(
            req.rollout_id, req.sample_ids, req.group_ids, same_noise=params.init_same_noise
        ),
        init_noise_latent_shape=list(plan.latent_shape),
    )


def _begun(req: RolloutReq, clean: Tensor) -> RolloutReq:
    """The request with initial latents mixed from clean latents [B, ...] and its noise at the first noise level."""
    params = diffusion_params(req)
    noise, sigmas = starting_latents(noise_recipe(req, params)), pinned_sigmas(req, params)
    start = torch.lerp(clean.to(noise), noise, float(sigmas[0]))
    return req.replace(request_conditions={"initial_latents": ImageLatentCondition(latents=start)})
