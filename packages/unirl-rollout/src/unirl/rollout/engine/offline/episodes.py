"""Plays moves from the data instead of a policy's, so that cloning of demonstrations looks like any other rollout.

A demonstration is the seed of a start and the moves from there: what was seen is made again by the environment.
Requests whose rows bring no moves, such as evaluations, are played by the policy.
Legend: n decisions, T moves of a demonstration, H moves of a chunk, D numbers of a move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from unirl.rollout.engine.episodes.engine import EpisodesEngine
from unirl.rollout.environments.vector import Played, VectorEnvironment
from unirl.types.actions import DrawnChunks
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.episodes import MOVES
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import ImitatingPipeline
from unirl.types.protocols.training import ShardedPolicyStore
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ActionSamplingParams


@bounded("engine")
class OfflineEpisodesEngine(EpisodesEngine):
    """Plays `metadata.moves` of the rows of a request, [[D numbers in [-1, 1]], ...], from their seeds; by the policy
    if they bring none. An episode ends with its moves, or where its environment ends it before.

    Arguments: see `EpisodesEngine`. Rows have no log-probs.
    Raises ConfigError for moves of another size, ContractError if some rows alone bring moves.
    """

    needs_moves: ClassVar[bool] = True
    gives_logp: ClassVar[bool] = False

    def __init__(
        self,
        pipeline: ImitatingPipeline,
        policies: ShardedPolicyStore | None = None,
        *,
        environment: VectorEnvironment,
        forward_batch_size: PositiveInt,
        device: str = "cpu",
        rank: int = 0,
        dump_dir: str | None = None,
        track: str = "action",
    ) -> None:
        super().__init__(
            pipeline,
            policies,
            environment=environment,
            forward_batch_size=forward_batch_size,
            device=device,
            rank=rank,
            dump_dir=dump_dir,
            track=track,
        )
        self._imitating = pipeline

    def _given(self, req: RolloutReq) -> list[Tensor]:
        rows = [row.get(MOVES) for row in req.rows]
        if all(moves is None for moves in rows):
            return []
        if req.rollout_id < 0:
            raise ConfigError(
                f"the rows of eval.prompts bring {MOVES}, so an evaluation would judge these instead of the policy. "
                "Give eval.prompts a file of starts alone."
            )
        size, found = self._pipeline.chunk_shape[1], []
        for name, moves in zip(req.sample_ids, rows, strict=True):
            if moves is None:
                raise ContractError(f"some rows bring {MOVES}; sample {name} has none")
            value = torch.tensor(moves, dtype=torch.float32)
            if value.ndim != 2 or value.shape[1] != size or not len(value) or not bool((value.abs() <= 1).all()):
                raise ConfigError(
                    f"{name}: metadata.{MOVES} has the shape {list(value.shape)}; give a list of moves, each of {size} "
                    "numbers in [-1, 1]."
                )
            found.append(value)
        return found

    def _shown(
        self, given: Sequence[Tensor], rows: Sequence[int], decision: int, params: ActionSamplingParams
    ) -> DrawnChunks:
        length = self._pipeline.chunk_shape[0]
        chunks = []
        for row in rows:
            chunk = given[row][decision * length : (decision + 1) * length]
            chunks.append(functional.pad(chunk, (0, 0, 0, length - len(chunk))))
        return self._imitating.given(torch.stack(chunks), params)

    def _of_shown(self, given: Sequence[Tensor], rows: Sequence[int], decision: int, played: Played) -> Played:
        length = self._pipeline.chunk_shape[0]
        left = np.array([len(given[row]) - decision * length for row in rows])
        return replace(
            played,
            num_moves=np.minimum(played.num_moves, left),
            terminated=played.terminated | ((left <= length) & ~played.truncated),
        )
