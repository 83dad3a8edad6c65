"""Texts of the workspace avoid the words that CONTRIBUTING.md lists."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("architecture_words", Path(__file__).with_name("words.py"))
assert _SPEC is not None and _SPEC.loader is not None
words = importlib.util.module_from_spec(_SPEC)
sys.modules["architecture_words"] = words  # dataclasses look their module up
_SPEC.loader.exec_module(words)


def test_texts_avoid_the_words_of_the_table():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    # This table and its planted violations hold the words themselves.
    names = [name for name in listed.stdout.split("\0") if name and not name.startswith("tests/architecture/")]
    found = words.avoided_words(ROOT, names)
    assert not found, "\n" + "\n".join(found)


def test_contributing_shows_every_word():
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [word.avoid for word in words.WORDS if f"| `{word.avoid}` | {word.write} |" not in table] == []


@pytest.mark.parametrize(
    ("source", "write"),
    [
        ('"""One forward a\nmicro-batch."""', "samples per prompt"),
        ("# a process\n# of its own", "its own process, a separate process"),
        ('raise ValueError("a in the place of b")', "instead of, replaces"),
        ("# waits for ever", "forever, or until when"),
        ('raise ValueError(f"{a}: nobody answers")', "the process, user or object meant"),
        ("# one picture", "image"),
        ("# a file beside it", "next to it, with it, besides it"),
        ('"""Raises ConfigError where it fails."""', "Raises X if"),
        ('x: bool\n"""Whether it works."""', '"""True if ..., or the noun'),
        ('x: int\n"""Of a file."""', '"""True if ..., or the noun'),
        ('def f():\n    """See `g`."""', "no docstring"),
    ],
)
def test_an_avoided_word_is_found(tmp_path, source, write):
    (tmp_path / "a.py").write_text(source, encoding="utf-8")
    (found,) = words.avoided_words(tmp_path, ["a.py"])
    assert found.endswith(f"write: {write}")


@pytest.mark.parametrize(
    "source",
    [
        'prompt = "a picture of nobody"',
        "# CPU seconds of its own process",
        "# see packages/pictures.py and `picture`",
        '"""True if images a device makes are kept. See `g`."""',
    ],
)
def test_other_uses_pass(tmp_path, source):
    (tmp_path / "a.py").write_text(source, encoding="utf-8")
    assert words.avoided_words(tmp_path, ["a.py"]) == []


def test_code_in_markdown_is_free(tmp_path):
    (tmp_path / "a.md").write_text("`picture`\n\n```\npicture\n```\nOne picture.\n", encoding="utf-8")
    assert words.avoided_words(tmp_path, ["a.md"]) == ["a.md:6: 'picture'; write: image"]
