"""Combines stage engines in different groups of workers into one engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from unirl.distributed.held import Held
from unirl.types.copies import Copies
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import DiffusionPlan, RolloutReq
from unirl.types.sampling import StagedSamplingParams
from unirl.types.stages import staged_params

Engine = Any  # Any: the role of a StagesEngine, whose methods follow its markers


class LedStages:
    """Passes a request from group to group, in the order of its stages. The response moves from worker to worker.

    `abort` ends what runs; the stages of other groups do not begin. Of requests with a number, whose calls begin as
    their gates say, they wait in the pools.
    engines: by track; stages of one group share an engine.
    """

    _is_ending = False

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = dict(engines)

    def generate(self, req: RolloutReq, policy: Copies = None, begun: Held | None = None) -> Held:
        """The tracks of all stages that the request names, held by the workers of the last stage, or of the one after
        which it was ended early. begun: what an earlier call made of the request; it is not released."""
        if req.number is None:  # the others are made in several threads at once
            self._is_ending = False
        held = begun
        for engine, params in self._legs(req):
            own = req.replace(sampling_params=params)
            if held is not None and own.is_answered_by(held.meta):
                continue
            if held is not begun and self._is_ending and req.number is None:
                break
            above = held
            try:
                held = engine.generate(own, policy=policy, **({} if above is None else {"begun": above}))
            finally:
                if above is not None and above is not begun:
                    above.release()
            if not own.is_answered_by(held.meta):
                break
        if held is None or held is begun:
            raise ContractError("a request for several stages names none that is to be made")
        return held

    def abort(self) -> None:
        """All engines, see StagesEngine."""
        self._is_ending = True
        for engine in dict.fromkeys(self._engines.values()):
            engine.abort()

    def plans(self, params: StagedSamplingParams) -> dict[str, DiffusionPlan]:
        """Plan of every diffusion stage, see StagesEngine."""
        found = {}
        for engine in dict.fromkeys(self._engine(track) for track in params.stages):
            own = {track: each for track, each in params.stages.items() if self._engines[track] is engine}
            found.update(engine.plans(dataclasses.replace(params, stages=own)))
        return {track: found[track] for track in params.stages if track in found}

    def check_prompts(self, req: RolloutReq) -> None:
        """Raise ConfigError if the first stage cannot read a prompt."""
        engine, params = self._legs(req)[0]
        engine.check_prompts(req.replace(sampling_params=params))

    def sleep(self) -> None:
        """All engines."""
        for engine in dict.fromkeys(self._engines.values()):
            engine.sleep()

    def wake_up(self) -> None:
        """All engines."""
        for engine in dict.fromkeys(self._engines.values()):
            engine.wake_up()

    def _engine(self, track: str) -> Engine:
        if track not in self._engines:
            raise ConfigError(f"the request names a stage {track!r}; there are {', '.join(self._engines)}.")
        return self._engines[track]

    def _legs(self, req: RolloutReq) -> list[tuple[Engine, StagedSamplingParams]]:
        """Consecutive stages of the same engine, joined to one call."""
        params = staged_params(req)
        legs: list[tuple[Engine, dict[str, Any]]] = []  # Any: parameters of any kind of stage
        for track, own in params.stages.items():
            engine = self._engine(track)
            if not legs or legs[-1][0] is not engine:
                legs.append((engine, {}))
            legs[-1][1][track] = own
        return [(engine, dataclasses.replace(params, stages=stages)) for engine, stages in legs]
