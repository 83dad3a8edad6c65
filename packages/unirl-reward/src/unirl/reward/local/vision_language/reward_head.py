"""Qwen2-VL with a reward head that reads the hidden states of special tokens in the text: HPSv3, VideoAlign.

Legend: b samples, T tokens, K special tokens, D width of the model, O outputs of the head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unirl.reward.local.preprocess import at_least_float32
from unirl.reward.local.pretrained import load_transformers, on_one_line
from unirl.types.errors import ConfigError
from unirl.types.weights import plain_names

_HEAD = "rm_head."
PROMPT = "{text_prompt}"
"""Where an instruction has the prompt."""


class RewardHeadModel(nn.Module):
    """backbone: transformers' Qwen2VLModel. head: D -> O. token_ids: the K special tokens, in the order of the result.

    The head runs in at least fp32. Positions are those of the sequence, equal on all three axes of the rotary
    embedding, also for images: the published models were trained so, by a forward pass that leaves position ids to
    the language model.
    """

    def __init__(self, backbone: Any, head: nn.Module, token_ids: Sequence[int]) -> None:  # Any: transformers' model
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.token_ids = list(token_ids)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[b, K, O] of the inputs of `QwenVLReader.tokens` and pixels. Raises ValueError unless every row holds every
        special token once."""
        input_ids = inputs["input_ids"]
        places = torch.stack([(input_ids == token).int().argmax(dim=1) for token in self.token_ids], dim=1)
        counts = torch.stack([(input_ids == token).sum(dim=1) for token in self.token_ids], dim=1)
        if not (counts == 1).all():
            raise ValueError(f"each text must hold each reward token once, found {counts.tolist()}")
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand(3, len(input_ids), -1)
        hidden_bTD = self.backbone(**inputs, position_ids=positions, use_cache=False).last_hidden_state
        rows = torch.arange(len(input_ids), device=input_ids.device)[:, None]
        return self.head(at_least_float32(hidden_bTD[rows, places]))


def load_reward_model(
    state: Mapping[str, Tensor],
    *,
    base: str,
    tokens: Sequence[int],
    num_words: int,
    dtype: torch.dtype,
    option: str,
) -> RewardHeadModel:
    """The model with the weights of `state`, on the CPU.

    state: names of Qwen2VLForConditionalGeneration as transformers saved them before version 4.52 ("visual.*",
    "model.layers.*") or since ("model.visual.*", "model.language_model.*"), and "rm_head.*". base: folder or hub id of
    the Qwen2-VL that was trained, for its configuration. num_words: of the tokenizer with the special tokens.
    option: names the checkpoint in messages. Raises ConfigError if the weights do not fit.
    """
    transformers = load_transformers(option)
    head_state = {key.removeprefix(_HEAD): value for key, value in state.items() if key.startswith(_HEAD)}
    backbone_state = {
        _backbone_name(key): value for key, value in state.items() if not key.startswith((_HEAD, "lm_head."))
    }
    words = backbone_state.get("language_model.embed_tokens.weight")
    if words is None or not head_state:
        raise ConfigError(
            f"{option} holds no Qwen2-VL with a reward head: it has {_some(state)}, expected "
            f"model.embed_tokens.weight and {_HEAD}*"
        )
    if len(words) < num_words:
        raise ConfigError(
            f"{option} embeds {len(words)} tokens, but the tokenizer of {base!r} has {num_words} with the reward "
            "tokens. Give the base model that the checkpoint was trained from."
        )
    config = transformers.Qwen2VLConfig.from_pretrained(base)
    config.text_config.vocab_size = len(words)
    head = _head_of(head_state, config.text_config.hidden_size)
    try:
        backbone, report = transformers.Qwen2VLModel.from_pretrained(
            None, config=config, state_dict=backbone_state, dtype=dtype, output_loading_info=True
        )
        head.load_state_dict(head_state)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{option} does not fit the base model {base!r}: {on_one_line(error)}") from error
    wrong = {key: sorted(map(str, report[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(wrong.values()):
        raise ConfigError(f"{option} does not fit the base model {base!r}: {on_one_line(ValueError(str(wrong)))}")
    return RewardHeadModel(backbone, head.float(), tokens).eval().requires_grad_(False)


def merged_lora(state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Weights of a PEFT model, as `get_peft_model` names them, with the adapter added: W + scale * B A, in fp32.

    scale: lora_alpha / r, or lora_alpha / sqrt(r) for rank-stabilised LoRA. Names lose PEFT's prefix and ".base_layer".
    """
    plain = plain_names(state)
    found = {}
    for key, value in plain.items():
        if ".lora_A." in key or ".lora_B." in key:
            continue
        stem = key.removesuffix(".base_layer.weight")
        if stem == key:
            found[key.replace(".base_layer.", ".")] = value
            continue
        down, up = plain.get(f"{stem}.lora_A.default.weight"), plain.get(f"{stem}.lora_B.default.weight")
        if down is None or up is None:
            raise ConfigError(f"the weights hold {key} without its lora_A and lora_B; give the whole checkpoint")
        found[f"{stem}.weight"] = (value.float() + scale * (up.float() @ down.float())).to(value.dtype)
    return found


def read_instruction(file: str, tokens: Sequence[str], owner: str) -> str:
    """The text of an instruction with {text_prompt} and each special token once. Raises ConfigError for another."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{owner}: cannot read instruction_file {file!r}: {error}") from error
    wrong = [part for part in (PROMPT, *tokens) if text.count(part) != 1]
    if wrong:
        raise ConfigError(
            f"{owner}: instruction_file {file!r} must hold each of {wrong} once; use the published wording"
        )
    return text


def _backbone_name(key: str) -> str:
    """Name in Qwen2VLModel of a weight of Qwen2VLForConditionalGeneration, of either layout."""
    inner = re.sub(r"^model\.(?=visual\.|language_model\.)", "", key)
    return re.sub(r"^model\.", "language_model.", inner)


def _head_of(state: Mapping[str, Tensor], width: int) -> nn.Module:
    """The head that these weights are of: one linear layer, or an MLP whose layers stand between ReLU and dropout."""
    if set(state) == {"weight"}:
        return nn.Linear(width, len(state["weight"]), bias=False)
    places = sorted({int(key.split(".")[0]) for key in state if key.split(".")[0].isdigit()})
    if not places or {f"{place}.{kind}" for place in places for kind in ("weight", "bias")} != set(state):
        raise ConfigError(f"a reward head with the weights {_some(state)} is not known")
    layers: list[nn.Module] = [nn.Identity() for _ in range(places[-1] + 1)]
    for place in places:
        outputs, inputs = state[f"{place}.weight"].shape
        layers[place] = nn.Linear(inputs, outputs)
        if place != places[-1]:
            layers[place + 1] = nn.ReLU()
    return nn.Sequential(*layers)


def _some(state: Mapping[str, Tensor]) -> list[str]:
    return sorted(state)[:4]
