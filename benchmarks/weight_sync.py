"""How much of a weight transfer do rollouts notice?

    python -m benchmarks.weight_sync [--iterations 8]

Three training runs as users start them, through Prefect and Dask. *Long answers* and *short answers*: simulated engines
and learner, weights of 16 GB that arrive at 2 GB/s, time scaled by 10, so that a transfer takes a good part of an
iteration. With long answers rollouts are the slower side: every switch meets running trajectories, whose KV is
recomputed (``recomputed tokens``). With short ones the learner is, and the engines have run out of work when the
weights come. *Local*: the quickstart on torch engines, whose weights are 2 MB. In all, a published version is fetched
beside serving, then every engine is suspended, switched and resumed.

Exposed: from the first suspend to the last resume, the time in which nobody generates. Total: that and the part of the
transfer that was hidden behind rollouts. ``hidden_share`` is 1 - exposed / total, summed over the iterations of the run
with long answers but its first two, which hold cold starts. RollArt (arXiv 2512.22560, section 7) hides 67 to 78 % of
its pull.

Counted as well: requests that were sent to an engine and never answered, answers that came when nobody waited for them
any more, and requests that had to go to another engine (their tokens, if any, were sampled again).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.record import HeadlineNumber, headline_number, record
from benchmarks.training_run import iteration_period_s, train_in_process
from resources.policy.tokenizer import train_tokenizer

SCALE = 10.0
NUM_PARAMETERS = 8.2e9
LOAD_BYTES_PER_S = 2e9
CONTEXT = 16384
COLD = 2
LOCAL = "local"


class Load(NamedTuple):
    """What a simulated run generates: serial tokens take rollouts time, all tokens together take the learner time."""

    mean_tokens: int
    """Of an answer."""
    groups: int
    """Of each of the two families, an iteration."""


LOADS = {"long answers": Load(1500, 2), "short answers": Load(200, 8)}
NOTES = (
    "Seconds of the machine; the simulated runs' clock is ten times as fast. Exposed is measured around the switch "
    "stage's calls, so it holds their round trips: for weights as small as the quickstart's it is nearly all there is, "
    "and the share of the local run says little more than that a fetch from a local folder takes milliseconds."
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Exposed and total time of weight transfers")
    parser.add_argument("--iterations", type=int, default=8)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in (*LOADS, LOCAL):
            own = Path(folder) / name.replace(" ", "-")
            run_files = [simulated_run(own, LOADS[name])] if name in LOADS else []
            overrides = {
                "store": str(own / "store"),
                "num_iterations": arguments.iterations,
                "evaluation.before": False,
                "evaluation.after": False,
            }
            summary = train_in_process(overrides, *run_files)
            rows.append({"run": name, **transfers(summary["rows"]), **losses(summary["rows"])})
    record("weight_sync", rows, weight_sync_headline(rows), notes=NOTES)


def weight_sync_headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, HeadlineNumber]:
    """Of the first row; what was lost, and the share of each other row."""
    headline = {"hidden_share": headline_number(rows[0]["hidden share"], "", 1.0)}
    for row in rows[1:]:
        headline[f"hidden_share_{row['run'].replace(' ', '_')}"] = headline_number(row["hidden share"], "", 1.0)
    headline["recomputed_tokens"] = headline_number(rows[0]["recomputed tokens"], "tokens/switch")
    headline["requests_lost"] = headline_number(sum(row["requests lost"] for row in rows), "requests", 0.0)
    thrown_away = sum(row["answers thrown away"] for row in rows)
    headline["answers_thrown_away"] = headline_number(thrown_away, "answers", 0.0)
    return headline


def simulated_run(folder: Path, load: Load) -> Path:
    """A run file whose policy is a tokenizer only."""
    policy = folder / "policy"
    corpus = ["guess: <answer>number</answer>", "1 to 7", "higher 4 to 7", "lower 1 to 3"] * 10
    train_tokenizer(corpus, vocab_size=320, min_word_frequency=10, context_length=CONTEXT).save_pretrained(policy)
    shared = {"time_scale": SCALE, "num_parameters": NUM_PARAMETERS}
    compute = {"flops_per_s": 989e12, "bytes_per_s": 3.35e12, "memory_bytes": 80e9}
    bandwidth = {"flops_per_s": 148e12, "bytes_per_s": 4.0e12, "memory_bytes": 96e9}
    link = {"load_bytes_per_s": LOAD_BYTES_PER_S}
    family = {"environment": "guess_number", "groups_per_iteration": load.groups, "group_size": 8}
    family |= {"max_new_tokens": 2 * load.mean_tokens}
    fields = {
        "name": "weight-sync",
        "warm_start": None,
        "policy": {"model_directory": str(policy)},
        "families": {name: {**family, "hardware_class": name} for name in ("compute", "bandwidth")},
        "engine": {
            "backend": "simulated",
            "context_length": CONTEXT,
            "simulated": {
                **shared,
                "hardware": {"compute": {**compute, **link}, "bandwidth": {**bandwidth, **link}},
                "answers": {"length": "lognormal", "mean_tokens": load.mean_tokens, "sigma": 0.6},
            },
        },
        "training": {"backend": "simulated", "simulated": shared},
    }
    path = folder / "simulated.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def transfers(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sums over all iterations but the cold ones, in seconds an iteration."""
    settled = rows[COLD:]
    assert settled, f"run more than {COLD} iterations"
    exposed = sum(row["weights/exposed_s"] for row in settled)
    hidden = sum(row["weights/total_s"] - row["weights/load_s"] for row in settled)
    return {
        "iteration s": iteration_period_s(settled),
        "total s": (exposed + hidden) / len(settled),
        "exposed s": exposed / len(settled),
        "engine load s": sum(row["weights/load_s"] for row in settled) / len(settled),
        "hidden share": 1.0 - exposed / (exposed + hidden),
        "recomputed tokens": sum(row["weights/recomputed_tokens"] for row in settled) / len(settled),
    }


def losses(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """What became of the requests of the whole run, as its proxies counted."""
    proxies = [worker["proxy"] for worker in rows[-1]["workers"]]
    links = [link for proxy in proxies for link in proxy["engines"].values()]
    sent, answered = (sum(link[key] for link in links) for key in ("num_requests", "num_generations"))
    under_way = sum(link["in_flight"] for link in links)
    # Rollouts that are evicted or redundant abort their requests: nobody waits for those, and they are not lost.
    cancelled = sum(
        row.get(f"{cause}.trajectories", 0)
        for row in rows
        for cause in ("evicted_stale", "cancelled_redundant", "preempted")
    )
    return {
        "requests": sent,
        "requests lost": max(0, sent - answered - under_way - cancelled),
        "answers thrown away": sum(link["num_refused"] for link in links)
        + sum(int(proxy["num_rerouted"]) for proxy in proxies),
        "failed by an engine": sum(row.get("failed.engine", 0) for row in rows),
    }


if __name__ == "__main__":
    main()
