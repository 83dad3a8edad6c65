"""What the pretend device does with single operators, as JSON; in a separate process, which registers a device."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from unirl.rehearsal.blocks import Blocks
from unirl.rehearsal.device import join_group
from unirl.rehearsal.kernels import kernels_of
from unirl.rehearsal.ledger import HOST
from unirl.rehearsal.mode import Rehearsal
from unirl.rehearsal.repeats import Repeats
from unirl.train.backend.wrap import checkpoint_activations, cut_linears
from unirl.types.devices import PRETEND, building_on, empty_cache, has_values, is_accelerator
from unirl.types.protocols.models import CutBlock

HEADS, TOKENS, WIDTH = 8, 512, 64


def reads(mode: Rehearsal) -> dict[str, Any]:
    """What comes back from the device."""
    x = torch.randn(3, 4, device=PRETEND)
    levels = torch.tensor([0.9, 0.2, 0.0]).to(PRETEND)
    large = torch.randn(1024, 1024, device=PRETEND).cpu()
    return {
        "is_pretend": is_accelerator(x.device) and not has_values(x.device),
        "copied": x.cpu().tolist(),
        "number": float(x.sum()),
        "boolean": bool((x > 0).all()),
        "strides of a large one": list(large.stride()),
        "levels": (levels * 2).cpu().tolist(),
        "low levels": list(levels[levels < 0.5].shape),
        "largest": float(levels.max()),
        "written over": (levels.clone().mul_(x[0, 0])).tolist(),
        "masked": list(x[x > 0].shape),
        "picked": levels[levels < 0.5].tolist(),
        "places": list((x > 0).nonzero().shape),
        "listed": _num_reads(mode, lambda: x.tolist()),
        "repeated": list(torch.arange(2, device=PRETEND).repeat_interleave(torch.tensor([3, 1]).to(PRETEND)).shape),
        "counts": torch.bincount(torch.randint(4, (10,), device=PRETEND), minlength=4).tolist(),
        "runs": torch.unique_consecutive(torch.tensor([2, 2, 5]).to(PRETEND)).tolist(),
        "many truths": int(torch.ones(1 << 18, dtype=torch.bool, device=PRETEND).sum()),
        "many weights": float(torch.ones(1 << 18, device=PRETEND).sum()),
        "of a list": torch.tensor([levels[0], levels[1]], device=PRETEND).tolist(),
        "at": sorted(mode.counts.reads),
    }


def _num_reads(mode: Rehearsal, read: Callable[[], object]) -> int:
    before = mode.counts.reads.total()
    read()
    return mode.counts.reads.total() - before


def mixed() -> str:
    """A mistake that a GPU would refuse."""
    try:
        torch.randn(2, device=PRETEND) + torch.randn(2)
    except RuntimeError as error:
        return str(error)
    return "none"


def memory(mode: Rehearsal) -> dict[str, int]:
    """Bytes of a module that leaves the device and comes back, and of one that is built for the host."""
    found = {}
    with torch.device(PRETEND):
        model = nn.Linear(100, 100, bias=False)
        counter = nn.BatchNorm1d(1).num_batches_tracked  # made by torch.tensor without a device
    found["counter of batches"] = counter is not None and counter.device.type == PRETEND
    del counter
    found["there"] = mode.ledger.device_bytes
    model.to("cpu")
    found["away"], found["host"] = mode.ledger.device_bytes, mode.ledger.alive[HOST]
    model.to(PRETEND)
    found["back"] = mode.ledger.device_bytes
    with building_on("cpu", of=PRETEND) as place, torch.device(place):
        other = nn.Linear(10, 10, bias=False)
    found["built for the host"] = mode.ledger.alive[HOST]
    state = torch.randn(1024, 1024, device=PRETEND)
    before = mode.ledger.device_bytes
    state = state.to("cpu").to(PRETEND)
    found["state that came back"] = mode.ledger.device_bytes - before
    del model, other, state
    found["gone"] = mode.ledger.device_bytes
    empty_cache(PRETEND)
    return found


def attention(mode: Rehearsal) -> dict[str, Any]:
    """Bytes that attention in bfloat16 keeps, without a mask and with one."""
    shape = (1, HEADS, TOKENS, WIDTH)
    query, key, value = (torch.randn(shape, dtype=torch.bfloat16, device=PRETEND, requires_grad=True) for _ in range(3))
    bias = torch.ones(TOKENS, TOKENS, dtype=torch.bfloat16, device=PRETEND)
    found, kept = {}, []
    for name, mask in (("plain", None), ("masked", bias)):
        before = mode.ledger.device_bytes
        kept.append(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))
        found[name] = mode.ledger.device_bytes - before
    sum(out.sum() for out in kept).backward()
    return found


def attention_of_a_cpu(mode: Rehearsal) -> dict[str, Any]:
    """Strides of results and kernels of attention in float32, of the pretend device and of the real one. The arguments
    are views of a batch whose heads come last, and as they are."""
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    cases: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
        "plain": ((2, 4, 5, 8), (2, 4, 7, 8), {}),
        "masked": ((2, 4, 5, 8), (2, 4, 7, 8), {"attn_mask": mask}),
        "causal": ((2, 4, 5, 8), (2, 4, 5, 8), {"is_causal": True}),
        "shared heads": ((2, 4, 5, 8), (2, 2, 7, 8), {"enable_gqa": True}),
        "without a batch": ((4, 5, 8), (4, 7, 8), {}),
    }
    found: dict[str, Any] = {}
    for name, (of_query, of_key, options) in cases.items():
        for device in ("cpu", PRETEND):
            query, key = torch.zeros(of_query, device=device), torch.zeros(of_key, device=device)
            on_device = {key: each.to(device) if isinstance(each, Tensor) else each for key, each in options.items()}
            mode.enter_phase(f"{name} on {device}")
            with kernels_of("cpu"):
                whole = F.scaled_dot_product_attention(query, key, key, **on_device)
                heads_last = query.transpose(-3, -2).contiguous().transpose(-3, -2)
                view = F.scaled_dot_product_attention(heads_last, key, key, **on_device)
            calls_of = mode.counts.operators[f"{name} on {device}"]
            kernels = sorted({call.name for call in calls_of if "dot_product" in call.name})
            found.setdefault(name, []).append([whole.stride(), view.stride(), kernels])
    query = torch.zeros(2, 4, 5, 8, device=PRETEND, requires_grad=True)
    with kernels_of("cpu"):
        F.scaled_dot_product_attention(query, query, query).sum().backward()
    found["gradient"] = None if query.grad is None else list(query.grad.shape)
    return found


def autocast() -> list[str]:
    """Dtypes of a product, a norm and a sum of unlike ones within autocast to bfloat16."""
    with torch.device(PRETEND):
        layer, x = nn.Linear(4, 4), torch.randn(2, 4)
        with torch.autocast(PRETEND, dtype=torch.bfloat16):
            y = layer(x)
            return [str(y.dtype), str(F.layer_norm(y, (4,)).dtype), str((y + x).dtype)]


def sharded(mode: Rehearsal) -> dict[str, Any]:
    """One rank's shards of two layers, and what crosses in a step."""
    with torch.device(PRETEND):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    mesh = init_device_mesh(PRETEND, (4,))
    before = mode.ledger.device_bytes
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    left = mode.ledger.device_bytes
    mode.enter_phase("step")
    model(torch.randn(2, 64, device=PRETEND)).sum().backward()
    return {
        "whole": before,
        "shards": left,
        "after": mode.ledger.device_bytes - left,
        "sent": dict(mode.counts.collectives["step"]),
        "exchanged": _exchanged(),
    }


def _launches(mode: Rehearsal, phase: str) -> int:
    """Calls that compute or write."""
    return sum(times for call, times in mode.counts.operators[phase].items() if call.is_launched)


def _exchanged() -> list[int]:
    """Counts for four ranks' experts that came from four ranks."""
    counts = torch.bincount(torch.randint(4, (8,), device=PRETEND), minlength=4)
    found = torch.empty_like(counts)
    dist.all_to_all_single(found, counts)
    return found.tolist()


def repeated(mode: Rehearsal) -> dict[str, Any]:
    """Three forwards, run and repeated."""
    with torch.device(PRETEND):
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        x = torch.randn(8, 64)
    found: dict[str, Any] = {}
    with torch.no_grad():
        for name in ("run", "repeated"):
            mode.enter_phase(name)
            before = mode.num_run
            if name == "run":
                kept = [model(x) for _ in range(3)]
            else:
                with Repeats(mode).active([model], {}):
                    kept = [model(x) for _ in range(3)]
            found[name] = {
                "flops": mode.counts.flops[name],
                "num_run": mode.num_run - before,
                "launches": _launches(mode, name),
                "peak": mode.ledger.peaks[name].num_bytes,
                "shapes": [list(out.shape) for out in kept],
            }
            del kept
    return found


class Layer(nn.Module):
    """One of several that are alike; the second argument, which all get, needs a gradient too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.other = nn.Linear(64, 64)  # of tokens that no input has

    def forward(self, x: Tensor, shift: Tensor, *, seen: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        if seen is not None:
            seen.append(x)
        return x + self.down(F.gelu(self.up(self.norm(x)))) + shift, shift


class DividedLayer(nn.Module):
    """One of which ranks have the products together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        own = {name: each.to_local() for name, each in self.named_parameters() if isinstance(each, DTensor)}
        normed = F.layer_norm(x, (64,), own["norm.weight"], own["norm.bias"])
        made = F.gelu(F.linear(normed, own["up.weight"], own["up.bias"]))
        return x + F.linear(made, own["down.weight"]) + shift, shift


class PairedLayer(nn.Module):
    """One of two streams, the second of which nothing reads after the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.of_x, self.of_shift = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        return x + F.gelu(self.of_x(x + shift)), shift + self.of_shift(shift)


LAYERS = {"kept": Layer, "checkpointed": Layer, "divided": DividedLayer, "paired": PairedLayer}


class Tower(nn.Module):
    """Six of them."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.begin = nn.Linear(64, 64)
        self.layers = nn.ModuleList(layer() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x, shift = self.begin(x), x.mean(1, keepdim=True)
        for layer in self.layers:
            x, shift = layer(x, shift)
        return x


def blocks(mode: Rehearsal) -> dict[str, Any]:
    """Two steps of a sharded tower whose layers all run, and one of whose layers are repeated; and a forward."""
    found: dict[str, Any] = {}
    for kind in LAYERS:
        for way in ("run", "repeated"):
            name = f"{kind} {way}"
            mode.enter_phase("other")
            gc.collect()  # cycles of the model before would be freed at any time
            with torch.device(PRETEND):
                model = Tower(LAYERS[kind])
            if kind == "checkpointed":
                checkpoint_activations(list(model.layers))
            mesh = over = init_device_mesh(PRETEND, (4,))
            if kind == "divided":
                both = init_device_mesh(PRETEND, (2, 2), mesh_dim_names=("dp", "tp"))
                over = both["dp"]
                cut_linears([CutBlock(layer, ("up",), ("down",)) for layer in model.layers], both["tp"])
            for layer in model.layers:
                fully_shard(layer, mesh=over)
            fully_shard(model, mesh=mesh)
            x = torch.randn(8, 128, 64, device=PRETEND, requires_grad=True)
            mode.enter_phase(name)
            before, num_run = mode.ledger.device_bytes, mode.num_run
            with Blocks(Repeats(mode)).active([model] if way == "repeated" else []):
                for _ in range(2):
                    model(x).sum().backward()
                with torch.no_grad():
                    model(x)
            found[name] = {
                "flops": mode.counts.flops[name],
                "num_run": mode.num_run - num_run,
                "launches": _launches(mode, name),
                "touched": sum(times * call.num_bytes for call, times in mode.counts.operators[name].items()),
                "peak": mode.ledger.peaks[name].num_bytes - before,
                "sent": dict(mode.counts.collectives[name]),
                "gradients": sorted(p for p, parameter in model.named_parameters() if parameter.grad is not None),
            }
            del model, x
    return found


def left_in_a_list() -> int:
    """What six layers leave in a list that they are given."""
    with torch.device(PRETEND):
        model, x = Tower(), torch.randn(2, 64)
    found: list[Tensor] = []
    with torch.no_grad(), Blocks(Repeats(Rehearsal())).active([model]):
        for layer in model.layers:
            layer(x, x, seen=found)
    return len(found)


def calls(mode: Rehearsal) -> dict[str, Any]:
    """Operations, bytes and how often, of operators that each read and write in another way."""
    table = torch.empty(1000, 16, device=PRETEND)
    one, two = torch.empty(4, 8, device=PRETEND), torch.empty(8, 2, device=PRETEND)
    places = torch.tensor([1, 2, 3]).to(PRETEND)
    mode.enter_phase("calls")
    _ = one @ two
    _ = one @ two
    one.add_(1.0)
    one.add_(2.0)
    _ = one + one[:1].expand(4, 8)
    one.t()
    F.embedding(places, table)
    _ = torch.ones(4, 4) @ torch.ones(4, 4)
    operators = mode.counts.operators["calls"]
    found: dict[str, Any] = {
        call.name: [call.flops, call.num_bytes, times] for call, times in operators.items() if not call.is_on_host
    }
    found["on the host"] = sorted({call.name for call in operators if call.is_on_host})
    found["flops"] = mode.counts.flops["calls"]
    return found


def main() -> None:
    """All of it."""
    found: dict[str, Any] = {}
    for name, look in (
        ("reads", reads),
        ("memory", memory),
        ("attention", attention),
        ("attention of a CPU", attention_of_a_cpu),
        ("repeated", repeated),
        ("calls", calls),
    ):
        mode = Rehearsal()
        with mode:
            found[name] = look(mode)
    with Rehearsal():
        found["mixed"], found["autocast"], found["left in a list"] = mixed(), autocast(), left_in_a_list()
    join_group(4)
    mode = Rehearsal()
    with mode:
        found["sharded"] = sharded(mode)
        found["blocks"] = blocks(mode)
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
