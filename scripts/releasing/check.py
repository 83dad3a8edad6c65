"""Builds all distributions, looks at their files, and tries each in environments outside the repository."""

from __future__ import annotations

import subprocess
import tarfile
import time
import tomllib
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from .installed import PROGRAMS, Environments, Findings, module_names, note
from .workspace import ENGINES, ROOT, Distribution, ReleaseError

WHEEL, SDIST = "-py3-none-any.whl", ".tar.gz"
TWINE = "twine>=6.1"  # the first that reads metadata 2.4
TESTED = frozenset({"unirl-types", "unirl-sde", "unirl-reward"})
"""Libraries whose tests need nothing of the repository but their folder, README and the settings of all tests."""
OVERRIDDEN = "uv.toml"
"""Metadata of others that the workspace corrects ([[tool.uv.dependency-metadata]]), for the environments as well."""


def build(dist: Path) -> None:
    """Build an sdist of every distribution, and from it a wheel. Raises ReleaseError if one does not build."""
    dist.mkdir(parents=True, exist_ok=True)
    for old in [*dist.glob(f"unirl_*{WHEEL}"), *dist.glob(f"unirl_*{SDIST}")]:
        old.unlink()
    ran(["uv", "build", "--quiet", "--all-packages", "--out-dir", str(dist)])


def ran(command: Sequence[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}".strip())
    return done.stdout


def file_failures(dist: Path, among: Sequence[Distribution]) -> list[str]:
    """What is wrong with the files that were built: metadata, license, changelog, a file in two wheels."""
    failures: list[str] = []
    owners: Counter[str] = Counter()
    for each in among:
        with zipfile.ZipFile(each.file(dist, WHEEL)) as wheel:
            names = wheel.namelist()
        with tarfile.open(each.file(dist, SDIST)) as sdist:
            sources = {name.split("/", 1)[-1] for name in sdist.getnames()}
        code = [name for name in names if ".dist-info/" not in name]
        owners.update(name for name in code if not name.endswith("/"))
        failures += [f"{each.name}: {name} in the wheel is outside unirl/" for name in code if not under_unirl(name)]
        failures += [f"{each.name}: no license in the wheel"] * (not any("licenses/LICENSE" in name for name in names))
        failures += [f"{each.name}: no py.typed in the wheel"] * (not any("py.typed" in name for name in names))
        failures += [
            f"{each.name}: no {name} in the sdist" for name in ("README.md", "CHANGELOG.md") if name not in sources
        ]
    failures += [f"{name} is in {count} wheels" for name, count in sorted(owners.items()) if count > 1]
    files = [str(each.file(dist, suffix)) for each in among for suffix in (WHEEL, SDIST)]
    try:
        ran(["uvx", "--quiet", "--from", TWINE, "twine", "check", "--strict", *files])
    except ReleaseError as error:
        failures.append(str(error))
    return failures


def under_unirl(name: str) -> bool:
    return name.startswith("unirl/") and name != "unirl/__init__.py"


def try_out(
    places: Environments, wheel: Distribution, version: str, program: str, say: Callable[[str], None]
) -> Findings:
    """Install one distribution in a fresh environment: alone, with each extra, with all; import, and run what it has.

    Between extras the environment is made to hold exactly what the next one needs.
    """
    findings = Findings()
    place = places.folder / f"{wheel.name}-{version}"
    modules = module_names(wheel.file(places.dist, WHEEL))
    here = [extra for extra in wheel.extras if extra not in ENGINES]
    together = [here] if len(here) > 1 else []
    for extras in [[], *([extra] for extra in here), *together]:
        start, label = time.monotonic(), f"{wheel.name}[{','.join(extras)}]" if extras else wheel.name
        before = len(findings.failures)
        try:
            python = places.install(program, wheel, extras, place)
            note(findings, places.probe(python, "modules", *modules), wheel, set(extras))
            if not extras:
                run_programs(places, wheel, place)
        except ReleaseError as error:
            findings.failures.append(f"{label}: {error}")
        verdict = "ok" if len(findings.failures) == before else "FAILED"
        for line in findings.failures[before:]:
            say(f"    {line}")
        say(f"  {version} {label}: {verdict}, {len(findings.imported)} of {len(modules)} modules, {since(start)}")
    readme = wheel.folder / "README.md"
    try:
        with places.serving(wheel.name, place) as is_served:
            blocks = places.probe(place / "bin" / "python", "readme", str(readme), *["served"] * is_served)
        say(f"  {version} {wheel.name}: {blocks['ran']} README examples ran, {blocks['left_out']} need more than this")
    except ReleaseError as error:
        findings.failures.append(f"{wheel.name}: README: {error}")
    for extra in (each for each in wheel.extras if each in ENGINES):
        try:
            places.resolve(wheel.name, extra, version)
            say(f"  {version} {wheel.name}[{extra}]: resolves")
        except ReleaseError as error:
            findings.failures.append(f"{wheel.name}[{extra}] does not resolve: {error}")
    for module, needs in sorted(findings.waiting.items()):
        if needs.split("[")[1].rstrip("]") not in ENGINES:
            findings.failures.append(f"import {module} asks for {needs}, with which it was tried")
    return findings


def run_tests(
    places: Environments, wheel: Distribution, version: str, findings: Findings, say: Callable[[str], None]
) -> None:
    """The quick tests of a package on what try_out has installed."""
    start = time.monotonic()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    markers = [marker.split(":")[0] for marker in settings["markers"]]
    try:
        last = places.test(wheel, places.folder / f"{wheel.name}-{version}", markers)
        say(f"  {version} {wheel.name}: {last}, {since(start)}")
    except ReleaseError as error:
        say(f"  {version} {wheel.name}: its tests FAILED")
        findings.failures.append(f"{wheel.name}: tests: {error}")


def run_programs(places: Environments, wheel: Distribution, place: Path) -> None:
    """The commands of a distribution, in an empty folder outside the repository."""
    work = places.folder / "work"
    work.mkdir(exist_ok=True)
    for program, *words in PROGRAMS.get(wheel.name, []):
        places.run([str(place / "bin" / program), *words], work)


def since(start: float) -> str:
    return f"{time.monotonic() - start:.0f} s"


def carry_overrides(folder: Path) -> None:
    """Write the metadata that the workspace corrects to where uv looks for it. pip has no such thing."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"].get("dependency-metadata", [])
    lines: list[str] = []
    for table in tables:
        lines.append("[[dependency-metadata]]")
        lines += [f"{key} = {value!r}" for key, value in table.items()]
    (folder / OVERRIDDEN).write_text("\n".join(lines) + "\n")
