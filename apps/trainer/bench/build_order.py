"""Measures what each rank holds while a sharded model is built, and prints Markdown.

    uv run python apps/trainer/bench/build_order.py FOLDER [--gigabytes 2] [--ranks 4] [--ways parts whole] [--full]

Writes a random language model of that size to FOLDER, in files of some blocks, unless there is one. Then ranks over
gloo build it on the CPU by the code that a run uses: in `parts`, where each reads the shards that it keeps, and
`whole`, where each loads all and keeps its shards. Peaks are of resident memory, pages of mapped files included, above
what the process held before (its libraries). The model is frozen in bfloat16 with LoRA; `--full` trains it in float32.
What a rank keeps is its shards and, of what trains, the optimizer's state.

Seconds are against those that all ranks together take to copy the file's bytes into memory, each its share. Both are
read from the page cache, into which the files are read first. The script ends with status 1 where a rank of `parts`
holds more than what it keeps, the largest block, and `ALLOWANCE_BYTES`.
"""

# ruff: noqa: INP001 - a script, no package
from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unirl.models.causal_lm.bundle import CausalLMBundle
from unirl.models.stored import MAPPED_BYTES
from unirl.models.tiny.text import byte_tokenizer
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, LoraConfig, OptimizerConfig

ALLOWANCE_BYTES = MAPPED_BYTES + 2**26
"""Files that are mapped, and what Python and the libraries hold of a model of this size besides its tensors."""
TIMEOUT = timedelta(minutes=10)
BLOCKS_PER_FILE = 4
MB = 1e6


def write_model(folder: Path, gigabytes: float) -> None:
    """A Qwen3 of width 2048 with as many blocks as the size allows, drawn and written some blocks at a time."""
    config = transformers.Qwen3Config(
        vocab_size=32768,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        one = transformers.Qwen3ForCausalLM(config)
    block = {name: tensor.shape for name, tensor in one.state_dict().items() if ".layers.0." in name}
    others = {name: tensor.shape for name, tensor in one.state_dict().items() if name not in block}
    sizes = [sum(2 * shape.numel() for shape in part.values()) for part in (block, others)]
    config.num_hidden_layers = max(1, round((gigabytes * 1e9 - sizes[1]) / sizes[0]))
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    folder.mkdir(parents=True)
    parts = [others]
    for layer in range(config.num_hidden_layers):
        if layer % BLOCKS_PER_FILE == 0:
            parts.append({})
        parts[-1] |= {name.replace(".layers.0.", f".layers.{layer}."): shape for name, shape in block.items()}
    weight_map = {}
    for number, part in enumerate(parts):
        file = f"model-{number + 1:05}-of-{len(parts):05}.safetensors"
        weights = {name: torch.randn(shape, dtype=torch.bfloat16) * 0.02 for name, shape in part.items()}
        save_file(weights, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    byte_tokenizer({}, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)
    config.save_pretrained(folder)


def memory(kind: str) -> int:
    """Bytes of this process by the name that the kernel gives them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {kind}")


def local_bytes(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def measured(folder: Path, way: str, is_full: bool) -> dict[str, Any]:
    """Figures of this rank."""
    config = FSDPConfig(param_dtype="bf16")
    lora = None if is_full else LoraConfig(rank=16, alpha=16.0)
    gc.collect()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    dist.barrier()
    start = time.perf_counter()
    bundle = CausalLMBundle(str(folder), "bf16", defers_weights=way == "parts")
    backend = FSDPBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-4), fsdp=config, lora=lora)
    building = time.perf_counter() - start
    peak = memory("VmHWM") - before
    parameters = list(bundle.model.parameters())
    blocks = [module for module in bundle.model.modules() if type(module).__name__ in bundle.block_class_names]
    units: list[nn.Module] = [*blocks, bundle.model.get_input_embeddings()]
    shards = sum(local_bytes(parameter) for parameter in parameters)
    state = sum(local_bytes(tensor) for name, tensor in backend.state_dict().items() if "exp_avg" in name)
    return {
        "peak": peak,
        "after": memory("VmRSS") - before,
        "shards": shards,
        "kept": shards + state,
        "block": max(sum(p.numel() * p.element_size() for p in unit.parameters()) for unit in units),
        "building": building,
        "reading": reading_seconds(folder),
    }


def reading_seconds(folder: Path) -> float:
    """Seconds until all ranks have copied their share of all files into memory."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    start = time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        first, last = size * rank // world, size * (rank + 1) // world
        with file.open("rb", buffering=0) as opened:
            opened.seek(first)
            memory = memoryview(bytearray(last - first))
            while memory:
                memory = memory[opened.readinto(memory) :]
    dist.barrier()
    return time.perf_counter() - start


def run_rank(rank: int, world: int, folder: Path, way: str, is_full: bool, results: Path) -> None:
    """One process, whose figures go to `results`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{results}/store", rank=rank, world_size=world, timeout=TIMEOUT)
    torch.save(measured(folder, way, is_full), results / f"{rank}.pt")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ways", nargs="+", choices=("parts", "whole"), default=["parts", "whole"])
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    if not args.folder.exists():
        write_model(args.folder, args.gigabytes)
    size = sum(len(file.read_bytes()) for file in args.folder.glob("*.safetensors"))  # into the page cache
    kind = "full" if args.full else "LoRA"
    say(f"{size / MB:.0f} MB in {args.folder}, {args.ranks} ranks, {kind}; MB and seconds:\n")
    columns = ("way", "rank", "shards", "kept", "largest block", "peak", "beyond", "after", "building", "reading")
    say(f"| {' | '.join(columns)} |")
    say("|---" * len(columns) + "|")
    worst = 0
    for way in args.ways:
        with tempfile.TemporaryDirectory() as results:
            torch.multiprocessing.spawn(
                run_rank, (args.ranks, args.folder, way, args.full, Path(results)), nprocs=args.ranks
            )
            found = [torch.load(Path(results) / f"{rank}.pt", weights_only=True) for rank in range(args.ranks)]
        for rank, one in enumerate(found):
            beyond = one["peak"] - one["kept"] - one["block"]
            worst = max(worst, beyond if way == "parts" else 0)
            sizes = (one["shards"], one["kept"], one["block"], one["peak"], beyond, one["after"])
            cells = [*(f"{each / MB:.0f}" for each in sizes), f"{one['building']:.1f}", f"{one['reading']:.1f}"]
            say(f"| {way} | {rank} | {' | '.join(cells)} |")
    if worst > ALLOWANCE_BYTES:
        allowed = f"{ALLOWANCE_BYTES / MB:.0f} are allowed"
        say(f"\na rank held {worst / MB:.0f} MB beyond what it keeps and a block, {allowed}")
        return 1
    return 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
