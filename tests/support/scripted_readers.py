"""Move classifiers whose answers a test writes."""

from collections.abc import Callable

from classroom_rl.judges.readings import Exchange, Trust

TRUST = Trust(0.5, (0.4, 0.6), 0.25, 100, 20, "a set", "classifier")


class ScriptedReaders:
    """A label holds where its function says so. `asked` keeps what was asked."""

    version = "readers.scripted"

    def __init__(self, **rules: Callable[[Exchange], bool]):
        self.rules = rules
        self.asked: list[tuple[str, Exchange]] = []
        self.trust = dict.fromkeys(rules, TRUST)

    def reads(self, label: str, exchange: Exchange) -> bool:
        self.asked.append((label, exchange))
        return self.rules[label](exchange)


def always(exchange: Exchange) -> bool:
    return True


def never(exchange: Exchange) -> bool:
    return False


def has_question_mark(exchange: Exchange) -> bool:
    return "?" in exchange.message
