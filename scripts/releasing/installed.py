"""Installs built wheels outside the repository, and tries what is there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
import zipfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from .workspace import ENGINES, ROOT, Distribution, ReleaseError

INSTALL = re.compile(r"pip install '(?P<name>[\w-]+)\[(?P<extra>[\w-]+)\]'")
"""How a module says which extra it needs."""
PROJECTS = {"yaml": "pyyaml", "hydra": "hydra-core", "PIL": "pillow"}
"""Modules that are not named as the projects that bring them."""
SKELETONS = "unirl.skeletons"
"""Files that `trainer init` copies: parts of programs of users, not modules."""
PROGRAMS: Mapping[str, Sequence[Sequence[str]]] = {
    "unirl-trainer": [
        ["trainer", "list"],
        ["trainer", "check", "worlds/shapes/nft"],
        ["trainer", "worlds/arithmetic/grpo", "num_rollouts=2", "eval.num_samples=16", "guardrails.action=off"],
    ],
    "unirl-reward-server": [["reward-server", "--help"]],
}
"""Commands that are run where the distribution is installed without extras."""

SERVERS: Mapping[str, tuple[Sequence[str], str]] = {
    "unirl-reward-server": (["reward-server"], "http://127.0.0.1:8080/ready"),
}
"""Distribution -> the server that its README talks to, and what answers 200 when it can."""


@dataclass
class Findings:
    """What was found of one distribution with one Python."""

    failures: list[str] = field(default_factory=list)
    imported: set[str] = field(default_factory=set)
    waiting: dict[str, str] = field(default_factory=dict)
    """Module that no environment so far has imported -> what it needs."""


def module_names(wheel: Path) -> list[str]:
    """Public modules in a wheel."""
    with zipfile.ZipFile(wheel) as opened:
        paths = [name[:-3] for name in opened.namelist() if name.endswith(".py")]
    names = {path.replace("/", ".").removesuffix(".__init__") for path in paths}
    private = re.compile(r"\.(_|__main__$)")
    return sorted(name for name in names if not private.search(name) and not name.startswith(f"{SKELETONS}."))


def judge_import(failure: Sequence[str], distribution: Distribution, installed: set[str]) -> str | None:
    """The extra that a module waits for, such as "unirl-reward[shapes]"; None if its failure is a mistake.

    failure: kind, missing module and message. installed: extras that are there. The message names the extra, or the
    module that is missing comes with one.
    """
    kind, missing, message = failure
    if said := INSTALL.search(message):
        is_there = said["name"] == distribution.name and said["extra"] in installed
        return None if is_there else f"{said['name']}[{said['extra']}]"
    if kind != "ModuleNotFoundError":
        return None
    top = missing.split(".")[0]
    brought_by = PROJECTS.get(top, canonicalize_name(top))
    for extra in distribution.extras:
        names = {canonicalize_name(each.name) for each in distribution.of_extra(extra)}
        if extra not in installed and brought_by in names:
            return f"{distribution.name}[{extra}]"
    return None


def note(
    findings: Findings, results: Mapping[str, Sequence[str] | None], distribution: Distribution, extras: set[str]
) -> None:
    """Add what importing all modules of `distribution` with `extras` gave."""
    for module, failure in results.items():
        if failure is None:
            findings.imported.add(module)
            findings.waiting.pop(module, None)
        elif (waits := judge_import(failure, distribution, extras)) is None:
            findings.failures.append(f"with [{','.join(sorted(extras))}], import {module}: {failure[0]}: {failure[2]}")
        elif module not in findings.imported:
            findings.waiting[module] = waits


class Environments:
    """Environments of built wheels, in a folder outside the repository.

    folder: where they are made. dist: wheels. is_newest: newest versions of what others publish, not those of uv.lock.
    """

    def __init__(self, folder: Path, dist: Path, *, is_newest: bool) -> None:
        if folder.resolve().is_relative_to(ROOT):
            raise ReleaseError(f"{folder} is in the repository, whose files would be found; choose another folder")
        self.folder, self.dist, self.is_newest = folder, dist, is_newest
        shutil.copy(ROOT / "scripts/releasing/probe.py", folder / "probe.py")

    def run(self, command: Sequence[str], folder: Path | None = None, *, timeout_s: float = 900) -> str:
        """Run outside the repository. Returns standard output; raises ReleaseError with the end of the other."""
        environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
        environment |= {"HF_HUB_OFFLINE": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "OMP_NUM_THREADS": "1"}
        where = folder or self.folder
        done = subprocess.run(
            command, cwd=where, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()[-12:]
            raise ReleaseError(f"{' '.join(map(str, command[:6]))} ended with {done.returncode}:\n" + "\n".join(said))
        return done.stdout

    def constraints(self, name: str, extras: Sequence[str], *, with_dev: bool = False) -> list[str]:
        """Options that hold everything else, and with `with_dev` what tests need, to the versions of uv.lock."""
        if self.is_newest:
            return []
        command = ["uv", "export", "-q", "--locked", "--no-hashes", "--no-header", "--no-annotate"]
        command += ["--no-dev"] * (not with_dev)
        command += ["--no-emit-workspace", "--package", name, *(f"--extra={extra}" for extra in extras)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            raise ReleaseError(f"uv export of {name}[{','.join(extras)}]: {done.stderr.strip()}")
        (file := self.folder / "constraints.txt").write_text(done.stdout)
        return ["--constraint", str(file)]

    def resolve(self, name: str, extra: str, version: str) -> None:
        """Resolve what an extra brings with Python `version`, without installing it."""
        (request := self.folder / "request.txt").write_text(f"{name}[{extra}]\n")
        self.run(
            ["uv", "pip", "compile", "--quiet", "--find-links", str(self.dist), "--python-version", version]
            + ["--python-platform", "x86_64-manylinux_2_36", "--output-file", str(self.folder / "resolved.txt")]
            + [str(request)]
        )

    def install(self, program: str, wheel: Distribution, extras: Sequence[str], place: Path) -> Path:
        """Exactly the wheel, its extras and what they need, in the environment `place`. Returns its Python."""
        if not place.exists():
            self.run(["uv", "venv", "--quiet", "--python", program, str(place)])
        python = place / "bin" / "python"
        (request := self.folder / "request.txt").write_text(
            f"{wheel.name}[{','.join(extras)}] @ {wheel.file(self.dist, '-py3-none-any.whl').resolve().as_uri()}\n"
        )
        common = ["--quiet", "--find-links", str(self.dist), "--python", str(python)]
        exact = self.folder / "exact.txt"
        self.run(
            ["uv", "pip", "compile", *common, *self.constraints(wheel.name, extras), str(request)]
            + ["--output-file", str(exact)]
        )
        self.run(["uv", "pip", "sync", *common, "--reinstall-package", wheel.name, str(exact)])
        self.run(["uv", "pip", "check", "--quiet", "--python", str(python)])
        return python

    def probe(self, python: Path, *words: str) -> dict[str, Any]:  # Any: JSON
        """What the probe says in this environment, run in an empty folder."""
        empty = self.folder / "empty"
        empty.mkdir(exist_ok=True)
        return json.loads(self.run([str(python), str(self.folder / "probe.py"), *words], empty).splitlines()[-1])

    def test(self, wheel: Distribution, place: Path, markers: Sequence[str]) -> str:
        """Run the quick tests of a package, copied here, on what is installed. Returns the last line of pytest.

        markers: those that the tests may carry. Raises ReleaseError if a test fails.
        """
        copied = self.folder / f"tests-{wheel.name}"
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(wheel.folder / "tests", copied / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(wheel.folder / "README.md", copied)
        shutil.copy(ROOT / "conftest.py", copied)
        (copied / "pytest.ini").write_text(
            "[pytest]\naddopts = --import-mode=importlib\nmarkers =\n" + "".join(f"  {each}\n" for each in markers)
        )
        python = place / "bin" / "python"
        needed = wheel.groups.get("dev", [])
        extras = [extra for extra in wheel.extras if extra not in ENGINES]
        options = self.constraints(wheel.name, extras, with_dev=True)
        self.run(["uv", "pip", "install", "--quiet", "--python", str(python), *options, *needed])
        chosen = "not slow and not ray and not matrix and not nightly and not gpu"
        said = self.run([str(python), "-m", "pytest", "-q", "tests", "-m", chosen], copied, timeout_s=3600)
        return next(line for line in reversed(said.splitlines()) if " passed" in line)

    @contextmanager
    def serving(self, name: str, place: Path, *, timeout_s: float = 120) -> Generator[bool]:
        """The server of a distribution while its README runs; gives False for one that has none.

        Raises ReleaseError if it does not answer in time, or its port is taken.
        """
        if name not in SERVERS:
            yield False
            return
        (program, *words), ready = SERVERS[name]
        if answers(ready):
            raise ReleaseError(f"something answers at {ready} already, so {program} cannot be tried; stop it first")
        log = self.folder / f"{name}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(place / "bin" / program), *words], cwd=self.folder, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                deadline = time.monotonic() + timeout_s
                while not answers(ready):
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise ReleaseError(f"{program} did not answer at {ready}:\n{log.read_text()[-1000:]}")
                    time.sleep(0.5)
                yield True
            finally:
                process.terminate()
                process.wait(timeout=60)


def answers(url: str) -> bool:
    """True if a GET of `url` on this machine gives 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
