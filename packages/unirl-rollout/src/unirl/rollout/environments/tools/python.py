"""Python code of the model, in a sandbox."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from unirl.rollout.environments.base import Task
from unirl.rollout.environments.sandbox.runner import Isolation, Limits, Ran, Sandbox
from unirl.rollout.environments.tools.base import Tool, ToolError, one_text
from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.errors import ConfigError

_MAX_CODE_CHARS = 20_000
_FILES_MB = 64
_MAX_ERROR_CHARS = 2000
"""What is told of the output of code that failed: its end, where the exception stands."""


@bounded("turns.environment.tools.python")
class PythonInterpreter(Tool):
    """Runs code to its end and answers what it printed, and the value of a last expression.

    Each call begins anew: files and names of an earlier one are gone. The code sees the standard library and an empty
    folder, no network, no other process, file or environment variable of this machine.

    time_s: of one call. memory_mb: of each process of the code. files_mb: of its files, in memory; by default 64.
    output_kb: that it may write. processes: and threads at a time; above 1 needs another user than root. libraries:
    folders with modules that it may import. isolation: "namespaces", or "landlock" where a container forbids them; then
    the code has no folder and one process, and sees names, sizes and dates of files that it cannot open.
    The constructor tries in a sandbox what must be impossible. Raises ConfigError with what is possible, or what
    this machine lacks.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.environments.tools.python_rules"
    description: str = "Run Python code. Answers what it prints and the value of a last expression."
    parameters: Mapping[str, Any] = one_text("code")  # Any: JSON

    def __init__(
        self,
        *,
        time_s: Positive = 3.0,
        memory_mb: PositiveInt = 512,
        files_mb: PositiveInt | None = None,
        output_kb: PositiveInt = 32,
        processes: PositiveInt = 1,
        libraries: Sequence[str] = (),
        isolation: Isolation = "namespaces",
    ) -> None:
        for folder in libraries:
            if not Path(folder).is_dir():
                raise ConfigError(f"turns.environment.tools.python.libraries: {folder} is no folder")
        if isolation == "landlock" and (files_mb is not None or processes > 1):
            raise ConfigError(
                "turns.environment.tools.python: isolation = landlock lets code write no files and start no processes, "
                f"but files_mb = {files_mb} and processes = {processes}. Remove both, or set isolation: namespaces."
            )
        self._limits = Limits(
            time_s=time_s,
            memory_bytes=memory_mb * 2**20,
            files_bytes=(files_mb or _FILES_MB) * 2**20,
            output_bytes=output_kb * 2**10,
            num_processes=processes,
        )
        self._sandbox = Sandbox(self._limits, libraries, isolation=isolation)
        self._sandbox.verify()

    def __call__(self, arguments: Mapping[str, Any], task: Task) -> str:
        """What the code wrote. Raises ToolError if it raised, was stopped by a limit or ended by a signal, and
        ConfigError if the machine cannot isolate it any more."""
        code = arguments["code"]
        if len(code) > _MAX_CODE_CHARS:
            raise ToolError(f"the code has {len(code)} characters; at most {_MAX_CODE_CHARS}")
        ran = self._sandbox.run(code)
        if (reason := self._reason(ran)) is None:
            return ran.output.rstrip("\n") or "(the code printed nothing)"
        if len(said := ran.output.strip("\n")) > _MAX_ERROR_CHARS:
            said = f"... {said[-_MAX_ERROR_CHARS:]}"
        raise ToolError(f"{reason}\n{said}" if said else reason)

    def _reason(self, ran: Ran) -> str | None:
        if ran.end == "time":
            return f"the code was stopped after {self._limits.time_s:g} s; it had written:"
        if ran.end == "output":
            return f"the code was stopped: it wrote more than {self._limits.output_bytes} bytes, which end with:"
        if ran.status > 128 and ran.status - 128 in set(signal.Signals):
            return f"the code was ended by {signal.Signals(ran.status - 128).name}"
        return f"the code ended with status {ran.status}" if ran.status else None
