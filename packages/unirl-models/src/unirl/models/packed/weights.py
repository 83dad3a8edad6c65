"""Weights of a folder in several files: where each is, and modules that are filled from them."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unirl.types.devices import has_values
from unirl.types.errors import CheckpointError
from unirl.types.weights import PublishedParts, in_published_parts

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MOST_HEADER_BYTES = 100_000_000
"""As safetensors allows."""


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a safetensors file, from its header alone: the file is not mapped, however large.

    Raises CheckpointError if it is damaged.
    """
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > MOST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if file.stat().st_size != end:
            raise ValueError(f"{file.stat().st_size} bytes instead of {end}")
        return {name: tuple(entry["shape"]) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}). Fetch the folder again.") from error


def weight_files(folder: Path) -> dict[str, Path]:
    """The file of each weight of a folder. Raises CheckpointError if a file is missing or cannot be read."""
    index = folder / INDEX
    if index.is_file():
        files = {folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    else:
        files = {folder / SINGLE}
    missing = sorted(file.name for file in files if not file.is_file())
    if missing:
        raise CheckpointError(f"{folder} lacks {missing[:4]} ({len(missing)} files). Fetch the folder again.")
    found: dict[str, Path] = {}
    for file in sorted(files):
        found |= dict.fromkeys(tensor_shapes(file), file)
    return found


def fill(
    modules: Sequence[tuple[str, nn.Module, torch.dtype]],
    files: Mapping[str, Path],
    *,
    deferred: Sequence[tuple[str, nn.Module, torch.dtype]] = (),
    device: torch.device | None = None,
    owner: str = "this model",
    most: int | None = None,
    stacks: Mapping[str, PublishedParts] | None = None,
) -> None:
    """Give modules on the meta device their weights, in place; frozen and in evaluation mode.

    modules: (beginning of the names in the files, module, dtype). deferred: those that get their weights later, which
    are checked, and given their dtype. On the CPU, where they are by default, a weight that has the dtype stays mapped
    to its file, so that processes of a machine share it. Raises CheckpointError, before anything is read, if weights
    are missing or of another shape; those that no module has are named in the log.
    owner: what the weights are of, most: names of a kind, in that error. stacks: by the beginning and name of tensors
    that are made of several in the files.
    """
    own = {} if stacks is None else stacks
    everything = {
        f"{prefix}{name}": tensor
        for prefix, module, _ in (*modules, *deferred)
        for name, tensor in module.state_dict().items()
    }
    expected = {name: tensor.shape for name, tensor in in_published_parts(everything, own).items()}
    paths = set(files.values())
    shapes = {name: shape for file in paths for name, shape in tensor_shapes(file).items()}
    wrong = {
        "missing": sorted(expected.keys() - files.keys()),
        "shape": sorted(name for name in expected.keys() & files.keys() if shapes[name] != tuple(expected[name])),
    }
    if any(wrong.values()):
        first = next(iter(files.values()))
        shown = {kind: names[:most] for kind, names in wrong.items()}
        where = first if len(paths) == 1 else first.parent
        raise CheckpointError(f"{where} does not hold the weights of {owner}: {shown}.")
    unread = sorted(files.keys() - expected.keys())
    if unread:
        logger.warning("%d tensors of %s are not read: %s", len(unread), owner, unread[:8])
    for _, module, dtype in deferred:
        module.to(dtype).requires_grad_(False).eval()
    if device is not None and not has_values(device):
        for _, module, dtype in modules:
            module.to_empty(device=device).to(dtype).requires_grad_(False).eval()
        return
    place = "cpu" if device is None else str(device)
    with ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(file, framework="pt", device=place)) for file in paths}
        for prefix, module, dtype in modules:
            tensors = {}
            for name, tensor in module.state_dict().items():
                whole = f"{prefix}{name}"
                if whole not in own:
                    tensors[name] = opened[files[whole]].get_tensor(whole).to(dtype)
                    continue
                tensors[name] = torch.empty(tensor.shape, dtype=dtype, device=place)
                for part, value in in_published_parts({whole: tensors[name]}, own).items():
                    value.copy_(opened[files[part]].get_tensor(part))
            module.load_state_dict(tensors, assign=True)
            module.requires_grad_(False).eval()


def replace_weights(files: Mapping[str, Path], replaced: Mapping[str, Tensor], target: Path) -> None:
    """Write the files again into `target`, with some weights replaced, one file at a time."""
    names_of = defaultdict(list)
    for name, file in files.items():
        names_of[file].append(name)
    for file, names in names_of.items():
        weights = load_file(file)
        for name in names:
            if name in replaced:
                weights[name] = replaced[name].detach().to("cpu").contiguous()
        save_file(weights, target / file.name, metadata={"format": "pt"})
