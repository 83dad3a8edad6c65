"""Which system calls the code of a model may not make, as a seccomp filter."""

from __future__ import annotations

import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from unirl.types.errors import ConfigError

_COMMON = {
    "pidfd_open": 434, "pidfd_getfd": 438, "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447,
    "process_mrelease": 448,
}  # fmt: skip
_X86_64 = {
    "shmget": 29, "socket": 41, "fork": 57, "vfork": 58, "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103,
    "personality": 135, "modify_ldt": 154, "pivot_root": 155, "prctl": 157, "chroot": 161, "acct": 163, "mount": 165,
    "umount2": 166, "swapon": 167, "reboot": 169, "init_module": 175, "quotactl": 179, "mq_open": 240,
    "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "move_pages": 279,
    "perf_event_open": 298, "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310,
    "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320,
    "bpf": 321, "userfaultfd": 323,
}  # fmt: skip
_AARCH64 = {
    "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "acct": 89, "personality": 92,
    "unshare": 97, "kexec_load": 104, "init_module": 105, "syslog": 116, "ptrace": 117, "reboot": 142, "prctl": 167,
    "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "socket": 198, "add_key": 217, "request_key": 218,
    "keyctl": 219, "swapon": 224, "move_pages": 239, "perf_event_open": 241, "name_to_handle_at": 264,
    "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
    "finit_module": 273, "memfd_create": 279, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
}  # fmt: skip
_SHARED_COMMON = {
    "fchmodat2": 452, "statmount": 457, "listmount": 458, "setxattrat": 463, "removexattrat": 466,
    "open_tree_attr": 467, "file_setattr": 469,
}  # fmt: skip
_SHARED_X86_64 = {
    "shmat": 30, "shmctl": 31, "socketpair": 53, "kill": 62, "semop": 65, "semctl": 66, "msgsnd": 69, "msgrcv": 70,
    "msgctl": 71, "truncate": 76, "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94,
    "rt_sigqueueinfo": 129, "utime": 132, "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144,
    "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199,
    "tkill": 200, "sched_setaffinity": 203, "semtimedop": 220, "tgkill": 234, "utimes": 235, "mq_unlink": 241,
    "ioprio_set": 251, "inotify_init": 253, "migrate_pages": 256, "fchownat": 260, "futimesat": 261, "fchmodat": 268,
    "utimensat": 280, "inotify_init1": 294, "rt_tgsigqueueinfo": 297, "fanotify_init": 300, "sched_setattr": 314,
}  # fmt: skip
_SHARED_AARCH64 = {
    "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16,
    "inotify_init1": 26, "ioprio_set": 30, "truncate": 45, "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55,
    "utimensat": 88, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122, "kill": 129,
    "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "setpriority": 140, "mq_unlink": 181, "msgctl": 187,
    "msgrcv": 188, "msgsnd": 189, "semctl": 191, "semtimedop": 192, "semop": 193, "shmctl": 195, "shmat": 196,
    "socketpair": 199, "migrate_pages": 238, "rt_tgsigqueueinfo": 240, "fanotify_init": 262, "sched_setattr": 274,
}  # fmt: skip


@dataclass(frozen=True)
class _Machine:
    """What filters need to know of one."""

    architecture: int
    """What the kernel calls it."""
    clone: int
    prlimit64: int
    fcntl: int
    refused: Mapping[str, int]
    """Calls that are refused in any sandbox."""
    refused_among_others: Mapping[str, int]
    """Calls that are refused, too, where code is not in its own namespaces: they reach other processes, or files that
    Landlock does not guard."""


_MACHINES = {
    "x86_64": _Machine(0xC000003E, 56, 302, 72, _X86_64 | _COMMON, _SHARED_X86_64 | _SHARED_COMMON),
    "aarch64": _Machine(0xC00000B7, 220, 261, 25, _AARCH64 | _COMMON, _SHARED_AARCH64 | _SHARED_COMMON),
}
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020000
"""The flags of clone that make namespaces."""
_X32 = 0x40000000
"""Numbers from here are of x32, another set of calls on x86_64."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW, _REFUSE, _MISSING = 0x80000000, 0x7FFF0000, 0x00050001, 0x00050026  # EPERM, ENOSYS
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_SIGNALS_BY_FILES = (8, 10, 15)
"""Commands of fcntl that let a file send signals: F_SETOWN, F_SETSIG and F_SETOWN_EX."""


def refused_calls(*, starts_processes: bool, is_among_others: bool = False) -> bytes:
    """The filter as `struct sock_filter`s: sockets, other processes, mounts, namespaces, keys, memory that no limit
    counts, and what has often had faults are refused with EPERM, and so are processes and threads unless
    `starts_processes`.

    is_among_others: the code sees other processes of its user, and no call that reaches them is allowed.
    Raises ConfigError on a machine that is neither x86_64 nor aarch64.
    """
    machine = platform.machine()
    if machine not in _MACHINES:
        raise ConfigError(f"code of a model is isolated on {' and '.join(_MACHINES)}, not on {machine}")
    own = _MACHINES[machine]
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_EQUAL, own.architecture, 1, 0),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        _line(_AT_LEAST, _X32, 0, 1),
        _line(_RETURN, _KILL),
        # Its flags are in memory, which a filter cannot read; where it is missing, libraries use clone.
        _line(_EQUAL, _CLONE3, 0, 1),
        _line(_RETURN, _MISSING),
    ]
    refused = {**own.refused, **(own.refused_among_others if is_among_others else {})}
    for number in sorted(refused.values()):
        lines += [_line(_EQUAL, number, 0, 1), _line(_RETURN, _REFUSE)]
    if is_among_others:
        # Limits of this process alone (0) may be asked and lowered.
        lines += [_line(_EQUAL, own.prlimit64, 0, 4), _line(_LOAD, _FIRST_ARGUMENT), _line(_EQUAL, 0, 1, 0)]
        lines += [_line(_RETURN, _REFUSE), _line(_RETURN, _ALLOW)]
        commands = len(_SIGNALS_BY_FILES)
        lines += [_line(_EQUAL, own.fcntl, 0, 2 * commands + 2), _line(_LOAD, _SECOND_ARGUMENT)]
        for command in _SIGNALS_BY_FILES:
            lines += [_line(_EQUAL, command, 0, 1), _line(_RETURN, _REFUSE)]
        lines += [_line(_RETURN, _ALLOW)]
    if starts_processes:
        lines += [_line(_EQUAL, own.clone, 0, 3), _line(_LOAD, _FIRST_ARGUMENT), _line(_ANY_BIT, _NEW_NAMESPACES, 0, 1)]
    else:
        lines += [_line(_EQUAL, own.clone, 0, 1)]
    return b"".join([*lines, _line(_RETURN, _REFUSE), _line(_RETURN, _ALLOW)])


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction; the jumps skip so many lines."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
