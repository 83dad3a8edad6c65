"""Composes and renders recipes. Besides `unirl.config.former_recipes` and the app, the only code that uses Hydra.

A recipe is a YAML file of the recipes package, composed from parts by a defaults list, or any YAML file given by path
(whose defaults may name packaged recipes too). `render` writes such a file.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir, initialize_config_module
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from unirl.config.catalog import RECIPES_MODULE, SUFFIXES, available, is_packaged, packaged_name, parts
from unirl.config.flow import in_own_words
from unirl.config.former import modernised
from unirl.config.former_recipes import SCHEME, FormerNames, former_recipe, present
from unirl.config.instantiation import TARGET
from unirl.config.suggestions import did_you_mean
from unirl.config.yaml_bounds import check_yaml
from unirl.types.errors import ConfigError
from unirl.types.urls import without_credentials

_HYDRA_VERSION = "1.3"

# Hydra imports every `hydra_plugins` on the path when it is first used. Used here, before the command adds the working
# directory to the path, it finds those of installed packages only.
Plugins.instance()
SourcesRegistry.instance().register(FormerNames)


NULL_ENTRIES = frozenset({"algorithms"})
"""Mappings from names to components in which null has a meaning: here, that a track is not trained."""


def compose(recipe: str, overrides: Sequence[str] = (), *, module: str = RECIPES_MODULE) -> DictConfig:
    """The recipe with `key=value` overrides applied; interpolations are not resolved.

    recipe: a packaged name (its first folders may be omitted if the rest is unique), a name of the last release, or the
    path of a YAML file. Overrides follow Hydra's grammar, except that new keys are added without a prefix; the check
    then reports keys that nothing takes. Raises ConfigError for an unknown recipe, a broken file or a bad override.
    """
    parsed = _parsed(overrides)
    path = Path(recipe).expanduser()
    if path.suffix in SUFFIXES and not path.is_file():
        raise ConfigError(f"{recipe}: no such recipe file.")
    if path.suffix in SUFFIXES:
        _require_utf8(path)
        check_yaml(path)
        folder, name = str(path.resolve().parent), path.stem
        with initialize_config_dir(folder, version_base=_HYDRA_VERSION, job_name="trainer"):
            return _composed(name, parsed, f"pkg://{module},{SCHEME}://{module}", recipe)
    former = None if is_packaged(recipe, module) else former_recipe(recipe, module)
    if former is None:
        name = packaged_name(recipe, module)
    else:
        name, changes = present(former, module)
        parsed = _before(_parsed(changes), parsed)
    composed = _changed(name, module, parsed, recipe)
    if composed is not None:
        return composed
    with initialize_config_module(module, version_base=_HYDRA_VERSION, job_name="trainer"):
        return _composed(name, parsed, f"{SCHEME}://{module}", recipe)


def resolve(config: DictConfig) -> dict[str, Any]:  # Any: a recipe's values
    """The recipe in plain containers, with interpolations resolved, current names (`unirl.config.former`), and without
    components removed by null.

    Raises ConfigError naming the key that cannot be resolved.
    """
    return modernised(in_own_words(_resolved(config)))


def _resolved(config: DictConfig) -> dict[str, Any]:  # Any: a recipe's values
    try:
        absent = sorted(OmegaConf.missing_keys(config))
        plain = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        why = _first_line(error)
        raise ConfigError(f"{error.full_key or 'recipe'}: {why.removeprefix(_REFUSED)}") from error
    if absent:
        given = " ".join(f"{key}=..." for key in absent)
        raise ConfigError(
            f"{', '.join(absent)}: no value is given. Set {'it' if len(absent) == 1 else 'them'} in the recipe, or on "
            f"the command line: {given}"
        )
    if not isinstance(plain, dict):
        raise ConfigError(f"a recipe is a mapping, this file holds a {type(plain).__name__}")
    recipe = {str(key): _without_removed(value, keeps_null=key in NULL_ENTRIES) for key, value in plain.items()}
    reward = recipe.get("reward")
    if isinstance(reward, dict) and isinstance(reward.get("weights"), dict):  # numbers by component name
        reward["weights"] = {name: weight for name, weight in reward["weights"].items() if weight is not None}
    return recipe


def published(config: DictConfig) -> dict[str, Any]:  # Any: a recipe's values
    """The resolved recipe as others may see it: values of resolvers, such as `${oc.env:NAME}` or a packaged file's
    path, are left as written in the recipe, also if another value refers to them. Passwords are removed from URLs.

    A mapping made by a resolver keeps its keys and import paths. Raises ConfigError as `resolve`.
    """
    raw = OmegaConf.to_container(config, resolve=False)
    texts: list[str] = []
    marked = OmegaConf.to_container(OmegaConf.create(_marked(raw, texts)), resolve=True)
    return modernised(in_own_words(_published(_resolved(config), marked, texts)))


_REFUSED = "ConfigError raised while resolving interpolation: "
"""What OmegaConf puts before the message of a resolver of ours."""
_RESOLVER = re.compile(r"\$\{\s*[A-Za-z_][\w.]*\s*:")
_MARK = re.compile("\ue000(\\d+)\ue001")
"""Marks the n-th value with a resolver while references to it are resolved."""


def _marked(node: Any, texts: list[str]) -> Any:  # Any: a recipe's values, not resolved
    if isinstance(node, dict):
        return {key: _marked(item, texts) for key, item in node.items()}
    if isinstance(node, list):
        return [_marked(item, texts) for item in node]
    if not isinstance(node, str) or not _RESOLVER.search(node):
        return node
    texts.append(node)
    return f"\ue000{len(texts) - 1}\ue001"


def _published(value: Any, marked: Any, texts: Sequence[str]) -> Any:  # Any: a recipe's values
    """value: resolved. marked: the same with marks; a mark may stand for a whole mapping or list."""
    if isinstance(value, dict):
        inner = marked if isinstance(marked, dict) else dict.fromkeys(value, marked)
        return {key: item if key == TARGET else _published(item, inner[key], texts) for key, item in value.items()}
    if isinstance(value, list):
        each = marked if isinstance(marked, list) else [marked] * len(value)
        return [_published(item, own, texts) for item, own in zip(value, each, strict=True)]
    shown = value
    if isinstance(marked, str) and _MARK.search(marked):
        shown = _MARK.sub(lambda mark: texts[int(mark[1])], marked)
    return without_credentials(shown) if isinstance(shown, str) else shown


def _without_removed(node: Any, *, keeps_null: bool = False) -> Any:  # Any: a recipe's values
    """The node without the null entries of mappings from names to components (`reward.scorers`, `trackers`, ...).

    A recipe composed from another one can only override, so null removes an entry of the other one. Null as a keyword
    of a component or a value of a plain section is kept, and so are NULL_ENTRIES.
    """
    if isinstance(node, list):
        return [_without_removed(item) for item in node]
    if not isinstance(node, dict):
        return node
    names_components = TARGET not in node and any(isinstance(item, dict) and TARGET in item for item in node.values())
    kept = {key: item for key, item in node.items() if item is not None or keeps_null or not names_components}
    return {key: _without_removed(item, keeps_null=key in NULL_ENTRIES) for key, item in kept.items()}


def render(config: DictConfig, *, is_resolved: bool = False) -> str:
    """The whole recipe as YAML that can be run by path, with the sections of the flow in the recipe's own words.

    is_resolved: replace interpolations (environment variables, packaged files) by their values on this machine.
    """
    if is_resolved:
        return OmegaConf.to_yaml(OmegaConf.create(resolve(config)))
    raw = OmegaConf.to_container(config, resolve=False)
    if not isinstance(raw, dict):
        return OmegaConf.to_yaml(config)
    own = {str(key): value for key, value in raw.items()}
    made = in_own_words(own)
    return OmegaConf.to_yaml(config if made == own else OmegaConf.create(made))


def _composed(name: str, overrides: list[Override], search_path: str, recipe: str) -> DictConfig:
    """search_path: where Hydra looks for files after the folder or package that is open."""
    extra = [f"hydra.searchpath=[{search_path}]"]
    try:
        with warnings.catch_warnings():
            # Hydra's warning about a defaults list without _self_, where the recipe's own values would not override the
            # others.
            warnings.filterwarnings("error", message=".*Defaults list is missing", category=UserWarning)
            base = hydra_compose(config_name=name, overrides=extra, return_hydra_config=True)
            known = base.hydra.runtime.choices
            with open_dict(base):
                del base["hydra"]
            lines = [_ready(override, base) for override in _with_new_parts(name, overrides, known)]
            config = hydra_compose(config_name=name, overrides=[*extra, *lines]) if lines else base
    except ConfigError:
        raise
    except RecursionError:  # Hydra would show thousands of lines of it
        raise ConfigError(
            f"recipe {recipe}: its defaults include one another without an end. Name each file once, and none that "
            "names the file itself (`override` replaces a group inside the files that it names, too)."
        ) from None
    except UserWarning as error:
        raise ConfigError(
            f"recipe {recipe}: its defaults do not say where its own values come. Add _self_ as the last of them."
        ) from error
    except MissingConfigException as error:
        missing = str(error.missing_cfg_file).lstrip("/")
        hint = did_you_mean(missing, ["_self_", *available(), *parts()])
        raise ConfigError(
            f"recipe {recipe}: there is no {missing}, which its defaults or the command line name. {hint}"
        ) from error
    except HydraException as error:
        raise ConfigError(f"recipe {recipe}: {_message(error)}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"recipe {recipe}: {_first_line(error)}") from error
    except YAMLError as error:
        raise ConfigError(f"recipe {recipe} is not YAML: {' '.join(str(error).split())}. Fix the file.") from error
    except ValueError as error:  # raised by Hydra for a defaults list; UnicodeDecodeError of a named file
        raise ConfigError(
            f"recipe {recipe}: {_first_line(error)} Write defaults as a list of names, the last of them _self_, in "
            "files of UTF-8."
        ) from error
    OmegaConf.set_struct(config, False)
    return config


@cache
def _packaged(name: str, module: str, recipe: str) -> DictConfig:
    """A packaged recipe. Cached and shared, so it must not be changed."""
    with initialize_config_module(module, version_base=_HYDRA_VERSION, job_name="trainer"):
        return _composed(name, [], f"{SCHEME}://{module}", recipe)


def _changed(name: str, module: str, overrides: Sequence[Override], recipe: str) -> DictConfig | None:
    """A packaged recipe with values assigned as Hydra would; None if Hydra itself is needed to compose or to refuse
    them.

    Hydra takes 80 ms for a recipe and for every variant of it; a copy takes 3 ms.
    """
    base = _packaged(name, module, recipe)
    if not all(_assigns_value(override, base) for override in overrides):
        return None
    config = copy.deepcopy(base)
    OmegaConf.set_struct(config, True)
    try:
        for override in overrides:
            is_new = _ready(override, base).startswith("++")
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=is_new)
    except OmegaConfBaseException:
        return None
    OmegaConf.set_struct(config, False)
    return config


def _with_new_parts(name: str, overrides: list[Override], known: Collection[str]) -> list[Override]:
    """The overrides, with `parts/train=lora` turned into an addition if the file's defaults choose no part of that
    kind.

    So files without defaults, such as those written by `show`, take it too. Hydra searches for added parts next to the
    recipe, which for a file means among the packaged ones. Raises ConfigError for an unknown kind of part.
    known: the kinds that the defaults choose from.
    """
    chosen = [override for override in overrides if "/" in override.key_or_group and _is_plain(override)]
    if not chosen:
        return overrides
    kinds = {part.rsplit("/", 1)[0] for part in parts()}
    added: dict[str, Override] = {}
    for override in chosen:
        kind, line = override.key_or_group, str(override.input_line)
        if kind in known:
            continue
        if kind not in kinds:
            raise ConfigError(f"{line}: there is no {kind} to choose from. {did_you_mean(kind, kinds)}")
        placed = sorted(f"{choice}={line.partition('=')[2]}" for choice in known if choice.startswith(f"{kind}@"))
        if placed:
            raise ConfigError(f"{line}: this recipe chooses {kind} for each policy. Say which: {' or '.join(placed)}.")
        if "/" in name:  # packaged
            raise ConfigError(
                f"{line}: this recipe has no {kind} to replace. Write your own recipe whose defaults are "
                f"[/{name}, /{kind}/{override.value()}, _self_]."
            )
        (added[line],) = _parsed([f"+{line}"])
    return [added.get(str(override.input_line), override) for override in overrides]


def _before(changes: list[Override], overrides: list[Override]) -> list[Override]:
    """Changes and then overrides, without the parts among the changes in whose place the overrides choose others."""
    chosen = {(override.key_or_group, override.package) for override in overrides if "/" in override.key_or_group}
    return [*(change for change in changes if (change.key_or_group, change.package) not in chosen), *overrides]


def _is_plain(override: Override) -> bool:
    return override.type is not None and override.type.name == "CHANGE" and override.package is None


def _assigns_value(override: Override, base: DictConfig) -> bool:
    """True if an override assigns a value of the recipe, and does not choose a part or change Hydra's settings."""
    first, *rest = override.key_or_group.split(".")
    return _is_plain(override) and "/" not in first and first != "hydra" and (bool(rest) or first in base)


def _ready(override: Override, base: DictConfig) -> str:
    """The override in Hydra's grammar: a plain assignment to an absent key becomes an addition."""
    line = override.input_line or ""
    if (
        not _is_plain(override) or "/" in override.key_or_group
    ):  # an override with a slash chooses a part, such as parts/reward=remote
        return line
    parts = override.key_or_group.split(".")
    node: Any = base  # Any: walks through mappings, lists and scalars
    for place, part in enumerate(parts):
        if isinstance(node, DictConfig) and part in node:
            is_last = place == len(parts) - 1
            node = None if is_last or OmegaConf.is_missing(node, part) else node._get_node(part)
            if isinstance(node, DictConfig) and node._is_none():
                return f"++{line}"
            if is_last:
                return line
            continue
        if isinstance(node, DictConfig) and override.value() is None and NULL_ENTRIES.isdisjoint(parts[:place]):
            _require_entry(node, parts[place:], line)
        if isinstance(node, DictConfig) or node is None:
            return f"++{line}"
        return line
    return line


def _require_entry(node: DictConfig, absent: Sequence[str], line: str) -> None:
    """Raise ConfigError if null would remove an entry that a mapping from names to components does not have."""
    names = [
        str(name) for name, item in node.items_ex(resolve=False) if isinstance(item, DictConfig) and TARGET in item
    ]
    if len(absent) == 1 and names and len(names) == len(node):
        raise ConfigError(f"{line} removes nothing: there is {', '.join(names)}. {did_you_mean(absent[0], names)}")


def _parsed(overrides: Sequence[str]) -> list[Override]:
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(
            f"{_message(error)} Write key=value, with quotes around values that hold , or [ ]."
        ) from error
    for override in parsed:
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line}: this command runs one recipe, not a sweep. Put lists in brackets: key=[a,b]."
            )
    return parsed


def _require_utf8(path: Path) -> None:
    text = path.read_bytes()
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line} is not UTF-8 text: byte 0x{text[error.start]:02x}. Save the file as UTF-8."
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") + "."


def _message(error: BaseException) -> str:
    """Hydra's message in one line, without its hints about prefixes, which do not apply here."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "https://hydra.cc" not in line]
    cause = error.__cause__
    if cause is not None:
        lines.append(_first_line(cause))
    return " ".join(dict.fromkeys(lines)).rstrip(".") + "."
