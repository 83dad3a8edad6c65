"""A diffusion or flow-matching model: its modules, and the five questions that sampling and training ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from unirl.models.adapter import DiffusionAdapter, check_multiples, require_condition
from unirl.models.pipeline import DiffusionPipeline
from unirl.models.stored import load_weights
from unirl.sde.kernels import SDEStrategy
from unirl.sde.loop import Velocity
from unirl.sde.schedule import SigmaSchedule
from unirl.types.conditions import Condition, TextEmbedCondition
from unirl.types.media import Images, Primitive, Texts
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

WEIGHTS = "model.safetensors"
TEXT_WIDTH = 16


class Block(nn.Module):
    """Convolution with the text and the noise level added to its channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.shift = nn.Linear(TEXT_WIDTH + 1, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return x + torch.tanh(self.conv(x) + self.shift(condition)[:, :, None, None])


class Net(nn.Module):
    """Velocity [R, 3, H, W] of pixels at a noise level, given one text vector."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.into = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        condition = torch.cat([text, sigma[:, None]], dim=1)
        x = self.into(x)
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x)


class MyModelBundle:
    """The modules. pretrained_model: a folder with model.safetensors; None starts from random weights."""

    index_file = WEIGHTS  # by which `trainer check` knows a folder of this model
    block_class_names = ("Block",)  # sharded, checkpointed and compiled one by one
    lora_target_modules = ("shift",)  # suffixes of the linear layers that LoRA adapts

    def __init__(self, pretrained_model: str | None = None, dtype: str = "fp32", device: str = "cpu") -> None:
        self.net = Net()
        if pretrained_model is not None:
            load_weights(self.net, Path(pretrained_model).expanduser() / WEIGHTS)
        self.net.to(device, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]).eval()
        # Stands for a frozen text encoder: the same in every process, so that exports need not hold it.
        fixed = torch.randn(256, TEXT_WIDTH, generator=torch.Generator().manual_seed(0))
        self.embed = nn.Embedding.from_pretrained(fixed).to(device)
        self.device = torch.device(device)

    def trainable_modules(self) -> dict[str, nn.Module]:
        return {"net": self.net}

    def export_lora(
        self,
        folder: str,
        lora_state: Mapping[str, Mapping[str, Tensor]],
        *,
        rank: int,
        alpha: float,
        target_modules: Sequence[str],
    ) -> None:
        weights = {name: tensor.cpu().contiguous() for name, tensor in lora_state["net"].items()}
        save_file(weights, Path(folder) / "lora.safetensors", metadata={"rank": str(rank), "alpha": str(alpha)})

    def export_merged(self, folder: str, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        weights = {name: tensor.cpu().contiguous() for name, tensor in state["net"].items()}
        save_file(weights, Path(folder) / WEIGHTS)


class MyModelAdapter(DiffusionAdapter):
    """Five questions: how large is a latent, how many tokens, what is the condition, the velocity, the image."""

    def __init__(self, bundle: MyModelBundle) -> None:
        self._bundle = bundle

    @property
    def bundle(self) -> MyModelBundle:
        return self._bundle

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        check_multiples(params, 4, reason="two halvings")
        return 3, params.height, params.width

    def image_seq_len(self, params: DiffusionSamplingParams) -> int:
        return params.height * params.width // 16

    @torch.no_grad()
    def encode(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> dict[str, Condition]:
        texts = primitives["text"]
        assert isinstance(texts, Texts)
        device = self.bundle.device
        rows = [self.bundle.embed(torch.tensor(list(text.encode()), device=device)).mean(0) for text in texts.texts]
        pooled = torch.stack(rows)
        return {"text": TextEmbedCondition(embeds=pooled[:, None], pooled=pooled)}

    def bind(self, conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
        text = require_condition(conditions, "text", TextEmbedCondition)
        dtype = next(self.bundle.net.parameters()).dtype

        def velocity(x_R: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
            return self.bundle.net(x_R.to(dtype), sigma_R.to(dtype), text.pooled.to(dtype)).float()

        return velocity

    def decode(self, latents: Tensor, params: DiffusionSamplingParams) -> Images:
        return Images(pixels=(latents.float() * 0.5 + 0.5).clamp(0, 1))


class MyModelPipeline(DiffusionPipeline):
    """What the recipe names. strategy and schedule are the recipe's."""

    def __init__(
        self, bundle: MyModelBundle, strategy: SDEStrategy, schedule: SigmaSchedule, *, decode_batch_size: int = 8
    ) -> None:
        super().__init__(MyModelAdapter(bundle), strategy, schedule)
