"""The Pythons that a release is checked with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence

SUPPORTED = ("3.11", "3.12")
"""What `requires-python` of the packages allows."""
NEXT = "3.13"
WHY_NOT_NEXT = "sglang[diffusion]==0.5.23 pins pyyaml==6.0.1, which has no wheel for it (`requires-python` is <3.13)"


def version_of(program: str) -> str | None:
    """Such as "3.12"; None if it does not run."""
    command = [program, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    found = re.fullmatch(r"\d+\.\d+", done.stdout.strip())
    return found[0] if found and done.returncode == 0 else None


def candidates(version: str) -> Iterator[str]:
    """Programs that may be Python `version`: on PATH, of pyenv, of uv."""
    if on_path := shutil.which(f"python{version}"):
        yield on_path
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    if os.path.isdir(f"{pyenv}/versions"):
        for name in sorted(os.listdir(f"{pyenv}/versions"), reverse=True):
            if name.startswith(f"{version}."):
                yield f"{pyenv}/versions/{name}/bin/python{version}"
    command = ["uv", "python", "find", "--managed-python", "--no-python-downloads", version]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode == 0:
        yield done.stdout.strip()


def interpreters(asked: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """({version: program}, versions that no program here is), of the versions asked for."""
    found: dict[str, str] = {}
    for version in asked:
        program = next((each for each in candidates(version) if version_of(each) == version), None)
        if program is not None:
            found[version] = program
    return found, [version for version in asked if version not in found]
