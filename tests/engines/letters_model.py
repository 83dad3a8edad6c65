"""A random Qwen3 of 100,000 parameters in the folder layout of a real one, and a codec that maps letters to tokens."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import LoraConfig, OptimizerConfig
from unirl.types.conditions import PromptCondition
from unirl.types.media import Texts
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ARSamplingParams

VOCABULARY = 97
STOP = 0
CONTEXT = 128
TOLERANCE = 1e-5  # float32, logits of a few units: two implementations round differently in the last bits
PARAMS = ARSamplingParams(temperature=0.8, max_new_tokens=16, seed=5)


def save_qwen3(folder: Path, *, seed: int = 0, tied: bool = False) -> Any:  # Any: transformers types it as a union
    """Save a model of fresh weights, large enough for a peaked softmax, and return it."""
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's attention on a CPU takes
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=STOP,
        pad_token_id=STOP,
    )
    model: Any = transformers.Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


class LetterCodec:
    """Stands for a pipeline's TextCodec: a character is its code point modulo the vocabulary, token 0 ends a text."""

    context_length = CONTEXT
    media_tokens = frozenset()

    def stop_token_ids(self, params):
        return tuple(sorted({STOP, *params.stop_token_ids}))

    def encode(self, primitives, params):
        texts = primitives["text"].texts
        return {"prompt": PromptCondition.pack(tokens=[torch.tensor(letters(text)) for text in texts])}

    def decode(self, segment):
        rows = segment.unpack("tokens")
        return Texts(texts=["".join(chr(token) for token in row.tolist() if token != STOP) for row in rows])


def letters(text: str) -> list[int]:
    """The tokens of a text."""
    return [ord(letter) % VOCABULARY for letter in text]


@torch.no_grad()
def log_probs(model: Any, prompt: list[int], tokens: list[int], temperature: float) -> torch.Tensor:
    """[len(tokens)] of the tokens after the prompt, by a forward of transformers."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def request(texts, params=PARAMS, rollout_id=0):
    return RolloutReq(
        sample_ids=[f"s{row}" for row in range(len(texts))],
        group_ids=list(texts),
        primitives={"text": Texts(texts=list(texts))},
        sampling_params=params,
        rollout_id=rollout_id,
    )


def gap(engine, model, params=PARAMS) -> float:
    """Largest |log-prob of the engine - log-prob of transformers| of fresh samples."""
    texts = ["one", "two words", "three"]
    segment = engine.generate(request(texts, params)).tracks["text"].segment
    return max(
        float((log_probs(model, letters(text), tokens.tolist(), params.temperature) - found).abs().max())
        for text, tokens, found in zip(texts, segment.unpack("tokens"), segment.unpack("log_probs"), strict=True)
    )


class ReplayedQwen3(LetterCodec):
    """Stands for an AutoregressivePipeline: replays a segment by one forward per sample."""

    def __init__(self, model):
        self.model = model

    def evaluating(self):
        return nullcontext()

    def replay(self, conditions, segment, params):
        rows = zip(conditions["prompt"].unpack("tokens"), segment.unpack("tokens"), strict=True)
        found = [log_probs(self.model, a.tolist(), b.tolist(), params.temperature) for a, b in rows]
        return SimpleNamespace(logp_N=torch.cat(found))


def backend_of(model, lora: LoraConfig | None = None) -> FSDPBackend:
    """The backend that trains a model, in fp32 on one device."""
    bundle: Any = SimpleNamespace(  # Any: what the backend reads of a ModelBundle
        block_class_names=("Qwen3DecoderLayer",),
        lora_target_modules=("q_proj", "v_proj", "down_proj"),
        trainable_modules=lambda: {"model": model},
    )
    return FSDPBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-3), lora=lora)
