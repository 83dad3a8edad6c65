"""Entry point of the `trainer` command."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Callable

from unirl.app.command_line import Command, parse
from unirl.types.errors import UniRLError

USER_ERROR = 2
INTERRUPTED = 130
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status.

    Mistakes of the user, and failures that the project reports on purpose, are one message on standard error and status
    2 (with --debug also the traceback). Anything else is a bug and ends with its traceback.
    """
    arguments = sys.argv[1:] if argv is None else argv
    try:
        command = parse(arguments)
        return _dispatch(command)
    except (UniRLError, ImportError) as error:
        if "--debug" in arguments:
            traceback.print_exc()
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return USER_ERROR
    except BrokenPipeError:
        return 0  # `trainer show | head`
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        if "--debug" in arguments:
            traceback.print_exc()
        sys.stderr.write(
            "The disk is full. Make room (save.keep_last keeps fewer checkpoints), then continue with resume=auto.\n"
            f"{type(error).__name__}: {error}\n"
        )
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def _dispatch(command: Command) -> int:
    # Everything below stays out of --help: Hydra, rich and, for the verbs that compute, torch.
    if command.verb == "list":
        from unirl.app.lists import write_list

        write_list(command.recipe)
        return 0
    if command.verb == "data":
        from unirl.app.data_sets import list_sets, prepare_set

        (list_sets if command.recipe == "list" else prepare_set)(command)
        return 0
    if command.verb == "view":
        from unirl.viewer.command import view_command

        view_command(command)
        return 0
    if command.verb == "init":
        from unirl.app.skeletons import write_skeleton

        write_skeleton(command)
        return 0
    if command.verb == "completion":
        from unirl.app.completion import shell_code

        sys.stdout.write(shell_code(command.recipe))
        return 0
    from unirl.app import verbs
    from unirl.app.environment import prepare_process, start_logging

    prepare_process()
    start_logging(command.is_debug)
    actions: dict[str, Callable[[Command], int | None]] = {
        "run": verbs.run,
        "show": verbs.show,
        "check": verbs.check,
        "eval": verbs.evaluate,
        "rehearse": verbs.rehearse,
        "plan": verbs.plan,
        "scale": verbs.scale,
        "export": verbs.export,
        "bench": verbs.bench,
        "profile": verbs.profile,
        "compare": verbs.compare,
        "conformance": verbs.conformance,
        "doctor": verbs.doctor,
    }
    return actions[command.verb](command) or 0


if __name__ == "__main__":
    sys.exit(main())
