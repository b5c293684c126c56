"""Inside a scorer process: `python -m resources.rewards.scorer_child` scores one request after another.

It ends when stdin does. Scorers run in the main thread (some, like math-verify, set alarm signals, which works nowhere
else). Nothing here watches the clock: the parent kills the whole process at the deadline. Frames on stdin and stdout
are four bytes of length, then JSON; whatever a scorer prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import sys
import time
from typing import Any, BinaryIO

from resources.rewards.base import ScoringRequest
from resources.rewards.checked import checked_score
from resources.rewards.scorers.registry import ResolvedScorer, resolve_scorer

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = int(sys.argv[1])
    _die_with_parent(parent)
    # The protocol moves to other descriptors: a scorer that prints, or reads stdin, cannot disturb it.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    scorers: dict[str, ResolvedScorer] = {}
    write_frame(replies, {"ready": os.getpid()})
    while (message := read_frame(requests)) is not None:
        write_frame(replies, _answer(message, scorers))


def _answer(message: dict[str, Any], scorers: dict[str, ResolvedScorer]) -> dict[str, Any]:
    request = ScoringRequest(**message["request"])
    started = time.perf_counter()
    try:
        key = json.dumps([request.scorer, message["arguments"]], sort_keys=True)
        if key not in scorers:
            scorers[key] = resolve_scorer(request.scorer, message["arguments"])
        scorer = scorers[key]
        if scorer.version != request.scorer_version:
            raise ValueError(
                f"version {request.scorer_version!r} of scorer {request.scorer!r} was asked for, this replica has "
                f"{scorer.version!r}: deploy the same code and scorer_arguments everywhere"
            )
        score = _as_json(scorer.score(request), request)
    # A scorer is anybody's code: whatever it raises (SystemExit too) is a failure of this one judgement.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}", "duration_s": time.perf_counter() - started}
    return {"score": score, "duration_s": time.perf_counter() - started}


def _as_json(score: Any, request: ScoringRequest) -> dict[str, Any]:
    """The scorer's answer as JSON. Raises ValueError when it is no answer to this request."""
    score = checked_score(score, request)
    return {
        "reward": score.reward,
        "success": score.success,
        "components": score.components,
        "failure": None if score.failure is None else str(score.failure),
        "failure_message": str(score.failure_message),
    }


def _die_with_parent(parent: int) -> None:
    """On Linux the kernel ends this process with the parent's thread that started it, even inside an endless loop."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the replica ended before its scorer process had started")


def write_frame(stream: BinaryIO, message: dict[str, Any]) -> None:
    stream.write(encode_frame(message))
    stream.flush()


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message; None when the stream has ended."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    body = stream.read(struct.unpack(">I", header)[0])
    return json.loads(body) if body else None


def encode_frame(message: dict[str, Any]) -> bytes:
    body = json.dumps(message, allow_nan=False).encode()
    return struct.pack(">I", len(body)) + body


if __name__ == "__main__":
    main()
