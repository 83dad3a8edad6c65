"""Errors that name the values and the fix, and that survive pickling (they cross process boundaries)."""

from __future__ import annotations


class UniRLError(Exception):
    """Base of every error that the project raises on purpose. Holds text only, so it pickles."""


class ContractError(UniRLError, ValueError):
    """Two sides of a contract disagree (shapes, dtypes, ids, sigmas)."""


class ConfigError(UniRLError, ValueError):
    """A recipe asks for something impossible. The message ends with the fix."""


class DataError(UniRLError, ValueError):
    """A data file (prompts, a stored rollout) or a row of it is wrong. The message names the file, and the line."""


class CheckpointError(UniRLError, RuntimeError):
    """A checkpoint is missing, truncated, corrupted or made for another model."""


class RewardError(UniRLError, RuntimeError):
    """A scorer failed or returned something that is not a finite number."""


class RefusedError(UniRLError, ValueError):
    """An engine takes none of the samples that it is asked for, such as tokens that stand for media which it lacks. The
    engine itself is well."""


class WeightSyncError(UniRLError, RuntimeError):
    """Weights that arrived are not the weights that were sent."""


class TrainingError(UniRLError, RuntimeError):
    """Training cannot go on (non-finite gradients in a row, collapse)."""


class WorkerError(UniRLError, RuntimeError):
    """A worker process failed. Carries the worker's name and its own traceback as text."""

    def __init__(self, worker: str, traceback_text: str) -> None:
        super().__init__(worker, traceback_text)
        self.worker = worker
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        return f"worker {self.worker} failed:\n{self.traceback_text}"


def as_sentence(error: object) -> str:
    """Its text with one full stop at the end, to be followed by advice: some messages have theirs, some have none."""
    text = str(error).rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
