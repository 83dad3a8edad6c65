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
from unirl.rollout.environments.begun import BegunEpisode
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
BEGUN_AGAIN = "begun_again"
"""Count of the episodes that began again because no other process could continue them."""
UNFINISHED = "unfinished episode"
"""Key of the metadata of a sample that can be continued (`RolloutTrack.is_unfinished`), and of those with it: an
`UnfinishedEpisode`."""
_TURN = ":turn:"
_STATUS: dict[End | None, SegmentStatus] = {
    "answered": SegmentStatus.COMPLETED,
    "failed": SegmentStatus.FAILED,
    None: SegmentStatus.ABORTED,
}


@dataclass(frozen=True)
class Written:
    """Tokens that the model wrote, in order."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Nats; empty of greedy sampling."""
    versions: list[int] = field(default_factory=list)
    """The policy that wrote each token."""


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
    begun_turn: Written | None = None
    """What there is of a turn that was ended early, which the engine continues."""
    transcript: list[dict[str, Any]] = field(default_factory=list)  # Any: JSON
    num_turns: int = 0
    turn_ends: list[int] = field(default_factory=list)
    """Place of the last token of each turn of the model, among `tokens`; of a turn without a token that before it."""
    turn_rewards: list[float] = field(default_factory=list)
    """What each turn earned."""
    counts: dict[str, float] = field(default_factory=dict)
    end: End | None = None
    reason: str | None = None
    versions: list[int] = field(default_factory=list)
    """The policy of each token; what the model reads has that of what it wrote before."""

    @property
    def reward(self) -> float:
        """What it earned so far."""
        return sum(self.turn_rewards)

    @property
    def rewards(self) -> list[float]:
        """What each token earned: what its turn did, the last token of a turn; 0 the others."""
        found = [0.0] * len(self.tokens)
        for end, reward in zip(self.turn_ends, self.turn_rewards, strict=True):
            if found:
                found[end] += reward
        return found

    def fail(self, reason: str) -> None:
        self.end, self.reason = "failed", reason

    def take(self, step: Step[Sequence[Message]]) -> None:
        """Count what a step earned, and end where the environment ends."""
        self.turn_rewards[-1] += step.reward
        for name, value in step.counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + value
        if step.terminated or step.truncated:
            self.end = "answered" if step.terminated else "environment"

    def write(self, turn: Written) -> None:
        self.tokens += turn.tokens
        self.log_probs += turn.log_probs
        self.versions += turn.versions
        self.is_written += [True] * len(turn.tokens)
        self.last_turn, self.begun_turn = list(turn.tokens), None
        self.turn_ends.append(max(len(self.tokens) - 1, 0))
        self.turn_rewards.append(0.0)
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
        self.versions += self.versions[-1:] * len(bridge.tokens)
        self.is_written += [False] * len(bridge.tokens)

    def say(self, role: str, content: str, num_images: int = 0) -> None:
        shown = {"images": num_images} if num_images else {}
        self.transcript.append({"role": role, "content": content, **shown})

    @property
    def waits_for_an_answer(self) -> bool:
        """True if the environment has to answer what the model wrote."""
        return self.end is None and self.begun_turn is None

    @property
    def last_text(self) -> str:
        """What the model wrote last; empty where it wrote nothing."""
        return next((said["content"] for said in reversed(self.transcript) if said["role"] == "assistant"), "")

    @property
    def summary(self) -> dict[str, Any]:  # Any: JSON
        """What scorers and records see."""
        return {
            "reward": self.reward,
            "turn_rewards": self.turn_rewards,
            "turns": self.num_turns,
            "end": self.end,
            "transcript": self.transcript,
            **({} if self.reason is None else {"reason": self.reason}),
            **{name: value for name, value in self.counts.items() if name != SECONDS},
        }


@dataclass(frozen=True)
class UnfinishedEpisode:
    """All that an engine needs to continue an episode, or to tell of one that has ended."""

    episode: Episode
    played: BegunEpisode | None
    """What the environment needs where it does not know the episode; None of one that has ended."""


def next_request(
    req: RolloutReq, episodes: Sequence[Episode], conditions: Mapping[str, Condition], rows: Sequence[int]
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
    names = [
        f"{name}{_TURN}{episode.num_turns}" if episode.num_turns else name
        for name, episode in zip(asked.sample_ids, played, strict=True)
    ]
    seen = _seen(played)
    asked = asked.replace(
        sample_ids=names,
        request_conditions=given if seen is None else {**given, "images": seen},
        primitives={**asked.primitives, **_images(played, req)},
    )
    return asked.replace(begun=_begun_turns(asked, played))


def is_of_later_turn(name: str) -> bool:
    """True of the name that a sample has in the request for a turn after its first."""
    return _TURN in name


def _begun_turns(asked: RolloutReq, episodes: Sequence[Episode]) -> RolloutTrack | None:
    """What there is of the turns that are asked for, as an engine of texts continues it."""
    if all(episode.begun_turn is None for episode in episodes):
        return None
    params = cast("ARSamplingParams", asked.sampling_params)
    begun = [episode.begun_turn or Written() for episode in episodes]
    segment = TextSegment.pack(
        tokens=[torch.tensor(own.tokens, dtype=torch.long) for own in begun],
        log_probs=None if params.is_greedy else [torch.tensor(own.log_probs, dtype=torch.float32) for own in begun],
        versions=[torch.tensor(own.versions, dtype=torch.long) for own in begun],
        status=torch.full((len(begun),), SegmentStatus.ABORTED, dtype=torch.long),
        params=params,
    )
    track = asked.make_root_track(conditions={}, segment=segment, decoded=None)
    return track.replace(policy_versions=torch.tensor([min(own.versions, default=0) for own in begun]))


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
    played: Sequence[BegunEpisode | None],
) -> RolloutTrack:
    """What came of the episodes. played: of those that are to be continued, what the environment needs."""
    device = cast("PromptCondition", conditions["prompt"]).tokens.device
    ends = [_STATUS.get(episode.end, SegmentStatus.TRUNCATED) for episode in episodes]
    is_mixed = any(len(set(episode.versions)) > 1 for episode in episodes)
    segment = TextSegment.pack(
        tokens=[torch.tensor(episode.tokens, dtype=torch.long, device=device) for episode in episodes],
        log_probs=None
        if params.is_greedy
        else [torch.tensor(episode.log_probs, dtype=torch.float32, device=device) for episode in episodes],
        loss_mask=[torch.tensor(episode.is_written, dtype=torch.bool, device=device) for episode in episodes],
        rewards=[torch.tensor(episode.rewards, dtype=torch.float32, device=device) for episode in episodes],
        versions=[torch.tensor(episode.versions, dtype=torch.long, device=device) for episode in episodes]
        if is_mixed
        else None,
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
    metadata = [{**row, EPISODE: episode.summary} for row, episode in zip(req.rows, episodes, strict=True)]
    is_unfinished = [episode.end is None for episode in episodes]
    if any(is_unfinished):
        for row, episode, own in zip(metadata, episodes, played, strict=True):
            row[UNFINISHED] = UnfinishedEpisode(episode, own)
        track.is_unfinished = torch.tensor(is_unfinished)
    if is_mixed:
        track.last_versions = torch.tensor([max(episode.versions, default=0) for episode in episodes])
    return track.replace(
        metadata=[*metadata],
        counts=counts,
        policy_versions=torch.tensor([min(episode.versions, default=0) for episode in episodes]),
    )
