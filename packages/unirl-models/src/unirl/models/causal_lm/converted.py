"""Where the weights of a transformers model are in files whose names or shapes are not the model's own.

transformers renames weights as it loads them, stacks the experts of a layer into one tensor, and ties parameters. Here
its own rules say what becomes of each name, and tensors that are joined of several are read in parts like any other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unirl.models.extras import from_extra
from unirl.models.stored import Box, FileTensor, Source, TensorFiles, check_state

with from_extra("transformers"):
    from transformers import conversion_mapping
    from transformers import core_model_loading as loading


_OLD_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Which earlier versions saved."""


class NotInPartsError(Exception):
    """Weights that cannot be read in parts, and why."""


@dataclass(frozen=True)
class Stacked:
    """Several tensors of one shape along a new first dimension."""

    parts: Sequence[Source]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    def read(self, box: Box) -> Tensor:
        """Reads the parts that are asked for."""
        chosen = self.parts[box[0]]
        return torch.stack([part.read(box[1:]) for part in chosen]) if chosen else self.parts[0].read(box[1:])[None][:0]


@dataclass(frozen=True)
class Joined:
    """Several tensors one after the other along a dimension."""

    parts: Sequence[Source]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        return (*first[: self.dim], sum(part.shape[self.dim] for part in self.parts), *first[self.dim + 1 :])

    def read(self, box: Box) -> Tensor:
        """Reads what the box has of each part."""
        found, offset = [], 0
        for part in self.parts:
            size = part.shape[self.dim]
            start, stop = (min(max(end - offset, 0), size) for end in (box[self.dim].start, box[self.dim].stop))
            if start < stop or not found:
                found.append(part.read((*box[: self.dim], slice(start, stop), *box[self.dim + 1 :])))
            offset += size
        return found[0] if len(found) == 1 else torch.cat(found, dim=self.dim)


@dataclass(frozen=True)
class ConvertedState:
    """Where the state of a transformers model is, by its own names."""

    found: dict[str, Source]
    unread: list[str]
    """Names of the files that nothing reads."""
    optional: set[str]
    """Names of the model that files may lack: the constructor's values stand."""

    def checked(self, model: Any, folder: Path) -> dict[str, Source]:  # Any: as below
        """What is found. Raises CheckpointError as `check_state` does."""
        check_state(model, self.found, folder, unread=self.unread, optional=self.optional)
        return self.found


def converted_state(model: Any, files: TensorFiles) -> ConvertedState:  # Any: classes of transformers share little
    """Find the state of a model in the files, by the rules of transformers. Reads no weights.

    model: as constructed. Raises NotInPartsError for what the rules do and these tensors cannot.
    """
    state = model.state_dict()
    transforms = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: dict[str, Source] = {}
    joined: defaultdict[str, defaultdict[str, list[Source]]] = defaultdict(lambda: defaultdict(list))
    unread = []
    for name in sorted(files.files, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = loading.rename_source_key(name, [], [], model.base_model_prefix, state)
        if target not in state:
            unread.append(name)
        elif pattern is None:
            found[target] = FileTensor(files, name, state[target].dtype)
        else:
            joined[target][pattern].append(FileTensor(files, name, state[target].dtype))
    for target, parts in joined.items():
        found[target] = _joined(target, parts, of_pattern[next(iter(parts))])
    _tie(found, model.all_tied_weights_keys)
    made = model._keys_to_ignore_on_load_missing or ()
    optional = {name for name in state.keys() - found.keys() if any(re.search(each, name) for each in made)}
    if optional & dict(model.named_parameters(remove_duplicate=False)).keys():
        raise NotInPartsError(f"{sorted(optional)[:4]} are made, not read")
    ignored = (*(model._keys_to_ignore_on_load_unexpected or ()), *_OLD_BUFFERS)
    unread = [name for name in unread if not any(re.search(each, name) for each in ignored)]
    return ConvertedState(found, unread, optional)


def _joined(target: str, parts: Mapping[str, list[Source]], converter: Any) -> Source:  # Any: of transformers
    ordered = [parts[pattern] for pattern in converter.source_patterns if pattern in parts]
    match converter.operations:
        case [loading.MergeModulelist(dim=0)] if len(ordered) == 1:
            return Stacked(ordered[0])
        case [loading.MergeModulelist(dim=0), loading.Concatenate(dim=int(dim))] if dim > 0:
            return Joined([Stacked(each) for each in ordered], dim)
        case [loading.Concatenate(dim=int(dim))]:
            return Joined([part for each in ordered for part in each], dim)
    raise NotInPartsError(f"{target} is made by {converter.operations}")


def _tie(found: dict[str, Source], ties: Mapping[str, str]) -> None:
    """Tied parameters are where one of their names is."""
    for name, source in ties.items():
        if name in found and source in found:
            # transformers ties them if their values are equal.
            raise NotInPartsError(f"{name} is tied to {source}, and both are in the files")
        if name in found or source in found:
            found[name] = found[source] = found[name] if name in found else found[source]
