"""How episodes begin: with a task that the environment has reset to, or where an earlier call has left them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from unirl.rollout.environments.base import Task
from unirl.rollout.environments.begun import Lost
from unirl.rollout.text_checks import prompt_conditions
from unirl.rollout.turns.episodes import BEGUN_AGAIN, SECONDS, UNFINISHED, Episode
from unirl.rollout.turns.parts import Parts
from unirl.rollout.turns.prompt_images import images_of_prompts, message_image, with_images
from unirl.sde.noise import noise_seed
from unirl.types.conditions import Condition, ImagePatchCondition, PromptCondition
from unirl.types.media import ImageLists, Texts, shown_pixels
from unirl.types.messages import ShownImage
from unirl.types.noise import noise_key
from unirl.types.protocols.models import ConversationCodec
from unirl.types.rollout import RolloutReq, RolloutTrack
from unirl.types.sampling import ARSamplingParams


class Opening:
    """Begins episodes in the environment, with their prompts as the model reads them.

    shows_images: whether messages of the environment may show images.
    """

    def __init__(self, codec: ConversationCodec, parts: Parts, *, shows_images: bool) -> None:
        self._codec = codec
        self._parts = parts
        self._shows_images = shows_images

    def begun(
        self, req: RolloutReq, params: ARSamplingParams, rows: Mapping[int, str]
    ) -> tuple[RolloutReq, list[Episode], dict[str, Condition]]:
        """The request with the prompts that the environment replaces, its episodes, and their conditions.

        rows: places of its samples in the call, with the names of the episodes.
        """
        texts, shown = req.texts, images_of_prompts(req)
        opened, took_s = self._parts.reset(_tasks(req, params, rows))
        if shown is None and self._shows_images:
            shown = ImageLists(images=[[] for _ in texts])
        for place, name in enumerate(rows.values()):
            first = opened[name]
            if not isinstance(first, Lost) and first:
                texts[place] = first[0].content
                if first[0].images:
                    shown = with_images(shown, place, [shown_pixels(image) for image in first[0].images])
        given = {} if shown is None else {"image": shown}
        req = req.replace(primitives={**req.primitives, "text": Texts(texts=texts), **given})
        conditions = prompt_conditions(req, self._codec)
        firsts = [opened[name] for name in rows.values()]
        return req, _episodes(conditions, texts, shown, firsts, took_s), conditions

    def resumed(
        self, req: RolloutReq, params: ARSamplingParams, begun: RolloutTrack, names: Sequence[str]
    ) -> tuple[RolloutReq, list[Episode], dict[str, Condition]]:
        """As `begun`, of episodes that an earlier call has begun."""
        own = [(row or {})[UNFINISHED] for row in begun.metadata]
        episodes = [each.episode for each in own]
        todo = {row: (names[row], each.played) for row, each in enumerate(own) if each.played is not None}
        if again := {row: names[row] for row in self._parts.resume(todo)}:
            _, fresh, _ = self.begun(req.select(list(again)), params, again)
            for row, episode in zip(again, fresh, strict=True):
                episode.counts[BEGUN_AGAIN] = 1.0
                episodes[row] = episode
        return req.replace(primitives=begun.primitives), episodes, begun.conditions


def _episodes(
    conditions: Mapping[str, Condition],
    texts: Sequence[str],
    shown: ImageLists | None,
    opened: Sequence[Any],  # Any: what each observes first
    took_s: float,
) -> list[Episode]:
    """Episodes that have read their prompts."""
    episodes = []
    images = conditions.get("images")
    for row, tokens in enumerate(cast("PromptCondition", conditions["prompt"]).to("cpu").unpack("tokens")):
        episode = Episode(tokens.tolist())
        if shown is not None:
            episode.images = list(shown.images[row])
            episode.sources = None if shown.sources is None else list(shown.sources[row])
        if isinstance(images, ImagePatchCondition) and images.places is not None:
            episode.seen.append((0, images.select([row])))
        episode.say("user", texts[row], len(episode.images))
        episode.counts[SECONDS] = took_s / len(texts)
        first = opened[row]
        if isinstance(first, Lost):
            episode.fail(first.reason)
        episodes.append(episode)
    return episodes


def _tasks(req: RolloutReq, params: ARSamplingParams, rows: Mapping[int, str]) -> dict[int, tuple[str, Task, int]]:
    """Row -> (name, task, seed) of each sample of a request. Episodes of a group begin equally."""
    shown = images_of_prompts(req)
    known: dict[int, ShownImage] = {}
    tasks: dict[int, tuple[str, Task, int]] = {}
    samples = zip(rows.items(), req.rows, req.texts, req.group_ids, strict=True)
    for place, ((row, name), metadata, text, group) in enumerate(samples):
        seed = noise_seed(params.seed, f"{noise_key(req.rollout_id, group)}:environment")
        task = {**metadata, "prompt": text}
        if shown is not None:
            task["images"] = tuple(message_image(image, known) for image in shown.images[place])
        tasks[row] = name, task, seed
    return tasks
