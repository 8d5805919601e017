"""A parser for the part of PromQL that the dashboard uses; what it does not know is an error."""

import re
from dataclasses import dataclass, field

FUNCTIONS = ("rate", "histogram_quantile")
AGGREGATIONS = ("sum", "avg", "max")
OPERATORS = ("+", "-", "*", "/")

_TOKEN = re.compile(r'\s*(?:([A-Za-z_:][\w:]*)|(\d+(?:\.\d+)?)|("[^"]*")|(\[\$?\w+\])|(=~|!=|!~|[-+*/=(){},]))')


class PromqlError(ValueError):
    """An expression that this parser does not know."""


@dataclass(frozen=True)
class Selector:
    """Series that an expression reads: their metric, the labels that match or group them, and whether over a range."""

    metric: str
    labels: frozenset[str]
    ranged: bool


@dataclass
class _Parser:
    tokens: list[str]
    found: list[Selector] = field(default_factory=list)

    def take(self, *wanted: str) -> str:
        token = self.tokens.pop(0)
        if wanted and token not in wanted:
            raise PromqlError(f"{token!r} where one of {wanted} should be")
        return token

    def expression(self, ranged: bool = False) -> None:
        """Operands with operators between them; `ranged`: the operand must have a range, and no other may."""
        self.operand(ranged)
        while self.tokens[0] in OPERATORS:
            self.take()
            self.operand(False)

    def operand(self, ranged: bool) -> None:
        token = self.take()
        if token == "(":
            self.expression()
            self.take(")")
        elif token in AGGREGATIONS:
            first, labels = len(self.found), self.labels() if self.tokens[0] == "by" else []
            self.take("(")
            self.expression()
            self.take(")")
            self.found[first:] = [Selector(s.metric, s.labels | set(labels), s.ranged) for s in self.found[first:]]
        elif token in FUNCTIONS:
            self.take("(")
            if token == "histogram_quantile":
                float(self.take())
                self.take(",")
            self.expression(ranged=token == "rate")
            self.take(")")
        elif ":" in token:
            self.selector(token, ranged)
        else:
            raise PromqlError(f"{token!r} is no metric, function or aggregation")

    def labels(self) -> list[str]:
        self.take("by")
        self.take("(")
        names = [self.take()]
        while self.take(",", ")") == ",":
            names.append(self.take())
        return names

    def selector(self, metric: str, ranged: bool) -> None:
        labels = []
        if self.tokens[0] == "{":
            self.take()
            while True:
                labels.append(self.take())
                self.take("=", "=~", "!=", "!~")
                if not self.take().startswith('"'):
                    raise PromqlError(f"a matcher of {metric} without a value")
                if self.take(",", "}") == "}":
                    break
        has_range = self.tokens[0].startswith("[")
        if has_range:
            self.take()
        if has_range != ranged:
            raise PromqlError(f"{metric} {'with' if has_range else 'without'} a range")
        self.found.append(Selector(metric, frozenset(labels), ranged))


def selectors(expression: str) -> list[Selector]:
    """What an expression reads.

    Raises:
        PromqlError: not of the language above.
    """
    tokens, at = [], 0
    while at < len(expression.rstrip()):
        match = _TOKEN.match(expression, at)
        if match is None:
            raise PromqlError(f"{expression[at:]!r} begins with no token")
        tokens.append(next(group for group in match.groups() if group is not None))
        at = match.end()
    parser = _Parser([*tokens, "end"])
    try:
        parser.expression()
        parser.take("end")
    except (IndexError, ValueError) as error:
        raise PromqlError(f"{expression}: {error}") from None
    return parser.found
