"""The API reference can be built, and has every public name."""

import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

import unirl.sde

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("generate_api", ROOT / "docs" / "api" / "generate.py")
assert _SPEC is not None and _SPEC.loader is not None
generate = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(generate)


@cache
def page(package):
    return generate.page(package, generate.PACKAGES[package])


def owner(path):
    """Package of an import path, None if it is an app's."""
    part = path.split(".")[1]
    return next((name for name, namespace in generate.PACKAGES.items() if (namespace / part).is_dir()), None)


def lacks(package, path):
    """True if neither the package's page nor that of unirl-types, whose names others re-export, has the name."""
    heading = f"\n### {path.rpartition('.')[2]}\n"
    return heading not in page(package) and heading not in page("unirl-types")


@pytest.mark.parametrize("package", generate.PACKAGES)
def test_a_page_has_the_classes_that_readmes_and_recipes_name(package):
    readme = (ROOT / "packages" / package / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(unirl(?:\.\w+)+\.[A-Z]\w+)`", readme))
    for recipe in (ROOT / "apps").glob("*/src/unirl/recipes/**/*.yaml"):
        named |= set(re.findall(r"_target_: (unirl(?:\.\w+)+\.[A-Z]\w+)", recipe.read_text(encoding="utf-8")))
    own = sorted(path for path in named if owner(path) == package)
    assert own or package in ("unirl-types", "unirl-sde")
    assert [path for path in own if lacks(package, path)] == []
    assert [name for name in unirl.sde.__all__ if package == "unirl-sde" and lacks(package, name)] == []


def test_a_missing_class_is_found():
    assert lacks("unirl-sde", "unirl.sde.kernels.NoKernel")


def test_the_command_writes_a_page_per_package(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "__file__", str(tmp_path / "generate.py"))
    monkeypatch.setattr(generate, "PACKAGES", {"unirl-sde": generate.PACKAGES["unirl-sde"]})
    generate.main()
    assert (tmp_path / "unirl-sde.md").read_text(encoding="utf-8").startswith("# API reference: unirl-sde\n")


def test_signatures_defaults_fields_and_properties_are_shown(tmp_path):
    source = tmp_path / "mine"
    source.mkdir()
    (source / "_private.py").write_text("def f(): ...")
    (source / "shown.py").write_text(
        '"""A module."""\nLIMIT = 3\n"""Most of it."""\n\n\n'
        "class Box(Base):\n"
        '    """A box."""\n\n    size: int = 1\n    """In cm."""\n\n'
        "    def __init__(self, size: int = 1, *, name: str | None = None) -> None: ...\n\n"
        '    @property\n    def half(self) -> float:\n        """Half."""\n\n'
        '    def _hidden(self):\n        """Hidden."""\n\n\n'
        'def fold(*boxes: Box, **options: int) -> Box:\n    """One box."""\n'
    )
    text = generate.page("unirl-mine", tmp_path)
    assert "## unirl.mine.shown\n\nA module.\n\n- `LIMIT`: Most of it." in text
    assert "class Box(Base)\nBox(size: int = 1, *, name: str | None = None)\n" in text
    assert "- `size: int = 1`: In cm." in text and "- `half: float`: Half." in text
    assert "fold(*boxes: Box, **options: int) -> Box" in text
    assert "_private" not in text and "Hidden" not in text
