"""Tokens/s of the local engine beside transformers `generate` with log-probabilities, on the tiny policy.

    python -m benchmarks.engine [--model DIRECTORY] [--repetitions N] [--new-tokens N]

Both sides run in this process on one torch thread, in turns, so that whatever else the machine does hits both alike.
Both sample at temperature 1 from the same prompts of equal length, without a stop token, and return one log-probability
per token: `generate` as its users get them (``output_logits`` and `compute_transition_scores`), the engine as it always
does. The bound of a row is what the machine's matrix throughput and its bandwidth, measured on a read of the same size,
allow for one decode step: every weight and every row's KV are read once, two FLOPs per parameter and row.

The last rows measure the load of the quickstart: 64 multi-turn trajectories in groups of 8, each turn a few sampled
tokens and a short observation, through the same engine. What ``engine.batch_invariant`` costs is measured beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks.record import HeadlineNumber, headline_number, median, record
from resources.engines.base import GenerateRequest, SamplingParams
from resources.engines.config import EngineConfig
from resources.engines.local import LocalEngine
from resources.engines.local_layout import ModelLayout, read_layout
from resources.policy.config import PolicyConfig
from resources.policy.tiny import create_tiny_policy

BATCHES = (1, 16, 64)
PROMPT_TOKENS = 100
NOTES = (
    "Medians of {} alternating repetitions, one thread. Tokens per CPU second show what a core does when others "
    "compete for it. Bounds are of an undisturbed core: beside a loaded machine they are out of reach for both sides."
)


class ModelDirectory:
    """A weight source that serves one directory under every version."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def fetch(self, version: int) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        tensors: dict[str, torch.Tensor] = {}
        for path in sorted(self._directory.glob("*.safetensors")):
            tensors.update(load_file(path))
        return tensors

    def num_bytes(self, version: int) -> int:
        return sum(path.stat().st_size for path in self._directory.glob("*.safetensors"))

    def policy_directory(self, version: int) -> Path:
        return self._directory


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens/s of the local engine beside transformers generate")
    parser.add_argument("--model", type=Path, help="model directory; the tiny policy of the quickstart if left out")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        directory = arguments.model or quickstart_policy(Path(folder))
        rows, headline = asyncio.run(measure(directory, arguments.repetitions, arguments.new_tokens))
    record("engine", rows, headline, notes=NOTES.format(arguments.repetitions))


def quickstart_policy(folder: Path) -> Path:
    words = [chr(97 + i % 26) + chr(97 + i // 26) for i in range(200)]
    return create_tiny_policy(folder / "tiny", PolicyConfig(), [" ".join(words)] * 20, seed=0)


async def measure(
    directory: Path, repetitions: int, new_tokens: int
) -> tuple[list[dict[str, Any]], dict[str, HeadlineNumber]]:
    from transformers import AutoModelForCausalLM

    layout = read_layout(directory)
    engine = LocalEngine("bench", "compute", ModelDirectory(directory), 0, EngineConfig(num_slots=64))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    machine = MachineSpeed()
    rows: list[dict[str, Any]] = []
    headline: dict[str, HeadlineNumber] = {}
    for batch in BATCHES:
        prompts = np.random.default_rng(batch).integers(20, layout.vocab_size, (batch, PROMPT_TOKENS)).astype(np.int32)
        local, generate, local_cpu, generate_cpu = [], [], [], []
        for repetition in range(repetitions + 1):
            started_at, cpu_started_at = time.perf_counter(), time.process_time()
            await generate_local(engine, prompts, new_tokens, repetition)
            halfway, cpu_halfway = time.perf_counter(), time.process_time()
            generate_transformers(model, prompts, new_tokens)
            if repetition:  # the first one warms both up
                local.append(batch * new_tokens / (halfway - started_at))
                generate.append(batch * new_tokens / (time.perf_counter() - halfway))
                local_cpu.append(batch * new_tokens / (cpu_halfway - cpu_started_at))
                generate_cpu.append(batch * new_tokens / (time.process_time() - cpu_halfway))
        ratio = median([mine / theirs for mine, theirs in zip(local, generate, strict=True)])
        bound = machine.decode_bound(layout, batch, PROMPT_TOKENS + new_tokens // 2)
        rows.append(
            {
                "batch": batch,
                "local tok/s": median(local),
                "generate tok/s": median(generate),
                "local / generate": ratio,
                "local tok/cpu s": median(local_cpu),
                "generate tok/cpu s": median(generate_cpu),
                "bound tok/s": bound,
                "limited by": machine.limit(layout, batch, PROMPT_TOKENS + new_tokens // 2),
            }
        )
        headline[f"local_vs_generate_b{batch}"] = headline_number(ratio, "x", bound / median(generate))
    turns = [await play_trajectories(engine, layout.vocab_size, seed) for seed in range(repetitions)]
    rows.append({"batch": "64 trajectories, 8 turns", "local tok/s": median([sampled for sampled, _ in turns])})
    rows.append({"batch": "  prefilled beside", "local tok/s": median([prefilled for _, prefilled in turns])})
    headline["multi_turn_sampled_tokens_per_s"] = headline_number(median([sampled for sampled, _ in turns]), "tok/s")
    headline["multi_turn_prefilled_tokens_per_s"] = headline_number(median([filled for _, filled in turns]), "tok/s")
    costs = await invariance_costs(engine, directory, layout.vocab_size, repetitions)
    for work, cost in costs.items():
        rows.append({"batch": f"  {work}, batch-invariant", "times as long": cost})
        headline[f"batch_invariant_{work}_cost"] = headline_number(cost, "x", 1.0)
    await engine.close()
    return rows, headline


async def invariance_costs(
    plain: LocalEngine, directory: Path, vocab_size: int, repetitions: int, batch: int = 16
) -> dict[str, float]:
    """How many times as long a prefill and a token take with ``engine.batch_invariant``: CPU seconds, in turns."""
    config = EngineConfig(num_slots=64, batch_invariant=True)
    invariant = LocalEngine("invariant", "compute", ModelDirectory(directory), 0, config)
    prompts = np.random.default_rng(0).integers(20, vocab_size, (batch, PROMPT_TOKENS)).astype(np.int32)
    costs: dict[str, list[float]] = {"prefill": [], "decode": []}
    for repetition in range(repetitions + 1):
        seconds = {}
        for engine in (plain, invariant):
            for new_tokens in (1, 65):
                started_at = time.process_time()
                await generate_local(engine, prompts, new_tokens, 1000 + 2 * repetition + new_tokens // 65)
                seconds[engine, new_tokens] = time.process_time() - started_at
        if repetition:  # the first one warms both up
            costs["prefill"].append(seconds[invariant, 1] / seconds[plain, 1])
            decode = {engine: seconds[engine, 65] - seconds[engine, 1] for engine in (plain, invariant)}
            costs["decode"].append(decode[invariant] / decode[plain])
    await invariant.close()
    return {work: median(values) for work, values in costs.items()}


async def generate_local(engine: LocalEngine, prompts: np.ndarray, new_tokens: int, repetition: int) -> None:
    """Every repetition under other trajectories and other first tokens, so that no KV is found in the cache."""
    prompts = prompts.copy()
    prompts[:, 0] = 20 + (repetition * len(prompts) + np.arange(len(prompts))) % 200
    sampling = SamplingParams(max_new_tokens=new_tokens)
    keys = [f"{len(prompts)}-{repetition}-{row}" for row in range(len(prompts))]
    answers = await asyncio.gather(
        *(
            engine.generate(GenerateRequest(k, k, p, sampling, seed))
            for seed, (k, p) in enumerate(zip(keys, prompts, strict=True))
        )
    )
    assert all(len(answer.token_ids) == new_tokens for answer in answers)
    for key in keys:
        await engine.release(key)


def generate_transformers(model: Any, prompts: np.ndarray, new_tokens: int) -> None:
    ids = torch.from_numpy(prompts.astype(np.int64))
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logprobs = model.compute_transition_scores(out.sequences, out.logits, normalize_logits=True)
    assert logprobs.shape == (len(prompts), new_tokens)


async def play_trajectories(engine: LocalEngine, vocab_size: int, seed: int) -> tuple[float, float]:
    """64 trajectories of 8 turns in groups of 8 with one prompt: (sampled, prefilled) tokens/s."""
    rng = np.random.default_rng(seed)

    def text(length: int) -> np.ndarray:
        return rng.integers(20, vocab_size, length).astype(np.int32)

    async def trajectory(key: str, history: np.ndarray) -> None:
        for turn in range(8):
            sampling = SamplingParams(max_new_tokens=int(rng.integers(3, 15)))
            answer = await engine.generate(GenerateRequest(f"{key}-{turn}", key, history, sampling, seed))
            history = np.concatenate([history, answer.token_ids, text(int(rng.integers(10, 41)))])
        await engine.release(key)

    prompts = [text(int(rng.integers(40, 151))) for _ in range(8)]
    before, started_at = await engine.stats(), time.perf_counter()
    await asyncio.gather(*(trajectory(f"{seed}-{g}-{m}", prompts[g]) for g in range(8) for m in range(8)))
    elapsed, after = time.perf_counter() - started_at, await engine.stats()
    sampled = after.generated_tokens - before.generated_tokens
    prefilled = after.prefilled_tokens - before.prefilled_tokens
    return sampled / elapsed, prefilled / elapsed


class MachineSpeed:
    """FLOP/s of a large matrix product and bytes/s of a read, as this machine does them on one thread."""

    def __init__(self) -> None:
        left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
        self.flop_per_s = 2 * 1024**3 / _best(lambda: torch.mm(left, right))
        self._read_s: dict[int, float] = {}

    def read_s(self, num_bytes: int) -> float:
        """Seconds to read so many bytes, as often as a step does: from a cache where they fit one."""
        if num_bytes not in self._read_s:
            values = torch.ones(num_bytes // 4)
            self._read_s[num_bytes] = _best(lambda: values.sum())
        return self._read_s[num_bytes]

    def decode_bound(self, layout: ModelLayout, batch: int, context: int) -> float:
        """Tokens/s that neither arithmetic nor memory lets a decode step exceed."""
        return batch / max(self._times(layout, batch, context).values())

    def limit(self, layout: ModelLayout, batch: int, context: int) -> str:
        times = self._times(layout, batch, context)
        return max(times, key=lambda name: times[name])

    def _times(self, layout: ModelLayout, batch: int, context: int) -> dict[str, float]:
        kv_values = 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim * context
        attention_flop = 4 * layout.num_layers * layout.num_heads * layout.head_dim * context
        return {
            "arithmetic": batch * (2 * layout.num_parameters + attention_flop) / self.flop_per_s,
            "memory": self.read_s(4 * (layout.num_parameters + batch * kv_values)),
        }


def _best(work: Callable[[], object], repetitions: int = 30) -> float:
    """Shortest time of some repetitions: a bound is what the machine can do undisturbed."""
    work()
    times = []
    for _ in range(repetitions):
        started_at = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_at)
    return min(times)


if __name__ == "__main__":
    main()
