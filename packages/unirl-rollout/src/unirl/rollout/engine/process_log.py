"""Extracts from the log of an engine's process why it failed."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_READ_BYTES = 1_000_000
_TAIL_BYTES = 4000
_NUM_ERRORS = 5
_ERROR = re.compile(
    r"^(?:\([^)\n]*\) )?(?:ERROR [^]\n]*\] )?((?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?)$", re.MULTILINE
)
"""The last line of a traceback, after the prefix that vLLM writes before lines of its processes."""


def end_of_log(log: Path, name: str = "its log") -> str:
    """The end of a log, preceded by the first errors in its earlier part: the process that fails first knows the
    reason, and the others fill the end of the log. Empty if there is no log."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _READ_BYTES))
        text = file.read()
        earlier, end = (part.decode(errors="replace") for part in (text[:-_TAIL_BYTES], text[-_TAIL_BYTES:]))
        errors = list(dict.fromkeys(_ERROR.findall(earlier)))[:_NUM_ERRORS]
        first = [f"The first errors in {name}:", *(f"  {error}" for error in errors)] if errors else []
        return "\n".join([*first, f"The end of {name}:", end])
    return ""
