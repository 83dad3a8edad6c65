"""The modules of a FLUX.2 Klein pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.components import processor, text_encoder
from unirl.models.extras import from_extra
from unirl.models.flux2.bundle import Flux2Bundle
from unirl.models.flux2_klein.text import Flux2KleinTextEncoders

with from_extra("diffusers"):
    from transformers import Qwen3ForCausalLM


class Flux2KleinBundle(Flux2Bundle):
    """Transformer, VAE, Qwen3 and tokenizer of one checkpoint, see `DiffusersBundle`."""

    family = "FLUX.2 Klein"
    pipeline_classes = ("Flux2KleinPipeline",)
    components = {
        **Flux2Bundle.components,
        "text_encoder": text_encoder(Qwen3ForCausalLM),
        "tokenizer": processor(),
    }
    text_class = Flux2KleinTextEncoders
    recipe_rules = "unirl.models.flux2_klein.rules"
    most_images = 4

    @property
    def is_distilled(self) -> bool:
        """True if the checkpoint takes few steps and no guidance, as its index says."""
        return bool(self.folder.index.get("is_distilled"))
