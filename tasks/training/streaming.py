"""What can be trained group by group as a batch fills (StreamRL's dynamic-batch pipelining, arXiv 2504.15930), and how
its denominators are split.

Every row's gradient is taken when its group arrives; the weights move once, when the batch is whole. So a row's
advantage must follow from its group alone, and the weight of its tokens must split into a factor that is known when the
row arrives and a scale that is shared by all rows of a *bucket* and known at the end:

| ``training.normaliser`` | factor                     | scale                             | bucket       |
|-------------------------|----------------------------|-----------------------------------|--------------|
| ``token_mean``          | 1                          | 1 / trained tokens                | one          |
| ``sequence_mean``       | 1 / trained tokens, row's  | 1 / rows                          | one          |
| ``fixed_length``        | 1                          | 1 / (constant * rows)             | one          |
| ``family_token_mean``   | 1                          | 1 / (family's tokens * families)  | a family's   |

each times the family's ``weight``. A bucket is one gradient in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.training.algorithm_config import AdvantageConfig, AlgorithmSections, CorrectionConfig
    from tasks.training.config import TrainingConfig

BATCH_ESTIMATORS = {
    "reinforce_plus_plus": "whitens over the whole batch",
    "reinforce_plus_plus_baseline": "whitens over the whole batch",
    "gdpo": "normalises over the whole batch",
}
"""Built-in estimators that need all rows of an update."""
BATCH_CORRECTIONS = {"m2po": "bounds a mean over the whole batch"}
"""Built-in corrections that do."""
STREAMED_NORMALISERS = ("token_mean", "sequence_mean", "fixed_length", "family_token_mean")


def check_streaming(config: TrainingConfig, algorithms: Mapping[str, AlgorithmSections]) -> None:
    """Raises ValueError for a setting that needs the whole batch, naming it and the remedy.

    ``algorithms``: those that are used, by where they are set.
    """
    if not config.streamed:
        return
    if config.backend != "torch":
        _refuse("training.backend", config.backend, "which has no gradients to add up", "set it to 'torch'")
    for name in ("minibatches", "epochs"):
        if (value := getattr(config, name)) != 1:
            _refuse(f"training.{name}", value, "and a streamed update takes one step", "set it to 1")
    if config.normaliser not in STREAMED_NORMALISERS:
        _refuse(
            "training.normaliser",
            config.normaliser,
            "whose weights are not known to split by row",
            f"choose one of {', '.join(STREAMED_NORMALISERS)}",
        )
    for where, each in algorithms.items():
        _check_advantage(where, each.advantage)
        _check_corrections(where, each.corrections)


def _check_advantage(where: str, advantage: AdvantageConfig) -> None:
    if advantage.estimator in BATCH_ESTIMATORS:
        _refuse(
            f"{where}.advantage.estimator",
            advantage.estimator,
            f"which {BATCH_ESTIMATORS[advantage.estimator]}",
            "choose grpo, rloo, turn_returns, gigpo or gae",
        )
    if advantage.normalisation != "none":
        _refuse(
            f"{where}.advantage.normalisation",
            advantage.normalisation,
            "which is taken over the whole batch",
            "set it to 'none'",
        )
    if advantage.estimator == "grpo" and advantage.scaling == "batch":
        _refuse(
            f"{where}.advantage.scaling", "batch", "which is taken over the whole batch", "set it to 'group' or 'none'"
        )


def _check_corrections(where: str, corrections: tuple[CorrectionConfig, ...]) -> None:
    for each in corrections:
        if each.name in BATCH_CORRECTIONS:
            _refuse(f"{where}.corrections", each.name, f"which {BATCH_CORRECTIONS[each.name]}", "leave it out")


def _refuse(setting: str, value: object, why: str, remedy: str) -> None:
    raise ValueError(
        f"training.streamed is true, but {setting} is {value!r}, {why}; {remedy}, or set training.streamed to false"
    )


def row_factor(normaliser: str, num_tokens: int, family_weight: float) -> float:
    """The part of a token's weight that is known when its row, of ``num_tokens`` trained tokens, arrives."""
    return family_weight / (num_tokens if normaliser == "sequence_mean" else 1)


def bucket_of(normaliser: str, family: str) -> str:
    """Which rows share a scale."""
    return family if normaliser == "family_token_mean" else ""
