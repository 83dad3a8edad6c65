"""Tokenizer and encoder of the edits world: a Qwen2.5-VL taught what images show and instructions ask.

Real encoders arrive pretrained, so this one is too: linear probes on its last hidden state must read off it the words,
what stands in each quadrant, and which object an instruction is about. The probes are then thrown away.
Shape letters: B tasks, T tokens after the template, D width, F facts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from unirl.models.qwen_image_edit.bundle import QwenImageEditBundle
from unirl.models.qwen_image_edit.text import TEMPLATE, TEMPLATE_TOKENS
from unirl.pretraining.probing import fact_losses, train_by_probes
from unirl.pretraining.vision_language import PATCH_SIDE, make_image_processor, make_qwen_vl
from unirl.reward.worlds.edits_grammar import CATEGORIES, DIRECTIONS, Edit
from unirl.reward.worlds.shapes_grammar import COLORS, SHAPES
from unirl.worlds.shapes.edits.world import Scene
from unirl.worlds.shapes.world import IMAGE_SIDE

WIDTH = 64
PICTURE = QwenImageEditBundle.picture_mark
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
WORDS = (
    *("make", "turn", "remove", "move", "the", "assistant", *COLORS, *SHAPES, *DIRECTIONS),
    *(f"the {shape}" for shape in SHAPES),
    *(f"into a {shape}" for shape in SHAPES),
)
VOCABULARY = {word: index for index, word in enumerate(("<|endoftext|>", "<unk>", *SPECIALS, *WORDS))}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer. Phrases are one token, so that every instruction has three and no row is padded: "remove
    the circle" alone keeps its words apart. The pipeline's template takes 64 tokens, as with the published tokenizer.
    """
    shapes = "|".join(SHAPES)
    phrases = (rf"(?<!remove )the (?:{shapes})", rf"into a (?:{shapes})", *DIRECTIONS, r"\w+", r"[^\w\s]+")
    tokenizer = Tokenizer(WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("|".join(phrases)), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=256,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIALS),
    )


def make_encoder() -> Qwen2_5_VLForConditionalGeneration:
    """See `make_qwen_vl`; 0.3 M parameters."""
    return make_qwen_vl(VOCABULARY.__getitem__, vocab_size=len(VOCABULARY), width=WIDTH, num_heads=2)


def pretrain_encoder(
    tasks: Sequence[tuple[Scene, Edit]],
    patches_BND: Tensor,
    ids_BT: Tensor,
    encoder: Qwen2_5_VLForConditionalGeneration,
    *,
    num_steps: int,
    batch_size: int = 64,
    learning_rate: float = 3e-3,
) -> float:
    """Train in place by linear probes; returns the share of right answers.

    patches_BND, ids_BT: the images and the whole texts of the tasks, as the pipeline gives them to the encoder.
    """
    facts_BF = torch.tensor([_facts(scene, edit) for scene, edit in tasks])
    contents_BQ2 = torch.tensor([_contents(scene) for scene, _ in tasks])
    sizes = (facts_BF.amax(0) + 1).tolist()
    fact_probe, word_probe = nn.Linear(WIDTH, sum(sizes)), nn.Linear(WIDTH, len(VOCABULARY))
    content_probe = nn.Linear(WIDTH, len(COLORS) + 1 + len(SHAPES) + 1)
    is_image_T = ids_BT[0, TEMPLATE_TOKENS:] == VOCABULARY["<|image_pad|>"]

    def batch() -> tuple[list[Tensor], list[Tensor]]:
        rows = torch.randint(len(tasks), (batch_size,))
        hidden_BTD = hidden_states(encoder, ids_BT[rows], patches_BND[rows])
        words_BTD, images_BQD = hidden_BTD[:, ~is_image_T], hidden_BTD[:, is_image_T]
        hits: list[Tensor] = []
        # The last token has read everything.
        losses = fact_losses(fact_probe(hidden_BTD[:, -1]), facts_BF[rows], sizes, hits)
        contents = contents_BQ2[rows].flatten(0, 1)
        read = content_probe(images_BQD.flatten(0, 1))
        losses += fact_losses(read, contents, [len(COLORS) + 1, len(SHAPES) + 1], hits)
        own = ids_BT[rows][:, TEMPLATE_TOKENS:][:, ~is_image_T]
        losses.append(nn.functional.cross_entropy(word_probe(words_BTD).flatten(0, 1), own.flatten()))
        return losses, hits

    modules = (encoder, fact_probe, word_probe, content_probe)
    return train_by_probes(modules, batch, num_steps=num_steps, learning_rate=learning_rate)


def hidden_states(encoder: Qwen2_5_VLForConditionalGeneration, ids_BT: Tensor, patches_BND: Tensor) -> Tensor:
    """The last hidden state after the template, [B, T, D], as the pipeline takes it."""
    side = IMAGE_SIDE // PATCH_SIDE
    output = encoder.model(
        input_ids=ids_BT,
        attention_mask=torch.ones_like(ids_BT),
        pixel_values=patches_BND.flatten(0, 1),
        image_grid_thw=torch.tensor([[1, side, side]] * len(ids_BT)),
    )
    return output.last_hidden_state[:, TEMPLATE_TOKENS:]


def texts_and_patches(prompts: Sequence[str], pictures_BCHW: np.ndarray) -> tuple[Tensor, Tensor]:
    """Token ids [B, T] of the filled template, with four image tokens, and patches [B, N, D]."""
    side = IMAGE_SIDE // PATCH_SIDE // 2
    filled = [
        TEMPLATE.format(PICTURE + prompt).replace("<|image_pad|>", "<|image_pad|>" * side**2) for prompt in prompts
    ]
    ids_BT = torch.tensor(make_tokenizer()(filled)["input_ids"])
    processor = make_image_processor(IMAGE_SIDE)
    out = processor(images=list(pictures_BCHW), return_tensors="pt", input_data_format="channels_first")
    return ids_BT, out["pixel_values"].unflatten(0, (len(prompts), -1))


def _facts(scene: Scene, edit: Edit) -> list[int]:
    """Category, new colour, new shape, direction (0: none), and quadrant and colour of the object that is meant."""
    subject = next(each for each in scene if each.item.shape == edit.subject)
    return [
        CATEGORIES.index(edit.category),
        SHAPES.index(edit.subject),
        1 + COLORS.index(edit.value) if edit.category == "color" else 0,
        1 + SHAPES.index(edit.value) if edit.category == "shape" else 0,
        1 + list(DIRECTIONS).index(edit.value) if edit.category == "move" else 0,
        subject.quadrant,
        COLORS.index(subject.item.color),
    ]


def _contents(scene: Scene) -> list[list[int]]:
    """Colour and shape in each quadrant; the number after the last means empty."""
    found = [[len(COLORS), len(SHAPES)] for _ in range(4)]
    for each in scene:
        found[each.quadrant] = [COLORS.index(each.item.color), SHAPES.index(each.item.shape)]
    return found
