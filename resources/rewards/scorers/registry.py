"""From a scorer's name in the configuration to the scorer."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from resources.rewards.base import Score, Scorer, ScoringRequest

BUILT_IN = {
    "environment": "resources.rewards.scorers.environment:EnvironmentScorer",
    "exact_answer": "resources.rewards.scorers.exact_answer:ExactAnswerScorer",
    "unit_tests": "resources.rewards.scorers.unit_tests:UnitTestsScorer",
}


@dataclass(frozen=True, slots=True)
class ResolvedScorer:
    """A scorer under the name by which the configuration knows it.

    The version names the arguments too: a replica that was given other ones refuses the request, instead of judging
    by another rule under the same key.
    """

    name: str
    version: str
    runs: Literal["inline", "pool"]
    scorer: Scorer

    def score(self, request: ScoringRequest) -> Score:
        return self.scorer.score(request)


def resolve_scorer(name: str, arguments: Mapping[str, Any] | None = None) -> ResolvedScorer:
    """The built-in scorer of this name, or the class at ``package.module:Class``, made with ``arguments``.

    Raises ValueError saying what is wrong (unknown name, no such module or class, wrong arguments, not a scorer).
    """
    arguments = dict(arguments or {})
    path = BUILT_IN.get(name, name)
    if ":" not in path:
        raise ValueError(
            f"scorer {name!r} is unknown; allowed: {sorted(BUILT_IN)}, or an import path 'package.module:Class'"
        )
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"scorer {name!r}: module {module_name!r} cannot be imported ({error}); "
            "install its package in every process that scores (environment workers and reward replicas)"
        ) from error
    scorer_class: Any = getattr(module, class_name, None)
    if not callable(scorer_class):
        raise ValueError(f"scorer {name!r}: module {module_name!r} has no class {class_name!r}")
    try:
        scorer: Any = scorer_class(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"scorer {name!r} cannot be made with scorer_arguments {arguments}: {error}") from error
    runs = getattr(scorer, "runs", None)
    if runs not in ("inline", "pool") or not callable(getattr(scorer, "score", None)):
        raise ValueError(
            f"scorer {name!r}: {class_name} is no scorer; it needs name, version, runs ('inline' or 'pool') and "
            "score(request) -> Score (resources.rewards.base.Scorer)"
        )
    version = str(scorer.version)
    if arguments:
        version += "+" + hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()[:8]
    return ResolvedScorer(name, version, runs, scorer)
