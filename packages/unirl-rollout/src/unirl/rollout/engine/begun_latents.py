"""Denoising that an engine was told to end early (`abort`), and continues at its step with a later policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from unirl.types.batch import rows_by
from unirl.types.errors import ContractError
from unirl.types.rollout import RolloutReq
from unirl.types.segments import LatentSegment


@dataclass(frozen=True)
class BegunLatents:
    """The samples of a request of which an earlier call took some steps. Rows are those of the request."""

    segment: LatentSegment
    versions: Tensor
    """[B, T] int64 on the CPU, see `LatentSegment.versions`."""

    @classmethod
    def of(cls, req: RolloutReq, device: torch.device) -> Self | None:
        """Those of a request, on a device; None if nothing was begun.

        Raises ContractError if they are no trajectories with versions.
        """
        if req.begun is None:
            return None
        segment, versions_B = req.begun.segment, req.begun.policy_versions
        if not isinstance(segment, LatentSegment) or versions_B is None:
            raise ContractError("the samples to continue are no trajectories with a version of the policy")
        versions = segment.versions_by_step(versions_B)
        return cls(segment.to(device).replace(sigmas=segment.sigmas.cpu(), versions=None, params=None), versions)

    @property
    def unfinished(self) -> list[list[int]]:
        """Rows that are to go on, those at one step together."""
        reached = self.segment.reached.tolist()
        return [rows for at, rows in sorted(rows_by(reached).items()) if at < self.segment.num_steps]

    def whole(self, parts: list[tuple[list[int], LatentSegment]], version: int) -> LatentSegment:
        """All samples of the request. parts: rows of `unfinished` as the pipeline continued them, with `version`."""
        going = {row for rows, _ in parts for row in rows}
        rest = [row for row in range(self.segment.batch_size) if row not in going]
        both = [*([(rest, self.segment.select(rest))] if rest else []), *parts]
        if all(bool((part.reached == part.num_steps).all()) for _, part in both):
            both = [(rows, part.replace(unfinished=None, status=None)) for rows, part in both]
        whole = LatentSegment.concat_rows(both)
        is_new = (self.versions < 0) & (torch.arange(whole.num_steps) < whole.reached[:, None])
        versions = torch.where(is_new, version, self.versions)
        return whole.replace(versions=versions.to(whole.latents.device))
