"""Returns conversations from the data instead of samples, so that supervised fine-tuning looks like any other rollout.

Requests whose rows bring none, such as evaluations, are sampled from the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch

from unirl.rollout.engine.trainside.text import TrainsideTextEngine
from unirl.rollout.text_checks import text_params
from unirl.rollout.turns.prompt_images import images_of_prompts, message_image
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.conditions import Condition, Conversation, ImagePatchCondition, PromptCondition
from unirl.types.episodes import EPISODE
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Texts
from unirl.types.messages import ASSISTANT, Message, ShownImage, demonstration
from unirl.types.protocols.models import AutoregressivePipeline, DemonstrationCodec
from unirl.types.protocols.training import ShardedPolicyStore
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.segments import SegmentStatus, TextSegment


class DemonstrationPipeline(AutoregressivePipeline, DemonstrationCodec, Protocol):
    """A pipeline of texts that reads conversations."""


@bounded("engine")
class OfflineTextEngine(TrainsideTextEngine):
    """Returns what the rows of a request bring: `messages`, or a `completion` of their prompt; samples if they bring
    neither. Training is on the turns of the model, of which each ends with its end-of-sequence token.

    Arguments: see `TrainsideTextEngine`. Rows have no log-probs and no policy version, since no policy made them.
    Raises ConfigError for a conversation that does not fit the context.
    """

    needs_texts: ClassVar[bool] = True
    gives_logp: ClassVar[bool] = False

    def __init__(
        self,
        pipeline: DemonstrationPipeline,
        policies: ShardedPolicyStore | None = None,
        *,
        forward_batch_size: PositiveInt,
        device: str = "cpu",
        rank: int = 0,
        dump_dir: str | None = None,
        track: str = "text",
    ) -> None:
        super().__init__(
            pipeline, policies, forward_batch_size=forward_batch_size, rank=rank, dump_dir=dump_dir, track=track
        )
        self._conversations: DemonstrationCodec = pipeline
        self._device = torch.device(device)

    def _generate_chunk(self, req: RolloutReq) -> RolloutResp:
        said = _conversations(req)
        found = [messages for messages in said if messages is not None]
        if not found:
            return super()._generate_chunk(req)
        if len(found) < len(said):
            first = req.sample_ids[said.index(None)]
            raise ContractError(f"{len(found)} of {len(said)} rows bring conversations; sample {first} has none")
        if req.rollout_id < 0:
            raise ConfigError(
                "the rows of eval.prompts bring conversations, so an evaluation would judge these instead of the "
                "policy. Give eval.prompts a file of prompts alone."
            )
        if unread := sorted(set(req.primitives) - {"text", "image"}):
            raise ConfigError(f"the rows bring conversations with {', '.join(unread)}; conversations show images alone")
        given = [self._conversations.conversation(messages) for messages in found]
        for name, each in zip(req.sample_ids, given, strict=True):
            self._check_length(name, each)
        device = self._device
        segment = TextSegment.pack(
            tokens=[torch.tensor(each.tokens, device=device) for each in given],
            loss_mask=[torch.tensor(each.is_written, device=device) for each in given],
            status=torch.full((len(given),), int(SegmentStatus.COMPLETED), device=device),
            params=text_params(req),
        )
        answers = Texts(texts=[messages[-1].content for messages in found])
        track = req.make_root_track(conditions=self._conditions(given), segment=segment, decoded=answers)
        track.metadata = [{**row, EPISODE: _summary(messages)} for row, messages in zip(req.rows, found, strict=True)]
        return RolloutResp(tracks={self._track: track})

    def _conditions(self, given: Sequence[Conversation]) -> dict[str, Condition]:
        prompts = [torch.tensor(each.prompt, device=self._device) for each in given]
        conditions: dict[str, Condition] = {"prompt": PromptCondition.pack(tokens=prompts)}
        some = next((each.images for each in given if each.images is not None), None)
        if some is not None:
            nothing = ImagePatchCondition.pack(patches=[some.patches[:0]], grids=[()], places=[()])
            shown = [nothing if each.images is None else each.images for each in given]
            conditions["images"] = ImagePatchCondition.in_turns([[(0, each)] for each in shown])
        return conditions

    def _check_length(self, name: str, given: Conversation) -> None:
        length, limit = len(given.prompt) + len(given.tokens), self._conversations.context_length
        if length > limit:
            raise ConfigError(
                f"the conversation of {name} has {length} tokens, more than the context of {limit}. Shorten or drop it."
            )


def _conversations(req: RolloutReq) -> list[list[Message] | None]:
    """What the rows bring, with the images that they show."""
    shown, known = images_of_prompts(req), dict[int, ShownImage]()
    return [
        demonstration(text, row, [message_image(image, known) for image in (shown.images[place] if shown else ())])
        for place, (text, row) in enumerate(zip(req.texts, req.rows, strict=True))
    ]


def _summary(messages: Sequence[Message]) -> dict[str, Any]:  # Any: JSON
    """A given conversation as an episode (`unirl.types.episodes`), of which no environment knows."""
    return {
        "reward": 0.0,
        "turns": sum(each.role == ASSISTANT for each in messages),
        "end": "given",
        "transcript": [
            {"role": each.role, "content": each.content, **({"images": len(each.images)} if each.images else {})}
            for each in messages
        ],
    }
