"""FLUX.2 dev as a family of the table. Any: classes of diffusers and transformers."""

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import transformers
from tokenizers import processors
from torch import Tensor
from transformers.models.pixtral import image_processing_pil_pixtral as pil_images

from unirl.models.flux2.bundle import Flux2DevBundle
from unirl.models.flux2.pipeline import Flux2DevPipeline
from unirl.models.tiny.images import dynamic_scheduler
from unirl.models.tiny.text import byte_tokenizer

from .flux2_klein import call as klein_call
from .flux2_klein import edit_call as klein_edit_call
from .flux2_klein import tiny_transformer, tiny_vae
from .kit import Family, Published, Request, seeded
from .tiny_parts import pictures

SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]") + (
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}[SYSTEM_PROMPT]{{ m['content'][0]['text'] }}"
    "[/SYSTEM_PROMPT]{% else %}[INST]{% for part in m['content'] %}{% if part['type'] == 'image' %}[IMG]{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}[/INST]{% endif %}{% endfor %}"
)
"""As Mistral's, whose contents are lists of parts."""


def tokenizer() -> Any:
    """Bytes after Mistral's special tokens, with a mark of the beginning, filled up on the left as Mistral's."""
    made = byte_tokenizer(
        {token: place for place, token in enumerate(SPECIAL)},
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=list(SPECIAL[4:]),
        padding_side="left",
    )
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", SPECIAL.index("<s>"))]
    )
    made.chat_template = TEMPLATE
    return made


def processor() -> Any:
    """The real processor of texts and images, whose module imports that of images that needs torchvision."""
    with mock.patch.dict(sys.modules, {"transformers.models.pixtral.image_processing_pixtral": pil_images}):
        module = importlib.import_module("transformers.models.pixtral.processing_pixtral")
    return module.PixtralProcessor(
        pil_images.PixtralImageProcessorPil(patch_size=4), tokenizer(), patch_size=4, chat_template=TEMPLATE
    )


def mistral3(**changes: Any) -> Any:
    """As many layers as the released transformer reads, and a vision tower of one layer.

    changes: of the text part.
    """
    ids = tokenizer().convert_tokens_to_ids
    text: dict[str, Any] = {
        "model_type": "mistral",
        "vocab_size": 272,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 31,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "pad_token_id": ids("<pad>"),
        **changes,
    }
    vision: dict[str, Any] = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": 32,
    }
    config = transformers.Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=ids("[IMG]"), tie_word_embeddings=False
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def tiny() -> Any:
    """One block of each kind."""
    pipeline_class: Any = diffusers.Flux2Pipeline
    return pipeline_class(
        scheduler=dynamic_scheduler(),
        vae=tiny_vae(),
        text_encoder=mistral3(),
        tokenizer=processor(),
        transformer=tiny_transformer(guidance_embeds=True),
    )


def dev_guidance(keywords: dict[str, Any], request: Request) -> dict[str, Any]:
    """What the stock pipeline calls `guidance_scale` is an input of its transformer."""
    return {**keywords, "guidance_scale": request.params.distilled_guidance_scale}


def from_stock(latents: Tensor, request: Request) -> Tensor:
    """The stock pipeline returns tokens, standardised."""
    return latents.mT.unflatten(2, tuple(request.noise.shape[-2:]))


# The system message alone takes 200 tokens of bytes.
PARAMS = {
    "max_sequence_length": 288,
    "guidance_scale": 1.0,
    "negative_prompt": None,
    "distilled_guidance_scale": 4.0,
}


def stock(folder: Path) -> Any:
    """The processor comes after, which transformers does not name without torchvision."""
    pipeline_class: Any = diffusers.Flux2Pipeline
    loaded = pipeline_class.from_pretrained(folder, tokenizer=None)
    loaded.tokenizer = processor()
    return loaded


FAMILIES = [
    Family(
        name="flux2_dev",
        bundle=Flux2DevBundle,
        pipeline=Flux2DevPipeline,
        tiny=seeded(tiny),
        stock=stock,
        params=PARAMS,
        call=lambda request: dev_guidance(klein_call(request), request),
        from_stock=from_stock,
        unguided=None,
        # The class's defaults are the released sizes.
        published=(Published("black-forest-labs/FLUX.2-dev", 32.2),),
    ),
    Family(
        name="flux2_dev_edit",
        bundle=Flux2DevBundle,
        pipeline=Flux2DevPipeline,
        tiny=seeded(tiny),
        stock=stock,
        params=PARAMS,
        call=lambda request: dev_guidance(klein_edit_call(request), request),
        from_stock=from_stock,
        unguided=None,
        inputs=pictures,
        is_latent_batch=False,
    ),
]
