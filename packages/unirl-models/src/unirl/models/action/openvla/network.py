"""OpenVLA-OFT behind one forward: all tokens of a chunk from one pass of the language model.

Legend: n observations, P patches, T tokens of a task, L tokens of a chunk, V = 256 tokens of a number, W width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unirl.models.action.openvla.configuration import NUM_TOKENS, OpenVLAShape
from unirl.models.action.openvla.towers import Projector, VisionBackbone
from unirl.models.extras import from_extra

with from_extra("transformers"):
    import transformers

STOP = 2
"""Id of the token after the chunk, </s> of Llama."""


class OpenVLANetwork(nn.Module):
    """Modules by the names of the released weights. `forward` is the only entry.

    The sequence is <s>, patches, the task, L tokens with embeddings of 0, and </s>, in which every token sees every
    other. The logits of a token of the chunk are those of the place before it.
    Source: OpenVLA-OFT (arXiv 2502.19645), parallel decoding of discrete actions.
    """

    def __init__(self, shape: OpenVLAShape, num_tokens: int) -> None:
        super().__init__()
        config = transformers.LlamaConfig.from_dict({**shape.text, "attn_implementation": "sdpa"})
        self.first_token = shape.first_token
        self.num_tokens = num_tokens
        self.vision_backbone = VisionBackbone(shape.towers, shape.image_side)
        self.projector = Projector(sum(tower.width for tower in shape.towers), config.hidden_size)
        self.language_model: Any = transformers.LlamaForCausalLM(config)  # Any: transformers types it loosely

    def forward(self, pixels: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Features [n, W] float32, the mean of the hidden states that the chunk is said from, and logits [n, L, V].

        pixels: [n, 6, h, w]. prompts: [n, T] int64, <s> first, -1 after their end.
        """
        model = self.language_model.model
        is_text = prompts >= 0
        texts = model.embed_tokens(prompts.clamp(min=0))
        patches = self.projector(self.vision_backbone(pixels.to(texts.dtype)))
        chunk = texts.new_zeros(len(texts), self.num_tokens, texts.shape[2])
        stop = model.embed_tokens(prompts.new_full((len(texts), 1), STOP))
        embedded = torch.cat([texts[:, :1], patches, texts[:, 1:], chunk, stop], dim=1)
        num_patches = patches.shape[1]
        always = is_text.new_ones(len(texts), 1)
        mask = torch.cat(
            [
                is_text[:, :1],
                always.expand(-1, num_patches),
                is_text[:, 1:],
                always.expand(-1, self.num_tokens + 1),
            ],
            dim=1,
        )
        length = mask.shape[1]
        hidden = model(
            inputs_embeds=embedded,
            attention_mask=mask[:, None, None].expand(-1, 1, length, -1),
            position_ids=mask.long().cumsum(-1) - 1,
            use_cache=False,
        ).last_hidden_state
        # The first token is said from the last of the task, the others from the token before each.
        last_n = num_patches + is_text.sum(dim=1, keepdim=True) - 1
        start = num_patches + prompts.shape[1]
        others = torch.arange(start, start + self.num_tokens - 1, device=prompts.device).expand(len(texts), -1)
        places = torch.cat([last_n, others], dim=1)
        said = hidden.gather(1, places[:, :, None].expand(-1, -1, hidden.shape[2]))
        logits = self.language_model.lm_head(said)[..., self.first_token : self.first_token + NUM_TOKENS].contiguous()
        return said.float().mean(dim=1), logits
