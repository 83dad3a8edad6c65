"""The status page: one file, no build step, nothing from other hosts."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

PAGE = (files("unirl.reward_server") / "page.html").read_text(encoding="utf-8")


def _hashes(tag: str) -> str:
    found = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


PAGE_POLICY = (
    f"default-src 'none'; connect-src 'self'; script-src {_hashes('script')}; style-src {_hashes('style')}; "
    "base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
)
"""Content-Security-Policy: only the page's own script and style run, and only this server is asked."""
