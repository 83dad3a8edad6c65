"""A CPU as a platform of vLLM-Omni, which has none: loaded by its entry point group of platform plugins.

Beside the platform, five helps, all for modules that vLLM-Omni imports after the platform is known:
attention runs the torch code that a GPU without another backend runs; linear layers and experts keep their weights as
they were loaded, where vLLM packs them for CPUs, so that a push would write to what no longer samples; and where a
family's code says bfloat16 or float16 whatever dtype is asked for, it is float32; and workers answer without streams.
"""

import importlib
import os
import sys
from typing import Any

import psutil
import torch

_platforms: Any = importlib.import_module("vllm.platforms.cpu")
_omni: Any = importlib.import_module("vllm_omni.platforms.interface")
_ROOT = "vllm_omni.diffusion"
_HALF_PRECISION = tuple(
    f"{_ROOT}.models.{name}"
    for name in (
        "bagel.bagel_transformer",
        "hunyuan_image3.hunyuan_image3_transformer",
        "hunyuan_image3.pipeline_hunyuan_image3",
    )
)


def plugin() -> str:
    """Import path of the platform."""
    # By this the processes of one engine find the memory that they share on a CPU; they inherit it.
    os.environ.setdefault("VLLM_DIST_IDENT", str(os.getpid()))
    return f"{__name__}.CPUOmniPlatform"


class CPUOmniPlatform(_omni.OmniPlatform, _platforms.CpuPlatform):
    """One CPU, host memory as device memory."""

    _omni_enum = _omni.OmniPlatformEnum.OOT

    @classmethod
    def get_diffusion_attn_backend_cls(cls, *args: object, **kwargs: object) -> str:
        """torch's attention. Every attention layer asks, before any linear layer takes its weights."""
        _attend_with_torch()
        _keep_linear_weights()
        _keep_expert_weights()
        _compute_in_float32()
        _answer_without_streams()
        return importlib.import_module(
            f"{_ROOT}.attention.backends.registry"
        ).DiffusionAttentionBackendEnum.TORCH_SDPA.get_path()

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return len(os.sched_getaffinity(0))

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        pass

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        pass

    @classmethod
    def empty_cache(cls) -> None:
        pass

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return psutil.virtual_memory().available

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.device | None = None) -> None:
        pass

    @classmethod
    def max_memory_allocated(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def max_memory_reserved(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def memory_allocated(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def memory_reserved(cls, device: torch.device | int | None = None) -> int:
        return 0

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"


def _attend_with_torch() -> None:
    sdpa = importlib.import_module(f"{_ROOT}.attention.backends.sdpa").SDPAImpl
    sdpa.forward = sdpa.forward_cuda


def _keep_linear_weights() -> None:
    utils: Any = importlib.import_module("vllm.model_executor.layers.utils")

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep


def _keep_expert_weights() -> None:
    """Experts run one after the other; the routing is vLLM's own. Its `w13` is gate first, then up."""
    module: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe")
    experts = module.CPUUnquantizedExperts
    silu = module.MoEActivation.SILU

    def keep(self: Any, layer: Any) -> None:
        pass

    def apply(self: Any, output: torch.Tensor, hidden_states: torch.Tensor, **given: Any) -> None:
        if given["activation"] != silu:
            raise NotImplementedError(f"this platform runs experts with {silu}, not {given['activation']}")
        output.zero_()
        weights, chosen, own = given["topk_weights"], given["topk_ids"], given["expert_map"]
        if own is not None:
            chosen = own[chosen]  # -1: the expert of another process
        for expert, (w13, w2) in enumerate(zip(given["w1"], given["w2"], strict=True)):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            gate, up = torch.nn.functional.linear(hidden_states[rows], w13).chunk(2, dim=-1)
            made = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2)
            output.index_add_(0, rows, made * weights[rows, places, None].to(made.dtype))

    experts.process_weights_after_loading, experts.apply = keep, apply


class _Float32Torch:
    """torch, in which bfloat16 and float16 are float32."""

    bfloat16 = float16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _compute_in_float32() -> None:
    for name in _HALF_PRECISION:
        module: Any = sys.modules.get(name)
        if module is not None:
            module.torch = _Float32Torch()


class _Stream:
    """A stream on a host, where nothing is under way when a call returns."""

    def __init__(self, device: torch.device) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _StreamlessTorch:
    """torch, whose streams are a host's."""

    Stream = _Stream

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _answer_without_streams() -> None:
    """Each of several workers has a thread that copies answers, on a stream of its device."""
    module: Any = importlib.import_module(f"{_ROOT}.worker.diffusion_worker")
    if isinstance(module.torch, _StreamlessTorch):
        return
    pack = module.pack_diffusion_output_shm

    def packed(output: Any, d2h_stream: _Stream | None = None) -> Any:
        return pack(output)

    module.torch, module.pack_diffusion_output_shm = _StreamlessTorch(), packed
