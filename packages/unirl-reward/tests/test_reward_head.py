"""HPSv3 and VideoAlign on tiny random weights in the published layout, against the published forward written out."""

import json
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn

from unirl.reward.local.pixels import to_pictures
from unirl.reward.local.vision_language.hpsv3 import HPSv3Scorer
from unirl.reward.local.vision_language.qwen_vl import QwenVLReader
from unirl.reward.local.vision_language.reward_head import merged_lora
from unirl.reward.local.vision_language.video_align import VideoAlignScorer, sampled
from unirl.types.errors import ConfigError, ContractError, RewardError
from unirl.types.media import Texts, Videos
from unirl.types.reward import RewardRequest

from .vlm_folders import byte_tokenizer, qwen_vl_config, write_processor

PIXELS: dict[str, Any] = {"min_pixels": 4 * 28 * 28, "max_pixels": 4 * 28 * 28}
IMAGE_TEXT = "Rate the picture.\nTextual prompt - {text_prompt}\n\nThe rating: <|Reward|>\nEND\n"
VIDEO_TEXT = "Rate.\nVQ: <|VQ_reward|>\nMQ: <|MQ_reward|>\nPrompt - {text_prompt}\nTA: <|TA_reward|>\nEND\n"
STANDARDS = {"VQ_mean": 0.5, "VQ_std": 2.0, "MQ_mean": -1.0, "MQ_std": 0.5, "TA_mean": 0.25, "TA_std": 4.0}
PROMPTS = ["a red cat", "a dog that runs", "x"]


class Published(nn.Module):
    """Qwen2-VL and head as the reward repositories wire them."""

    def __init__(self, tokens: list[str], head: Any):
        super().__init__()
        self.tokenizer = byte_tokenizer()
        self.tokenizer.add_special_tokens({"additional_special_tokens": tokens})
        torch.manual_seed(1)
        config = qwen_vl_config("qwen2_vl", self.tokenizer)
        config.text_config.vocab_size = len(self.tokenizer)
        self.qwen: Any = transformers.Qwen2VLForConditionalGeneration(config).eval()
        for parameter in self.qwen.model.visual.parameters():
            parameter.data.mul_(4) if parameter.ndim > 1 else None
        self.head = head
        for parameter in head.parameters():
            parameter.data.normal_(generator=torch.Generator().manual_seed(len(parameter)))
        self.ids = [self.tokenizer.convert_tokens_to_ids(token) for token in tokens]

    def state(self) -> dict[str, torch.Tensor]:
        """Under the names of transformers 4.45, by which the checkpoints were saved."""
        found = {}
        for key, value in self.qwen.state_dict().items():
            name = key.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
            found[name] = value.clone()
        return found | {f"rm_head.{key}": value.clone() for key, value in self.head.state_dict().items()}

    @torch.no_grad()
    def forward(self, text: str, pixels: torch.Tensor, grid: torch.Tensor, kind: str) -> torch.Tensor:
        """[K, O] of one sample: embeddings, the image's features in their place, the language model, the head."""
        pad = {"image": "<|image_pad|>", "video": "<|video_pad|>"}[kind]
        shown = f"<|vision_start|>{pad * (int(grid.prod()) // 4)}<|vision_end|>"
        chat = f"<|im_start|>user\n{shown}{text}<|im_end|>\n<|im_start|>assistant\n"
        ids = self.tokenizer(chat, return_tensors="pt", add_special_tokens=False)["input_ids"]
        embeds = self.qwen.model.language_model.embed_tokens(ids)
        seen = self.qwen.model.visual(pixels, grid_thw=grid).pooler_output
        embeds[ids == self.tokenizer.convert_tokens_to_ids(pad)] = seen
        hidden = self.qwen.model.language_model(inputs_embeds=embeds).last_hidden_state[0]
        return torch.stack([self.head(hidden[(ids[0] == token).nonzero()[0, 0]]) for token in self.ids])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Qwen2-VL as its own repository has it: no reward token, more embeddings than tokens."""
    path = tmp_path_factory.mktemp("base")
    tokenizer = byte_tokenizer()
    qwen_vl_config("qwen2_vl", tokenizer).save_pretrained(path)
    write_processor(path, tokenizer, 14)
    return str(path)


@pytest.fixture(scope="module")
def hpsv3(tmp_path_factory):
    path = tmp_path_factory.mktemp("hpsv3")
    head = nn.Sequential(
        nn.Linear(64, 24), nn.ReLU(), nn.Dropout(0.05), nn.Linear(24, 6), nn.ReLU(), nn.Linear(6, 2)
    ).eval()
    model = Published(["<|Reward|>"], head)
    save_file(model.state(), path / "HPSv3.safetensors")
    (path / "instruction.txt").write_text(IMAGE_TEXT)
    return model, {"model": str(path), "instruction_file": str(path / "instruction.txt")} | PIXELS


def random(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


def hpsv3_scorer(files, base, **changes) -> HPSv3Scorer:
    return HPSv3Scorer(**(files | {"base": base, "dtype": "fp32", "normalise": False} | changes))


def test_hpsv3_is_the_published_forward(hpsv3, base, make_request):
    model, files = hpsv3
    request = make_request(num_samples=3, prompts=PROMPTS, size=70)
    found = hpsv3_scorer(files, base).score(request)
    processor: Any = transformers.Qwen2VLImageProcessorPil.from_pretrained(base)
    size = {"shortest_edge": PIXELS["min_pixels"], "longest_edge": PIXELS["max_pixels"]}
    expected = []
    for picture, prompt in zip(to_pictures(request.pixels), PROMPTS, strict=True):
        ready = processor(images=[picture], size=size, return_tensors="pt")
        assert ready["image_grid_thw"].tolist() == [[1, 4, 4]]
        text = IMAGE_TEXT.replace("{text_prompt}", prompt)
        expected.append(model(text, ready["pixel_values"], ready["image_grid_thw"], "image")[0])
    expected = torch.stack(expected)
    assert expected[:, 0].std() > 1e-2
    torch.testing.assert_close(found.rewards, expected[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.component_rewards["hpsv3/sigma"], expected[:, 1].exp(), rtol=1e-4, atol=1e-5)
    over_15 = hpsv3_scorer(files, base, normalise=True).score(request).rewards
    torch.testing.assert_close(over_15, found.rewards / 15)


def test_hpsv3_does_not_depend_on_the_batch(hpsv3, base, make_request):
    request = make_request(num_samples=3, prompts=PROMPTS, size=70)
    three = hpsv3_scorer(hpsv3[1], base, batch_size=3).score(request).rewards
    one = hpsv3_scorer(hpsv3[1], base, batch_size=1).score(request).rewards
    torch.testing.assert_close(one, three, rtol=1e-5, atol=1e-5)


def test_hpsv3_has_gradients_that_are_finite_differences(hpsv3, base, make_request):
    scorer = hpsv3_scorer(hpsv3[1], base)
    exact = make_request(num_samples=2, prompts=PROMPTS[:2], pixels=(random(2, 3, 56, 56) * 255).round() / 255)
    torch.testing.assert_close(scorer.score_with_gradient(exact), scorer.score(exact).rewards, rtol=1e-5, atol=1e-5)
    scorer.modules()[0].double()
    pixels = (0.1 + 0.8 * random(2, 3, 70, 70).double()).requires_grad_()

    def value(pixels):
        request = make_request(num_samples=2, prompts=PROMPTS[:2], pixels=pixels)
        return scorer.score_batch_with_gradient(request)["mu"].sum()

    (gradient,) = torch.autograd.grad(value(pixels), pixels)
    direction = gradient / gradient.norm()
    step = 1e-3  # transformers computes the rotary embedding in float32, which a smaller one would show
    with torch.no_grad():
        slope = (value(pixels + step * direction) - value(pixels - step * direction)) / (2 * step)
    assert gradient.norm() > 1
    torch.testing.assert_close(gradient.norm(), slope, rtol=5e-3, atol=0)


def test_weights_of_newer_transformers_load_too(hpsv3, base, make_request, tmp_path):
    model, files = hpsv3
    newer = {key: value.clone() for key, value in model.qwen.state_dict().items()}
    newer |= {f"rm_head.{key}": value for key, value in model.head.state_dict().items()}
    torch.save({"model": newer}, tmp_path / "model.pth")
    request = make_request(num_samples=1, prompts=PROMPTS[:1], size=56)
    found = hpsv3_scorer(files | {"model": str(tmp_path), "file": "model.pth"}, base).score(request).rewards
    assert torch.equal(found, hpsv3_scorer(files, base).score(request).rewards)


def test_a_prompt_with_special_tokens_fails(hpsv3, base, make_request):
    request = make_request(num_samples=2, prompts=["a cat", "a <|Reward|>"], size=56)
    with pytest.raises(RewardError, match=r"holds the special tokens \['<\|Reward\|>'\]"):
        hpsv3_scorer(hpsv3[1], base).score(request)
    assert hpsv3_scorer(hpsv3[1], base).score_isolated(request, "sample").successes == [True, False]


def test_hpsv3_says_what_does_not_fit(hpsv3, base, tmp_path):
    model, files = hpsv3
    with pytest.raises(ConfigError, match="has no file other.safetensors"):
        hpsv3_scorer(files, base, file="other.safetensors")
    (tmp_path / "bare.txt").write_text("Rate {text_prompt}")
    with pytest.raises(ConfigError, match=r"must hold each of \['<\|Reward\|>'\] once"):
        hpsv3_scorer(files, base, instruction_file=str(tmp_path / "bare.txt"))
    with pytest.raises(ConfigError, match="cannot read instruction_file"):
        hpsv3_scorer(files, base, instruction_file="/no/file")
    state = model.state()
    for name, change, text in [
        ("headless", {key: value for key, value in state.items() if "rm_head" not in key}, "with a reward head"),
        ("extra", state | {"model.layers.9.extra.weight": torch.ones(1)}, "extra.weight"),
        ("missing", {key: value for key, value in state.items() if key != "model.norm.weight"}, "norm.weight"),
        ("small", state | {"model.embed_tokens.weight": torch.ones(100, 64)}, "embeds 100 tokens, but the tokenizer"),
        ("three", state | {"rm_head.5.weight": torch.ones(3, 6), "rm_head.5.bias": torch.ones(3)}, "has 3 outputs"),
        ("odd", {**state, "rm_head.strange": torch.ones(3)}, "a reward head with the weights"),
    ]:
        save_file(change, tmp_path / f"{name}.safetensors")
        with pytest.raises(ConfigError, match=text):
            hpsv3_scorer(files | {"model": str(tmp_path), "file": f"{name}.safetensors"}, base)


@pytest.fixture(scope="module", params=[1, 3], ids=["one output", "three outputs"])
def video_align(request, tmp_path_factory, base):
    """The published folder: a PEFT model's state and its configuration."""
    path = tmp_path_factory.mktemp("video_align")
    tokens = ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]
    model = Published(tokens, nn.Linear(64, request.param, bias=False))
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj", "qkv"])
    wrapped: Any = get_peft_model(model.qwen, lora)
    for name, parameter in wrapped.named_parameters():
        parameter.data.normal_(std=0.1) if "lora_B" in name else None
    state = {}
    for key, value in wrapped.state_dict().items():
        name = key.replace("base_model.model.model.visual.", "base_model.model.visual.")
        state[name.replace("base_model.model.model.language_model.", "base_model.model.model.")] = value.clone()
    state["base_model.model.rm_head.weight"] = model.head.weight.detach().clone()
    for step in (90, 1000):
        (path / f"checkpoint-{step}").mkdir()
        torch.save(state if step == 1000 else {}, path / f"checkpoint-{step}" / "model.pth")
    model.qwen = wrapped.eval().merge_and_unload()
    settings = {
        "data_config": {"fps": 2.0, "num_frames": None, "max_frame_pixels": 64 * 28 * 28},
        "model_config": {"model_name_or_path": base, "output_dim": request.param},
        "peft_lora_config": {"lora_enable": True, "lora_r": 4, "lora_alpha": 8, "use_rslora": False},
        "inference_config": STANDARDS,
    }
    (path / "model_config.json").write_text(json.dumps(settings))
    (path / "instruction.txt").write_text(VIDEO_TEXT)
    return model, {"model": str(path), "instruction_file": str(path / "instruction.txt")}


def video_request(lengths=(16, 20), fps=8.0, height=56, width=84):
    generator = torch.Generator().manual_seed(5)
    frames = [torch.rand(length, 3, height, width, generator=generator) for length in lengths]
    names = [f"v{i}" for i in range(len(lengths))]
    return RewardRequest(
        sample_ids=names,
        group_ids=names,
        primitives={"text": Texts(texts=PROMPTS[: len(lengths)])},
        generated={"video": Videos.pack(frames=frames, fps=fps)},
    )


def video_patches(base, frames):
    """As the image processor gives them: of a pair of frames, each fills its half of the temporal patch."""
    processor: Any = transformers.Qwen2VLImageProcessorPil.from_pretrained(base)
    size = {"shortest_edge": 1, "longest_edge": 10**9}
    each = [processor(images=[picture], size=size, return_tensors="pt") for picture in to_pictures(frames)]
    halves = [one["pixel_values"].unflatten(1, (3, 2, 14, 14))[:, :, 0] for one in each]
    pairs = [torch.stack(halves[i : i + 2], dim=2).flatten(1) for i in range(0, len(halves), 2)]
    _, height, width = each[0]["image_grid_thw"][0].tolist()
    return torch.cat(pairs), torch.tensor([[len(pairs), height, width]])


def test_patches_of_frames_are_those_of_the_official_processor(base):
    frames = (torch.rand(4, 3, 56, 84, generator=torch.Generator().manual_seed(2)) * 255).round() / 255
    expected, grid = video_patches(base, frames)
    found, found_grid = QwenVLReader(base, "test").patches(frames)
    assert torch.equal(found_grid, grid)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    picture, picture_grid = QwenVLReader(base, "test").patches(frames[:1])
    processor: Any = transformers.Qwen2VLImageProcessorPil.from_pretrained(base)
    ready = processor(
        images=to_pictures(frames[:1]), size={"shortest_edge": 1, "longest_edge": 10**9}, return_tensors="pt"
    )
    assert torch.equal(picture_grid, ready["image_grid_thw"])
    torch.testing.assert_close(picture, ready["pixel_values"], rtol=0, atol=1e-6)


def test_video_align_is_the_published_forward_standardised(video_align, base, monkeypatch):
    smallest = "unirl.reward.local.vision_language.video_align.MIN_PIXELS"
    monkeypatch.setattr(smallest, 28 * 28)  # so that nothing is resized
    model, files = video_align
    request = video_request()
    scorer = VideoAlignScorer(**files, dtype="fp32", batch_size=2)
    found = scorer.score(request)
    for row, frames in enumerate(request.generated["video"].unpack("frames")):
        chosen = frames[torch.linspace(0, len(frames) - 1, 4).round().long()]  # 2 and 2.5 seconds at 2 a second
        pixels, grid = video_patches(base, chosen)
        raw = model(VIDEO_TEXT.replace("{text_prompt}", PROMPTS[row]), pixels, grid, "video")
        raw = raw.diagonal() if raw.shape[1] == 3 else raw[:, 0]
        expected = {
            key: (raw[i] - STANDARDS[f"{key}_mean"]) / STANDARDS[f"{key}_std"]
            for i, key in enumerate(("VQ", "MQ", "TA"))
        }
        for key, value in expected.items():
            torch.testing.assert_close(found.component_rewards[f"video_align/{key}"][row], value, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.rewards[row], torch.stack(list(expected.values())).sum(), rtol=1e-4, atol=1e-4)
    alone = VideoAlignScorer(**files, dtype="fp32", batch_size=1).score(request).rewards
    torch.testing.assert_close(alone, found.rewards, rtol=1e-4, atol=1e-4)
    raw = VideoAlignScorer(**files, dtype="fp32", is_standardised=False).score(request).component_rewards
    undone = found.component_rewards["video_align/MQ"] * STANDARDS["MQ_std"] + STANDARDS["MQ_mean"]
    torch.testing.assert_close(raw["video_align/MQ"], undone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("frames", "wanted", "places"),
    [
        (16, 4.0, [0, 5, 10, 15]),
        (81, 81 / 16 * 2, [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]),
        (10, 1.0, [0, 3, 6, 9]),
        (3, 6.0, [0, 2]),
        (5, None, [0, 1, 3, 4]),
        (9, 5.0, [0, 3, 5, 8]),  # 5 rounds to 4, as half to even of 2.5
    ],
)
def test_frames_are_taken_evenly_and_in_pairs(frames, wanted, places):
    assert sampled(frames, wanted) == places


def test_video_align_says_what_it_lacks(video_align, base, make_request, tmp_path):
    _, files = video_align
    scorer = VideoAlignScorer(**files, dtype="fp32")
    with pytest.raises(ConfigError, match="takes 2.0 frames per second, but the videos have no fps"):
        scorer.score(video_request(fps=None))
    with pytest.raises(RewardError, match="a video of 1 frames is too short"):
        scorer.score(video_request(lengths=(1,)))
    with pytest.raises(ContractError, match="scores generated video"):
        scorer.score(make_request(num_samples=1))
    with pytest.raises(ConfigError, match="has no readable model_config.json"):
        VideoAlignScorer(**(files | {"model": str(tmp_path)}))
    settings = {"data_config": {"fps": 2.0, "max_frame_pixels": 1}, "model_config": {}, "peft_lora_config": {}}
    (tmp_path / "model_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="has no folder checkpoint-<step>"):
        VideoAlignScorer(**(files | {"model": str(tmp_path), "base": base}))
    with pytest.raises(ConfigError, match=r"component_weights are of \['VQ'\]"):
        VideoAlignScorer(**files, component_weights={"VQ": 1.0})


def test_an_adapter_is_added_to_its_layer_and_halves_of_one_are_refused():
    torch.manual_seed(0)
    weight, down, up = torch.randn(4, 3), torch.randn(2, 3), torch.randn(4, 2)
    state = {
        "base_model.model.a.base_layer.weight": weight,
        "base_model.model.a.base_layer.bias": torch.ones(4),
        "base_model.model.a.lora_A.default.weight": down,
        "base_model.model.a.lora_B.default.weight": up,
        "base_model.model.norm.weight": torch.ones(2),
    }
    found = merged_lora(state, 0.5)
    assert set(found) == {"a.weight", "a.bias", "norm.weight"}
    torch.testing.assert_close(found["a.weight"], weight + 0.5 * up @ down)
    del state["base_model.model.a.lora_B.default.weight"]
    with pytest.raises(ConfigError, match="a.base_layer.weight without its lora_A and lora_B"):
        merged_lora(state, 0.5)
