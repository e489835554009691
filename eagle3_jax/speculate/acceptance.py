"""What rounds accepted, in numbers."""

from collections.abc import Sequence


def tau(accepted: int, rounds: int) -> float:
    """Mean tokens that a verification by the target commits: 1 + accepted drafts / rounds (spec 7.4); 1 without any."""
    return 1.0 + accepted / max(rounds, 1)


def acceptance_by_depth(accepted: Sequence[int], depth: int) -> list[float]:
    """Share of rounds that accepted at least d draft tokens, d = 1..depth."""
    return [round(sum(count >= d for count in accepted) / max(len(accepted), 1), 4) for d in range(1, depth + 1)]
