"""Who may ask, which files are read, and what errors tell."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from unirl.types.errors import ConfigError, DataError

MIN_TOKEN_CHARS = 16


def is_loopback(host: str) -> bool:
    """True if only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked_token(host: str, token: str | None) -> str | None:
    """The token that clients must send; None where none is needed.

    Raises ConfigError for an address that others reach without a token, and for a short one.
    """
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"host = {host} can be reached from other machines, which needs a token. Put one into a file and name it "
            "in server.token_file, or into the environment variable REWARD_SERVER_TOKEN; or listen on 127.0.0.1."
        )
    if token is not None and len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(f"the token has {len(token)} characters; use at least {MIN_TOKEN_CHARS}")
    return token


def read_token(path: str) -> str:
    """First line of a file. Raises ConfigError if it cannot be read."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"server.token_file = {path!r} cannot be read: {error}") from error
    return lines[0].strip() if lines else ""


def is_allowed(header: str | None, token: str | None) -> bool:
    """True if an Authorization header carries the token. The time taken does not depend on where they differ."""
    if token is None:
        return True
    scheme, _, given = (header or "").partition(" ")
    return hmac.compare_digest(given.strip().encode("utf-8", "replace"), token.encode()) and scheme.lower() == "bearer"


def video_reader(roots: Sequence[str], max_bytes: int) -> Callable[[str], bytes] | None:
    """Reads a `video_path` below one of the roots, links resolved; None where there are no roots.

    Its messages do not tell whether a file outside exists. Raises ConfigError for a root that is no folder.
    """
    folders = [Path(root).resolve() for root in roots]
    missing = [root for root, folder in zip(roots, folders, strict=True) if not folder.is_dir()]
    if missing:
        raise ConfigError(f"server.video_roots: {missing} are no folders")

    def read(path: str) -> bytes:
        refusal = DataError("video_path names no file below the folders that this server reads (server.video_roots)")
        for folder in folders:
            try:
                file = (folder / path).resolve(strict=True)
                if not file.is_relative_to(folder) or not file.is_file():
                    continue
                if file.stat().st_size > max_bytes:
                    raise DataError(f"video_path: the file has more than max_body_bytes = {max_bytes} bytes")
                return file.read_bytes()
            except (OSError, ValueError, RuntimeError):
                continue
        raise refusal

    return read if folders else None


_PATH = re.compile(r"(?<![\w.])(?:~|\.{1,2})?(?:/[^\s/'\",:;()<>\[\]]+)+/(?=[^\s/])")


def without_paths(text: str, max_chars: int = 600) -> str:
    """An error's text for strangers: folders are left out, names of files stay; one line."""
    return _PATH.sub("", " ".join(text.split()))[:max_chars]
