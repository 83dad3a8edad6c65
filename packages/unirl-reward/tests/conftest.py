import pytest
import torch

from unirl.types.media import Images, Texts
from unirl.types.reward import RewardRequest


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def make_request():
    """Builds a request of `num_samples` random pictures, groups of `per_group`, prompts "prompt 0", ..."""

    def make(num_samples=6, per_group=2, size=16, prompts=None, pixels=None):
        generator = torch.Generator().manual_seed(7)
        if pixels is None:
            pixels = torch.rand(num_samples, 3, size, size, generator=generator)
        return RewardRequest(
            sample_ids=[f"s{i}" for i in range(num_samples)],
            group_ids=[f"g{i // per_group}" for i in range(num_samples)],
            primitives={"text": Texts(texts=prompts or [f"prompt {i}" for i in range(num_samples)])},
            generated={"image": Images(pixels=pixels)},
            metadata=[{"row": i} for i in range(num_samples)],
        )

    return make
