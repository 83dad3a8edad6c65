"""The index of errors, a page of the site that is built with it and not kept: `uv run python docs/reference/errors.py`
prints it. Sources are parsed, not imported."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "ConfigError": "A recipe, or a word of the command, asks for something impossible. Nothing was started; change "
    "what the message names and run the command again. `trainer check RECIPE` finds it without starting anything.",
    "DataError": "A file of prompts, preferences or media is wrong. The message names the file and the line.",
    "CheckpointError": "A checkpoint or an export is missing, cut off, changed, or of another model. Nothing was "
    "overwritten.",
    "RewardError": "A scorer failed, or gave something that is not a finite number. `reward.on_failure` says what "
    "becomes of such samples.",
    "WeightSyncError": "An engine does not hold the weights that were sent. The run stops before it samples with them; "
    "`resume=auto` continues from the newest checkpoint.",
    "TrainingError": "Training cannot go on. `resume=auto` continues from the newest checkpoint, with the values that "
    "the message asks for.",
    "WorkerError": "A worker process failed; its traceback follows. `resume=auto` continues from the newest "
    "checkpoint.",
    "ContractError": "Two parts do not fit together: a shape, a dtype, an id, a noise level. Of a part that you wrote "
    "it says what the other side expects; otherwise it is a bug, please report it with the traceback (`--debug`).",
    "ImportError": "A library is missing or of another version. The message names what to install; `trainer doctor` "
    "lists all.",
}
"""Class of an error -> what it means and what to do, in the order of the page."""
FINDINGS = "Findings of `trainer check`"
LONGEST = 28
"""Characters of an expression that is shown in a message; longer ones become dots."""


@dataclass(frozen=True)
class Message:
    """One message as the source has it, with {names} for values."""

    kind: str
    text: str
    module: str


def messages() -> list[Message]:
    """Every message of the packages and apps that a user may see, without repetitions."""
    found = {}
    for path in sorted([*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("apps/*/src/**/*.py")]):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[parts.index("src") + 1 :])
        if "skeletons" in parts or "pretraining" in parts:
            continue
        for message in _of_module(ast.parse(path.read_text(encoding="utf-8")), module):
            found.setdefault((message.kind, message.text), message)
    return list(found.values())


def _of_module(tree: ast.Module, module: str) -> Iterator[Message]:
    is_rules = "rules" in module.rsplit(".", 1)[-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            kind = getattr(node.exc.func, "id", getattr(node.exc.func, "attr", ""))
            text = _text(node.exc.args[0])
            if kind in KINDS and text is not None:
                yield Message(kind, text, module)
        elif is_rules and isinstance(node, ast.Yield) and (text := _text(node.value)) is not None:
            yield Message(FINDINGS, text, module)


def _text(node: ast.AST | None) -> str | None:
    """A string of the source with {names} for its values; None for anything else, and where no word is left."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    elif isinstance(node, ast.JoinedStr):
        text = "".join(_value(part) for part in node.values)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [_text(node.left), _text(node.right)]
        text = "".join(side or "{...}" for side in sides) if any(sides) else ""
    else:
        return None
    return text if re.search(r"[a-z]{2,} .*[a-z]{2,}", re.sub(r"\{[^}]*\}", "", text)) else None


def _value(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    shown = ast.unparse(part.value) if isinstance(part, ast.FormattedValue) else "..."
    return f"{{{shown}}}" if len(shown) <= LONGEST and "'" not in shown and '"' not in shown else "{...}"


def page() -> str:
    """The index as Markdown."""
    every = messages()
    lines = [
        "# Errors",
        "",
        f"All {len(every)} messages of UniRL, built from the sources. Each says what is wrong, with which values, and "
        "what to change; values stand in braces here. Search for a few words of yours. What a message means for a run "
        "that does not learn is in [troubleshooting](../guides/troubleshooting.md).",
    ]
    for kind in (FINDINGS, *KINDS):
        found = sorted((message for message in every if message.kind == kind), key=lambda each: each.module)
        if not found:
            continue
        about = KINDS.get(kind, "A value of a recipe does not fit the others; found before anything is loaded.")
        lines += ["", f"## {kind}", "", about, "", "| message | from |", "|---|---|"]
        lines += [f"| {_escaped(message.text)} | `{message.module}` |" for message in found]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text)


if __name__ == "__main__":
    sys.stdout.write(page())
