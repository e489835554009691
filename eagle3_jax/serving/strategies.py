"""Which strategies an engine has: those compiled at start, and what else a request may name.

A strategy that nothing was compiled for is compiled by its first rounds, while all others wait, and its programs stay
in memory. So there is a bound to how wide one may be, and to how many there are; one whose compilation or first round
fails is not tried again.
"""

from collections.abc import Iterable

from eagle3_jax.draft.draft import Draft
from eagle3_jax.errors import UserError
from eagle3_jax.serving.requests import Request, Settings
from eagle3_jax.speculate.round import UNREAD, cache_room
from eagle3_jax.speculate.strategy import Strategy, parse_strategy

AUTO = "auto"
_MENU = ("chain:1", "chain:2", "chain:3")  # what "auto" chooses from besides plain where nothing is named
_MOST = 16  # compiled at start and named by requests later
_ROOM = 34  # entries of a slot beyond its text, which most strategies can do with


def slot_room(strategies: Iterable[Strategy]) -> int:
    """Entries of a slot beyond its text: what rounds of these strategies need, and of most others."""
    return max(UNREAD, _ROOM, *(cache_room(strategy, batch=1) for strategy in strategies))


class Strategies:
    """known: by their text, those of the start and those named since. at_start: the former, among which "auto" chooses.

    Raises UserError for settings that name a strategy which cannot be.
    """

    def __init__(self, draft: Draft | None, settings: Settings):
        self.known = _at_start(draft, settings)
        self.at_start = frozenset(self.known)
        self.depth = max(strategy.depth for strategy in self.known.values())
        self._draft, self._default = draft, settings.strategy
        self._room = slot_room(self.known.values())
        self._failed: dict[str, str] = {}

    def of(self, request: Request) -> str:
        """The text of the strategy that a request gets, or "auto". Raises UserError for one that it cannot have."""
        name = self._default if request.strategy is None else request.strategy
        strategy = None if name == AUTO else parse_strategy(name)
        if self._draft is None and request.strategy is not None and strategy is not None and strategy.depth:
            raise UserError(f"strategy {name} needs a draft / this server has none: use plain")
        if self._draft is None or request.grammar is not None:
            return "plain"  # a grammar says what may come after a token only when that token is committed
        if strategy is None:
            return AUTO if self.depth else "plain"
        if strategy.text not in self.known:
            self._check_new(strategy)
        return strategy.text

    def add(self, name: str) -> None:
        """A request with this strategy, or "auto", is on its way."""
        if name != AUTO:
            self.known.setdefault(name, parse_strategy(name))

    def give_up(self, name: str, reason: str) -> None:
        """A strategy does not work here: requests that name it are refused from now on."""
        self.known.pop(name, None)
        self._failed[name] = reason

    def _check_new(self, strategy: Strategy) -> None:
        has = f"this server has auto, {', '.join(self.known)}"
        _check_width(strategy, self._draft)
        width = max(cache_room(strategy, batch=1), strategy.top_k)
        if width > self._room:
            raise UserError(
                f"strategy {strategy.text} is {width} tokens wide / a slot here has room for {self._room}: N, K and "
                f"K x (D - 1) + 1 of tree:DxKxN are at most that / {has}"
            )
        if strategy.text in self._failed:
            raise UserError(f"strategy {strategy.text} / {self._failed[strategy.text]} / {has}")
        if len(self.known) >= _MOST:
            raise UserError(f"strategy {strategy.text} is not compiled, and no more than {_MOST} will be / {has}")


def _at_start(draft: Draft | None, settings: Settings) -> dict[str, Strategy]:
    names = settings.strategies if settings.strategy == AUTO else (settings.strategy, *settings.strategies)
    if draft is None:
        names = ()
    elif settings.strategy == AUTO and not names:
        names = _MENU
    shapes = [parse_strategy(name) for name in ("plain", *names) if name != AUTO]
    for shape in shapes:
        _check_width(shape, draft)
    return {shape.text: shape for shape in shapes}


def _check_width(strategy: Strategy, draft: Draft | None) -> None:
    if draft is not None and strategy.top_k > draft.config.draft_vocab_size:
        raise UserError(
            f"strategy {strategy.text} / the draft's vocabulary has {draft.config.draft_vocab_size} tokens / lower K"
        )
