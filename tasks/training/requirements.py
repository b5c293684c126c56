"""Does an update's configuration have all that its algorithms need, and nothing that they would ignore?

What a family does otherwise is a section of its own; the run's own sections count only where some family has them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from tasks.training.ignored_settings import check_nothing_ignored
from tasks.training.plugins import ESTIMATORS, NORMALISERS, RATIO_LOSSES, WEIGHTING_CORRECTIONS
from tasks.training.streaming import check_streaming

if TYPE_CHECKING:
    from tasks.training.algorithm_config import CorrectionConfig, LossConfig
    from tasks.training.config import TrainingConfig


def check_requirements(config: TrainingConfig, families: Collection[str] | None = None) -> None:
    """Raises ValueError, naming the setting, its value and the remedy.

    ``families``: of the run; None: not known, and those that do something otherwise are checked, or the run's own
    algorithm when there are none.
    """
    used = config.algorithms_of(config.families or None if families is None else families)
    for where, each in used.items():
        if each.advantage.estimator == "gae" and config.critic is None:
            raise ValueError(
                f"{where}.advantage.estimator is 'gae', which needs a critic, but training.critic is null; "
                "set training.critic to {} for its defaults, or choose another estimator"
            )
        _check_weights_count_once(where, each.loss, each.corrections)
        check_nothing_ignored(where, each)
        if each.advantage.estimator == "gdpo" and each.kl.coefficient and each.kl.place == "reward":
            raise ValueError(
                f"{where}.kl.place is 'reward', but {where}.advantage.estimator is 'gdpo', which weighs the components "
                "of a reward: the penalty is none; set kl.place to 'loss', or choose another estimator"
            )
    # What somebody must read may be read by the run's own algorithm, unless all families are known to have theirs.
    readers = config.algorithms_of(families).values()
    estimators = {each.advantage.estimator for each in readers}
    if config.critic is not None and all(name in ESTIMATORS and name != "gae" for name in estimators):
        raise ValueError(
            f"training.critic is given, but no estimator reads it (they are {sorted(estimators)}); "
            "set training.advantage.estimator to 'gae', or leave training.critic out"
        )
    is_fixed_length = config.normaliser == "fixed_length"
    if is_fixed_length and config.fixed_length_tokens is None:
        raise ValueError(
            "training.normaliser is 'fixed_length', but training.fixed_length_tokens is null; give the constant, "
            "for instance the most tokens that a row may sample"
        )
    if config.fixed_length_tokens is not None and config.normaliser in NORMALISERS and not is_fixed_length:
        raise ValueError(
            f"training.fixed_length_tokens is {config.fixed_length_tokens}, which training.normaliser "
            f"{config.normaliser!r} does not read; set the normaliser to 'fixed_length', or leave it out"
        )
    directory = None if config.reference is None else config.reference.model_directory
    if directory is not None and not any(each.may_need_reference for each in readers):
        raise ValueError(
            f"training.reference.model_directory is {directory!r}, but training.kl.coefficient is 0, so nothing reads "
            "a reference; set the coefficient, or leave training.reference out"
        )
    check_streaming(config, used)


def check_own_parts(config: TrainingConfig, families: Collection[str]) -> None:
    """Import and build the estimators, losses, corrections and the normaliser that are a user's own, as the learner
    will. Built-in ones need no check, and are not imported (they bring torch).

    Raises ValueError, naming the setting, for what cannot be imported, built or used.
    """
    config = config.for_families(families)
    if config.backend != "torch":
        return
    if ":" in config.normaliser:
        from tasks.training.normalisers import build_normaliser

        build_normaliser(config)
    sections = config.algorithms_of(families).values()
    names = [name for each in sections for name in (each.advantage.estimator, each.loss.name)]
    names += [correction.name for each in sections for correction in each.corrections]
    if any(":" in name for name in names):
        from tasks.training.algorithms import Algorithms

        Algorithms(config)


def _check_weights_count_once(where: str, loss: LossConfig, corrections: tuple[CorrectionConfig, ...]) -> None:
    """A weight proximal / behaviour beside a ratio that already divides by the behaviour policy counts it twice."""
    weighs = [each.name for each in corrections if each.name in WEIGHTING_CORRECTIONS]
    if len(weighs) > 1:
        raise ValueError(
            f"{where}.corrections has {' and '.join(map(repr, weighs))}, each of which weighs by proximal / behaviour: "
            "the product would be its square; keep one, or use masks (ratio_mask) beside it"
        )
    counted = loss.name in RATIO_LOSSES and (loss.ratio_to == "behaviour" or loss.name == "decoupled")
    if weighs and counted:
        remedy = (
            "leave the correction out (decoupled has this weight in it)"
            if loss.name == "decoupled"
            else "set its loss.ratio_to to 'proximal', or use a mask (ratio_mask) instead"
        )
        raise ValueError(
            f"{where}.corrections has {weighs[0]!r}, a weight proximal / behaviour, but loss {loss.name!r} with "
            f"ratio_to {loss.ratio_to!r} already weighs by the behaviour policy; {remedy}"
        )
