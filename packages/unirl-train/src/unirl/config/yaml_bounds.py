"""Limits the size of YAML files: aliases of aliases double with every line, and nesting exhausts the stack."""

from __future__ import annotations

from pathlib import Path

import yaml

from unirl.types.errors import ConfigError

MAX_BYTES = 2**24
MAX_VALUES = 100_000
"""Counted with aliases expanded; the largest packaged recipe has a few hundred."""
MAX_DEPTH = 100


def check_yaml(path: Path) -> None:
    """Raise ConfigError for a file that is too large, nests too deeply, or becomes too large by its aliases.

    Invalid YAML is left to the reader of the file.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError(f"{path} has {path.stat().st_size} bytes; a recipe has at most {MAX_BYTES}. Is it a recipe?")
    num_values, depth = 0, 0
    begun: list[tuple[str | None, int]] = []
    """Anchor of each open mapping or list, and the number of values before it."""
    sizes: dict[str, int] = {}
    try:
        for event in yaml.parse(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                num_values += sizes.get(str(event.anchor), 1)
            elif isinstance(event, yaml.ScalarEvent):
                num_values += 1
            elif isinstance(event, yaml.CollectionStartEvent):
                begun.append((event.anchor, num_values))
                num_values += 1
                depth = max(depth, len(begun))
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = begun.pop()
                if anchor is not None:
                    sizes[anchor] = num_values - before
            if num_values > MAX_VALUES or depth > MAX_DEPTH:
                what = (
                    f"nests deeper than {MAX_DEPTH} levels"
                    if depth > MAX_DEPTH
                    else (f"holds more than {MAX_VALUES} values when its aliases are written out")
                )
                raise ConfigError(f"{path}:{event.start_mark.line + 1} {what}. Is it a recipe?")
    except yaml.YAMLError:
        return
