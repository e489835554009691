"""How a round drafts: the shape of the draft tree. Plain decoding and chains are trees as well.

    plain          no draft tokens
    chain:K        one path of K draft tokens; the same as tree:Kx1x(K+1)
    tree:DxKxN     EAGLE-2's dynamic tree: D levels, the K likeliest continuations of each of the K best nodes of a
                   level, of all of which the N - 1 with the highest cumulative probability are verified (and the root)
    paths          a static tree, from Python: a list of paths, each a tuple of ranks from the root. (0, 1) is the
                   second likeliest continuation of the likeliest one; every prefix of a path must be in the list too

Candidates are numbered level by level, those of one expanded node ("beam") side by side in the order of their rank.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eagle3_jax.errors import UserError

MAX_DEPTH = 32
Path = tuple[int, ...]


@dataclass(frozen=True)
class Strategy:
    """A tree shape; hashable, so that it can be static in a compiled round.

    depth: most draft tokens on a path (0: plain). top_k: continuations drafted a node. nodes: tokens verified in a
    round, the root (pending token) included. paths: of a static tree. sampled: draft tokens are drawn from the draft's
    distribution and verified against it, instead of being the draft's likeliest ones.
    """

    depth: int
    top_k: int = 1
    nodes: int = 1
    paths: tuple[Path, ...] | None = None
    sampled: bool = False

    @property
    def text(self) -> str:
        """As `parse_strategy` takes it; of a static tree its paths."""
        if not self.depth:
            return "plain"
        if self.is_chain:
            return f"chain:{self.depth}"
        return f"tree:{self.depth}x{self.top_k}x{self.nodes}" if self.paths is None else str(list(self.paths))

    @property
    def is_chain(self) -> bool:
        """Each node has at most one child, so that nodes lie in the cache as the tokens of a text would."""
        return self.top_k == 1

    @property
    def is_static(self) -> bool:
        """Which candidates are expanded and verified does not depend on the draft's probabilities."""
        return self.is_chain or self.paths is not None

    @property
    def beams(self) -> tuple[tuple[int, ...], ...]:
        """Of a static tree: for each level but the last, the candidates of that level that are expanded."""
        levels = self._expanded()
        return tuple(self._numbers(above, here) for above, here in zip(levels, levels[1:], strict=False))

    @property
    def kept(self) -> tuple[int, ...]:
        """Of a static tree: the candidates that are verified, numbered over all levels."""
        numbers, offset = [], 0
        for level, above in enumerate(self._expanded(), start=1):
            here = [path for path in self._paths() if len(path) == level]
            numbers += [offset + number for number in self._numbers(above, here)]
            offset += len(above) * self.top_k
        return tuple(numbers)

    @property
    def parents(self) -> tuple[int, ...]:
        """Of a static tree: the parent of each node, nodes numbered as verified (0 is the root and its own parent)."""
        nodes: list[Path] = [()]
        for level, above in enumerate(self._expanded(), start=1):
            here = {self._numbers(above, [path])[0]: path for path in self._paths() if len(path) == level}
            nodes += [here[number] for number in sorted(here)]
        return tuple(nodes.index(path[:-1]) for path in nodes)

    def beam_count(self, level: int) -> int:
        """Nodes of a level (1..depth-1) that are expanded, which is what the draft reads in one step."""
        return len(self.beams[level - 1]) if self.is_static else self.top_k

    @property
    def drafted_rows(self) -> int:
        """Entries that drafting writes to the draft's cache, beyond the committed tokens."""
        return sum(self.beam_count(level) for level in range(1, self.depth))

    def _paths(self) -> tuple[Path, ...]:
        return tuple((0,) * d for d in range(1, self.depth + 1)) if self.paths is None else self.paths

    def _expanded(self) -> list[list[Path]]:
        """Paths that have children, for levels 0..depth-1."""
        inner = {path[:-1] for path in self._paths()}
        return [sorted(path for path in inner if len(path) == level) for level in range(self.depth)]

    def _numbers(self, above: list[Path], paths: list[Path]) -> tuple[int, ...]:
        """Candidate numbers within a level of paths below the expanded paths of the level above."""
        return tuple(sorted(above.index(path[:-1]) * self.top_k + path[-1] for path in paths))


PLAIN = Strategy(depth=0)


def parse_strategy(strategy: str | Iterable[Sequence[int]]) -> Strategy:
    """The strategy of a string or of a list of paths. Raises UserError for anything else.

    "tree:D,K,N" is taken as well, for requests to a server; command lines separate strategies by commas.
    """
    if not isinstance(strategy, str):
        return _static(strategy)
    kind, _, numbers = strategy.partition(":")
    # Nine digits at most: Python refuses to read numbers of thousands.
    fields = [int(n) if re.fullmatch("[0-9]{1,9}", n) else 0 for n in numbers.replace(",", "x").split("x")]
    if strategy == "plain":
        return PLAIN
    if kind == "chain" and len(fields) == 1 and 1 <= fields[0] <= MAX_DEPTH:
        return Strategy(fields[0], 1, fields[0] + 1)
    if kind == "tree" and len(fields) == 3 and min(fields) >= 1 and fields[0] <= MAX_DEPTH and fields[2] >= 2:
        return _dynamic(strategy, *fields)
    raise UserError(
        f"strategy {strategy!r} is not known / use plain, auto, chain:K, or tree:DxKxN: D levels of the K likeliest "
        f"continuations, N verified nodes with the root; K of a chain and D go from 1 to {MAX_DEPTH}, N from 2"
    )


def _dynamic(text: str, depth: int, top_k: int, nodes: int) -> Strategy:
    candidates = top_k + (depth - 1) * top_k**2
    if nodes > candidates + 1:
        raise UserError(
            f"strategy {text!r} asks for {nodes} nodes, {depth} levels of top-{top_k} give at most {candidates + 1} "
            f"with the root / lower N, or raise D or K"
        )
    return Strategy(min(depth, nodes - 1), top_k, nodes)  # fewer nodes than levels: deeper ones cannot be chosen


def _static(paths: Iterable[Sequence[int]]) -> Strategy:
    try:
        listed = [tuple(path) for path in paths]
    except TypeError as error:
        raise UserError(
            f"strategy {paths!r} is neither text nor a list of paths / use plain, chain:K, tree:DxKxN, or paths of a "
            f"static tree like [(0,), (1,), (0, 0)]"
        ) from error
    unique = sorted(set(listed), key=lambda path: (len(path), path))
    if not listed or any(not path or any(type(rank) is not int or rank < 0 for rank in path) for path in listed):
        raise UserError("a static tree is a list of paths of ranks >= 0 / for example [(0,), (1,), (0, 0)]")
    if len(unique) < len(listed):
        raise UserError("a static tree names a path twice / list each path once")
    if orphans := [path for path in unique if len(path) > 1 and path[:-1] not in unique]:
        raise UserError(f"static tree: path {orphans[0]} has no parent / list {orphans[0][:-1]} as well")
    if len(unique[-1]) > MAX_DEPTH:
        raise UserError(f"static tree: path {unique[-1]} is too deep / at most {MAX_DEPTH} ranks")
    top_k = 1 + max(max(path) for path in unique)
    if top_k == 1:
        return Strategy(len(unique), 1, len(unique) + 1)
    return Strategy(len(unique[-1]), top_k, len(unique) + 1, tuple(unique))


def with_sampled_drafts(strategy: Strategy) -> Strategy:
    """The same tree with drafts drawn from the draft's distribution.

    The j-th draw takes the place of the j-th child, so the ranks among the children of a static node are closed up.
    """
    if strategy.paths is None:
        return dataclasses.replace(strategy, sampled=True)
    renamed: dict[Path, Path] = {(): ()}
    children: dict[Path, int] = {}
    for path in strategy.paths:  # parents first
        renamed[path] = (*renamed[path[:-1]], children.setdefault(path[:-1], 0))
        children[path[:-1]] += 1
    return dataclasses.replace(_static([path for path in renamed.values() if path]), sampled=True)
