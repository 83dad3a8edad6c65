"""The engine of a unified model on a language model of five words and a velocity field that share a policy."""

import dataclasses
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from rollout_fakes import PARAMS, SHAPE, Copies, LinearPipeline
from test_trainside_text import Backend, FiveWords

from unirl.rollout.engine.composed.stages import texts_of
from unirl.rollout.engine.unified.engine import UnifiedEngine
from unirl.sde.schedule import linear_sigmas
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Texts
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import ARSamplingParams, ComposedSamplingParams

TEXTS = ARSamplingParams(temperature=1.0, max_new_tokens=5, seed=3, samples_per_prompt=2)
BOTH = ComposedSamplingParams(ar=TEXTS, diffusion=dataclasses.replace(PARAMS, samples_per_prompt=3))
PROMPTS = ["a cat", "two dogs"]


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


def engine() -> tuple[UnifiedEngine, Any, Any]:
    """The engine and the two pipelines that it joins."""
    words, field = FiveWords(), Drawing()
    store: Any = Weights(words, field)
    pipelines = {"default": {"text": words, "image": field}}
    return UnifiedEngine(pipelines, {"default": store}, text_batch_size=4, forward_batch_size=12), words, field


def request() -> RolloutReq:
    """Two thoughts of each prompt."""
    groups = [f"prompt:{prompt}" for prompt in PROMPTS for _ in range(2)]
    return RolloutReq(
        sample_ids=[f"{group}:{row % 2}" for row, group in enumerate(groups)],
        group_ids=groups,
        primitives={"text": Texts(texts=[prompt for prompt in PROMPTS for _ in range(2)])},
        metadata=[{"asked": prompt} for prompt in PROMPTS for _ in range(2)],
        sampling_params=BOTH,
        sigmas=linear_sigmas(PARAMS.num_inference_steps),
        init_noise_latent_shape=list(SHAPE),
        rollout_id=5,
    )


def tracks(resp: RolloutResp) -> tuple[Any, Any]:  # Any: the engines' own segments and media
    return resp.tracks["text"], resp.tracks["image"]


def test_every_thought_becomes_images_of_prompt_and_thought():
    made, _, field = engine()
    resp = made.generate(request())
    text, image = tracks(resp)
    assert text.sample_ids == request().sample_ids and text.group_ids == request().group_ids
    assert (image.parent_track, image.parent_ids) == ("text", [name for name in text.sample_ids for _ in range(3)])
    assert field.read == {
        "text": [prompt for prompt in PROMPTS for _ in range(6)],
        "thought": [thought for thought in text.decoded.texts for _ in range(3)],
    }
    assert image.primitives["thought"].texts == field.read["thought"]
    assert len(set(text.decoded.texts)) == 4
    asked = resp.with_inputs("image")
    assert [row and row["asked"] for row in asked.metadata] == field.read["text"]
    assert text.policy_versions.tolist() == [7] * 4 and image.policy_versions.tolist() == [7] * 12


def test_each_track_is_sampled_from_its_copy():
    plain, both, images = (tracks(engine()[0].generate(request(), copy)) for copy in (None, "old", "image/old"))
    assert both[0].decoded.texts == ["aaaaa"] * 4
    assert images[0].decoded.texts == plain[0].decoded.texts != both[0].decoded.texts
    # The velocity does not depend on conditions here, so images tell the weights alone.
    assert torch.equal(images[1].segment.latents, both[1].segment.latents)
    assert not torch.equal(images[1].segment.latents, plain[1].segment.latents)
    texts = tracks(engine()[0].generate(request(), "text/old"))
    assert texts[0].decoded.texts == both[0].decoded.texts
    assert torch.equal(texts[1].segment.latents, plain[1].segment.latents)


def test_a_shard_holds_what_the_whole_does_there():
    whole, req = engine()[0].generate(request()), request()
    joined = RolloutResp.concat([engine()[0].generate(req.slice(start, start + 2)) for start in (0, 2)])
    for one, other in zip(tracks(joined), tracks(whole), strict=True):
        assert one.sample_ids == other.sample_ids
    assert torch.equal(tracks(joined)[1].segment.latents, tracks(whole)[1].segment.latents)
    assert tracks(joined)[0].decoded.texts == tracks(whole)[0].decoded.texts


def test_a_model_that_writes_nothing_is_counted_and_draws_the_prompt():
    made, words, field = engine()
    words.decode = lambda segment: Texts(texts=["", "ab", "", "c"])
    text, _ = tracks(made.generate(request()))
    assert text.counts["empty"].tolist() == [1, 0, 1, 0]
    assert field.read["thought"][:4] == ["", "", "", "ab"]


def test_images_alone_are_drawn_without_a_thought():
    made, _, field = engine()
    params = dataclasses.replace(BOTH.diffusion, samples_per_prompt=1)
    req = request()
    resp = made.generate(req.replace(sampling_params=params, init_noise_group_ids=req.sample_ids))
    assert list(resp.tracks) == ["image"] and set(field.read) == {"text"}


def test_mistakes_have_their_message():
    words, field, store = FiveWords(), Drawing(), Weights(None, None)
    pipelines: Any = {"a": {"text": words, "image": field}, "b": {"text": words}}
    stores: Any = {"a": store, "b": store}
    with pytest.raises(ConfigError, match="samples one policy, this recipe has a, b. Take .*ComposedEngine"):
        UnifiedEngine(pipelines, stores, text_batch_size=1, forward_batch_size=1)
    with pytest.raises(ConfigError, match="pipelines lacks image; it has text. Add what is missing"):
        UnifiedEngine({"b": pipelines["b"]}, stores, text_batch_size=1, forward_batch_size=1)
    with pytest.raises(ConfigError, match="'/old' names no copies"):
        engine()[0].generate(request(), "/old")
    with pytest.raises(ContractError, match=r"two stages needs primitives\['text'\], it has \['image'\]"):
        texts_of({"image": Texts(texts=["not a text"])})


class Sizing(FiveWords):
    """Thoughts that end with "a" ask for 16 x 32 pixels, with "b" for 24 x 24; others for none."""

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
    store: Any = Weights(words, field)
    pipelines = {"default": {"text": words, "image": field}}
    made = UnifiedEngine(pipelines, {"default": store}, text_batch_size=4, forward_batch_size=12)
    asked = dataclasses.replace(BOTH, diffusion=dataclasses.replace(BOTH.diffusion, height=8, width=8))
    assert made.plan(asked).latent_shape == (2, 1, 1)
    field.follows_size = True
    with pytest.raises(ConfigError, match="noise levels of 16 x 32 pixels are not those of 8 x 8, .*chooses_size: f"):
        made.plan(asked)
