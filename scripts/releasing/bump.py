"""What a release changes: version, bounds of dependents, heading of the changelog. Pure functions of texts."""

from __future__ import annotations

import re
from typing import Literal

from packaging.version import Version

from .workspace import ReleaseError

Part = Literal["major", "minor", "patch", "first"]
PARTS: tuple[Part, ...] = ("major", "minor", "patch", "first")

_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_DATED = re.compile(r"\d+\.\d+\.\d+ - \d{4}-\d{2}-\d{2}")
UNRELEASED = "Unreleased"


def next_version(version: str, part: Part) -> str:
    """The version after `version`; "first" keeps it, for a version that was never released."""
    now = Version(version)
    match part:
        case "first":
            return version
        case "patch":
            return f"{now.major}.{now.minor}.{now.micro + 1}"
        case "minor":
            return f"{now.major}.{now.minor + 1}.0"
        case "major":
            return f"{now.major + 1}.0.0"


def bounds(version: str) -> str:
    """What dependents ask for: this minor version or later, below the next that may break them (0.x: each minor)."""
    now = Version(version)
    above = f"{now.major}.{now.minor + 1}" if now.major == 0 else f"{now.major + 1}"
    return f">={now.major}.{now.minor},<{above}"


def with_version(pyproject: str, version: str) -> str:
    """The text of a pyproject.toml with another version of its project."""
    changed, count = re.subn(r'(?m)^version = "[^"]+"$', f'version = "{version}"', pyproject, count=1)
    if count != 1:
        raise ReleaseError('pyproject.toml has no line `version = "..."`')
    return changed


def with_bounds(pyproject: str, name: str, version: str) -> str:
    """The text of a pyproject.toml whose requirements of `name` have the bounds of `version`."""
    bounded = re.compile(rf'"{re.escape(name)}(\[[\w,-]+\])?[><=~!][^"]*"')
    return bounded.sub(lambda found: f'"{name}{found[1] or ""}{bounds(version)}"', pyproject)


def unreleased(changelog: str, name: str) -> str:
    """The entries under the first heading. Raises ReleaseError if it is dated, so released, or has no entry."""
    headings = list(_HEADING.finditer(changelog))
    if not headings or _DATED.fullmatch(headings[0][1]):
        raise ReleaseError(f"the CHANGELOG of {name} has no section of what is not released: add ## {UNRELEASED}")
    end = headings[1].start() if len(headings) > 1 else len(changelog)
    entries = changelog[headings[0].end() : end]
    if not re.search(r"^- ", entries, re.MULTILINE):
        raise ReleaseError(f"the CHANGELOG of {name} has no entry under ## {headings[0][1]}: say what changed")
    return entries.strip()


def with_entry(changelog: str, entry: str) -> str:
    """The text of a CHANGELOG with one more entry in its section of what is not released, which is made if absent."""
    first = _HEADING.search(changelog)
    if first is None or _DATED.fullmatch(first[1]):
        start = first.start() if first else len(changelog)
        return f"{changelog[:start]}## {UNRELEASED}\n\n- {entry}\n\n{changelog[start:]}"
    rest = changelog[first.end() :].lstrip("\n")
    space = "\n" if rest.startswith("## ") else ""
    return f"{changelog[: first.end()]}\n\n- {entry}\n{space}{rest}"


def released(changelog: str, name: str, version: str, date: str) -> str:
    """The text of a CHANGELOG whose entries so far are those of `version`, with an empty section for the next ones."""
    unreleased(changelog, name)
    heading = f"## {UNRELEASED}\n\n## {version} - {date}"
    return _HEADING.sub(heading, changelog, count=1)


def tag(name: str, version: str) -> str:
    return f"{name}-v{version}"


def from_tag(text: str) -> tuple[str, str]:
    """(name, version) of a tag such as unirl-sde-v0.2.0."""
    found = re.fullmatch(r"(unirl-[a-z-]+)-v(\d+\.\d+\.\d+)", text)
    if found is None:
        raise ReleaseError(f"the tag {text!r} is none of a release, such as unirl-sde-v0.2.0")
    return found[1], found[2]


def is_dated(changelog: str, version: str) -> bool:
    """True if the CHANGELOG has a dated section of `version`."""
    return any(_DATED.fullmatch(each) and each.startswith(f"{version} - ") for each in _HEADING.findall(changelog))
