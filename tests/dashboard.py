"""What the Grafana dashboard asks for, and whether series answer."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from promql import Selector, selectors

FILE = Path(__file__).parents[1] / "grafana" / "locks.json"


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return dict(json.loads(FILE.read_text()))


def wanted() -> list[Selector]:
    """Selectors of every expression, with the labels that its legend shows, and of the variables' queries."""
    found = []
    for panel in dashboard()["panels"]:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            shown = frozenset(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            read = selectors(target["expr"])
            assert read, target["expr"]
            found += [Selector(one.metric, one.labels | shown, one.ranged) for one in read]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", variable["query"]["query"])
            assert match is not None, variable["query"]
            found.append(Selector(match[1], frozenset([match[2]]), False))
    return found


def unanswered(series: Mapping[str, Sequence[Mapping[str, str]]]) -> list[Selector]:
    """Selectors that none of these series fits: the labels of each, by metric."""
    return [one for one in wanted() if not any(one.labels <= set(labels) for labels in series.get(one.metric, ()))]
