import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from unirl.types.media import Images, Texts
from unirl.types.reward import RewardRequest


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def make_request():
    """Builds a request of `num_samples` random images, groups of `per_group`, prompts "prompt 0", ..."""

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


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory):
    """A CLIP folder as the hub has them: two random towers, a byte tokenizer, an image processor."""
    path = tmp_path_factory.mktemp("clip")
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*symbols, *(symbol + "</w>" for symbol in symbols), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = transformers.CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[])
    torch.manual_seed(0)
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(words), "max_position_embeddings": 24, "eos_token_id": tokenizer.eos_token_id}
    config = transformers.CLIPConfig(
        text_config=tower | text,
        vision_config=tower | {"image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    model = transformers.CLIPModel(config)
    # Random towers give nearly equal embeddings; larger weights make the comparison say something.
    for parameter in model.parameters():
        parameter.data.mul_(3) if parameter.ndim > 1 else None
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    crop = {"height": 16, "width": 16}
    transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=crop).save_pretrained(path)
    return str(path)
