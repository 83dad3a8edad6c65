"""An adapted linear layer in two operators more than its base layer: W x + (alpha / rank) B A x.

peft takes four (two products, a scale, a sum), the last two over the whole output. Here the second product adds to the
base layer's output, which is rounded once. In float32 that moves last bits, so float32 runs keep peft's form.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor
from torch.nn import functional as F


class FusedLoraLinear(Linear):
    """peft's adapted linear layer with one plain adapter, without dropout."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # Any: peft's own signature
        """[..., I] -> [..., O]"""
        result: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return result
        (adapter,) = self.active_adapters
        a, b = cast(Tensor, self.lora_A[adapter].weight), cast(Tensor, self.lora_B[adapter].weight)
        inner = F.linear(x.to(a.dtype), a).flatten(0, -2)
        added = torch.addmm(result.flatten(0, -2), inner, b.t(), alpha=self.scaling[adapter])
        return added.view(result.shape)
