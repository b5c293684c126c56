from resources.rewards.scorers.registry import ResolvedScorer, resolve_scorer

__all__ = ["ResolvedScorer", "resolve_scorer"]
