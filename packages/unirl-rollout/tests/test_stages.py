"""The engine of several stages on a language model of five words and a velocity field, and how stages read."""

import dataclasses
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from rollout_fakes import PARAMS, SHAPE, Copies, LinearPipeline
from test_trainside_text import Backend, FiveWords

from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.rollout.engine.trainside.text import TrainsideTextEngine
from unirl.rollout.stages.engine import StagesEngine
from unirl.rollout.stages.reading import Asked, Instruction, Redraw, Thought, WrittenPrompt
from unirl.sde.noise import initial_noise
from unirl.sde.schedule import linear_sigmas
from unirl.types.conditions import TextEmbedCondition
from unirl.types.copies import Copies as NamedCopies
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Texts
from unirl.types.noise import noise_keys
from unirl.types.rollout import DiffusionPlan, RolloutReq, RolloutResp
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams, StagedSamplingParams
from unirl.types.stages import BuiltStage

TEXTS = ARSamplingParams(temperature=1.0, max_new_tokens=5, seed=3, samples_per_prompt=2)
IMAGES = dataclasses.replace(PARAMS, samples_per_prompt=3)
PHRASES = ["a cat", "two dogs"]
PLAN = DiffusionPlan(linear_sigmas(IMAGES.num_inference_steps), tuple(SHAPE), "linear")


class Run:
    """A writer, a painter, and the engine that joins them."""

    def __init__(self, instruction: Any = None, **reads: Any) -> None:
        self.words, self.field = FiveWords(), LinearPipeline()
        words, field = cast_any(self.words), cast_any(self.field)
        writer = TrainsideTextEngine(words, cast_any(Backend(self.words)), forward_batch_size=4)
        painter = TrainsideRolloutEngine(field, cast_any(Copies(self.field)), forward_batch_size=4)
        self.stages = {
            "text": BuiltStage(engine=writer, pipeline=words, reader=instruction or Asked(), policy="writer"),
            "image": BuiltStage(
                engine=painter, pipeline=field, reader=WrittenPrompt(**reads), policy="painter", grows_from="text"
            ),
        }
        self.engine = StagesEngine(self.stages)

    def says(self, texts: list[str]) -> None:
        """Let the writer's four completions read so."""
        self.words.decode = cast_any(lambda segment: Texts(texts=texts))


def cast_any(value: Any) -> Any:
    return value


def request(*wanted: str, stages: dict[str, Any] | None = None) -> RolloutReq:
    """Two rows of each phrase, for the named stages or all."""
    params = {"text": TEXTS, "image": IMAGES} if stages is None else stages
    groups = [f"prompt:{phrase}" for phrase in PHRASES for _ in range(2)]
    return RolloutReq(
        sample_ids=[f"{group}:{row % 2}" for row, group in enumerate(groups)],
        group_ids=groups,
        primitives={"text": Texts(texts=[phrase for phrase in PHRASES for _ in range(2)])},
        metadata=[{"meaning": phrase.upper()} for phrase in PHRASES for _ in range(2)],
        sampling_params=StagedSamplingParams(stages={name: params[name] for name in wanted or params}),
        plans={name: PLAN for name, own in params.items() if isinstance(own, DiffusionSamplingParams)},
        rollout_id=5,
    )


def tracks(resp: RolloutResp) -> Any:  # Any: the engines' own segments and media
    """The tracks by name."""
    return resp.tracks


def test_every_text_becomes_images_that_know_their_text_and_their_prompt():
    resp = Run().engine.generate(request())
    text, image = tracks(resp)["text"], tracks(resp)["image"]
    assert text.sample_ids == request().sample_ids and text.group_ids == request().group_ids
    assert image.sample_ids == [f"{name}/i{j}" for name in text.sample_ids for j in range(3)]
    assert (image.parent_track, image.parent_ids) == ("text", [name for name in text.sample_ids for _ in range(3)])
    drawn = [said or phrase for said, phrase in zip(text.decoded.texts, text.primitives["text"].texts, strict=True)]
    assert image.primitives["text"].texts == [each for each in drawn for _ in range(3)]
    asked = resp.with_inputs("image")
    assert cast_any(asked.primitives["text"]).texts == [phrase for phrase in PHRASES for _ in range(6)]
    assert [row and row["meaning"] for row in asked.metadata] == [
        phrase.upper() for phrase in PHRASES for _ in range(6)
    ]


def test_a_shard_holds_what_the_whole_does_there():
    whole, req = Run().engine.generate(request()), request()
    joined = RolloutResp.concat([Run().engine.generate(req.slice(start, start + 2)) for start in (0, 2)])
    for name in ("text", "image"):
        assert joined.track(name).sample_ids == whole.track(name).sample_ids
    assert torch.equal(tracks(joined)["image"].segment.latents, tracks(whole)["image"].segment.latents)
    assert tracks(joined)["text"].decoded.texts == tracks(whole)["text"].decoded.texts


def test_an_empty_text_draws_the_prompt_itself_and_is_counted():
    run = Run()
    run.says(["", " ", '""', "abc"])
    resp = run.engine.generate(request())
    assert tracks(resp)["text"].counts["fallback"].tolist() == [1, 1, 1, 0]
    assert tracks(resp)["image"].primitives["text"].texts[::3] == ["a cat", "a cat", "two dogs", "abc"]


def test_a_long_text_is_cut_between_words_and_what_the_painter_cannot_read_is_counted():
    run = Run(max_chars=9)
    run.says(["red ball", "red balls here", "onewordthatislong", "abc"])
    resp = run.engine.generate(request())
    assert tracks(resp)["text"].counts["shortened"].tolist() == [0, 1, 1, 0]
    drawn = ["red ball", "red balls", "onewordth", "abc"]
    assert tracks(resp)["image"].primitives["text"].texts[::3] == drawn
    assert tracks(resp)["image"].counts["cut_tokens"].tolist()[::3] == [3, 4, 4, 0]


def test_the_writer_reads_the_instruction_and_no_other_stage_does():
    run = Run(Instruction("{braces} {prompt}:"))
    seen: list[str] = []
    encode = run.words.encode

    def reading(primitives: Any, params: Any) -> Any:
        seen.extend(primitives["text"].texts)
        return encode(primitives, params)

    run.words.encode = reading
    resp = run.engine.generate(request())
    assert seen == [f"{{braces}} {p}:" for p in PHRASES for _ in range(2)]
    assert tracks(resp)["text"].primitives["text"].texts == ["a cat", "a cat", "two dogs", "two dogs"]


def test_images_can_be_had_without_the_writer_and_texts_without_the_painter():
    run = Run(Instruction("{prompt}!"))
    image = run.engine.generate(request("image"))
    assert list(image.tracks) == ["image"] and run.words.batches == []
    assert tracks(image)["image"].counts["cut_tokens"].tolist() == [0, 0, 3, 3]
    assert tracks(image)["image"].primitives["text"].texts[0] == "a cat"
    text = run.engine.generate(request("text"))
    assert list(text.tracks) == ["text"] and tracks(text)["text"].primitives["text"].texts[0] == "a cat"
    assert len(run.field.batch_sizes) == 1


@pytest.mark.parametrize("copies", [{"painter": "old"}, {"image": "old"}])
def test_each_stage_is_sampled_from_its_copy(copies: NamedCopies):
    run = Run()
    now, old = run.engine.generate(request()), run.engine.generate(request(), copies)
    assert tracks(now)["text"].decoded.texts == tracks(old)["text"].decoded.texts
    assert not torch.equal(tracks(now)["image"].segment.latents, tracks(old)["image"].segment.latents)


def test_a_third_stage_reads_what_the_first_two_made_and_what_was_asked():
    run = Run()
    words = FiveWords()
    critic = TrainsideTextEngine(cast_any(words), cast_any(Backend(words)), forward_batch_size=4, track="critique")
    stages = {
        "text": run.stages["text"],
        "critique": BuiltStage(
            engine=critic,
            pipeline=words,
            reader=Instruction("{prompt} as {text}"),
            policy="critic",
            grows_from="text",
        ),
        "image": dataclasses.replace(run.stages["image"], grows_from="critique"),
    }
    seen: list[str] = []
    encode = words.encode

    def reading(primitives: Any, params: Any) -> Any:
        seen.extend(primitives["text"].texts)
        return encode(primitives, params)

    words.encode = reading
    params = {"text": TEXTS, "critique": TEXTS, "image": IMAGES}
    resp = StagesEngine(stages).generate(request(stages=params))
    text, critique, image = (tracks(resp)[name] for name in params)
    said = list(zip(text.primitives["text"].texts, text.decoded.texts, strict=True))
    assert seen == [f"{prompt} as {words}" for prompt, words in said for _ in range(2)]
    assert critique.sample_ids == [f"{name}/c{j}" for name in text.sample_ids for j in range(2)]
    assert image.sample_ids == [f"{name}/i{j}" for name in critique.sample_ids for j in range(3)]
    assert image.batch_size == 4 * 2 * 3
    asked = resp.with_inputs("image")
    assert cast_any(asked.primitives["text"]).texts == [phrase for phrase in PHRASES for _ in range(12)]
    drawn = [said or phrase for said, phrase in zip(critique.decoded.texts, asked_of(critique, text), strict=True)]
    assert image.primitives["text"].texts == [each for each in drawn for _ in range(3)]


def asked_of(child: Any, root: Any) -> list[str]:
    """The user's prompt of each sample of a child of the root."""
    prompts = dict(zip(root.sample_ids, root.primitives["text"].texts, strict=True))
    return [prompts[name] for name in child.group_ids]


class Drawing(LinearPipeline):
    """Reads prompt and thought."""

    def encode(self, primitives, params):
        self.read = {slot: value.texts for slot, value in primitives.items()}
        lengths = [[float(len(text)) for text in texts] for texts in self.read.values()]
        return {"text": TextEmbedCondition(embeds=torch.tensor(lengths).T[:, None])}


class Weights:
    """Stands for a backend whose copy "old" changes both models."""

    policy_version = 7

    def __init__(self, words, field):
        self.copies = Backend(words), Copies(field)

    def any_rank(self, value):
        return value

    @contextmanager
    def using_policy(self, name):
        with self.copies[0].using_policy(name), self.copies[1].using_policy(name):
            yield


def thinking() -> tuple[StagesEngine, Any, Any]:
    """A model that thinks, then draws, and its two pipelines."""
    words, field = FiveWords(), Drawing()
    store = cast_any(Weights(words, field))
    writer = TrainsideTextEngine(cast_any(words), store, forward_batch_size=4)
    painter = TrainsideRolloutEngine(cast_any(field), store, forward_batch_size=12)
    stages = {
        "text": BuiltStage(engine=writer, pipeline=words, reader=Asked(), policy="default"),
        "image": BuiltStage(engine=painter, pipeline=field, reader=Thought(), policy="default", grows_from="text"),
    }
    return StagesEngine(stages), words, field


def test_every_thought_becomes_images_of_prompt_and_thought():
    engine, _, field = thinking()
    resp = engine.generate(request())
    text, image = tracks(resp)["text"], tracks(resp)["image"]
    assert field.read == {
        "text": [prompt for prompt in PHRASES for _ in range(6)],
        "thought": [thought for thought in text.decoded.texts for _ in range(3)],
    }
    assert image.primitives["thought"].texts == field.read["thought"]
    assert len(set(text.decoded.texts)) == 4
    assert text.policy_versions.tolist() == [7] * 4 and image.policy_versions.tolist() == [7] * 12


def test_tracks_of_one_policy_are_sampled_from_their_copies():
    plain, both, images, texts = (
        tracks(thinking()[0].generate(request(), copies)) for copies in (None, "old", {"image": "old"}, {"text": "old"})
    )
    assert both["text"].decoded.texts == ["aaaaa"] * 4
    assert images["text"].decoded.texts == plain["text"].decoded.texts != both["text"].decoded.texts
    # The velocity does not depend on conditions here, so images tell the weights alone.
    assert torch.equal(images["image"].segment.latents, both["image"].segment.latents)
    assert not torch.equal(images["image"].segment.latents, plain["image"].segment.latents)
    assert texts["text"].decoded.texts == both["text"].decoded.texts
    assert torch.equal(texts["image"].segment.latents, plain["image"].segment.latents)


def test_a_model_that_writes_nothing_is_counted_and_draws_the_prompt():
    engine, words, field = thinking()
    words.decode = lambda segment: Texts(texts=["", "ab", "", "c"])
    text = tracks(engine.generate(request()))["text"]
    assert text.counts["empty"].tolist() == [1, 0, 1, 0]
    assert field.read["thought"][:4] == ["", "", "", "ab"]


def test_images_alone_are_drawn_without_a_thought():
    engine, _, field = thinking()
    resp = engine.generate(request("image"))
    assert list(resp.tracks) == ["image"] and set(field.read) == {"text"}


def test_a_stage_in_another_worker_reads_thoughts_with_its_own_copy_of_the_pipeline_that_wrote_them():
    together, _, _ = thinking()
    expected = tracks(together.generate(request()))
    (_, words, field), (_, _, elsewhere) = thinking(), thinking()
    writer = TrainsideTextEngine(cast_any(words), cast_any(Weights(words, field)), forward_batch_size=4)
    painter = TrainsideRolloutEngine(cast_any(elsewhere), cast_any(Weights(words, elsewhere)), forward_batch_size=12)
    writes = StagesEngine({"text": BuiltStage(engine=writer, pipeline=words, reader=Asked(), policy="default")})
    stage = BuiltStage(
        engine=painter,
        pipeline=elsewhere,
        reader=Thought(),
        policy="default",
        grows_from="text",
        parent_pipeline=FiveWords(),
    )
    draws = StagesEngine({"image": stage})
    asked = request()
    written = writes.generate(asked.replace(sampling_params=StagedSamplingParams(stages={"text": TEXTS})))
    drawing = asked.replace(sampling_params=StagedSamplingParams(stages={"image": IMAGES}))
    found = tracks(draws.generate(drawing, begun=written))
    assert found["text"].decoded.texts == expected["text"].decoded.texts
    assert torch.equal(found["image"].segment.latents, expected["image"].segment.latents)
    assert elsewhere.read["thought"] == expected["image"].primitives["thought"].texts


class Sizing(FiveWords):
    """Thoughts that begin with the first word ask for 16 x 32 pixels, with the second for 24 x 24; others for none."""

    image_sizes = ((16, 32), (24, 24))

    def chosen_sizes(self, segment):
        sizes = dict(enumerate(self.image_sizes))
        return [sizes.get(int(tokens[0])) for tokens in segment.unpack("tokens")]


class SizedDrawing(Drawing):
    """A latent is an eighth of the pixels; `shift` of the schedule may depend on the size."""

    follows_size = False

    def latent_shape(self, params):
        return 2, params.height // 8, params.width // 8

    def sigmas(self, params):
        levels = super().sigmas(params)
        return levels * (params.height / 8) if self.follows_size else levels


def test_a_schedule_that_follows_the_size_is_refused_where_thoughts_choose_it():
    words, field = Sizing(), SizedDrawing()
    store = cast_any(Weights(words, field))
    writer = TrainsideTextEngine(cast_any(words), store, forward_batch_size=4)
    painter = TrainsideRolloutEngine(cast_any(field), store, forward_batch_size=12)
    engine = StagesEngine(
        {
            "text": BuiltStage(engine=writer, pipeline=words, reader=Asked(), policy="default"),
            "image": BuiltStage(engine=painter, pipeline=field, reader=Thought(), policy="default", grows_from="text"),
        }
    )
    asked = StagedSamplingParams(stages={"text": TEXTS, "image": dataclasses.replace(IMAGES, height=8, width=8)})
    assert engine.plans(asked)["image"].latent_shape == (2, 1, 1)
    field.follows_size = True
    with pytest.raises(ConfigError, match="noise levels of 16 x 32 pixels are not those of 8 x 8, .*chooses_size: f"):
        engine.plans(asked)


@pytest.mark.parametrize(
    ("reader", "completion", "prompt"),
    [
        (WrittenPrompt(), "  a red\n ball ", "a red ball"),
        (WrittenPrompt(), "<think>a cat?</think> 'a dog'", "a dog"),
        (WrittenPrompt(), '"', ""),
        (WrittenPrompt(marker="Prompt:"), "Prompt: no. Prompt: a dog", "a dog"),
        (WrittenPrompt(marker="Prompt:"), "a dog", ""),
        (WrittenPrompt(marker="Prompt:"), "Prompt: a </think> dog", ""),
    ],
)
def test_a_prompt_is_read_off_a_completion(reader: WrittenPrompt, completion: str, prompt: str):
    assert reader.prompt_in(completion) == prompt


def test_mistakes_have_their_message():
    with pytest.raises(ConfigError, match=r"reads.template = 'draw' holds neither {prompt}, the user's prompt, nor"):
        Instruction("draw")
    with pytest.raises(ConfigError, match="reads.marker = ' ' is found everywhere"):
        WrittenPrompt(marker=" ")
    with pytest.raises(ContractError, match="this engine has several stages, the request has ARSamplingParams"):
        Run().engine.generate(request().replace(sampling_params=TEXTS))
    with pytest.raises(ConfigError, match="the request names a stage 'sound'; there are text, image"):
        Run().engine.generate(request(stages={"sound": TEXTS}))
    with pytest.raises(ContractError, match="a request for a stage of latents needs its plan"):
        Run().engine.generate(request().replace(plans={}))


def test_a_track_is_called_as_its_stage_whatever_its_engine_calls_it():
    run = Run()
    painter = TrainsideRolloutEngine(cast_any(run.field), forward_batch_size=4, track="other")
    renamed = {**run.stages, "image": dataclasses.replace(run.stages["image"], engine=painter)}
    assert list(StagesEngine(renamed).generate(request()).tracks) == ["text", "image"]


def test_a_redrawn_image_begins_from_the_one_above_at_its_noise_level():
    run = Run()
    painter = TrainsideRolloutEngine(cast_any(run.field), forward_batch_size=4, track="redraw")
    stages = {
        **run.stages,
        "redraw": dataclasses.replace(
            run.stages["image"], engine=painter, reader=Redraw(strength=0.25), grows_from="image"
        ),
    }
    engine = StagesEngine(stages)
    params = {"text": TEXTS, "image": IMAGES, "redraw": dataclasses.replace(IMAGES, samples_per_prompt=2)}
    plans = engine.plans(StagedSamplingParams(stages=cast_any(params)))
    assert torch.equal(plans["redraw"].sigmas, plans["image"].sigmas * 0.25)
    asked = dataclasses.replace(request(stages=params), plans=plans)
    image, redraw = (tracks(engine.generate(asked))[name] for name in ("image", "redraw"))
    assert redraw.sample_ids == [f"{name}/r{j}" for name in image.sample_ids for j in range(2)]
    assert redraw.primitives["text"].texts == [text for text in image.primitives["text"].texts for _ in range(2)]
    keys = noise_keys(5, redraw.sample_ids, redraw.parent_ids, same_noise=False)
    noise = initial_noise(keys, IMAGES.seed, list(SHAPE))
    clean = image.segment.clean_latents.repeat_interleave(2, dim=0)
    first = redraw.segment.latents[:, redraw.segment.indices.index(0)]
    torch.testing.assert_close(first, 0.75 * clean + 0.25 * noise)
    # Without the image above there is nothing to begin from: the stage reads the request.
    alone = engine.generate(dataclasses.replace(request("redraw", stages=params), plans=plans))
    assert list(alone.tracks) == ["redraw"]
