"""A tiny Qwen3, Qwen3.5 or Qwen2.5-VL behind the backend, sampled and replayed: what one process and each of two ranks
run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

from unirl.models.qwen3.bundle import Qwen3Bundle
from unirl.models.qwen3.pipeline import Qwen3Pipeline
from unirl.models.qwen3_5.bundle import Qwen35Bundle
from unirl.models.qwen3_5.pipeline import Qwen35Pipeline
from unirl.models.qwen_vl.bundle import QwenVLBundle
from unirl.models.qwen_vl.pipeline import QwenVLPipeline
from unirl.models.tiny.text import byte_tokenizer
from unirl.rollout.engine.trainside.text import TrainsideTextEngine
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, LoraConfig, OptimizerConfig
from unirl.types.media import ImageLists, Texts
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

PARAMS = ARSamplingParams(temperature=0.9, max_new_tokens=20, seed=2)
CASES = {
    "tied-full": ("tied", False),
    "untied-full": ("untied", False),
    "untied-lora": ("untied", True),
    "linear-full": ("linear", False),
    "linear-lora": ("linear", True),
    "vision-full": ("vision", False),
    "vision-lora": ("vision", True),
}
"""A model, and whether LoRA trains."""
PROMPTS = ["1+1=", "a longer prompt", "ab", "1+1="]


def save_model(folder: Path, *, is_tied: bool = False, has_linear: bool = False) -> None:
    """Bytes as tokens; weights large enough for a peaked softmax. has_linear: with layers of linear attention."""
    tokenizer = byte_tokenizer({}, eos_token="<|im_end|>", pad_token="<pad>")
    torch.manual_seed(0)
    values: dict[str, Any] = {
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,
        "tie_word_embeddings": is_tied,
        "eos_token_id": tokenizer.eos_token_id,
    }
    linear = {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    model = (
        transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**values, **linear))
        if has_linear
        else transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**values))
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def loaded(folder: Path) -> tuple[Any, Any]:
    """Bundle and pipeline of a folder."""
    if (folder / "preprocessor_config.json").is_file():
        bundle = QwenVLBundle(str(folder))
        return bundle, QwenVLPipeline(bundle)
    if json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_5_text":
        linear = Qwen35Bundle(str(folder))
        return linear, Qwen35Pipeline(linear)
    text = Qwen3Bundle(str(folder))
    return text, Qwen3Pipeline(text)


def pictures() -> ImageLists:
    """Images of the first two prompts alone, so that the second of two ranks has none."""
    generator = torch.Generator().manual_seed(0)
    first, second, third = (torch.rand(3, 32, 32, generator=generator) for _ in range(3))
    return ImageLists(images=[[first], [second, third], [], []])


def request(params: ARSamplingParams, *, has_pictures: bool) -> RolloutReq:
    shown = {"image": pictures()} if has_pictures else {}
    return RolloutReq(
        sample_ids=[f"s{i}" for i in range(len(PROMPTS))],
        group_ids=[f"s{i}" for i in range(len(PROMPTS))],
        primitives={"text": Texts(texts=PROMPTS), **shown},
        sampling_params=params,
    )


def stop_tokens(folder: Path) -> tuple[int, ...]:
    """Tokens that end samples, as the test has chosen them."""
    return tuple(int(token) for token in (folder / "stop").read_text().split())


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sample_and_differentiate(
    folder: Path, rows: slice, params: ARSamplingParams, *, lora: bool, config: FSDPConfig | None = None
) -> dict[str, Any]:
    """Tokens, log-probs of rollout and replay of these rows, and the gradient of the mean log-prob over all ranks."""
    bundle, pipeline = loaded(folder)
    torch.manual_seed(0)  # of the adapters
    backend = FSDPBackend(
        bundle,
        optimizer=OptimizerConfig(learning_rate=1e-3),
        fsdp=config if config is not None else FSDPConfig(param_dtype="fp32"),
        lora=LoraConfig(rank=2, alpha=4) if lora else None,
    )
    forwards: list[int] = []
    bundle.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    track = (
        TrainsideTextEngine(pipeline, backend, forward_batch_size=4)
        .generate(request(params, has_pictures=bundle.reads_media).select(rows))
        .tracks["text"]
    )
    num_sampling = len(forwards)
    assert isinstance(track.segment, TextSegment) and track.segment.log_probs is not None
    out = pipeline.replay(track.conditions, track.segment, params)
    total = backend.collectives.all_reduce_sum(torch.tensor(float(len(out.logp_N))), "dp")
    (out.logp_N.sum() * backend.dp_size / total).backward()
    with torch.no_grad(), backend.reference_policy() if lora else torch.no_grad():
        again = pipeline.replay(track.conditions, track.segment, params).logp_N
    gradients = {name: gathered(p.grad) for name, p in backend.parameters.items() if p.grad is not None}
    backend.close()
    return {
        "tokens": track.segment.tokens,
        "lengths": track.segment.lengths,
        "rollout": track.segment.log_probs,
        "replay": out.logp_N.detach(),
        "again": again,
        "gradients": gradients,
        "num_sampling": num_sampling,
    }


def results_of_a_rank(folder: Path) -> dict[str, Any]:
    """This rank's half of the batch, by every model."""
    rank = dist.get_rank()
    params = replace(PARAMS, stop_token_ids=stop_tokens(folder))
    return {
        case: sample_and_differentiate(folder / model, slice(2 * rank, 2 * rank + 2), params, lora=lora)
        for case, (model, lora) in CASES.items()
    }
