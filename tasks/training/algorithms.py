"""Which algorithm applies to which rows: the run's, or that of a row's family. The rest of the learner asks this file
and never a configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tasks.training.advantages.base import AdvantageEstimator, AdvantageInputs, Advantages
from tasks.training.advantages.whitening import whiten
from tasks.training.algorithm_config import AdvantageConfig, AlgorithmSections, CorrectionConfig, KLConfig
from tasks.training.config import TrainingConfig
from tasks.training.corrections.base import Correction
from tasks.training.losses.base import Loss
from tasks.training.plugins import CORRECTIONS, ESTIMATORS, LOSSES, build


@dataclass(frozen=True)
class Algorithm:
    """What is done with the rows of some families."""

    advantage: AdvantageConfig
    estimator: AdvantageEstimator
    loss: Loss
    corrections: tuple[Correction, ...]
    correction_configs: tuple[CorrectionConfig, ...]
    kl: KLConfig
    entropy_coefficient: float

    @property
    def correction_names(self) -> tuple[str, ...]:
        return tuple(each.name.rpartition(":")[2] for each in self.correction_configs)

    def staleness_bound(self, max_staleness: int | None) -> int | None:
        """Versions beyond which no token counts: the run's bound, or that of a ``staleness_mask`` where it is lower."""
        bounds = [each.max_staleness for each in self.correction_configs if each.name == "staleness_mask"]
        return min(bounds if max_staleness is None else [*bounds, max_staleness], default=None)

    @property
    def needs_proximal(self) -> bool:
        """Log-probabilities under the weights with which the update starts."""
        return self.loss.needs_proximal or any(correction.needs_proximal for correction in self.corrections)

    @property
    def needs_reference(self) -> bool:
        return (
            self.kl.coefficient > 0 or _asks(self.loss, "needs_reference") or _asks(self.estimator, "needs_reference")
        )

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.entropy_coefficient > 0 or _asks(self.loss, "needs_entropy_gradient")

    @property
    def needs_critic(self) -> bool:
        return _asks(self.estimator, "needs_critic")

    @property
    def needs_components(self) -> bool:
        return _asks(self.estimator, "needs_components")


class Algorithms:
    """All algorithms of a run, built from its configuration. Families without a section of their own share one.

    Raises:
        ValueError: when a plug-in cannot be found, cannot be streamed though ``training.streamed`` says so, or needs a
            critic that the run lacks.
    """

    def __init__(self, config: TrainingConfig) -> None:
        built: dict[str, Algorithm] = {}
        estimators: dict[str, AdvantageEstimator] = {}

        def estimator_of(where: str, advantage: AdvantageConfig) -> AdvantageEstimator:
            # Statistics over the batch are of all families with this section, whatever else they do otherwise.
            key = repr(advantage)
            if key not in estimators:
                setting = f"{where}.advantage.estimator"
                estimators[key] = build(setting, advantage.estimator, ESTIMATORS, advantage, "estimate")
            return estimators[key]

        def built_once(where: str, sections: AlgorithmSections) -> Algorithm:
            # Families of one configuration share one algorithm, so that a correction sees their tokens together.
            key = repr(sections)
            if key not in built:
                advantage, loss, corrections, kl = sections
                built[key] = Algorithm(
                    advantage,
                    estimator_of(where, advantage),
                    build(f"{where}.loss.name", loss.name, LOSSES, loss, "needs_proximal", "token_losses"),
                    tuple(
                        build(f"{where}.corrections", each.name, CORRECTIONS, each, "needs_proximal", "weights")
                        for each in corrections
                    ),
                    corrections,
                    kl,
                    loss.entropy_coefficient,
                )
                if config.streamed:
                    _check_streams(where, built[key])
            return built[key]

        of = {where: built_once(where, sections) for where, sections in config.algorithms_of().items()}
        self._default = of["training"]
        self._of_family = {name: of[f"training.families.{name}"] for name in config.families}
        self.all: tuple[Algorithm, ...] = tuple(built.values())
        for algorithm in self.all:
            if algorithm.needs_critic and config.critic is None:
                raise ValueError(
                    f"training.advantage.estimator {algorithm.advantage.estimator!r} needs a critic, but "
                    "training.critic is null; set training.critic to {} for its defaults"
                )

    def of(self, family: str) -> Algorithm:
        return self._of_family.get(family, self._default)

    def by_algorithm(self, families: Sequence[str]) -> list[tuple[Algorithm, list[int]]]:
        """The places of ``families`` that each algorithm is for, in order of first appearance."""
        places: dict[int, tuple[Algorithm, list[int]]] = {}
        for place, family in enumerate(families):
            algorithm = self.of(family)
            places.setdefault(id(algorithm), (algorithm, []))[1].append(place)
        return list(places.values())

    def _by_estimator(self, families: Sequence[str]) -> list[tuple[AdvantageConfig, AdvantageEstimator, list[int]]]:
        """The places of ``families`` that each estimator is for, ascending."""
        places: dict[int, tuple[AdvantageConfig, AdvantageEstimator, list[int]]] = {}
        for place, family in enumerate(families):
            algorithm = self.of(family)
            entry = (algorithm.advantage, algorithm.estimator, [])
            places.setdefault(id(algorithm.estimator), entry)[2].append(place)
        return list(places.values())

    @property
    def needs_components(self) -> bool:
        return any(algorithm.needs_components for algorithm in self.all)

    @property
    def needs_critic(self) -> bool:
        return any(algorithm.needs_critic for algorithm in self.all)

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Each row's advantages by the estimator of its family, then the normalisation over tokens. Families that share
        a ``training.advantage`` share both, though their losses may differ."""
        rows = inputs.rows
        values: list[np.ndarray] = [np.zeros(len(row.token_ids), np.float32) for row in rows]
        returns: list[np.ndarray | None] = [None] * len(rows)
        excluded: list[str | None] = [None] * len(rows)
        num_groups: Counter[str] = Counter()
        num_dead: Counter[str] = Counter()
        num_unscored = num_rollouts = 0
        for config, estimator, places in self._by_estimator([row.family for row in rows]):
            part = _take(inputs, places)
            estimated = estimator.estimate(part)
            _check_advantages(config.estimator, part, estimated)
            normalised = _normalise(part, estimated, config.normalisation)
            for number, place in enumerate(places):
                values[place] = normalised[number]
                excluded[place] = estimated.excluded_R[number]
                if estimated.returns_RT is not None:
                    returns[place] = estimated.returns_RT[number]
            num_groups.update(estimated.num_groups)
            num_dead.update(estimated.num_dead_groups)
            num_unscored += estimated.num_unscored
            num_rollouts += estimated.num_rollouts
        return Advantages(
            values_RT=values,
            excluded_R=excluded,
            num_groups=dict(num_groups),
            num_dead_groups=dict(num_dead),
            num_unscored=num_unscored,
            num_rollouts=num_rollouts,
            returns_RT=returns if any(each is not None for each in returns) else None,
        )


def _check_advantages(name: str, inputs: AdvantageInputs, advantages: Advantages) -> None:
    """One finite number for each token: numpy would spread anything else over the batch in silence."""
    expected = [(len(row.token_ids),) for row in inputs.rows]
    shapes = [np.shape(values) for values in advantages.values_RT]
    if shapes != expected or len(advantages.excluded_R) != len(expected):
        wrong = next((pair for pair in zip(shapes, expected, strict=False) if pair[0] != pair[1]), None)
        told = f"an array of shape {wrong[0]} for a row of shape {wrong[1]}" if wrong else f"{len(shapes)} arrays"
        raise ValueError(
            f"estimator {name!r} gave {told}; it must give, for each of {len(expected)} rows, one number a token and "
            "why it is excluded, or None"
        )
    for row, values, mask, cause in zip(
        inputs.rows, advantages.values_RT, inputs.trainable_RT, advantages.excluded_R, strict=True
    ):
        if cause is None and not np.isfinite(values[mask]).all():
            raise ValueError(
                f"estimator {name!r} gave an advantage that is NaN or infinite for trajectory {row.trajectory_id} "
                f"({row.family}), whose reward is {row.reward}"
            )


def _normalise(inputs: AdvantageInputs, advantages: Advantages, normalisation: str) -> list[np.ndarray]:
    """Over the tokens that are trained: of all rows (``batch``), or of each family by itself (``family``: task
    advantage normalisation, AgentRL, arXiv 2510.04206, section 3)."""
    if normalisation == "none":
        return advantages.values_RT
    trained = [mask & (cause is None) for mask, cause in zip(inputs.trainable_RT, advantages.excluded_R, strict=True)]
    if normalisation == "batch":
        return whiten(advantages.values_RT, trained)
    values = list(advantages.values_RT)
    families = [row.family for row in inputs.rows]
    for family in dict.fromkeys(families):
        places = [place for place, other in enumerate(families) if other == family]
        whitened = whiten([values[place] for place in places], [trained[place] for place in places])
        for place, row in zip(places, whitened, strict=True):
            values[place] = row
    return values


def _take(inputs: AdvantageInputs, places: Sequence[int]) -> AdvantageInputs:
    if len(places) == len(inputs.rows):
        return inputs
    return AdvantageInputs(
        rows=[inputs.rows[place] for place in places],
        trainable_RT=[inputs.trainable_RT[place] for place in places],
        counted_R=[inputs.counted_R[place] for place in places],
        penalty_RT=None if inputs.penalty_RT is None else [inputs.penalty_RT[place] for place in places],
        values_RT=None if inputs.values_RT is None else [inputs.values_RT[place] for place in places],
    )


def _asks(part: object, what: str) -> bool:
    return bool(getattr(part, what, False))


def _check_streams(where: str, algorithm: Algorithm) -> None:
    """A plug-in says itself whether it looks at groups (a correction: at rows) one by one."""
    parts: dict[str, tuple[str, object]] = {}
    if algorithm.advantage.estimator not in ESTIMATORS:
        parts[f"{where}.advantage.estimator"] = (algorithm.advantage.estimator, algorithm.estimator)
    for config, correction in zip(algorithm.correction_configs, algorithm.corrections, strict=True):
        if config.name not in CORRECTIONS:
            parts[f"{where}.corrections"] = (config.name, correction)
    for setting, (name, part) in parts.items():
        if not _asks(part, "streams"):
            raise ValueError(
                f"training.streamed is true, but {setting} is {name!r}, which does not say that it needs no more than "
                "one group at a time; give its class streams = True if that is so, or set training.streamed to false"
            )
