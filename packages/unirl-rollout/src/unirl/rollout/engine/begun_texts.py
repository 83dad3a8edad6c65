"""Texts that an engine was told to end early (`abort`) and continues with a later policy.

The tokens that are there become a part of the prompt, whose keys and values are computed anew with the present weights,
unless the engine has kept those of the former ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from unirl.types.conditions import Condition, PromptCondition
from unirl.types.errors import ContractError
from unirl.types.rollout import RolloutReq
from unirl.types.segments import SegmentStatus, TextSegment

IN_PLACE, BY_PREFILL = "continued_in_place", "continued_by_prefill"
"""Counts of engines that keep keys and values (`RolloutTrack.counts`)."""


@dataclass(frozen=True)
class BegunTexts:
    """The samples of a request of which an earlier call made a part. Rows are those of the request."""

    segment: TextSegment | None
    """What there is; None: nothing was begun."""
    versions: Tensor | None
    """[N] int64, the policy of each of its tokens."""
    rows: list[int]
    """Samples that are still to be finished."""
    tokens: list[Tensor]
    """What each of `rows` has, int64."""
    counts: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] float32 each, what the earlier calls counted."""

    @classmethod
    def of(cls, req: RolloutReq, media_tokens: Collection[int]) -> Self:
        """Those of a request. Raises ContractError if they are no texts, or without versions.

        media_tokens: placeholders of media. In a prompt each stands for a medium, so unfinished samples that wrote one
            begin anew.
        """
        if req.begun is None:
            rows = list(range(req.batch_size))
            return cls(None, None, rows, [torch.zeros(0, dtype=torch.long)] * len(rows))
        track = req.begun
        segment, versions_B = track.segment, track.policy_versions
        if not isinstance(segment, TextSegment) or segment.status is None or versions_B is None:
            raise ContractError("the samples to continue are no texts with a status and a version of the policy")
        if segment.loss_mask is not None:
            raise ContractError("texts with tokens that were not sampled cannot be continued")
        versions = segment.versions_by_token(versions_B)
        rows = (segment.status == SegmentStatus.ABORTED).nonzero().flatten().tolist()
        own = segment.unpack("tokens")
        if anew := [row for row in rows if not set(media_tokens).isdisjoint(own[row].tolist())]:
            segment, versions = _without(segment.replace(versions=versions), anew)
            own = segment.unpack("tokens")
        return cls(segment, versions, rows, [own[row] for row in rows], track.counts)

    @property
    def lengths(self) -> list[int]:
        """Tokens that each of `rows` has."""
        return [len(tokens) for tokens in self.tokens]

    def prompts(self, conditions: Mapping[str, Condition]) -> dict[str, Condition]:
        """Conditions of `rows`, whose prompts end with what there is."""
        own = {name: condition.select(self.rows) for name, condition in conditions.items()}
        prompt = own.get("prompt")
        if self.segment is None or not isinstance(prompt, PromptCondition):
            return {**conditions}
        asked = zip(prompt.unpack("tokens"), self.tokens, strict=True)
        return {**own, "prompt": PromptCondition.pack(tokens=[torch.cat([a, b.to(a.device)]) for a, b in asked])}

    def whole(self, more: TextSegment | None, version: int) -> TextSegment:
        """All samples of the request. more: what this call added to `rows`; None: nothing, since `rows` is empty.
        version: the policy of its tokens, where it does not say more. Raises ContractError if a request without begun
        samples was not answered."""
        if self.segment is None or self.versions is None or self.segment.status is None:
            if more is None:
                raise ContractError("a request without samples makes no texts")
            return more
        kept = {"tokens": self.segment.unpack("tokens"), "versions": self.segment_versions}
        added = {"tokens": [], "versions": []} if more is None else _parts(more, version)
        if self.segment.log_probs is not None:
            kept["log_probs"] = self.segment.unpack("log_probs")
        status = self.segment.status.clone()
        for new, row in enumerate(self.rows if more is not None else ()):
            for name, own in kept.items():
                own[row] = torch.cat([own[row], added[name][new].to(own[row].device)])
            status[row] = SegmentStatus.COMPLETED if more is None or more.status is None else more.status[new]
        return TextSegment.pack(**kept, status=status, params=self.segment.params)

    def continued(self, num_samples: int, in_place: Collection[int]) -> dict[str, Tensor]:
        """How often each sample of the request went on with kept keys and values, and how often by another prefill,
        [N] float32 each, with the earlier calls. in_place: samples that this call continues with kept ones."""
        found = {name: torch.zeros(num_samples) for name in (IN_PLACE, BY_PREFILL)}
        for row, num in zip(self.rows, self.lengths, strict=True):
            if num:
                found[IN_PLACE if row in in_place else BY_PREFILL][row] = 1
        return {name: own + self.counts.get(name, torch.zeros(num_samples)) for name, own in found.items()}

    @property
    def segment_versions(self) -> list[Tensor]:
        """The policy of each token, per sample."""
        if self.segment is None or self.versions is None:
            return []
        return list(self.versions.split(self.segment.lengths.tolist()))


def _without(segment: TextSegment, rows: Collection[int]) -> tuple[TextSegment, Tensor]:
    """The segment with nothing of these samples, and the versions of its tokens."""
    names = [name for name in ("tokens", "log_probs", "versions") if getattr(segment, name) is not None]
    parts = {name: [own[:0] if row in rows else own for row, own in enumerate(segment.unpack(name))] for name in names}
    left = TextSegment.pack(**parts, status=segment.status, params=segment.params)
    return left, torch.cat(parts["versions"])


def _parts(segment: TextSegment, version: int) -> dict[str, list[Tensor]]:
    tokens = segment.unpack("tokens")
    log_probs = {} if segment.log_probs is None else {"log_probs": segment.unpack("log_probs")}
    same = [torch.full_like(own, version) for own in tokens]
    return {"tokens": tokens, "versions": same if segment.versions is None else segment.unpack("versions"), **log_probs}
