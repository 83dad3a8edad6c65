"""Environments next to the workspace have their own locks, which must follow the packages that they install."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ENVIRONMENTS = Path(__file__).parents[2] / "environments"


def locked(package):
    """Requirements of a package as the lock remembers them: name, extras, versions, the extra that asks for them."""
    for entry in package.get("metadata", {}).get("requires-dist", []):
        extra = re.fullmatch(r"extra == '(.+)'", entry.get("marker", ""))
        yield entry["name"], tuple(entry.get("extras", ())), entry.get("specifier", ""), extra and extra[1]


def declared(folder):
    """The same, as its pyproject.toml has them."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    for extra, texts in [(None, project.get("dependencies", [])), *project.get("optional-dependencies", {}).items()]:
        for requirement in map(Requirement, texts):
            yield canonicalize_name(requirement.name), tuple(sorted(requirement.extras)), requirement.specifier, extra


def test_every_extra_that_a_page_or_an_example_names_exists():
    root = ENVIRONMENTS.parent
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = [
        root / "README.md",
        *(root / "docs").rglob("*.md"),
        *(path for path in (root / "examples").rglob("*") if path.is_file()),
    ]
    named = {(path.name, extra) for path in pages for extra in re.findall(r"--extra ([\w-]+)", path.read_text())}
    assert named and [pair for pair in sorted(named) if pair[1] not in extras] == []


@pytest.mark.parametrize("name", sorted(path.parent.name for path in ENVIRONMENTS.glob("*/uv.lock")))
def test_the_lock_of_an_environment_knows_what_its_packages_require_now(name):
    lock = tomllib.loads((ENVIRONMENTS / name / "uv.lock").read_text())
    ours = {package["name"]: package for package in lock["package"] if "editable" in package["source"]}
    assert {"unirl-rollout", "unirl-train"} & set(ours)
    for package in ours.values():
        folder = (ENVIRONMENTS / name / package["source"]["editable"]).resolve()
        # A package that the environment takes from a folder is locked by that, whatever versions are asked for.
        found = {
            (what, extras, "" if what in ours else Requirement(f"x{versions}").specifier, extra)
            for what, extras, versions, extra in locked(package)
        }
        wanted = {
            (what, extras, "" if what in ours else versions, extra)
            for what, extras, versions, extra in declared(folder)
        }
        assert found == wanted, f"uv lock --project environments/{name}"
