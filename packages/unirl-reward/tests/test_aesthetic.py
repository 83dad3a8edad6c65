"""LAION's aesthetic predictor against transformers and the published layout, on tiny random weights."""

import pytest
import torch
import transformers
from torch import nn

from unirl.reward.local.images.aesthetic import AestheticScorer
from unirl.reward.local.pixels import to_pictures
from unirl.types.errors import ConfigError

FILE = "aesthetic-model.pth"


class PublishedHead(nn.Module):
    """The layout of the published file in tiny: linear layers with dropouts between, and none before the last."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 12), nn.Dropout(0.2), nn.Linear(12, 8), nn.Dropout(0.2), nn.Linear(8, 6), nn.Dropout(0.1),
            nn.Linear(6, 4), nn.Linear(4, 1),
        )  # fmt: skip

    def forward(self, embedded):
        return self.layers(embedded)


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    torch.manual_seed(1)
    torch.save(PublishedHead().state_dict(), folder / FILE)
    return str(folder)


@pytest.fixture(scope="module")
def scorer(clip_folder, head_folder):
    return AestheticScorer(model=clip_folder, head=head_folder, batch_size=4)


def reference(clip_folder, head_folder, pictures):
    """CLIP's own image features and the published head, image by image."""
    model = transformers.CLIPModel.from_pretrained(clip_folder).eval()
    processor = transformers.CLIPImageProcessorPil.from_pretrained(clip_folder)
    head = PublishedHead().eval()
    head.load_state_dict(torch.load(f"{head_folder}/{FILE}", weights_only=True))
    scores = []
    for picture in pictures:
        with torch.no_grad():
            found = model.get_image_features(**processor(images=picture, return_tensors="pt")).pooler_output
            scores.append(head(found / found.norm(dim=-1, keepdim=True))[0, 0])
    return torch.stack(scores)


def test_scores_are_those_of_clip_and_the_published_head(scorer, clip_folder, head_folder, make_request):
    request = make_request(num_samples=5, per_group=5, size=24)
    expected = reference(clip_folder, head_folder, to_pictures(request.pixels))
    assert expected.std() > 1e-4
    # Two orders of summation in fp32.
    torch.testing.assert_close(scorer.score(request).rewards, expected, rtol=0, atol=1e-6)
    alone = torch.cat([scorer.score(request.select([row])).rewards for row in range(5)])
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-6)


def test_the_gradient_is_that_of_finite_differences(scorer, make_request):
    request = make_request(num_samples=2, size=16)
    pixels = (request.pixels * 0.8 + 0.1).requires_grad_()
    request.generated["image"].pixels = pixels
    rewards = scorer.score_with_gradient(request)
    torch.testing.assert_close(rewards.detach(), scorer.score(request).rewards, rtol=0, atol=0.02)
    (gradient,) = torch.autograd.grad(rewards.sum(), pixels)
    step = 0.002 * gradient / gradient.abs().max()
    with torch.no_grad():
        ends = []
        for sign in (1, -1):
            request.generated["image"].pixels = pixels + sign * step
            ends.append(scorer.score_with_gradient(request).sum())
    # Central differences of a smooth function along the gradient: the error is of third order in the step.
    torch.testing.assert_close(ends[0] - ends[1], 2 * (gradient * step).sum(), rtol=0.02, atol=0)
    assert all(parameter.grad is None for module in scorer.modules() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"weight": torch.ones(1, 16)}, "not the linear layers of an aesthetic predictor"),
        ({"layers.0.weight": torch.ones(1, 16)}, "not the linear layers"),
        ({"layers.0.weight": torch.ones(2, 16), "layers.0.bias": torch.ones(2)}, "do not lead to one number"),
        ({"layers.0.weight": torch.ones(1, 9), "layers.0.bias": torch.ones(1)}, "takes 9 numbers, .* embeds in 16"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(clip_folder, tmp_path, state, message):
    torch.save(state, tmp_path / FILE)
    with pytest.raises(ConfigError, match=message):
        AestheticScorer(model=clip_folder, head=str(tmp_path))


def test_missing_files_are_named(clip_folder, head_folder, tmp_path):
    with pytest.raises(ConfigError, match=f"head = '{tmp_path}' has no file {FILE}"):
        AestheticScorer(model=clip_folder, head=str(tmp_path))
    with pytest.raises(ConfigError, match=f"scorer aesthetic: model = '{tmp_path}' cannot be loaded"):
        AestheticScorer(model=str(tmp_path), head=head_folder)


def test_weights_that_are_missing_are_not_left_at_random(clip_folder, head_folder, tmp_path):
    model = transformers.CLIPModel.from_pretrained(clip_folder)
    kept = {key: value for key, value in model.state_dict().items() if key != "visual_projection.weight"}
    model.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(ConfigError, match="is no whole CLIPModel: 1 weights are missing, such as visual_projection"):
        AestheticScorer(model=str(tmp_path), head=head_folder)
