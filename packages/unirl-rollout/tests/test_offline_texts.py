"""Given conversations come out as a rollout; everything else is sampled."""

from typing import Any

import pytest
import torch
from text_fakes import NumberCodec, request

from unirl.rollout.engine.offline.texts import OfflineTextEngine
from unirl.types.conditions import Conversation, ImagePatchCondition
from unirl.types.episodes import EPISODE
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Audios, ImageLists
from unirl.types.segments import SegmentStatus, TextSegment


class TaughtCodec(NumberCodec):
    """A turn of the model is its numbers and a 9, what another says its numbers behind an 8."""

    def conversation(self, messages):
        tokens, is_written = [], []
        for each in messages[1:]:
            own = each.role == "assistant"
            part = [*map(int, each.content.split()), 9] if own else [8, *map(int, each.content.split())]
            tokens += part
            is_written += [own] * len(part)
        return Conversation([int(word) for word in messages[0].content.split()], tokens, is_written)

    def generate(self, conditions, params, *, noise_keys, any_rank=None):
        num = len(noise_keys)
        ends = torch.full((num,), int(SegmentStatus.COMPLETED))
        tokens, logp = [torch.tensor([9])] * num, [torch.zeros(1)] * num
        return TextSegment.pack(tokens=tokens, log_probs=logp, status=ends, params=params)

    def evaluating(self):
        return torch.no_grad()


def engine():
    codec: Any = TaughtCodec()
    return OfflineTextEngine(codec, forward_batch_size=8)


def said(*contents):
    return [{"role": ("user", "assistant")[place % 2], "content": each} for place, each in enumerate(contents)]


def test_a_given_conversation_is_a_track_that_trains_the_models_turns():
    req = request(["1 2", "5"]).replace(metadata=[{"messages": said("1 2", "3", "4", "5 6")}, {"completion": "7"}])
    track = engine().generate(req).root_track()
    assert [row.tolist() for row in track.segment.unpack("tokens")] == [[3, 9, 8, 4, 5, 6, 9], [7, 9]]
    assert track.segment.loss_mask.tolist() == [True, True, False, False, True, True, True, True, True]
    assert track.segment.log_probs is None and track.policy_versions is None
    assert [row.tolist() for row in track.conditions["prompt"].unpack("tokens")] == [[1, 2], [5]]
    assert track.decoded.texts == ["5 6", "7"]
    assert [row[EPISODE]["turns"] for row in track.metadata] == [2, 1]


class SeeingCodec(TaughtCodec):
    """An image is a 5 ahead of its message; its only patch is how bright it is."""

    def conversation(self, messages):
        placed, tokens = [], []
        for each in messages:
            placed += range(len(tokens), len(tokens) + len(each.images))
            tokens += [*[5] * len(each.images), *map(int, each.content.split())]
        patches = torch.tensor([[image.pixels[0] / 255] for each in messages for image in each.images]).reshape(-1, 1)
        shown = ImagePatchCondition.pack(patches=[patches], grids=[((1, 1, 1),) * len(placed)], places=[tuple(placed)])
        start = len(messages[0].images) + len(messages[0].content.split())
        is_written = [True] * (len(tokens) - start)
        return Conversation(tokens[:start], tokens[start:], is_written, shown if placed else None)


def lit(*levels):
    return [torch.full((3, 2, 2), float(level)) for level in levels]


def test_each_message_gets_its_images_and_their_places_are_conditions():
    messages = [
        {**said("1")[0], "images": 1},
        *said("", "2")[1:],
        {"role": "tool", "content": "", "images": 2},
        said("", "3")[1],
    ]
    req = request(["1", "4", "6"]).replace(
        metadata=[{"messages": messages}, {"completion": "7"}, {"messages": said("6", "7")}]
    )
    images = ImageLists(images=[lit(0, 1, 0), lit(1), []])
    codec: Any = SeeingCodec()
    req = req.replace(primitives={**req.primitives, "image": images})
    track: Any = OfflineTextEngine(codec, forward_batch_size=8).generate(req).root_track()
    shown = track.conditions["images"]
    assert shown.places == [(0, 3, 4), (0,), ()] and shown.grids[2] == ()
    assert [row.flatten().tolist() for row in shown.unpack("patches")] == [[0, 1, 0], [1], []]
    assert [row.tolist() for row in track.conditions["prompt"].unpack("tokens")] == [[5, 1], [5, 4], [6]]
    said_of = [turn.get("images", 0) for turn in track.metadata[0][EPISODE]["transcript"]]
    assert said_of == [1, 0, 2, 0] and [len(own) for own in track.primitives["image"].images] == [3, 1, 0]


def test_images_that_no_message_shows_and_sounds_are_refused():
    req = request(["1"]).replace(metadata=[{"messages": [{**said("1")[0], "images": 1}, said("", "2")[1]]}])
    with pytest.raises(ContractError, match="show 1 images, its row brings 0"):
        engine().generate(req)
    sounds = Audios.pack(waveform=[torch.zeros(1)])
    req = req.replace(metadata=[{"completion": "7"}], primitives={**req.primitives, "audio": sounds})
    with pytest.raises(ConfigError, match="conversations with audio; conversations show images alone"):
        engine().generate(req)


def test_prompts_without_an_answer_are_sampled():
    track = engine().generate(request(["1 2", "5"])).root_track()
    assert track.segment.tokens.tolist() == [9, 9] and track.segment.log_probs is not None


def test_mixtures_evaluations_and_long_conversations_are_refused():
    with pytest.raises(ContractError, match="1 of 2 rows bring conversations; sample s1 has none"):
        engine().generate(request(["1", "2"]).replace(metadata=[{"completion": "7"}, None]))
    with pytest.raises(ConfigError, match="an evaluation would judge these instead of the policy"):
        engine().generate(request(["1"]).replace(metadata=[{"completion": "7"}], rollout_id=-1))
    with pytest.raises(ConfigError, match="the conversation of s0 has 27 tokens, more than the context of 20"):
        engine().generate(request(["1"]).replace(metadata=[{"completion": " ".join("7" * 25)}]))
