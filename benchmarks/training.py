"""Tokens/s of the learner with packed rows, beside padded rows and beside a plain loop over transformers.

    python -m benchmarks.training [--repetitions N] [--quick]

One batch of the quickstart's shape (four families, 144 rows, of which 120 have an advantage;
`benchmarks.training_rows`) is trained again and again by every variant (`benchmarks.training_variants`), each in
processes of its own that take turns, one torch thread each. A tokens/s counts the tokens of rows that are trained,
never padding. Before anything is timed, all variants must agree on loss and gradient norm of the first update.

Bounds: from packing alone, the tokens that padding lays out by the tokens there are, at equal tokens/s of the model;
from arithmetic, matrix throughput of this machine by the multiplications of a trained token; from ranks, their number,
as far as there are cores.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.engine import MachineSpeed
from benchmarks.record import HeadlineNumber, headline_number, median, record
from benchmarks.training_processes import TimedUpdate, VariantProcesses
from benchmarks.training_rows import Workload, play_workload
from benchmarks.training_variants import PACKED, PADDED, PLAIN, SORTED, VARIANTS
from flows.config import RunConfig, load_run_file
from resources.engines.local_layout import ModelLayout, read_layout
from resources.state_dir import state_dir

QUICKSTART = Path(__file__).resolve().parent.parent / "examples" / "quickstart" / "run.yaml"
AGREEMENT = 1e-3
"""Largest relative difference of loss and gradient norm between variants, in the first update."""
TWO_RANKS = "packed, 2 ranks"
QUICK_RESULTS = state_dir() / "benchmarks"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=9, help="updates of each variant (default: 9)")
    parser.add_argument(
        "--quick", action="store_true", help="one group of each family, written to the state folder: does it run?"
    )
    options = parser.parse_args(arguments)
    if options.repetitions < 1:
        parser.error(f"--repetitions is {options.repetitions}; at least 1 is needed")
    torch.set_num_threads(1)
    config = load_run_file(QUICKSTART)
    if options.quick:
        config = one_group_each(config)
    with tempfile.TemporaryDirectory() as folder:
        workload = asyncio.run(play_workload(config, Path(folder)))
        updates, peaks = measure(workload, options.repetitions)
        layout = read_layout(Path(workload.directory))
    flop_per_s = MachineSpeed().flop_per_s
    rows = table(workload, updates, peaks, flop_per_s / flop_per_token(layout, workload))
    notes = (
        f"Medians of {options.repetitions} alternating updates after one that warms up, {len(workload.live)} rows, "
        f"{sum(workload.lengths)} tokens (longest row {max(workload.lengths)}), {workload.num_trained} trained. "
        f"Matrix products reach {flop_per_s / 1e9:.0f} GFLOP/s on one thread. Peak memory: VmHWM of a fresh process "
        "during updates, less VmRSS before them (activations, gradients, moments). A padded layout may lose more than "
        "its padding: attention with a padding mask leaves the fused causal kernel, and larger batches leave the cache."
    )
    results = {"results": QUICK_RESULTS} if options.quick else {}
    record("training", rows, headline(workload, updates, peaks), notes=notes, **results)


def one_group_each(config: RunConfig) -> RunConfig:
    return config.model_copy(
        update={
            "families": {
                name: family.model_copy(update={"groups_per_iteration": 1}) for name, family in config.families.items()
            }
        }
    )


def measure(workload: Workload, repetitions: int) -> tuple[dict[str, list[TimedUpdate]], dict[str, int]]:
    """Timed updates of each variant, the first ones left out, and peak bytes."""
    with ExitStack() as stack:
        processes = {variant.name: VariantProcesses(variant, workload) for variant in VARIANTS}
        processes[TWO_RANKS] = VariantProcesses(PACKED, workload, num_ranks=2)
        for each in processes.values():
            stack.enter_context(each)
        check_agreement({name: each.update(0) for name, each in processes.items()})
        updates: dict[str, list[TimedUpdate]] = {name: [] for name in processes}
        for version in range(1, repetitions + 1):
            for name, each in processes.items():
                updates[name].append(each.update(version))
        return updates, {name: each.peak_bytes() for name, each in processes.items()}


def check_agreement(firsts: Mapping[str, TimedUpdate]) -> None:
    """Raises RuntimeError when a variant trains something else than the packed learner."""
    packed = firsts[PACKED.name].result
    for name, first in firsts.items():
        for quantity in ("loss", "grad_norm"):
            mine, theirs = getattr(packed, quantity), getattr(first.result, quantity)
            if not math.isclose(mine, theirs, rel_tol=AGREEMENT, abs_tol=1e-6):
                raise RuntimeError(
                    f"{quantity} of the first update is {theirs:.6g} for {name!r} and {mine:.6g} for {PACKED.name!r}: "
                    "they do not train the same thing, so their times are not comparable"
                )


def table(
    workload: Workload, updates: Mapping[str, Sequence[TimedUpdate]], peaks: Mapping[str, int], bound: float
) -> list[dict[str, Any]]:
    """One row a variant. ``bound``: tokens/s that arithmetic allows on one core."""
    num_tokens = sum(workload.lengths)
    laid_out = {variant.name: variant.laid_out_tokens(workload) for variant in VARIANTS}
    rows = []
    for name, of_variant in updates.items():
        ranks = 2 if name == TWO_RANKS else 1
        rows.append(
            {
                "variant": name,
                "tok/s": median([num_tokens / each.wall_s for each in of_variant]),
                "tok/cpu s": median([num_tokens / each.cpu_s for each in of_variant]),
                "arithmetic bound tok/s": bound * ranks,
                "packed / this": ratio(updates, PACKED.name, name),
                "share of real tokens": num_tokens / laid_out.get(name, num_tokens),
                "peak MiB": peaks[name] / 2**20,
            }
        )
    return rows


def headline(
    workload: Workload, updates: Mapping[str, Sequence[TimedUpdate]], peaks: Mapping[str, int]
) -> dict[str, HeadlineNumber]:
    num_tokens = sum(workload.lengths)

    def over(slower: Any) -> HeadlineNumber:
        bound = slower.laid_out_tokens(workload) / num_tokens
        return headline_number(ratio(updates, PACKED.name, slower.name), "x", bound)

    return {
        "packed_vs_padded": over(PADDED),
        "packed_vs_padded_sorted": over(SORTED),
        "packed_vs_transformers": over(PLAIN),
        "packed_tokens_per_s": headline_number(
            median([num_tokens / each.wall_s for each in updates[PACKED.name]]), "tok/s"
        ),
        "padded_vs_packed_peak_memory": headline_number(peaks[PADDED.name] / max(1, peaks[PACKED.name]), "x"),
        "two_ranks_vs_one": headline_number(
            ratio(updates, TWO_RANKS, PACKED.name), "x", float(min(2, os.cpu_count() or 1))
        ),
    }


def ratio(updates: Mapping[str, Sequence[TimedUpdate]], faster: str, slower: str) -> float:
    """Median over repetitions of how much longer the slower one took right after, or before, the faster one."""
    return median([other.wall_s / one.wall_s for one, other in zip(updates[faster], updates[slower], strict=True)])


def flop_per_token(layout: ModelLayout, workload: Workload) -> float:
    """Multiplications and additions of one token, forward and backward: 6 per weight of the decoder's matrices, the
    head's only for trained tokens, and causal attention over the rows as long as they are."""
    head = layout.hidden_size * layout.vocab_size
    decoder = layout.num_parameters - head  # with a tied head the embedding is the head; looking a token up is free
    num_tokens = sum(workload.lengths)
    pairs = sum(length * (length + 1) / 2 for length in workload.lengths)
    attention = 12 * layout.num_layers * layout.num_heads * layout.head_dim * pairs
    return 6 * decoder + (6 * head * workload.num_trained + attention) / num_tokens


if __name__ == "__main__":
    main()
