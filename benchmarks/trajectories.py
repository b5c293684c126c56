"""The trajectory store beside JSON lines of the same rows: seconds to write and to read, bytes per trajectory.

`python -m benchmarks.trajectories` alternates the formats in one process and takes medians. Rows are synthetic and
realistic: the text is Python source of the standard library, token ids follow its words (rank by frequency), the
log-probabilities are random float32. Each format goes from `Trajectory` objects to a file and back to equal objects.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import importlib
import inspect
import json
import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.record import headline_number, median, record
from resources.environments.base import Message
from resources.trajectories.arrow_files import COMPRESSION, decode_arrow, encode_arrow
from resources.trajectories.schema import from_table, to_table
from resources.trajectories.trajectory import Trajectory, Turn

MODULES = ("argparse", "ast", "decimal", "inspect", "logging", "pathlib", "statistics", "tarfile", "typing", "zipfile")
REPETITIONS = 5


@dataclass(frozen=True)
class Shape:
    """What the trajectories of one workload look like (lengths in tokens)."""

    name: str
    num_trajectories: int
    num_tokens: tuple[int, int]
    num_turns: tuple[int, int]
    vocabulary: int


SHAPES = (
    Shape("quickstart", num_trajectories=1024, num_tokens=(100, 300), num_turns=(1, 10), vocabulary=351),
    Shape("agentic_8k", num_trajectories=64, num_tokens=(7000, 9000), num_turns=(15, 40), vocabulary=150_000),
)


@dataclass(frozen=True)
class Format:
    """One way to keep a batch of trajectories in a file."""

    name: str
    encode: Callable[[Sequence[Trajectory]], bytes]
    decode: Callable[[bytes], list[Trajectory]]


def formats() -> list[Format]:
    def arrow(compression: str | None) -> Format:
        return Format(
            f"arrow {compression or 'uncompressed'}",
            lambda rows: encode_arrow(to_table(rows), compression),
            lambda data: from_table(decode_arrow(data)),
        )

    return [
        Format("jsonl", _encode_jsonl, _decode_jsonl),
        Format("jsonl orjson", _encode_orjson, _decode_orjson),
        arrow("zstd"),
        arrow("lz4"),
        arrow(None),
        Format("parquet zstd", _encode_parquet, lambda data: from_table(pq.read_table(pa.BufferReader(data)))),
    ]


def make_trajectories(shape: Shape, seed: int) -> list[Trajectory]:
    rng = random.Random(seed)
    words, ids = _corpus(shape.vocabulary)
    return [_make_trajectory(shape, index, words, ids, rng) for index in range(shape.num_trajectories)]


def measure(shape: Shape, repetitions: int) -> list[dict[str, Any]]:
    """One row per format: medians of ``repetitions`` alternating passes over the same trajectories."""
    trajectories = make_trajectories(shape, seed=0)
    kinds = formats()
    for kind in kinds:
        back = kind.decode(kind.encode(trajectories))
        assert len(back) == len(trajectories) and all(map(_equal, back, trajectories)), f"{kind.name} lost something"
    write_s: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    read_s: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    num_bytes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repetitions):
            for kind in kinds:
                path = Path(folder) / "rows"
                write_s[kind.name].append(_timed(lambda: path.write_bytes(kind.encode(trajectories))))  # noqa: B023
                read_s[kind.name].append(_timed(lambda: kind.decode(path.read_bytes())))  # noqa: B023
                num_bytes[kind.name] = path.stat().st_size
    payload = num_bytes["arrow uncompressed"]
    return [
        {
            "rows": shape.name,
            "format": kind.name,
            "write_mb_per_s": payload / median(write_s[kind.name]) / 1e6,
            "read_mb_per_s": payload / median(read_s[kind.name]) / 1e6,
            "bytes_per_trajectory": num_bytes[kind.name] / shape.num_trajectories,
            "size_vs_jsonl": num_bytes[kind.name] / num_bytes["jsonl"],
            "write_speedup_vs_jsonl": median(write_s["jsonl"]) / median(write_s[kind.name]),
            "read_speedup_vs_jsonl": median(read_s["jsonl"]) / median(read_s[kind.name]),
        }
        for kind in kinds
    ]


def _timed(work: Callable[[], object]) -> float:
    """Seconds of one call. What earlier calls left to the garbage collector is collected before, not on this clock."""
    gc.collect()
    start = time.perf_counter()
    result = work()
    elapsed_s = time.perf_counter() - start
    del result
    return elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="passes per format (default: %(default)s)")
    repetitions = parser.parse_args().repetitions
    rows = [row for shape in SHAPES for row in measure(shape, repetitions)]
    ours = [row for row in rows if row["format"] == f"arrow {COMPRESSION}"]
    # The worse of the workloads stands for the store.
    record(
        "trajectories",
        rows,
        {
            "read_speedup_vs_jsonl": headline_number(min(row["read_speedup_vs_jsonl"] for row in ours), "x"),
            "write_speedup_vs_jsonl": headline_number(min(row["write_speedup_vs_jsonl"] for row in ours), "x"),
            "size_ratio_vs_jsonl": headline_number(max(row["size_vs_jsonl"] for row in ours), "bytes/bytes"),
        },
        notes="MB/s count uncompressed Arrow bytes for every format alike. Headlines: the worse workload.",
    )


def _make_trajectory(shape: Shape, index: int, words: list[str], ids: np.ndarray, rng: random.Random) -> Trajectory:
    num_tokens, num_turns = rng.randint(*shape.num_tokens), rng.randint(*shape.num_turns)
    start = rng.randrange(len(words) - num_tokens)
    cuts = [*sorted(rng.sample(range(1, num_tokens), 2 * num_turns - 1)), num_tokens]
    mask = np.zeros(num_tokens, bool)
    turns: list[Turn] = []
    messages: list[Message] = []
    position = 0
    for action_start, action_end in zip(cuts[::2], cuts[1::2], strict=True):
        mask[action_start:action_end] = True
        messages.append({"role": "user", "content": "".join(words[start + position : start + action_start])})
        messages.append({"role": "assistant", "content": "".join(words[start + action_start : start + action_end])})
        queue_s, prefill_s, decode_s, environment_s = (rng.random() * 0.1 for _ in range(4))
        turns.append(
            Turn(
                observation_start=position, action_start=action_start, action_end=action_end, engine="compute-0",
                hardware_class="compute", finish_reason="stop", cached_tokens=position, queue_s=queue_s,
                prefill_s=prefill_s, decode_s=decode_s, environment_s=environment_s, tool_name="python",
            )
        )  # fmt: skip
        position = action_end
    logprobs = np.log(np.random.default_rng(index).uniform(0.05, 1, num_tokens)).astype(np.float32)
    name = f"bench/family-{index // 8:06d}/{index % 8}/0"
    return Trajectory(
        run_id="bench", trajectory_id=name, rollout_id=name, attempt=0, family="family", env_id="family",
        env_version="1", group_id=f"family-{index // 8:06d}", member=index % 8, group_size=8,
        seed_env=rng.getrandbits(31), seed_sampling=rng.getrandbits(62), split="train",
        temperature=1.0, top_p=1.0, top_k=0,
        tokenizer_hash="0123456789abcdef", template_hash="fedcba9876543210",
        token_ids=ids[start : start + num_tokens].copy(), loss_mask=mask,
        behaviour_logprobs=np.where(mask, logprobs, np.float32(0)),
        token_versions=np.where(mask, np.int32(12), np.int32(-1)), prompt_length=cuts[0], turns=turns,
        reward=rng.choice([0.0, 1.0, 0.9]), reward_components={"outcome": 1.0, "invalid_action": -0.1}, success=True,
        termination="terminated", truncated=False, messages=messages, final_state=messages[-1]["content"][:200],
        submitted_at=1.7e9 + index, started_at=1.7e9 + index + rng.random(), finished_at=1.7e9 + index + 2,
        reset_s=rng.random(), environment_s=rng.random(), generation_s=rng.random(),
    )  # fmt: skip


def _corpus(vocabulary: int) -> tuple[list[str], np.ndarray]:
    """Words of the standard library's source, and an id for each: its rank by frequency, folded into the vocabulary."""
    source = "".join(inspect.getsource(importlib.import_module(name)) for name in MODULES)
    words = re.findall(r" ?\w{1,6}|\s+|[^\w\s]", source)
    rank = {word: place for place, (word, _) in enumerate(collections.Counter(words).most_common())}
    return words, np.array([rank[word] % vocabulary for word in words], np.int32)


def _as_json(trajectory: Trajectory) -> dict[str, Any]:
    row = {field.name: getattr(trajectory, field.name) for field in dataclasses.fields(trajectory)}
    for name in ("token_ids", "loss_mask", "token_versions"):
        row[name] = row[name].tolist()
    # Shortest digits that give the float32 back: half of what float64 would print.
    row["behaviour_logprobs"] = row["behaviour_logprobs"].astype("U16").astype(np.float64).tolist()
    row["turns"] = [{name: getattr(turn, name) for name in Turn.__slots__} for turn in trajectory.turns]
    return row


def _from_json(row: dict[str, Any]) -> Trajectory:
    row["token_ids"] = np.array(row["token_ids"], np.int32)
    row["loss_mask"] = np.array(row["loss_mask"], bool)
    row["behaviour_logprobs"] = np.array(row["behaviour_logprobs"], np.float32)
    row["token_versions"] = np.array(row["token_versions"], np.int32)
    row["turns"] = [Turn(**turn) for turn in row["turns"]]
    return Trajectory(**row)


def _encode_jsonl(trajectories: Sequence[Trajectory]) -> bytes:
    return "".join(json.dumps(_as_json(t), separators=(",", ":")) + "\n" for t in trajectories).encode()


def _decode_jsonl(data: bytes) -> list[Trajectory]:
    return [_from_json(json.loads(line)) for line in data.splitlines()]


def _encode_orjson(trajectories: Sequence[Trajectory]) -> bytes:
    return b"".join(orjson.dumps(_as_json(t)) + b"\n" for t in trajectories)


def _decode_orjson(data: bytes) -> list[Trajectory]:
    return [_from_json(orjson.loads(line)) for line in data.splitlines()]


def _encode_parquet(trajectories: Sequence[Trajectory]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(to_table(trajectories), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _equal(left: Trajectory, right: Trajectory) -> bool:
    return all(
        np.array_equal(getattr(left, field.name), getattr(right, field.name))
        if isinstance(getattr(left, field.name), np.ndarray)
        else getattr(left, field.name) == getattr(right, field.name)
        for field in dataclasses.fields(left)
    )


if __name__ == "__main__":
    main()
