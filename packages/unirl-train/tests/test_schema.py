"""The schema of recipes: what is derived from its dataclasses, and plain sections built from what a recipe says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from unirl.config.schema import Component, Recipe, Save, built, components, plain_sections, required


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A plain section inside another one."""

    size: int = 1


@dataclass(frozen=True, kw_only=True)
class Outer:
    """A section of every kind of field."""

    name: str
    part: Annotated[Mapping[str, Any], Component(injected=frozenset({"device"}))]
    inner: Inner = Inner()
    other: Inner | None = None
    spare: Annotated[Mapping[str, Any] | None, Component(default="a.B")] = None


def test_fields_say_which_keys_are_required_components_or_sections():
    assert required(Outer) == ("name", "part")
    assert {name: item.default for name, item in components(Outer).items()} == {"part": None, "spare": "a.B"}
    assert plain_sections(Outer) == {"inner": Inner, "other": Inner}


def test_a_plain_section_is_built_with_its_defaults_for_null_and_absent_keys():
    outer = built(Outer, {"name": "x", "part": {"_target_": "a.A"}, "inner": None, "other": {"size": 3}})
    assert outer == Outer(name="x", part={"_target_": "a.A"}, other=Inner(size=3))
    assert built(Save, {"interval": 5, "best_metric": None}) == Save(interval=5)


def test_the_sections_of_a_recipe_are_known_as_such():
    assert plain_sections(Recipe)["save"] is Save
    assert components(Recipe)["engine"].if_taken >= {"device", "rank"}
