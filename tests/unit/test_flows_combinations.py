"""Settings that are valid by themselves and cannot work together are refused, with the remedy, at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.combinations import VERDICTS, check_combinations
from flows.config import RunConfig, load_run_file, with_overrides
from resources.environments.instances import BUILT_IN

LAKE = "families.frozen_lake"
CROSS = {"rollout.cross_policy": {"p_stale": 0.5, "refresh_every": 2}}
TWO_ENGINES = {"pools.classes.compute.num_workers": 2, "pools.classes.bandwidth.num_workers": 2}
UNCORRECTED = {"training.loss.name": "policy_gradient"}
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*/run.yaml"))
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a group of one under grpo": (
        {f"{LAKE}.group_size": 1},
        r"frozen_lake.group_size is 1, .* 'grpo' .* set group_size to 2 or more",
    ),
    "a group of one under the estimator of its family": (
        {
            f"{LAKE}.group_size": 1,
            "training.advantage.estimator": "reinforce_plus_plus",
            "training.families": {"frozen_lake": {"advantage": {"estimator": "rloo"}}},
        },
        r"frozen_lake.group_size is 1, but training.families.frozen_lake.advantage.estimator 'rloo'",
    ),
    "an algorithm for a family that is not there": (
        {"training.families": {"frozen_lak": {"weight": 2.0}}},
        r"training.families has the names \['frozen_lak'\], .* allowed: \['calculator', .*Correct the name",
    ),
    "a streamed update of a deterministic run": (
        {"deterministic": True, "training.streamed": True, "training.minibatches": 1},
        r"training.streamed is true, and rollout.deterministic too: .* set training.streamed to false, or determ",
    ),
    "the run's own estimator without its critic, where a family has it": (
        {
            "training.advantage.estimator": "gae",
            "training.families": {"frozen_lake": {"advantage": {"estimator": "grpo"}}},
        },
        r"training.advantage.estimator is 'gae', which needs a critic",
    ),
    "nucleus sampling": ({f"{LAKE}.top_p": 0.9}, r"families.frozen_lake: top_p is 0.9; only 1.0 is allowed"),
    "top-k sampling": ({f"{LAKE}.top_k": 5}, r"families.frozen_lake: top_k is 5; only 0"),
    "nothing to judge": (
        {f"{LAKE}.scorer": "exact_answer"},
        r"frozen_lake.scorer is 'exact_answer', which cannot judge .* set it to 'environment'",
    ),
    "nobody judges": ({"families.calculator.scorer": "environment"}, r"calculator.scorer .* set it to 'exact_answer'"),
    "the other pool scorer": ({"families.code_repair.scorer": "exact_answer"}, r"set it to 'unit_tests'"),
    "a turn as long as the context": (
        {f"{LAKE}.max_new_tokens": 64, "engine.context_length": 64},
        r"frozen_lake.max_new_tokens is 64, .* room for 64 tokens",
    ),
    "a context beyond the model's": (
        {"engine.context_length": 1024},
        r"engine.context_length is 1024, but the policy is built for 512 tokens",
    ),
    "prompts left out of no pool": (
        {"rollout.curriculum": "informative_prompts"},
        r"rollout.curriculum is 'informative_prompts', .* no family has one; set families.<name>.num_prompts",
    ),
    "an unknown curriculum": ({"rollout.curriculum": "harder"}, r"rollout.curriculum is 'harder'; allowed are"),
    "a family that hides the mean": (
        {"families": {"mean": {"environment": "guess_number", "hardware_class": "compute"}}},
        r"families has the name 'mean'",
    ),
    "a family that is a path": (
        {"families": {"a/b": {"environment": "guess_number", "hardware_class": "compute"}}},
        r"families has the name 'a/b'",
    ),
    "a class without workers": (
        {"pools.classes.compute.num_workers": 0, "pools.classes.compute.fallback": []},
        r"pools.classes.compute.num_workers is 0 and no fallback",
    ),
    "a race for a place": (
        {"deterministic": True, f"{LAKE}.redundant_members": 1},
        r"frozen_lake.redundant_members is 1, and a deterministic run .* set it to 0",
    ),
    "redundant groups in logical time": (
        {"deterministic": True, f"{LAKE}.redundant_groups": 2},
        r"frozen_lake.redundant_groups is 2, and a deterministic run",
    ),
    "determinism by halves": (
        {"rollout.deterministic": True},
        r"engine.batch_invariant is false: .* set engine.batch_invariant to true",
    ),
    "another device as fallback": (
        {"deterministic": True, "pools.classes.compute.device": "cuda"},
        r"compute.fallback names 'bandwidth', whose device is 'cpu', not 'cuda'",
    ),
    "fallbacks without workers": (
        {"pools.classes.compute.num_workers": 0, "pools.classes.bandwidth.num_workers": 0},
        r"pools.classes.compute.num_workers is 0 and no fallback",
    ),
    "a stale engine and no current one": (
        CROSS,
        r"stale_engines is 1, .*'bandwidth'.* has 1 engines: .*bandwidth.num_workers.*cross_policy to null",
    ),
    "stale tokens under a loss that does not know them": (
        {**CROSS, **TWO_ENGINES, **UNCORRECTED},
        r"cross_policy is set, but training.loss .*'policy_gradient'.* corrections are empty: .*truncated_weight",
    ),
    "stale tokens under a ratio to the proximal policy": (
        {**CROSS, **TWO_ENGINES, "training.loss.ratio_to": "proximal"},
        r"'ppo_clip', ratio_to 'proximal'\) takes every token for the learner's own",
    ),
    "stale tokens under a mask that lets them through": (
        {
            **CROSS,
            **TWO_ENGINES,
            **UNCORRECTED,
            "training.corrections": [{"name": "staleness_mask", "max_staleness": 9}],
        },
        r"'policy_gradient'.* corrections leave older tokens as they are: .*truncated_weight",
    ),
    "stale tokens under the loss of one family": (
        {
            **CROSS,
            **TWO_ENGINES,
            "training.families": {"frozen_lake": {"loss": {"name": "kimi", "ratio_to": "proximal"}}},
        },
        r"but training.families.frozen_lake.loss .*'kimi'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(case: str) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        check_combinations(with_overrides(RunConfig(), overrides))


def test_what_works_is_let_through() -> None:
    check_combinations(RunConfig())
    check_combinations(with_overrides(RunConfig(), {"pools.classes.compute.num_workers": 0}))  # bandwidth stands in
    alone = {
        f"{LAKE}.group_size": 1,
        "training.families": {"frozen_lake": {"advantage": {"estimator": "reinforce_plus_plus"}}},
    }
    check_combinations(with_overrides(RunConfig(), alone))
    standing = {"pools.classes.learner.num_workers": 0, "pools.address": "tcp://127.0.0.1:8786"}
    check_combinations(with_overrides(RunConfig(), standing))
    check_combinations(with_overrides(RunConfig(), {"deterministic": True}))
    crossing = {**CROSS, **TWO_ENGINES}
    corrected = {**UNCORRECTED, "training.corrections": [{"name": "truncated_weight"}]}
    masked = {**UNCORRECTED, "training.corrections": [{"name": "staleness_mask"}]}  # no stale turn is trained at all
    for algorithm in (
        {},
        corrected,
        masked,
        {"training.loss.name": "decoupled"},
        {"training.loss.name": "my.package:Loss"},
    ):
        check_combinations(with_overrides(RunConfig(), {**crossing, **algorithm}))
    served_by_one = {"pools.classes.compute.num_workers": 0, "pools.classes.bandwidth.num_workers": 2, **CROSS}
    check_combinations(with_overrides(RunConfig(), served_by_one))
    check_combinations(with_overrides(RunConfig(), {**CROSS, "pools.address": "tcp://127.0.0.1:8786"}))
    own = {"families.calculator.scorer": "my.package:Scorer"}
    check_combinations(with_overrides(RunConfig(), own))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_the_examples_work(path: Path) -> None:
    check_combinations(load_run_file(path))


def test_every_built_in_environment_names_its_judge() -> None:
    assert VERDICTS.keys() == BUILT_IN.keys()
