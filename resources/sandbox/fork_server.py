"""How does one test call run? A small server *inside* the sandbox forks a limited child for each call, and kills it.

Runs as plain source text in an interpreter of its own (standard library only, torch never imported), so a fork costs
about a millisecond. Frames on stdin and stdout: four bytes of length, then JSON. The server runs one call at a time;
between calls nothing of the last one is alive: where it is process 1 of a PID namespace it kills everything else in it,
elsewhere the syscall filter lets no second process start.

The child evaluates expressions and reports their values; it never learns the expected ones. Its report is data from
untrusted code and is judged outside (`resources.sandbox.verdict`).
"""

# Many of these are for the code under test: it finds the usual modules without reading files, and without their start-
# up cost.
import abc  # noqa: F401
import array  # noqa: F401
import bisect  # noqa: F401
import collections  # noqa: F401
import contextlib
import copy  # noqa: F401
import ctypes
import dataclasses  # noqa: F401
import datetime  # noqa: F401
import decimal  # noqa: F401
import enum  # noqa: F401
import fractions  # noqa: F401
import functools  # noqa: F401
import gc
import heapq  # noqa: F401
import itertools  # noqa: F401
import json
import math  # noqa: F401
import operator  # noqa: F401
import os
import random
import re  # noqa: F401
import resource
import select
import signal
import statistics  # noqa: F401
import string  # noqa: F401
import struct
import textwrap  # noqa: F401
import time
import traceback  # noqa: F401  (the interpreter needs it for reports, and the file may be out of reach later)
import typing  # noqa: F401

from resources.sandbox.syscall_filter import build_filter, forbid_new_privileges, install_filter, machine_name

MAX_REPORT_BYTES = 256 * 1024
MAX_VALUE_CHARACTERS = 64 * 1024
MAX_MESSAGE_CHARACTERS = 300
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWIPC = 0x10000000, 0x40000000, 0x08000000
_NOBODY = 65534


def serve(inside_bubblewrap):
    """Answer requests until stdin ends (the parent closed it, or is gone)."""
    # The protocol moves to high descriptors: whatever writes to 0, 1 or 2 writes to /dev/null.
    requests, replies = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    libc = ctypes.CDLL(None, use_errno=True)
    layers = ["bubblewrap"] if inside_bubblewrap else _isolate_process(libc)
    forbid_new_privileges(libc)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # no child may read this process's memory
    program = build_filter(machine_name())
    if program is not None and not _filter_is_possible(libc, program):
        program = None
    if program is not None:
        layers.append("syscall filter")
    gc.collect()
    gc.freeze()  # a child's collector then leaves the shared pages alone
    _write_frame(replies, {"ready": layers})
    while True:
        request = _read_frame(requests)
        if request is None:
            return
        reply = _run_call(request, libc, program, requests)
        if reply is None:
            return
        _write_frame(replies, reply)


def _isolate_process(libc):
    """The layers that a plain process can take itself: no network where namespaces are permitted, nobody where we are
    root."""
    layers = []
    if os.geteuid() == 0:
        if libc.unshare(_CLONE_NEWNET | _CLONE_NEWIPC) == 0:
            layers.append("no network")
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        layers.append("user nobody")
    elif libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC) == 0:
        layers.append("no network")
    return layers


def _filter_is_possible(libc, program):
    """Try the filter on a child that does nothing else."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            install_filter(libc, program)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _run_call(request, libc, program, requests):
    """Fork, wait for the report, the deadline or the parent's end, kill, reap. None: the parent is gone."""
    reader, writer = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            _limit_child(request, libc, program, writer)
            _report(request, writer)
        finally:
            os._exit(0)
    os.close(writer)
    report, state, parent_alive = bytearray(), "finished", True
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    poller.register(requests, 0)  # hang-up is always reported: the parent closed its end
    end = started + request["deadline_s"]
    while True:
        remaining = end - time.monotonic()
        if remaining <= 0:
            state = "timed_out"
            break
        events = dict(poller.poll(remaining * 1000))
        if events.get(requests):
            parent_alive = False
            break
        if reader in events:
            piece = os.read(reader, 65536)
            if not piece:
                break
            report += piece
            if len(report) > MAX_REPORT_BYTES:
                state = "report_too_large"
                break
    os.close(reader)
    exit_code = _kill_and_reap(child, give_exit_time=state == "finished" and parent_alive)
    if not parent_alive:
        return None
    if state == "finished" and exit_code == -signal.SIGXCPU:
        state = "timed_out"
    return {
        "nonce": request["nonce"],
        "state": state,
        "exit_code": exit_code,
        "report": report.decode("utf-8", "replace") if state == "finished" else "",
        "duration_s": time.monotonic() - started,
    }


def _kill_and_reap(child, give_exit_time):
    """End the child and, as process 1 of a namespace, everything else in it. Returns the child's own exit code."""
    if give_exit_time:
        # Its report is complete or it is dying: for a true exit code let it end by itself, for 50 ms at most.
        end = time.monotonic() + 0.05
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < end:
            time.sleep(0.0002)
    os.kill(child, signal.SIGKILL)  # no harm to a zombie; and until it is reaped, the number is its own
    exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    while os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    return exit_code


def _limit_child(request, libc, program, writer):
    """Everything that narrows the child. Any error here ends it without a report, which counts as an unusable
    sandbox."""
    os.setsid()
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.closerange(3, writer)
    os.closerange(writer + 1, 65536)
    seconds = int(request["deadline_s"]) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (request["memory_bytes"], request["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    random.seed(0)
    if program is not None:
        install_filter(libc, program)
    os.write(writer, b"limited\n")


def _report(request, writer):
    namespace = {"__name__": "__main__", "__builtins__": __builtins__}
    report = {"nonce": request["nonce"], "results": []}
    error = _attempt(lambda: exec(compile(request["code"], "<code>", "exec"), namespace))
    if error is not None:
        report["code_error"] = error
    else:
        for probe in request["probes"]:
            report["results"].append(_run_probe(probe, namespace))
    data = json.dumps(report).encode()
    while data:
        data = data[os.write(writer, data) :]


def _run_probe(probe, namespace):
    if "statement" in probe:
        error = _attempt(lambda: exec(compile(probe["statement"], "<test>", "exec"), namespace))
        return {"passed": True} if error is None else {"error": error}
    value = []
    error = _attempt(lambda: value.append(eval(compile(probe["expression"], "<test>", "eval"), namespace)))
    if error is None:
        text = []
        error = _attempt(lambda: text.append(_plain_text(value[0])))
        if error is None:
            return {"value": text[0]}
    return {"error": error}


def _attempt(action):
    """Run untrusted code. Returns None, or the error it ended with, in one bounded line; ``SystemExit`` counts as
    one."""
    try:
        action()
    except BaseException as error:  # noqa: BLE001  (whatever the code raises is its result)
        try:
            detail = str(error)
        except BaseException:  # noqa: BLE001
            detail = ""
        return (type(error).__name__ + (": " + detail if detail else "")).replace("\n", " ")[:MAX_MESSAGE_CHARACTERS]
    return None


def _plain_text(value):
    """The literal of a value made of exactly the built-in plain types: a subclass could claim to equal anything."""
    if not _is_plain(value, 0):
        raise TypeError("a " + type(value).__name__ + " is not plain data")
    text = repr(value)
    if len(text) > MAX_VALUE_CHARACTERS:
        raise ValueError("the value has more than " + str(MAX_VALUE_CHARACTERS) + " characters")
    return text


def _is_plain(value, depth):
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return True
    if depth > 50:
        return False
    if kind in (list, tuple, set):
        return all(_is_plain(item, depth + 1) for item in value)
    if kind is dict:
        return all(_is_plain(key, depth + 1) and _is_plain(item, depth + 1) for key, item in value.items())
    return False


def _read_exactly(descriptor, size):
    data = b""
    while len(data) < size:
        piece = os.read(descriptor, size - len(data))
        if not piece:
            return None
        data += piece
    return data


def _read_frame(descriptor):
    header = _read_exactly(descriptor, 4)
    if header is None:
        return None
    data = _read_exactly(descriptor, struct.unpack("!I", header)[0])
    return None if data is None else json.loads(data)


def _write_frame(descriptor, message):
    data = json.dumps(message).encode()
    data = struct.pack("!I", len(data)) + data
    while data:
        data = data[os.write(descriptor, data) :]
