"""Prompts in a seeded order that can be continued."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import ClassVar

from unirl.data.datasets import PromptRow, read_rows
from unirl.data.media import MediaRef
from unirl.types.errors import DataError

__all__ = ["MediaRef", "MultimodalRLDataSource", "PromptRow", "epoch_order", "fingerprint"]


def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """A permutation of the rows that depends on (seed, epoch) alone: sorted by hash, so on no library's generator."""

    def key(row: int) -> bytes:
        return hashlib.blake2b(f"{seed}::{epoch}::{row}".encode(), digest_size=16).digest()

    return sorted(range(num_rows), key=key)


def fingerprint(rows: list[PromptRow]) -> str:
    """Hash of the content of all rows, in file order."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        content = {"prompt": row.prompt, "prompt_id": row.prompt_id, "metadata": row.metadata}
        # Not the folder, which differs from machine to machine.
        media = [{"modality": ref.modality, "role": ref.role, "uri": ref.uri} for ref in row.media]
        digest.update(json.dumps({**content, "media": media}, sort_keys=True, default=str).encode())
        for ref in row.media:
            digest.update(ref.data or b"")
        digest.update(b"\n")
    return digest.hexdigest()


class MultimodalRLDataSource:
    """Rows of a prompt file, epoch after epoch, each epoch in its own order.

    path: a prompt file or a Hugging Face dataset folder, see `unirl.data.datasets`.
    seed: of the order. shuffle: False keeps the file's order. split: of a dataset folder with several.
    Raises DataError if the file is missing, empty or malformed.
    """

    recipe_rules: ClassVar[str] = "unirl.data.rules"
    """Module with the rules of recipes, see `unirl.types.recipe`."""
    reads_prompt_rows: ClassVar[bool] = True
    """True if `path` holds rows in a format of `unirl.data.datasets`, so that `trainer check` can read them; a source
    of another format sets it to the literal False."""
    brings_images: ClassVar[bool] = False
    """True if its rows bring their own images (`unirl.types.preference`), for engines that need them.

    `trainer check` reads it without importing the class, so a source that brings some sets it to the literal True."""
    brings_targets: ClassVar[bool] = False
    """True if what its rows bring is to be learned as it is (`unirl.data.targets`), and not judged; read likewise."""

    def __init__(self, path: str, seed: int = 0, shuffle: bool = True, split: str | None = None) -> None:
        self.path = Path(path)
        self.rows = read_rows(path, split)
        self.seed = seed
        self.shuffle = shuffle
        self._fingerprint = fingerprint(self.rows)
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def epoch(self) -> int:
        """Epochs finished."""
        return self._epoch

    def next(self, num_rows: int) -> list[PromptRow]:
        """The next rows; goes on into the next epoch where this one ends."""
        taken: list[PromptRow] = []
        while len(taken) < num_rows:
            part = self._order[self._position : self._position + num_rows - len(taken)]
            taken.extend(self.rows[row] for row in part)
            self._position += len(part)
            if self._position == len(self.rows):
                self._epoch += 1
                self._position = 0
                self._order = self._epoch_order()
        return taken

    def state_dict(self) -> dict[str, int | str | bool]:
        """Where the order stands, and of which content."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, int | str | bool]) -> None:
        """Continue where `state` stood. Raises DataError if the content, the seed or the shuffling has changed."""
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                f"{self.path}: its rows have changed since the checkpoint was written, so the order cannot be "
                "continued. Restore the file, or start a new run."
            )
        for name, value in (("seed", self.seed), ("shuffle", self.shuffle)):
            if state[name] != value:
                raise DataError(
                    f"{self.path}: the checkpoint was written with {name} = {state[name]}, this run has {value}. "
                    f"Set {name} back to continue, or start a new run."
                )
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        return epoch_order(len(self.rows), self.seed, self._epoch) if self.shuffle else list(range(len(self.rows)))
