"""Names of the last release of recipes and their parts, wherever a name is taken.

A line of the table `former_names.yaml` of the recipes package says what an old name is now: another name, or words as
they are typed, names of files before changes (`sd3/grpo parts/engine=replica num_devices=16`). Hydra finds the old name
as a file with these defaults and values, after all real files, so that recipes of users who name it compose as before.
"""

from __future__ import annotations

import importlib.resources
import shlex
from collections.abc import Mapping
from functools import cache

import yaml
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from unirl.config.catalog import PARTS, RECIPES_MODULE
from unirl.types.renamed import say_once

TABLE = "former_names.yaml"
SCHEME = "former"
Names = list[str]  # inside the class below, `list` is a method that Hydra calls


@cache
def former_names(module: str = RECIPES_MODULE) -> Mapping[str, str]:
    """Old name -> what is typed now."""
    table = importlib.resources.files(module) / TABLE
    return (yaml.safe_load(table.read_text(encoding="utf-8")) or {}) if table.is_file() else {}


def former_recipe(given: str, module: str = RECIPES_MODULE) -> str | None:
    """The old name of a recipe that `given` means, whose folder may be left out where that is unique; else None."""
    names = [name for name in former_names(module) if not name.startswith(f"{PARTS}/")]
    ends = [name for name in names if name == given or name.endswith(f"/{given}")]
    return ends[0] if len(ends) == 1 else None


def present(former: str, module: str = RECIPES_MODULE) -> tuple[str, list[str]]:
    """The recipe that an old name means and changes of it. Says so once.

    Where there are changes, the recipe keeps its old name too, so that its runs lie where they lay.
    """
    now = former_names(module)[former]
    say_former(former, now)
    recipe, *changes = shlex.split(now)
    return recipe, [*changes, f"recipe={former}"] if changes else []


def names_before(recipe: str, module: str = RECIPES_MODULE) -> list[str]:
    """The old names of a recipe."""
    return [former for former, now in former_names(module).items() if now == recipe]


def say_former(former: str, now: str) -> None:
    """Log, once per process, what an old name is now."""
    say_once(f"{former} is {now} now. This release still takes the old name; write the new one.")


class FormerNames(ConfigSource):
    """Where Hydra finds old names, `former://MODULE` of a search path."""

    @staticmethod
    def scheme() -> str:
        """What its paths begin with."""
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """The file that an old name stands for, with a message."""
        former = _name(config_path)
        now = former_names(self.path)[former]
        say_former(former, now)
        words = shlex.split(now)
        if any("=" in word for word in words):
            words.append(f"recipe={former}")
        config = OmegaConf.create(_file(words))
        return ConfigResult(self.provider, self.full_path(), config, header={"package": "_global_"})

    def is_config(self, config_path: str) -> bool:
        """True for an old name."""
        return _name(config_path) in former_names(self.path)

    def is_group(self, config_path: str) -> bool:
        """True for a folder of old names."""
        return any(name.startswith(f"{config_path.rstrip('/')}/") for name in former_names(self.path))

    def available(self) -> bool:
        """True: the table may be empty."""
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> Names:
        """Nothing: old names are taken, not offered."""
        del config_path, results_filter
        return []


def _name(config_path: str) -> str:
    return config_path.strip("/").removesuffix(".yaml")


def _file(words: list[str]) -> dict[str, object]:
    """Defaults and values that words say."""
    defaults: list[str | dict[str, str]] = [f"/{word}" for word in words if "=" not in word]
    values = OmegaConf.create()
    for change in OverridesParser.create().parse_overrides([word for word in words if "=" in word]):
        if "/" in change.key_or_group:
            at = "" if change.package is None else f"@{change.package}"
            defaults.append({f"override /{change.key_or_group}{at}": str(change.value())})
        else:
            OmegaConf.update(values, change.key_or_group, change.value())
    return {"defaults": [*defaults, "_self_"], **{str(key): values._get_node(key) for key in values}}
