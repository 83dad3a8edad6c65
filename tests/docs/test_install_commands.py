"""Commands that install something name packages that have what is used next, from where they can be had."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("*/*/README.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if not page.is_relative_to(ROOT / "docs" / "zh")]  # commands are those of the English
PROJECTS = {
    project["name"]: project
    for path in sorted(ROOT.glob("*/*/pyproject.toml"))
    if (project := tomllib.loads(path.read_text()).get("project")) is not None
}
PROVIDERS = {script: name for name, project in PROJECTS.items() for script in project.get("scripts", {})}
"""Command -> the package that has it."""
OF_ANYONE = {"python", "pytest"}


def blocks(page):
    """The fenced blocks of a page, and each row of its tables."""
    text = page.read_text(encoding="utf-8")
    yield from re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    yield from (line for line in text.splitlines() if line.startswith("|"))


def installed_then_used():
    """(page, package, command) of every `uv sync --package` with a `uv run` after it in the same block."""
    for page in PAGES:
        for block in blocks(page):
            for package, rest in re.findall(r"uv sync --package ([\w-]+)(.*)", block, re.DOTALL):
                used = re.findall(r"uv run (?:--no-sync |--package [\w-]+ )*([\w-]+)", rest)
                yield from ((str(page.relative_to(ROOT)), package, command) for command in used)


@pytest.mark.parametrize(("page", "package", "command"), sorted(set(installed_then_used())))
def test_a_package_that_is_installed_has_the_command_that_follows(page, package, command):
    assert package in PROJECTS, page
    assert command in OF_ANYONE or PROVIDERS[command] == package, f"{page}: {command} comes with {PROVIDERS[command]}"


def test_the_pages_install_a_reward_node_with_its_server():
    assert {page for page, *rest in installed_then_used() if rest == ["unirl-reward-server", "reward-server"]} >= {
        "docs/guides/install.md",
        "apps/reward-server/README.md",
    }


def test_pages_that_install_from_an_index_say_that_the_packages_are_on_none():
    silent = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        # With --find-links, or an address after it, a name is not looked up on an index.
        from_index = re.search(r"pip install (?:-[-\w]+ )*[\"']?unirl-[\w-]+(?:\[[\w,-]+\])?[\"']?(?! @)", text)
        if from_index and "not on PyPI" not in text.replace("Not on", "not on"):
            silent.append(f"{page.relative_to(ROOT)}: {from_index[0]}")
    assert silent == []
