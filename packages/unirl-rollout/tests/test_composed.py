"""The engine of two stages on a language model of five words and a velocity field, and how prompts are read."""

import dataclasses
from typing import Any

import pytest
import torch
from rollout_fakes import PARAMS, SHAPE, Copies, LinearPipeline
from test_trainside_text import Backend, FiveWords

from unirl.rollout.engine.composed.engine import ComposedEngine
from unirl.rollout.engine.composed.reading import PromptReader
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.rollout.engine.trainside.text import TrainsideTextEngine
from unirl.sde.schedule import linear_sigmas
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Texts
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import ARSamplingParams, ComposedSamplingParams, DiffusionSamplingParams

TEXTS = ARSamplingParams(temperature=1.0, max_new_tokens=5, seed=3, samples_per_prompt=2)
IMAGES = dataclasses.replace(PARAMS, samples_per_prompt=3)
BOTH = ComposedSamplingParams(ar=TEXTS, diffusion=IMAGES)
PHRASES = ["a cat", "two dogs"]


class Stages:
    """The engine, and the two models that it joins."""

    def __init__(self, **options: Any) -> None:
        self.words, self.field = FiveWords(), LinearPipeline()
        words: Any = self.words
        field: Any = self.field
        backend: Any = Backend(self.words)
        copies: Any = Copies(self.field)
        self.engine = ComposedEngine(
            {"writer": {"default": words}, "painter": {"default": field}},
            {
                "writer": TrainsideTextEngine(words, backend, forward_batch_size=4),
                "painter": TrainsideRolloutEngine(field, copies, forward_batch_size=4),
            },
            **options,
        )

    def says(self, texts: list[str]) -> None:
        """Let the writer's four completions read so."""
        decoded: Any = lambda segment: Texts(texts=texts)  # noqa: E731
        self.words.decode = decoded


def request(params: Any = BOTH, phrases: list[str] = PHRASES) -> RolloutReq:
    """Two texts of each phrase; for a diffusion request, two images."""
    groups = [f"prompt:{phrase}" for phrase in phrases for _ in range(2)]
    ids = [f"{group}:{row % 2}" for row, group in enumerate(groups)]
    return RolloutReq(
        sample_ids=ids,
        group_ids=groups,
        primitives={"text": Texts(texts=[phrase for phrase in phrases for _ in range(2)])},
        metadata=[{"meaning": phrase.upper()} for phrase in phrases for _ in range(2)],
        sampling_params=params,
        sigmas=linear_sigmas(IMAGES.num_inference_steps),
        init_noise_group_ids=ids if isinstance(params, DiffusionSamplingParams) else [],
        init_noise_latent_shape=list(SHAPE),
        rollout_id=5,
    )


def tracks(resp: RolloutResp) -> Any:  # Any: the engines' own segments and media
    """The tracks by name."""
    return resp.tracks


def test_every_text_becomes_images_that_know_their_text_and_their_prompt():
    stages = Stages()
    resp = stages.engine.generate(request())
    text, image = tracks(resp)["text"], tracks(resp)["image"]
    assert text.sample_ids == request().sample_ids and text.group_ids == request().group_ids
    assert image.sample_ids == [f"{name}/i{j}" for name in text.sample_ids for j in range(3)]
    assert (image.parent_track, image.parent_ids) == ("text", [name for name in text.sample_ids for _ in range(3)])
    assert isinstance(text.decoded, Texts)
    drawn = [
        text if text else phrase for text, phrase in zip(text.decoded.texts, text.primitives["text"].texts, strict=True)
    ]
    assert image.primitives["text"].texts == [each for each in drawn for _ in range(3)]
    asked = resp.with_inputs("image")
    texts: Any = asked.primitives["text"]
    assert texts.texts == [phrase for phrase in PHRASES for _ in range(6)]
    assert [row and row["meaning"] for row in asked.metadata] == [
        phrase.upper() for phrase in PHRASES for _ in range(6)
    ]


def test_a_shard_holds_what_the_whole_does_there():
    whole, req = Stages().engine.generate(request()), request()
    parts = [Stages().engine.generate(req.slice(start, start + 2)) for start in (0, 2)]
    joined = RolloutResp.concat(parts)
    for name in ("text", "image"):
        assert joined.track(name).sample_ids == whole.track(name).sample_ids
    assert torch.equal(tracks(joined)["image"].segment.latents, tracks(whole)["image"].segment.latents)
    assert tracks(joined)["text"].decoded.texts == tracks(whole)["text"].decoded.texts


def test_an_empty_text_draws_the_prompt_itself_and_is_counted():
    stages = Stages()
    stages.says(["", " ", '""', "abc"])
    resp = stages.engine.generate(request())
    assert tracks(resp)["text"].counts["fallback"].tolist() == [1, 1, 1, 0]
    assert tracks(resp)["image"].primitives["text"].texts[::3] == ["a cat", "a cat", "two dogs", "abc"]


def test_a_long_text_is_cut_between_words_and_what_the_painter_cannot_read_is_counted():
    stages = Stages(max_chars=9)
    stages.says(["red ball", "red balls here", "onewordthatislong", "abc"])
    resp = stages.engine.generate(request())
    assert tracks(resp)["text"].counts["shortened"].tolist() == [0, 1, 1, 0]
    drawn = ["red ball", "red balls", "onewordth", "abc"]
    assert tracks(resp)["image"].primitives["text"].texts[::3] == drawn
    assert tracks(resp)["image"].counts["cut_tokens"].tolist()[::3] == [3, 4, 4, 0]


def test_the_writer_reads_the_instruction_and_nobody_else_does():
    stages = Stages(instruction="{braces} {prompt}:")
    seen: list[str] = []
    encode = stages.words.encode

    def reading(primitives: Any, params: Any) -> Any:
        seen.extend(primitives["text"].texts)
        return encode(primitives, params)

    stages.words.encode = reading
    resp = stages.engine.generate(request())
    assert seen == [f"{{braces}} {p}:" for p in PHRASES for _ in range(2)]
    assert tracks(resp)["text"].primitives["text"].texts == ["a cat", "a cat", "two dogs", "two dogs"]


def test_images_can_be_had_without_the_writer_and_texts_without_the_painter():
    stages = Stages()
    image = stages.engine.generate(request(IMAGES))
    assert list(image.tracks) == ["image"] and stages.words.batches == []
    assert tracks(image)["image"].counts["cut_tokens"].tolist() == [0, 0, 3, 3]
    text = stages.engine.generate(request(TEXTS))
    assert list(text.tracks) == ["text"] and tracks(text)["text"].primitives["text"].texts[0] == "a cat"
    assert len(stages.field.batch_sizes) == 1


def test_each_policy_is_sampled_from_its_own_copy():
    stages = Stages()
    now, old = stages.engine.generate(request()), stages.engine.generate(request(), "painter/old")
    assert tracks(now)["text"].decoded.texts == tracks(old)["text"].decoded.texts
    assert not torch.equal(tracks(now)["image"].segment.latents, tracks(old)["image"].segment.latents)
    both = stages.engine.generate(request(), "painter/old,writer/old")
    assert set("".join(tracks(both)["text"].decoded.texts)) == {"a"}
    with pytest.raises(ConfigError, match="'old' names no copies of several policies. Write <policy>/<copy>"):
        stages.engine.generate(request(), "old")


@pytest.mark.parametrize(
    ("reader", "completion", "prompt"),
    [
        (PromptReader(), "  a red\n ball ", "a red ball"),
        (PromptReader(), "<think>a cat?</think> 'a dog'", "a dog"),
        (PromptReader(), '"', ""),
        (PromptReader(marker="Prompt:"), "Prompt: no. Prompt: a dog", "a dog"),
        (PromptReader(marker="Prompt:"), "a dog", ""),
        (PromptReader(marker="Prompt:"), "Prompt: a </think> dog", ""),
    ],
)
def test_a_prompt_is_read_off_a_completion(reader: PromptReader, completion: str, prompt: str):
    assert reader.read(completion) == prompt


def test_mistakes_have_their_message():
    with pytest.raises(
        ConfigError, match=r"engine.writer = 'poet' is no policy of this recipe; there are \['writer', "
    ):
        Stages(writer="poet")
    with pytest.raises(ConfigError, match="engine.instruction = 'draw' holds no {prompt}"):
        Stages(instruction="draw")
    with pytest.raises(ConfigError, match="engine.marker = ' ' is found everywhere"):
        Stages(marker=" ")
    with pytest.raises(ContractError, match="this engine makes texts and images, the request has NoneType"):
        Stages().engine.generate(request(None))


def test_engines_of_one_track_are_refused():
    stages = Stages()
    field: Any = stages.field
    painter = TrainsideRolloutEngine(field, forward_batch_size=4, track="text")
    words: Any = stages.words
    writer = TrainsideTextEngine(words, forward_batch_size=4)
    both = ComposedEngine({"painter": {"default": field}}, {"writer": writer, "painter": painter})
    with pytest.raises(ConfigError, match="both engines call their track 'text'. Set the `track` of one of them."):
        both.generate(request())
