"""Which system calls may untrusted code make? A seccomp filter that refuses new processes and threads, network, signals
and file changes.

Runs inside the sandbox as plain source text (standard library only, no imports of this project). The filter is a deny-
list over one architecture's numbers: a call that is refused returns EPERM, so that the code under test sees an ordinary
``PermissionError`` instead of being killed without a word.
"""

import ctypes
import os
import platform
import struct

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_RET_ALLOW = 0x7FFF0000
_RET_ERRNO = 0x00050000
_EPERM, _ENOSYS = 1, 38
_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NUMBER, _OFFSET_ARCHITECTURE, _OFFSET_ARGUMENTS = 0, 4, 16
_WRITE_FLAGS = 0x3 | 0x40 | 0x200  # write or read-write access, O_CREAT, O_TRUNC (equal on both architectures)
_X32_CALLS = 0x40000000  # the second numbering of x86_64 kernels: refused whole, or every number below could be evaded

# fork, vfork, clone, clone3, execve, execveat; socket, socketpair; kill and its relatives, pidfd_*; ptrace,
# process_vm_*; unlink, rename, mkdir, rmdir, link, symlink, chmod, chown, truncate, mknod, creat, xattr, utime and
# their *at forms; mount, namespaces, chroot; keys, bpf, perf, io_uring, userfaultfd, memfd, System V and POSIX IPC,
# fanotify, open_by_handle_at; limits and priorities of other processes.
_DENIED = {
    "x86_64": (
        57, 58, 56, 435, 59, 322, 41, 53, 62, 200, 234, 129, 297, 424, 434, 438, 101, 310, 311, 87, 263, 82, 264, 316,
        83, 258, 84, 86, 265, 88, 266, 90, 91, 268, 452, 92, 93, 94, 260, 76, 77, 133, 259, 85, 188, 189, 190, 197, 198,
        199, 132, 235, 261, 280, 165, 166, 308, 272, 161, 155, 248, 249, 250, 321, 298, 425, 426, 427, 323, 319, 447,
        29, 68, 64, 240, 300, 304, 160, 302, 141, 144, 203, 251, 314,
    ),
    "aarch64": (
        220, 435, 221, 281, 198, 199, 129, 130, 131, 138, 240, 424, 434, 438, 117, 270, 271, 35, 38, 276, 34, 37, 36,
        52, 53, 452, 55, 54, 45, 46, 33, 5, 6, 7, 14, 15, 16, 88, 40, 39, 268, 97, 51, 41, 217, 218, 219, 280, 241, 425,
        426, 427, 282, 279, 447, 194, 186, 190, 180, 262, 265, 164, 261, 140, 119, 122, 30, 274,
    ),
}  # fmt: skip
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# (number, index of its flags argument)
_OPENS = {"x86_64": ((2, 1), (257, 2)), "aarch64": ((56, 2),)}
# openat2 hides its flags behind a pointer, which a filter cannot follow; "not implemented" makes callers fall back to
# openat.
_OPENAT2 = 437


def build_filter(machine):
    """The filter as bytes of ``struct sock_filter`` (8 bytes each), or None for an architecture without a table
    here."""
    if machine not in _DENIED:
        return None
    program = []

    def emit(code, value, if_true=0, if_false=0):
        program.append(struct.pack("=HBBI", code, if_true, if_false, value))

    refuse = _RET_ERRNO | _EPERM
    emit(_LOAD_WORD, _OFFSET_ARCHITECTURE)
    emit(_JUMP_EQUAL, _ARCHITECTURE[machine], 1, 0)
    emit(_RETURN, refuse)
    emit(_LOAD_WORD, _OFFSET_NUMBER)
    if machine == "x86_64":
        emit(_JUMP_AT_LEAST, _X32_CALLS, 0, 1)
        emit(_RETURN, refuse)
    for number in _DENIED[machine]:
        emit(_JUMP_EQUAL, number, 0, 1)
        emit(_RETURN, refuse)
    emit(_JUMP_EQUAL, _OPENAT2, 0, 1)
    emit(_RETURN, _RET_ERRNO | _ENOSYS)
    for number, argument in _OPENS[machine]:
        emit(_JUMP_EQUAL, number, 0, 4)
        emit(_LOAD_WORD, _OFFSET_ARGUMENTS + 8 * argument)
        emit(_JUMP_ANY_BIT, _WRITE_FLAGS, 0, 1)
        emit(_RETURN, refuse)
        emit(_RETURN, _RET_ALLOW)
    emit(_RETURN, _RET_ALLOW)
    return b"".join(program)


def forbid_new_privileges(libc):
    """No set-uid program can raise this process any more. Raises OSError where the kernel refuses."""
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS): " + os.strerror(ctypes.get_errno()))


def install_filter(libc, program):
    """Put this process, for the rest of its life, under the filter. Raises OSError where the kernel refuses."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]

    argument = Program(len(program) // 8, program)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(argument), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP): " + os.strerror(ctypes.get_errno()))


def machine_name():
    """The architecture under the kernel's name, e.g. ``x86_64``."""
    return platform.machine()
