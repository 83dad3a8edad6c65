"""An episode of turns as far as it has come, the request for its next turn, and the track of those that ended.

Images travel twice: as pixels, for engines elsewhere, scorers and people, and as the model takes them, with the place
of each among the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch

from unirl.rollout.environments.base import Step
from unirl.types.conditions import Bridge, Condition, ImagePatchCondition, PromptCondition
from unirl.types.episodes import EPISODE
from unirl.types.media import ImageLists, Texts, shown_pixels
from unirl.types.messages import Message
from unirl.types.rollout import RolloutReq, RolloutTrack
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment

End = Literal["answered", "length", "turns", "tokens", "media", "environment", "failed"]
SECONDS = "environment_s"
"""Count of the seconds that the environment took for a sample."""
_STATUS: dict[str, SegmentStatus] = {"answered": SegmentStatus.COMPLETED, "failed": SegmentStatus.FAILED}


@dataclass
class Episode:
    """An episode as far as it has come."""

    prompt: list[int]
    images: list[torch.Tensor] = field(default_factory=list)
    """All that it has been shown, in order, [3, H, W] in [0, 1]."""
    sources: list[str] | None = None
    """What each image is called; None where those of the prompt have no names."""
    seen: list[tuple[int, ImagePatchCondition]] = field(default_factory=list)
    """The same as the model takes them: where the tokens of a part begin, and its images."""
    tokens: list[int] = field(default_factory=list)
    """After the prompt."""
    log_probs: list[float] = field(default_factory=list)
    is_written: list[bool] = field(default_factory=list)
    """By the model."""
    last_turn: list[int] = field(default_factory=list)
    """What the model wrote last."""
    transcript: list[dict[str, Any]] = field(default_factory=list)  # Any: JSON
    num_turns: int = 0
    reward: float = 0.0
    counts: dict[str, float] = field(default_factory=dict)
    end: End | None = None
    reason: str | None = None
    versions: list[int] = field(default_factory=list)

    def fail(self, reason: str) -> None:
        self.end, self.reason = "failed", reason

    def take(self, step: Step[Sequence[Message]]) -> None:
        """Count what a step earned, and end where the environment ends."""
        self.reward += step.reward
        for name, value in step.counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + value
        if step.terminated or step.truncated:
            self.end = "answered" if step.terminated else "environment"

    def write(self, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        self.tokens += tokens
        self.log_probs += log_probs
        self.is_written += [True] * len(tokens)
        self.last_turn = list(tokens)
        self.num_turns += 1

    def read(self, messages: Sequence[Message], bridge: Bridge) -> None:
        for message in messages:
            self.say(message.role, message.content, len(message.images))
            self.images += [shown_pixels(image) for image in message.images]
            if self.sources is not None:
                self.sources += [f"turn {self.num_turns}"] * len(message.images)
        if bridge.images is not None:
            self.seen.append((len(self.prompt) + len(self.tokens), bridge.images))
        self.tokens += bridge.tokens
        self.log_probs += [0.0] * len(bridge.tokens)
        self.is_written += [False] * len(bridge.tokens)

    def say(self, role: str, content: str, num_images: int = 0) -> None:
        shown = {"images": num_images} if num_images else {}
        self.transcript.append({"role": role, "content": content, **shown})

    @property
    def last_text(self) -> str:
        """What the model wrote last; empty where it wrote nothing."""
        return next((said["content"] for said in reversed(self.transcript) if said["role"] == "assistant"), "")

    @property
    def summary(self) -> dict[str, Any]:  # Any: JSON
        """What scorers and records see."""
        return {
            "reward": self.reward,
            "turns": self.num_turns,
            "end": self.end,
            "transcript": self.transcript,
            **({} if self.reason is None else {"reason": self.reason}),
            **{name: value for name, value in self.counts.items() if name != SECONDS},
        }


def next_request(
    req: RolloutReq,
    episodes: Sequence[Episode],
    conditions: Mapping[str, Condition],
    rows: Sequence[int],
    turn: int,
) -> RolloutReq:
    """The request for the next turn of some episodes. Each turn draws other numbers; the first those of a sample
    without turns."""
    asked = req.select(list(rows))
    played = [episodes[row] for row in rows]
    given = {name: condition.select(list(rows)) for name, condition in conditions.items()}
    device = cast("PromptCondition", conditions["prompt"]).tokens.device
    given["prompt"] = PromptCondition.pack(
        tokens=[torch.tensor(episode.prompt + episode.tokens, device=device) for episode in played]
    )
    names = asked.sample_ids if turn == 0 else [f"{name}:turn:{turn}" for name in asked.sample_ids]
    seen = _seen(played)
    return asked.replace(
        sample_ids=names,
        request_conditions=given if seen is None else {**given, "images": seen},
        primitives={**asked.primitives, **_images(played, req)},
    )


def _seen(episodes: Sequence[Episode]) -> ImagePatchCondition | None:
    """The images of episodes as the model takes them; None of a model that reads none."""
    return ImagePatchCondition.in_turns([episode.seen for episode in episodes]) if episodes[0].seen else None


def _images(episodes: Sequence[Episode], req: RolloutReq) -> dict[str, ImageLists]:
    """The slot of a request or track with all that episodes were shown; empty where there is none."""
    if "image" not in req.primitives:
        return {}
    sources = [tuple(episode.sources) for episode in episodes if episode.sources is not None]
    return {
        "image": ImageLists(
            images=[list(episode.images) for episode in episodes],
            sources=sources if len(sources) == len(episodes) else None,
        )
    }


def track_of(
    req: RolloutReq,
    params: ARSamplingParams,
    episodes: Sequence[Episode],
    conditions: Mapping[str, Condition],
) -> RolloutTrack:
    device = cast("PromptCondition", conditions["prompt"]).tokens.device
    ends = [_STATUS.get(str(episode.end), SegmentStatus.TRUNCATED) for episode in episodes]
    segment = TextSegment.pack(
        tokens=[torch.tensor(episode.tokens, dtype=torch.long, device=device) for episode in episodes],
        log_probs=None
        if params.is_greedy
        else [torch.tensor(episode.log_probs, dtype=torch.float32, device=device) for episode in episodes],
        loss_mask=[torch.tensor(episode.is_written, dtype=torch.bool, device=device) for episode in episodes],
        status=torch.tensor(ends, dtype=torch.long, device=device),
        params=params,
    )
    texts = [episode.last_text for episode in episodes]
    seen = _seen(episodes)
    conditions = conditions if seen is None else {**conditions, "images": seen}
    req = req.replace(primitives={**req.primitives, **_images(episodes, req)})
    track = req.make_root_track(conditions=conditions, segment=segment, decoded=Texts(texts=texts))
    names = sorted({name for episode in episodes for name in episode.counts})
    counts = {name: torch.tensor([episode.counts.get(name, 0.0) for episode in episodes]) for name in names}
    counts["turns"] = torch.tensor([float(episode.num_turns) for episode in episodes])
    counts["written_tokens"] = torch.tensor([float(sum(episode.is_written)) for episode in episodes])
    return track.replace(
        metadata=[{**row, EPISODE: episode.summary} for row, episode in zip(req.rows, episodes, strict=True)],
        counts=counts,
        policy_versions=torch.tensor([min(episode.versions, default=0) for episode in episodes]),
    )
