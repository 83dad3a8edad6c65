"""How fast devices are: published rates, and what programs reach of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from unirl.rehearsal.operators import Call
from unirl.train.flops import PUBLISHED, MatrixRates
from unirl.types.errors import ConfigError


class Clock(Protocol):
    """Knows what a call takes on one kind of device."""

    @property
    def name(self) -> str:
        """Name of the device."""
        ...

    @property
    def host_s(self) -> float:
        """Seconds that the host takes to start one call."""
        ...

    @property
    def is_asynchronous(self) -> bool:
        """True if the host goes on while the device computes."""
        ...

    @property
    def peak_flops(self) -> float:
        """Rate of large matrix products, in FLOP per second, that utilisation is given of."""
        ...

    def is_started(self, call: Call) -> bool:
        """True if the host takes `host_s` for it."""
        ...

    def seconds(self, call: Call, *, trains: bool = False) -> float:
        """Seconds of the device for one call. trains: activations stay for a backward pass."""
        ...

    def sent_s(self, num_bytes: float, num_ranks: int) -> float:
        """Seconds of a collective over ranks that gives each so many bytes."""
        ...

    def remarks(self) -> Iterator[str]:
        """What its seconds rest on; once they were asked for."""
        ...


MATRIX_SHARE = 0.8
"""Share of the published rate that large matrix products reach."""
ATTENTION_SHARE = 0.45
"""The same of fused attention."""
MEMORY_SHARE = 0.85
"""Share of the published bandwidth that operators reach which only read and write."""
KERNEL_S = 3e-6
"""The shortest kernel."""
HOST_S = 26e-6
"""Host seconds per call of eager PyTorch with autograd: 376 ms for the 13,000 calls of one forward and backward."""
HALF_FILLED = 40e6
"""FLOPs per unit of the peak rate in 1e12 FLOP per second, at which a product reaches half of its share: short ones do
not fill the device."""


@dataclass(frozen=True)
class Rates:
    """One kind of device. Rates in units per second, dense, one direction."""

    name: str
    memory_bytes: float
    matrix: MatrixRates
    bandwidth: float
    """Bytes of its memory."""
    link: float
    """Bytes to the other devices of the node."""
    network: float
    """Bytes to other nodes, for each device."""
    node_size: int = 8
    host_s: float = HOST_S
    is_asynchronous: bool = True

    @property
    def peak_flops(self) -> float:
        """In bfloat16."""
        return self.matrix.half

    def is_started(self, call: Call) -> bool:
        """What the device computes."""
        return call.is_launched

    def seconds(self, call: Call, *, trains: bool = False) -> float:
        """The longer of what it computes and what it reads and writes."""
        del trains  # larger than its caches either way
        if not call.is_launched:
            return 0.0
        peak = self.matrix.half if call.dtype in (torch.bfloat16, torch.float16) else self.matrix.single
        share = ATTENTION_SHARE if "attention" in call.name else MATRIX_SHARE
        computing = (call.flops + HALF_FILLED * peak / 1e12) / (peak * share) if call.flops else 0.0
        return max(computing, call.num_bytes / (self.bandwidth * MEMORY_SHARE), KERNEL_S)

    def sent_s(self, num_bytes: float, num_ranks: int) -> float:
        """By the slowest link on the way."""
        if num_ranks <= 1:
            return 0.0
        rate = self.link if num_ranks <= self.node_size else self.network
        return num_bytes * (num_ranks - 1) / num_ranks / rate

    def remarks(self) -> Iterator[str]:
        """The shares that are taken of the rates."""
        yield (
            f"taken: {MATRIX_SHARE:.0%} of the published rate in matrix products, {ATTENTION_SHARE:.0%} in attention, "
            f"{MEMORY_SHARE:.0%} of the bandwidth, {self.host_s * 1e6:.0f} us of the host per operator; eager code; "
            "the host, the device and the links work at once"
        )


DEVICES: Mapping[str, Rates] = {
    "h100": Rates("H100 SXM", 80e9, PUBLISHED["H100"], 3.35e12, 450e9, 50e9),
    "h200": Rates("H200", 141e9, PUBLISHED["H200"], 4.8e12, 450e9, 50e9),
    "a100": Rates("A100 SXM 80 GB", 80e9, PUBLISHED["A100"], 2.04e12, 300e9, 25e9),
    "mi300": Rates("MI300X", 192e9, PUBLISHED["MI300X"], 5.3e12, 448e9, 50e9),
    "910b": Rates("Ascend 910B", 64e9, PUBLISHED["Ascend910B"], 1.6e12, 196e9, 25e9),
}
"""By the names that `--on` takes; from the makers' data sheets."""


def rates_of(name: str) -> Rates:
    """Raises ConfigError for another name."""
    if name not in DEVICES:
        raise ConfigError(f"--on takes one of {', '.join(DEVICES)} or here (this machine), not {name!r}.")
    return DEVICES[name]
