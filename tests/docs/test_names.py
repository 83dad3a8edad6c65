"""Every name of ours in docs/reference/names.md exists."""

import ast
import re
from pathlib import Path

import pytest

from unirl.config.signatures import read_module

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "names.md"
ROWS = [line.split("|")[2] for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
NAMES = sorted({name for row in ROWS for name in re.findall(r"`(unirl\.[\w.]+)`", row)})


def exists(name: str) -> bool:
    """True if it is a module, what a module defines, or a member of a class that a module defines."""
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        module = read_module(".".join(parts[:length]))
        if module is None or not (module.definitions or length == len(parts)):
            continue
        rest = parts[length:]
        if not rest:
            return True
        found = module.definitions.get(rest[0])
        if len(rest) == 1 or not isinstance(found, ast.ClassDef):
            return found is not None and len(rest) == 1
        members = [item.target if isinstance(item, ast.AnnAssign) else item for item in found.body]
        return any(rest[1] in (getattr(item, "name", ""), getattr(item, "id", "")) for item in members)
    return False


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_the_table_gives_exists(name):
    assert exists(name)


@pytest.mark.parametrize("name", ["unirl.algorithms.nowhere", "unirl.algorithms.base.StageAlgorithm.nothing"])
def test_a_name_that_does_not_exist_is_found_out(name):
    assert not exists(name)
