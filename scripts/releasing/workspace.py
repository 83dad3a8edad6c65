"""The distributions of the workspace, as their pyproject.toml have them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
ENGINES = frozenset({"sglang", "vllm", "vllm-omni", "paddleocr"})
"""Extras that are resolved and not installed: engines bring ten gigabytes each, PaddleOCR needs paddlepaddle too."""


class ReleaseError(Exception):
    """What stands in the way of a release, with its values and the fix."""


@dataclass(frozen=True)
class Distribution:
    """One package or app."""

    folder: Path
    project: dict[str, Any]  # Any: a table of TOML
    groups: dict[str, list[str]]
    """What development needs besides."""

    @property
    def name(self) -> str:
        return self.project["name"]

    @property
    def version(self) -> str:
        return self.project["version"]

    @property
    def extras(self) -> list[str]:
        return sorted(self.project.get("optional-dependencies", {}))

    def of_extra(self, extra: str) -> list[Requirement]:
        return [Requirement(text) for text in self.project["optional-dependencies"][extra]]

    def requirements(self) -> list[Requirement]:
        """Its own, and those of its extras."""
        always = [Requirement(text) for text in self.project.get("dependencies", [])]
        return [*always, *(each for extra in self.extras for each in self.of_extra(extra))]

    def file(self, folder: Path, suffix: str) -> Path:
        """Its wheel ("-py3-none-any.whl") or sdist (".tar.gz") in `folder`."""
        return folder / f"{self.name.replace('-', '_')}-{self.version}{suffix}"


def distributions(root: Path = ROOT) -> list[Distribution]:
    """All of them, what is needed by others first. Raises ReleaseError if they need one another in a circle."""
    found = [
        Distribution(path.parent, content["project"], content.get("dependency-groups", {}))
        for path in sorted([*root.glob("packages/*/pyproject.toml"), *root.glob("apps/*/pyproject.toml")])
        for content in [tomllib.loads(path.read_text(encoding="utf-8"))]
    ]
    names = {each.name for each in found}
    ordered: list[Distribution] = []
    while len(ordered) < len(found):
        done = {each.name for each in ordered}
        ready = [each for each in found if each.name not in done and needed_names(each) & names <= done | {each.name}]
        if not ready:
            raise ReleaseError(f"packages need one another in a circle: {', '.join(sorted(names - done))}")
        ordered += ready
    return ordered


def needed_names(distribution: Distribution) -> set[str]:
    return {canonicalize_name(each.name) for each in distribution.requirements()}


def dependents(name: str, among: Iterable[Distribution]) -> list[Distribution]:
    """Those whose requirements bound the version of `name`."""
    return [
        each
        for each in among
        if any(canonicalize_name(needed.name) == name and needed.specifier for needed in each.requirements())
    ]


def chosen(names: Sequence[str], among: Sequence[Distribution]) -> list[Distribution]:
    """Those named; all of them for "all" or no name. Raises ReleaseError for a name that none has."""
    known = {each.name for each in among}
    if unknown := sorted(set(names) - known - {"all"}):
        raise ReleaseError(f"no package {', '.join(unknown)}. There are {', '.join(sorted(known))}, and all.")
    return [each for each in among if not names or "all" in names or each.name in names]


def bounds_that_exclude(among: Sequence[Distribution]) -> list[str]:
    """A line for every requirement of one distribution that the present version of another does not meet."""
    versions = {each.name: each.version for each in among}
    return [
        f"{each.name} needs {needed}, and {needed.name} is {versions[needed.name]}"
        for each in among
        for needed in each.requirements()
        if needed.name in versions and not needed.specifier.contains(versions[needed.name], prereleases=True)
    ]
