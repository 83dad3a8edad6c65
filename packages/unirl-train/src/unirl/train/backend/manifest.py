"""The manifest of a checkpoint folder: each file with its size and digest, so that damage is found and named."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 22


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Force every file of `folder` to the disk, read it back and list it, together with `facts`, in the manifest."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            flush(path)
            files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "blake2b": file_digest(path)}
    content = {**facts, "files": files}
    path = folder / MANIFEST
    path.write_text(json.dumps({"content": content, "blake2b": _digest(content)}, indent=1) + "\n")
    flush(path)
    flush(folder)


def read_manifest(folder: Path) -> tuple[dict[str, Any], str | None]:
    """The manifest's content, and what is wrong with it (then the content is empty)."""
    path = folder / MANIFEST
    try:
        stored = json.loads(path.read_text())
        content = stored["content"]
        is_sound = stored["blake2b"] == _digest(content)
    except OSError as error:
        return {}, f"{MANIFEST} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError):
        return {}, f"{MANIFEST} is truncated or no manifest"
    return (content, None) if is_sound else ({}, f"{MANIFEST} does not have its own checksum")


def damage(folder: Path) -> str | None:
    """The first thing wrong with a checkpoint folder, with the file's name, or None. Reads every byte."""
    content, problem = read_manifest(folder)
    if problem is not None:
        return problem
    for name, expected in content["files"].items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']}"
            if file_digest(path) != expected["blake2b"]:
                return f"{name} does not have its checksum"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def file_digest(path: Path) -> str:
    """BLAKE2b of a file's bytes, 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Force a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
