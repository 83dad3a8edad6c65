"""What is known of a few samples per token or denoising step: log-probs of who sampled and of the forward that trains.

Nothing is computed for it but text of single tokens; where no sample is asked for, nothing is kept.
Legend: B samples of a micro-batch, N tokens of their segments, M of them trained, R rows of transitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.types.media import Texts
from unirl.types.rollout import RolloutTrack
from unirl.types.segments import LatentSegment, TextSegment

Trace = dict[str, Any]  # Any: JSON values, see docs/reference/run_directory.md
MAX_TOKENS = 2048
"""Tokens of a sample that a trace has, from its first."""


class Traces:
    """Collects traces of the named samples, from one rollout's training on one rank.

    Values stay on the device that computed them until `take`, so that no GPU waits between two backwards.
    """

    def __init__(self, samples: Collection[str]) -> None:
        self._samples = frozenset(samples)
        self._kept: list[Callable[[], Iterator[Trace]]] = []

    def tokens(
        self, track: RolloutTrack, update: int, chosen_N: Tensor, logp_M: Tensor, decode: Callable[[TextSegment], Texts]
    ) -> None:
        """Note the tokens of a micro-batch.

        chosen_N: bool, which tokens train. logp_M: theirs, in the forward that trains on them. decode: the text of a
        segment's samples.
        """
        if self._has_some_of(track):
            logp_N = torch.full(chosen_N.shape, math.nan, dtype=torch.float32, device=logp_M.device)
            logp_N[chosen_N.to(logp_M.device)] = logp_M.detach().float()
            self._kept.append(lambda: self._token_traces(track, update, logp_N, decode))

    def steps(self, track: RolloutTrack, update: int, sample_R: Tensor, step_R: Tensor, logp_R: Tensor) -> None:
        """Note transitions of a micro-batch: row r is the step `step_R[r]` of the sample `sample_R[r]`.

        logp_R: in the forward that trains on them.
        """
        if self._has_some_of(track):
            values_R = logp_R.detach().float()
            self._kept.append(lambda: self._step_traces(track, update, sample_R, step_R, values_R))

    def take(self) -> list[Trace]:
        """The traces, a sample's steps in one."""
        found: dict[tuple[str, str], Trace] = {}
        for each in self._kept:
            for trace in each():
                known = found.setdefault((trace["kind"], trace["sample_id"]), trace)
                if known is not trace:
                    for name in ("steps", "sigmas", "logp", "trained_logp"):
                        known[name] = [*known[name], *trace[name]]
        self._kept = []
        return list(found.values())

    def _has_some_of(self, track: RolloutTrack) -> bool:
        return not self._samples.isdisjoint(track.sample_ids)

    def _token_traces(
        self, track: RolloutTrack, update: int, logp_N: Tensor, decode: Callable[[TextSegment], Texts]
    ) -> Iterator[Trace]:
        segment = track.segment
        assert isinstance(segment, TextSegment)  # noqa: S101 - what trains tokens
        starts = segment.cu_seqlens.tolist()
        for row, sample in enumerate(track.sample_ids):
            if sample in self._samples:
                own = slice(starts[row], min(starts[row + 1], starts[row] + MAX_TOKENS))
                tokens = segment.tokens[own].cpu()
                yield {
                    "kind": "tokens",
                    "sample_id": sample,
                    "update": update,
                    "tokens": tokens.tolist(),
                    "texts": list(decode(TextSegment.pack(tokens=list(tokens.split(1)))).texts) if len(tokens) else [],
                    "logp": None if segment.log_probs is None else _numbers(segment.log_probs[own]),
                    "trained_logp": _numbers(logp_N[own]),
                }

    def _step_traces(
        self, track: RolloutTrack, update: int, sample_R: Tensor, step_R: Tensor, logp_R: Tensor
    ) -> Iterator[Trace]:
        segment = track.segment
        assert isinstance(segment, LatentSegment)  # noqa: S101 - what trains transitions
        columns = {step: column for column, step in enumerate(segment.sde_indices)}
        rows: dict[int, list[int]] = {}
        for place, row in enumerate(sample_R.tolist()):
            rows.setdefault(row, []).append(place)
        values, steps = _numbers(logp_R), step_R.tolist()
        for row, places in rows.items():
            if track.sample_ids[row] in self._samples:
                own = [steps[place] for place in places]
                given = None if segment.sde_logp is None else _numbers(segment.sde_logp[row])
                yield {
                    "kind": "steps",
                    "sample_id": track.sample_ids[row],
                    "update": update,
                    "steps": own,
                    "sigmas": [round(float(segment.sigmas[step]), 6) for step in own],
                    "logp": [None if given is None else given[columns[step]] for step in own],
                    "trained_logp": [values[place] for place in places],
                }


def _numbers(values: Tensor) -> list[float | None]:
    """Seven digits; None for what is not finite."""
    numbers: Sequence[float] = values.detach().float().cpu().tolist()
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in numbers]
