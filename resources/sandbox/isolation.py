"""With what is untrusted code shut in on this machine? Bubblewrap when it works, else a stripped process, said
aloud."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import resources as package_files
from typing import Literal

SandboxKind = Literal["bubblewrap", "process"]
"""``bubblewrap``: own namespaces, an almost empty read-only file system, user 65534. ``process``: the same rlimits and
syscall filter in a plain process (user nobody and no network where this user may take such steps), but it can read
files."""

PROBE_DEADLINE_S = 20.0

_BOOTSTRAP = """
import sys, types
sources = {sources!r}
for name, text in sources.items():
    module = types.ModuleType(name)
    module.__path__ = []
    sys.modules[name] = module
    exec(compile(text, name, "exec"), module.__dict__)
sys.modules["resources.sandbox.fork_server"].serve({inside_bubblewrap!r})
"""

logger = logging.getLogger(__name__)


def interpreter() -> str:
    """The base interpreter of this one: no virtual environment, nothing of this project's dependencies."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def server_command(kind: SandboxKind) -> list[str]:
    """Command line of a fork server shut in by ``kind``.

    The server's source travels as text: inside, no file of this project exists, and a user without rights could not
    read it.
    """
    source = _BOOTSTRAP.format(sources=_server_sources(), inside_bubblewrap=kind == "bubblewrap")
    # Not -I, which would ignore PYTHONHASHSEED: the order of a set must not differ from server to server.
    python = [interpreter(), "-B", "-s", "-S", "-P", "-c", source]
    return [*_bubblewrap_arguments(), *python] if kind == "bubblewrap" else python


def server_environment() -> dict[str, str]:
    """The whole environment of a fork server: nothing of ours leaks into it."""
    return {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}


@functools.cache
def sandbox_kind() -> SandboxKind:
    """The best kind that works here, tried once in this process; a fallback is logged as a warning with its reason."""
    reason = why_bubblewrap_fails()
    if reason is None:
        return "bubblewrap"
    logger.warning(
        "bubblewrap is not usable here (%s): untrusted code runs in a plain process with resource limits, no new "
        "privileges and a system call filter; it cannot start processes, open sockets or change files, but it CAN READ "
        "what its user can read. Remedy: install bubblewrap, and allow user namespaces.",
        reason,
    )
    return "process"


def why_bubblewrap_fails() -> str | None:
    """None when bubblewrap can run our interpreter here, else the reason in one line."""
    if shutil.which("bwrap") is None:
        return "there is no bwrap on the PATH"
    command = [*_bubblewrap_arguments(), interpreter(), "-B", "-s", "-S", "-P", "-c", "import math, json, ctypes"]
    try:
        done = subprocess.run(
            command, env=server_environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        return f"a probe did not end within {PROBE_DEADLINE_S:g} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return None
    return done.stderr.decode(errors="replace").strip()[-300:] or f"a probe ended with exit code {done.returncode}"


def _bubblewrap_arguments() -> list[str]:
    arguments = ["bwrap", "--unshare-all", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    arguments += ["--cap-drop", "ALL", "--clearenv", "--as-pid-1"]
    for name, value in server_environment().items():
        arguments += ["--setenv", name, value]
    for folder in ("/lib", "/lib64", "/lib32"):
        if os.path.islink(folder):
            arguments += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            arguments += ["--ro-bind", folder, folder]
    arguments += ["--ro-bind", "/usr/lib", "/usr/lib", "--ro-bind-try", "/usr/lib64", "/usr/lib64"]
    arguments += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for path in _python_files():
        if not path.startswith(("/usr/lib/", "/lib/")):
            arguments += ["--ro-bind", path, path]
    # A /dev of four nodes: the usual one has a writable /dev/shm, where one call could leave a message for the next.
    for device in ("null", "zero", "random", "urandom"):
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return [*arguments, "--proc", "/proc", "--remount-ro", "/", "--chdir", "/", "--"]


def _python_files() -> list[str]:
    """All that the interpreter needs: itself, its shared object if it has one, its standard library."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    files = {interpreter(), *(sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib"))}
    folder, shared_object = sysconfig.get_config_vars("LIBDIR", "INSTSONAME")
    if folder and shared_object:
        files.add(os.path.join(folder, shared_object))
    return sorted(path for path in files if os.path.exists(path))


def _server_sources() -> dict[str, str]:
    """Module name -> source of what runs inside, parents first (the parents are empty)."""
    folder = package_files.files("resources.sandbox")
    sources = {"resources": "", "resources.sandbox": ""}
    for name in ("syscall_filter", "fork_server"):
        sources[f"resources.sandbox.{name}"] = (folder / f"{name}.py").read_text(encoding="utf-8")
    return sources
