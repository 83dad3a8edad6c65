"""What scorers built on a published model share: the optional import, and where weights come from."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from unirl.types.devices import has_values
from unirl.types.errors import ConfigError
from unirl.types.precision import dtype_named

_LONGEST_MESSAGE = 300
# Wider than `unirl.types.hub`: early models of the hub have no owner.
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load_transformers(owner: str, extra: str = "clip") -> ModuleType:
    """The transformers package. Raises ImportError naming the extra that `owner` needs."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{owner} needs transformers. Install it with: pip install 'unirl-reward[{extra}]'"
        ) from error
    return transformers


def check_dtype(dtype: str, name: str) -> None:
    """Raises ConfigError for a precision that has no name in `unirl.types.precision.DTYPES`."""
    dtype_named(dtype, f"scorer {name}: dtype")


def check_source(source: str, what: str) -> None:
    """Raises ConfigError for a string that is neither an existing folder nor shaped like a hub id."""
    if not Path(source).is_dir() and not _HUB_ID.fullmatch(source):
        raise ConfigError(f"{what} = {source!r} is no folder. Give an existing folder or a hub id, owner/name.")


def load_complete(  # Any: transformers is optional
    model_class: Any, source: str, what: str, *, device: str = "cpu", **keywords: Any
) -> Any:
    """A transformers model from a folder or hub id, every weight of it read and none left at random.

    what: the option that names `source`, for messages. device: where it will compute; on one without values the model
    is made there by its configuration, and no weight is read. Raises ConfigError if it cannot be loaded, or if weights
    are missing, which transformers only warns of.
    """
    check_source(source, what)
    if not has_values(device):
        return _without_values(model_class, source, device)
    try:
        model, report = model_class.from_pretrained(source, output_loading_info=True, **keywords)
    except (AttributeError, OSError, RuntimeError, ValueError) as error:  # Attribute: parts of another kind of model
        raise ConfigError(f"{what} = {source!r} cannot be loaded: {on_one_line(error)}") from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ConfigError(
            f"{what} = {source!r} is no whole {model_class.__name__}: {len(missing)} weights are missing, such as "
            f"{missing[0]}. Give the folder or id of the published model."
        )
    return model


def _without_values(model_class: Any, source: str, device: str) -> Any:  # Any: as above
    from transformers.initialization import no_init_weights

    with torch.device(device), no_init_weights():  # a draw that is repeated until it fits never ends without values
        return model_class(model_class.config_class.from_pretrained(source))


def load_state(source: str, file: str, what: str) -> dict[str, Tensor]:
    """The tensors of `file` in a folder or on the hub, on the CPU; a "state_dict" or "model" inside it is unwrapped.

    A file that ends in .safetensors is read as such, any other as torch saves.

    what: the option that names `source`, for messages. Raises ConfigError if there is no such file or it holds
    something else.
    """
    check_source(source, what)
    path = source_file(source, file, what)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch raises depends on how the file is broken
        raise ConfigError(f"{what}: {path} is no file of weights: {on_one_line(error)}") from error
    for wrapper in ("state_dict", "model"):
        state = state.get(wrapper, state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(f"{what}: {path} holds no tensors by name. Give the published checkpoint.")
    return state


def source_file(source: str, file: str, what: str) -> Path:
    """Path of a file in a folder, or in the cache of the hub after fetching it. Raises ConfigError without one."""
    if Path(source).is_dir():
        if not (Path(source) / file).is_file():
            raise ConfigError(f"{what} = {source!r} has no file {file}. Give the folder of the published model.")
        return Path(source) / file
    try:
        return Path(str(load_transformers(what).utils.cached_file(source, file)))
    except OSError as error:
        raise ConfigError(f"{what} = {source!r}: cannot fetch {file}: {error}") from error


def on_one_line(error: Exception) -> str:
    """An error's text on one line, cut where it goes on: torch lists every weight."""
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + " ..."
