"""Commands of pages that no test follows (tests/e2e/test_guides.py does the guides): the trainer takes each."""

import re
import shlex
from pathlib import Path

import pytest

from unirl.app.command_line import parse
from unirl.app.main import main

DOCS = Path(__file__).parents[2] / "docs"
FOLDERS = ("worlds", "reference", "results", "design")
BLOCK = re.compile(r"^```bash\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
ASKS_FOR_A_RECIPE = ("run", "check", "bench", "plan", "rehearse", "profile")


def commands(page: Path) -> list[list[str]]:
    """Words after `trainer` of every line of the page's shell blocks that calls it."""
    found = []
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        for line in block["text"].replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            words = words[2:] if words[:2] == ["uv", "run"] else words
            if words[:1] == ["trainer"]:
                found.append(words[1:])
    return found


CASES = [
    pytest.param(words, id=f"{page.stem}: {' '.join(words)}"[:100])
    for folder in FOLDERS
    for page in sorted((DOCS / folder).glob("*.md"))
    for words in commands(page)
]


def test_commands_of_shell_blocks_are_found():
    assert len(CASES) >= 10


@pytest.mark.parametrize("words", CASES)
def test_a_command_is_one_that_the_trainer_takes(words: list[str], capsys: pytest.CaptureFixture[str]):
    command = parse(words)
    if command.verb in ASKS_FOR_A_RECIPE:
        assert main(["check", command.recipe, *command.overrides]) == 0, capsys.readouterr().err
