"""The engine of images that are drawn token by token, on a model of five codes that stands for a real one."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from unirl.rollout.engine.trainside.image_tokens import TrainsideImageTokenEngine
from unirl.types.conditions import PromptCondition
from unirl.types.errors import ContractError
from unirl.types.media import Images, Texts
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment

PARAMS = ARSamplingParams(temperature=1.0, max_new_tokens=4, seed=3)


class FiveCodes:
    """Draws images of 2 x 2 pixels, a code each."""

    sample_length = 4
    drawn = 4

    def encode(self, primitives, params):
        return {"prompt": PromptCondition.pack(tokens=[torch.tensor([1]) for _ in primitives["text"].texts])}

    def evaluating(self):
        return nullcontext()

    def stop_token_ids(self, params):
        return ()

    def generate(self, conditions, params, *, noise_keys, any_rank=None, **options):
        logp = torch.zeros(5).log_softmax(-1)
        numbers = torch.arange(len(noise_keys) * self.drawn).view(len(noise_keys), -1) % 5
        return TextSegment.pack(
            tokens=list(numbers),
            log_probs=[logp[row] for row in numbers],
            status=torch.full((len(noise_keys),), int(SegmentStatus.COMPLETED)),
            params=params,
        )

    def images(self, segment):
        codes = torch.stack(segment.unpack("tokens")).float() / 4
        return Images(pixels=codes.view(-1, 1, 2, 2).expand(-1, 3, -1, -1).contiguous())


def request(num: int) -> RolloutReq:
    names = [f"p{row}" for row in range(num)]
    return RolloutReq(
        sample_ids=names,
        group_ids=names,
        primitives={"text": Texts(texts=["a"] * num)},
        sampling_params=PARAMS,
        rollout_id=0,
    )


def engine(pipeline: Any, **options: Any) -> TrainsideImageTokenEngine:
    return TrainsideImageTokenEngine(pipeline, forward_batch_size=2, **options)


def test_a_track_has_tokens_to_train_on_and_images_to_score():
    track = engine(FiveCodes()).generate(request(3)).track("image")
    assert isinstance(track.segment, TextSegment) and isinstance(track.decoded, Images)
    assert track.segment.lengths.tolist() == [4, 4, 4]
    expected = torch.tensor([[0, 1, 2, 3], [4, 0, 1, 2], [0, 1, 2, 3]])  # in forwards of two
    assert torch.equal(track.decoded.pixels[:, 0].flatten(1), expected / 4)


def test_images_may_be_kept_in_bytes():
    decoded = engine(FiveCodes(), media_bits=8).generate(request(1)).track("image").decoded
    assert isinstance(decoded, Images) and decoded.pixels.dtype == torch.uint8


def test_an_image_of_too_few_tokens_is_refused():
    pipeline = FiveCodes()
    pipeline.drawn = 3
    with pytest.raises(ContractError, match="sample 0 is COMPLETED but its last token is 2"):
        engine(pipeline).generate(request(1))
