"""Words that the texts of the workspace avoid, each with what to write instead.

Checked are docstrings, comments, messages of raised errors and Markdown (code in it and changelogs apart). Recipes,
prompts and identifiers are free. CONTRIBUTING.md has the table for readers.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_COUNTED = (
    r"actors?|backwards?|bits|bytes|devices?|engines?|entry|entries|files?|forwards?|frames?|[GM]i?B|GPUs?|groups?|images?|"
    r"instances?|lines?|numbers?|once|one|pairs?|positions?|processes|prompts?|pushes|questions?|ranks?|requests?|rewards?|"
    r"rollouts?|rows?|samples?|seconds?|steps?|tensors?|threads?|tokens?|updates?|values?|videos?|words?"
)
_UNIT = (
    r"batch|channel|chunk|device|epoch|forward|frame|GPU|group|head|image|instance|layer|machine|micro-batch|minute|node|"
    r"pixel|process|prompt|rank|request|rollout|row|sample|scorer|second|seed|stage|step|text|token|track|update|worker"
)
_AFTER_OWN = (
    r"(?=\W*$|[.,;:)|]|\s+(?:a|an|and|as|at|before|but|by|for|from|in|is|it|of|on|or|so|than|that|the|they|to|under|when|"
    r"where|which|while|with|without)\b)"
)


@dataclass(frozen=True)
class Word:
    """One word or turn that readers stumble over."""

    avoid: str
    """As CONTRIBUTING.md shows it."""
    write: str
    pattern: re.Pattern[str]
    only_docstrings: bool = False


WORDS = (
    Word(
        "samples a prompt",
        "samples per prompt",
        # A verb with an article between the nouns ("images a device makes") is no rate.
        re.compile(rf"\b(?:{_COUNTED})\s+an?\s+(?:{_UNIT})\b(?!\s+(?:has|have|is|was|goes|makes|may|of)\b)"),
    ),
    Word(
        "a process of its own",
        "its own process, a separate process",
        re.compile(rf"\bof\s+(?:its|their)\s+own\b{_AFTER_OWN}"),
    ),
    Word("in the place of", "instead of, replaces", re.compile(r"\bin\s+the\s+place\s+of\b")),
    Word("for ever", "forever, or until when", re.compile(r"\bfor\s+ever\b")),
    Word("somebody, nobody", "the process, user or object meant", re.compile(r"\b(?:some|no|any|every)body\b", re.I)),
    Word("picture", "image", re.compile(r"(?<![\w/.`-])[Pp]ictures?\b(?!\.py|=)")),
    Word("beside it", "next to it, with it, besides it", re.compile(r"(?<![-\"(`])\bbeside\b(?=\s+\w)")),
    Word("Raises X where", "Raises X if", re.compile(r"\b[Rr]aises?\s+\w*Error\s+where\b")),
    Word(
        '"""Whether ..., """Of ...',
        '"""True if ..., or the noun',
        re.compile(r"\A\s*(?:Whether|Of|Tells of)\b"),
        only_docstrings=True,
    ),
    Word('"""See X."""', "no docstring", re.compile(r"\A\s*See\s+`?[\w.]+`?\.?\s*\Z"), only_docstrings=True),
)


def avoided_words(root: Path, files: Iterable[str]) -> list[str]:
    """Lines of these files, named from `root`, with a word of WORDS and what to write instead."""
    found = []
    for name in files:
        path = root / name
        if name.endswith("CHANGELOG.md") or not path.is_file():
            continue
        content = path.read_text(encoding="utf-8")
        for line, text, is_docstring in _prose(content) if name.endswith(".md") else _texts(content):
            for word in WORDS:
                if word.only_docstrings and not is_docstring:
                    continue
                for match in word.pattern.finditer(text):
                    at = line + text[: match.start()].count("\n")
                    found.append(f"{name}:{at}: {' '.join(match[0].split())!r}; write: {word.write}")
    return found


def _prose(content: str) -> Iterator[tuple[int, str, bool]]:
    """Markdown without its code."""
    content = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), content, flags=re.MULTILINE | re.DOTALL)
    yield 1, re.sub(r"`[^`\n]*`", "`", content), False


def _texts(content: str) -> Iterator[tuple[int, str, bool]]:
    """(first line, text, is a docstring) of docstrings, messages of raised errors, and comments, joined over lines."""
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value, True
        elif isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value, False
    block: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.COMMENT:
            if block and block[-1][0] != token.start[0] - 1:
                yield block[0][0], "\n".join(text for _, text in block), False
                block = []
            block.append((token.start[0], token.string.lstrip("#")))
    if block:
        yield block[0][0], "\n".join(text for _, text in block), False
