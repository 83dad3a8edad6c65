"""Runs in an environment that a distribution was installed in, with nothing of the repository on its path.

    python probe.py modules NAME ...    imports each, and prints {name: null, or how the import failed}
    python probe.py readme FILE [served]
                                        runs the Python blocks of a README, one after the other; served: those that ask
                                        a server as well

The last line of what it prints is JSON. It imports nothing of its own folder, which is not there.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
ELSEWHERE = re.compile(r'"cuda"|http://|from_pretrained\(')
"""What a block says that needs a GPU, a server or weights that are downloaded."""


def import_failures(names: list[str]) -> dict[str, list[str] | None]:
    """Name -> None, or [kind of the error, the module that is missing or "", the message]."""
    found: dict[str, list[str] | None] = {}
    for name in names:
        try:
            importlib.import_module(name)
            found[name] = None
        except Exception as error:  # noqa: BLE001 -- every kind of failure is what is asked for
            missing = getattr(error, "name", None)  # ImportError alone has it
            found[name] = [type(error).__name__, missing or "", str(error)]
    return found


def offered(is_served: bool) -> set[str]:
    return {"http://"} if is_served else set()


def run_readme(path: Path, *, is_served: bool = False) -> dict[str, int]:
    """Numbers of blocks that ran, and of those that need a GPU, a server or downloads."""
    blocks = BLOCK.findall(path.read_text(encoding="utf-8"))
    here = [block for block in blocks if {found[0] for found in ELSEWHERE.finditer(block)} <= offered(is_served)]
    scope: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(here):
        exec(compile(block, f"README block {number}", "exec"), scope)
    return {"ran": len(here), "left_out": len(blocks) - len(here)}


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    result = import_failures(rest) if verb == "modules" else run_readme(Path(rest[0]), is_served="served" in rest)
    sys.stdout.write("\n" + json.dumps(result) + "\n")
