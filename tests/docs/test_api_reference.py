"""The API reference is what the docstrings say now, and has every public name."""

import importlib.util
from pathlib import Path

import pytest

import unirl.sde
from unirl.reward.catalog import CATALOG

API = Path(__file__).parents[2] / "docs" / "api"


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", API / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["unirl-sde.md", "unirl-reward.md"])
def test_the_reference_is_what_the_sources_say(generate, name):
    fresh = generate.page(generate.PAGES[name])
    assert (API / name).read_text() == fresh, "the docstrings have changed; uv run python docs/api/generate.py"


def test_every_exported_name_and_every_scorer_is_there():
    sde, reward = (API / name for name in ("unirl-sde.md", "unirl-reward.md"))
    assert [name for name in unirl.sde.__all__ if f"\n### {name}\n" not in sde.read_text()] == []
    scorers = (API.parents[1] / "packages/unirl-reward/README.md").read_text()
    named = {line.split("`")[1] for line in scorers.splitlines() if line.startswith("| `unirl.reward.")}
    assert len(named) >= len(CATALOG)
    assert [name for name in named if f"\n### {name.rpartition('.')[2]}\n" not in reward.read_text()] == []


def test_signatures_defaults_fields_and_properties_are_shown(generate, tmp_path):
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
    text = generate.page(source)
    assert "## unirl.mine.shown\n\nA module.\n\n- `LIMIT`: Most of it." in text
    assert "class Box(Base)\nBox(size: int = 1, *, name: str | None = None)\n" in text
    assert "- `size: int = 1`: In cm." in text and "- `half: float`: Half." in text
    assert "fold(*boxes: Box, **options: int) -> Box" in text
    assert "_private" not in text and "Hidden" not in text
