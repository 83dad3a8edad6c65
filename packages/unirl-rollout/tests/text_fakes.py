"""What tests of served texts share: a codec of numbers, and requests of it."""

import torch

from unirl.types.conditions import ImagePatchCondition, PromptCondition
from unirl.types.media import Texts
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ARSamplingParams

PARAMS = ARSamplingParams(temperature=0.7, max_new_tokens=3)


class NumberCodec:
    """A text is its tokens, written as numbers."""

    context_length = 20
    media_tokens = frozenset()

    def stop_token_ids(self, params):
        return (9,)

    def encode(self, primitives, params):
        rows = [[int(word) for word in text.split()] for text in primitives["text"].texts]
        prompt = PromptCondition.pack(tokens=[torch.tensor(row) for row in rows])
        shown = primitives.get("image")
        if shown is None:
            return {"prompt": prompt}
        patches = [torch.zeros(len(each), 1) for each in shown.images]
        grids = [((1, 1, 1),) * len(each) for each in shown.images]
        return {"prompt": prompt, "images": ImagePatchCondition.pack(patches=patches, grids=grids)}

    def decode(self, segment):
        return Texts(texts=[" ".join(map(str, row.tolist())) for row in segment.unpack("tokens")])


def request(texts, params=PARAMS):
    ids = [f"s{row}" for row in range(len(texts))]
    return RolloutReq(
        sample_ids=ids, group_ids=list(texts), primitives={"text": Texts(texts=list(texts))}, sampling_params=params
    )
