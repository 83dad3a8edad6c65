"""Images between turns: in the order of the tokens, for the model, for engines elsewhere and for people."""

from typing import Any

import pytest
import torch
from looking_environments import Camera, Darkroom, Undeclared
from text_fakes import request
from turn_fakes import PARAMS, SAYS, STOP, ScriptedEngine, TalkingCodec, rows

from unirl.rollout.environments.tool_use import ToolUse
from unirl.rollout.environments.tools.calculator import Calculator
from unirl.rollout.turns.engine import TurnsEngine
from unirl.types.conditions import Bridge, ImagePatchCondition, PromptCondition
from unirl.types.episodes import EPISODE
from unirl.types.errors import ConfigError, DataError
from unirl.types.media import ImageLists, Images, Texts, shown_pixels
from unirl.types.rollout import RolloutReq

SEES = 5
"""Token that stands for an image; its only patch is how bright it is."""


class SeeingCodec(TalkingCodec):
    """A message is one SEES per image and its numbers behind an 8; the images of a prompt stand before it."""

    reads_images_in_turns = True
    media_tokens = frozenset({SEES})

    def encode(self, primitives, params):
        numbers = [[int(word) for word in text.split()] for text in primitives["text"].texts]
        shown = primitives["image"].images if "image" in primitives else None
        if shown is None:
            return {"prompt": PromptCondition.pack(tokens=[torch.tensor(row) for row in numbers])}
        tokens = [torch.tensor([SEES] * len(own) + row) for own, row in zip(shown, numbers, strict=True)]
        return {"prompt": PromptCondition.pack(tokens=tokens), "images": self.seen(shown)}

    def seen(self, samples):
        return ImagePatchCondition.pack(
            patches=[torch.tensor([[float(image.mean())] for image in own]).reshape(-1, 1) for own in samples],
            grids=[((1, 1, 1),) * len(own) for own in samples],
            places=[tuple(range(len(own))) for own in samples],
        )

    def bridge(self, messages):
        tokens: list[int] = []
        parts = []
        for message in messages:
            if any(image.width != image.height for image in message.images):
                raise DataError("an image of 3 x 1 pixels cannot be resized")
            tokens.append(SAYS)
            parts.append((len(tokens), self.seen([[shown_pixels(image) for image in message.images]])))
            tokens += [SEES] * len(message.images) + [int(word) for word in message.content.split()]
        has_images = any(message.images for message in messages)
        return Bridge(tokens, ImagePatchCondition.in_turns([parts]) if has_images else None)


@pytest.fixture
def play():
    made = []

    def run(texts, script, images=None, *, environment=None, codec=None, sources=None, **options):
        codec = codec or SeeingCodec()
        inner = ScriptedEngine(codec, script)
        given: dict[str, Any] = {"max_turns": 4} | options
        engine = TurnsEngine(inner, codec, environment=environment or Darkroom(), **given)
        made.append(engine)
        primitives: dict[str, Any] = {"text": Texts(texts=list(texts))}
        if images is not None:
            lists = [[torch.full((3, 1, 1), level / 255) for level in own] for own in images]
            primitives["image"] = ImageLists(images=lists, sources=sources)
        req = RolloutReq(
            sample_ids=[f"s{row}" for row in range(len(texts))],
            group_ids=list(texts),
            primitives=primitives,
            sampling_params=PARAMS,
        )
        return engine.generate(req).root_track(), inner

    yield run
    for engine in made:
        engine.shutdown()


def levels(images: Any) -> list[list[int]]:
    """How bright each image is, of 255."""
    return [[round(float(image.mean()) * 255) for image in own] for own in images.images]


def patches(condition: Any) -> list[list[int]]:
    return [[round(value * 255) for value in own.flatten().tolist()] for own in condition.unpack("patches")]


SCRIPT = {
    (SEES, 7): [2, STOP],
    (SEES, 7, 2, STOP, SAYS, SEES, SEES, 2): [1, STOP],
    (SEES, 7, 2, STOP, SAYS, SEES, SEES, 2, 1, STOP, SAYS, 1): [4, STOP],
    (SEES, 7, 2, STOP, SAYS, SEES, SEES, 2, 1, STOP, SAYS, 1, 4, STOP, SAYS, SEES, 4): [0, STOP],
    (6,): [0, STOP],
}


def test_a_track_has_all_images_in_order_with_their_places(play):
    track, _ = play(["7", "6"], SCRIPT, [[90], []], sources=[("a.png",), ()])
    tokens = rows(track, "tokens")[0]
    assert tokens == [2, STOP, SAYS, SEES, SEES, 2, 1, STOP, SAYS, 1, 4, STOP, SAYS, SEES, 4, 0, STOP]
    assert [token for token, own in zip(tokens, rows(track, "loss_mask")[0], strict=True) if own] == [
        *(2, STOP, 1, STOP, 4, STOP, 0, STOP)
    ]
    seen = track.conditions["images"]
    assert patches(seen) == [[90, 20, 21, 4], []] == levels(track.primitives["image"])
    whole = [SEES, 7, *tokens]
    assert [whole[place] for place in seen.places[0]] == [SEES] * 4 and seen.places == [(0, 5, 6, 15), ()]
    assert track.primitives["image"].sources == [("a.png", "turn 1", "turn 1", "turn 3"), ()]
    assert [turn.get("images", 0) for turn in track.metadata[0][EPISODE]["transcript"]] == [1, 0, 2, 0, 0, 0, 1, 0]
    assert track.counts["dark"].tolist() == [4 * 90, 0], "the environment sees the images of the prompt"


def test_every_request_has_the_images_so_far_for_the_model_and_for_engines_elsewhere(play):
    _, inner = play(["7", "6"], SCRIPT, [[90], []])
    whole = [90, 20, 21, 4]
    for turn, num in enumerate((1, 3, 3, 4)):
        req = inner.asked[turn]
        assert levels(req.primitives["image"])[0] == whole[:num] == patches(req.request_conditions["images"])[0]
        prompt = req.request_conditions["prompt"].unpack("tokens")[0].tolist()
        assert [place for place, token in enumerate(prompt) if token == SEES] == [
            *req.request_conditions["images"].places[0]
        ]


def test_an_environment_may_begin_with_other_images(play):
    script = {(SEES, SEES, 2, 2): [0, STOP], (SEES, 6): [0, STOP]}
    track, _ = play(["3", "6"], script, [[90], [91]], sources=[("a",), ("b",)])
    assert levels(track.primitives["image"]) == [[30, 40], [91]] == patches(track.conditions["images"])
    assert track.primitives["image"].sources == [("", ""), ("b",)]
    first, _ = play(["3"], script)
    assert levels(first.primitives["image"]) == [[30, 40]], "also where the prompt has none"


def test_tracks_of_workers_with_and_without_images_join(play):
    script = {(6,): [0, STOP], (7,): [4, STOP], (7, 4, STOP, SAYS, SEES, 4): [0, STOP]}
    joined = type(play(["6"], script)[0]).concat([play(["6"], script)[0], play(["7"], script)[0]])
    assert patches(joined.conditions["images"]) == [[], [4]] == levels(joined.primitives["image"])


def test_images_of_one_size_may_begin_a_prompt(play):
    codec = SeeingCodec()
    engine = TurnsEngine(ScriptedEngine(codec, {(SEES, 6): [0, STOP]}), codec, environment=Darkroom(), max_turns=1)
    req = request(["6"], PARAMS)
    req.primitives["image"] = Images(pixels=torch.full((1, 3, 2, 2), 7, dtype=torch.uint8))
    track = engine.generate(req).root_track()
    engine.shutdown()
    assert levels(track.primitives["image"]) == [[7]]


def test_a_model_that_writes_a_placeholder_gets_no_other_turn(play):
    track, _ = play(["7", "6"], {(7,): [1, SEES, STOP], (6,): [0, SEES, STOP]})
    assert [row[EPISODE]["end"] for row in track.metadata] == ["media", "answered"]


def test_an_image_that_no_model_reads_fails_its_episode_alone(play):
    track, _ = play(["7", "6"], {(7,): [3, STOP], (6,): [0, STOP]})
    assert [row[EPISODE]["end"] for row in track.metadata] == ["failed", "answered"]
    assert track.metadata[0][EPISODE]["reason"] == "an image of 3 x 1 pixels cannot be resized"


def test_images_that_are_not_declared_or_not_read_are_refused(play):
    with pytest.raises(ConfigError, match="its class declares none. Set shows_images = True"):
        play(["7"], {(7,): [4, STOP]}, environment=Undeclared())
    with pytest.raises(ConfigError, match="its class declares none. Set shows_images = True"):
        play(["3"], {}, environment=Undeclared())
    with pytest.raises(ConfigError, match="shows images, and TalkingCodec reads none between turns"):
        play([], {}, codec=TalkingCodec())


def test_tools_show_images_if_one_of_them_does():
    assert ToolUse({"camera": Camera(), "calculator": Calculator()}).shows_images
    assert not ToolUse({"calculator": Calculator()}).shows_images
