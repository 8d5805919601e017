"""The stateful test: 20,000 steps of a real scheduler, all that happens to pages mixed at random, and after each step every
summary compared with a rebuild. And that it can fail: each mutation of what serves is found out.

What is real and what is not: `lifecycle.py`.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from mutations import MUTATIONS
from starts import model_folder
from worker import Worker

pytestmark = pytest.mark.server


class Configuration(NamedTuple):
    """A scheduler, and how many steps it is to do.

    Attributes:
        graphs: decode steps are planned as graph replays are. environment, arguments: as `Worker` takes them.
    """

    steps: int
    arguments: dict[str, Any]
    environment: dict[str, str] = {}  # noqa: RUF012
    graphs: bool = False


CONFIGURATIONS = {
    "pages of 16, mixed batches": Configuration(
        6700, {"page_size": 16, "max_total_tokens": 768, "chunked_prefill_size": 96, "enable_mixed_chunk": True}
    ),
    "pages of 64, planned as replays": Configuration(
        6700, {"page_size": 64, "max_total_tokens": 1536, "chunked_prefill_size": 64}, graphs=True
    ),
    "pages of 32, without overlap, short ones dense": Configuration(
        6700,
        {
            "page_size": 32,
            "max_total_tokens": 1024,
            "chunked_prefill_size": 64,
            "enable_mixed_chunk": True,
            "disable_overlap_schedule": True,
        },
        {"LOCKS_MIN_CONTEXT_TOKENS": "100"},
    ),
}
COMMON = {
    "attention_backend": "locks",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "context_length": 512,
    "max_running_requests": 6,
    "log_level": "error",
}
MIXED, REPLAYED, ALONE = CONFIGURATIONS

EVERYWHERE = (
    "prefix pages reused",
    "nodes split",
    "duplicates freed",
    "pages evicted",
    "pages written again",
    "decode steps that fill pages of some rows",
    "aborts between chunks",
    "retractions",
    "flushes",
    "audits",
    "pages rebuilt",
    *(f"loads through {way}, {what}" for way in ("HiCache", "load_cpu_copy") for what in ("wanted", "unwanted")),
    "steps before a queued load",
    "steps with pages left to the next plan",
)
"""What must have happened in every configuration, if seldom where pages are large, and often in all; the rest depends on it."""


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    """A scheduler of each configuration; they start together."""
    import lifecycle  # all of SGLang's scheduler, which only these tests need

    folder = model_folder(tmp_path_factory.mktemp("model"), **lifecycle.MODEL)

    def start(name: str) -> Worker:
        configuration = CONFIGURATIONS[name]
        return Worker(folder, configuration.environment, **COMMON, **configuration.arguments)

    with ThreadPoolExecutor() as pool:
        started = dict(zip(CONFIGURATIONS, pool.map(start, CONFIGURATIONS), strict=True))
    yield started
    for worker in started.values():
        worker.close()


def test_summaries_are_right_after_every_step(workers: dict[str, Worker]) -> None:
    """20,000 steps and more, and nothing that was to happen in them never did."""
    import lifecycle

    def live(name: str) -> Counter[str]:
        configuration = CONFIGURATIONS[name]
        return Counter(workers[name].call(lifecycle.live, configuration.steps, configuration.graphs))

    with ThreadPoolExecutor() as pool:
        happened = dict(zip(CONFIGURATIONS, pool.map(live, CONFIGURATIONS), strict=True))
    print(*(f"{name}: {dict(sorted(counts.items()))}" for name, counts in happened.items()), sep="\n")
    assert sum(counts["rules"] for counts in happened.values()) >= 20_000
    for name, counts in happened.items():
        assert counts["rules"] >= CONFIGURATIONS[name].steps
        assert [what for what in EVERYWHERE if not counts[what]] == [], name
    assert [what for what in EVERYWHERE if sum(counts[what] for counts in happened.values()) < 50] == []
    assert happened[MIXED]["surplus steps"] >= 100
    assert happened[REPLAYED]["surplus steps"] >= 100
    for name in (MIXED, ALONE):
        assert happened[name]["mixed rows"] >= 100
        assert happened[name]["chunks that begin inside a page"] >= 10
    assert happened[ALONE]["short rows"] >= 100


@pytest.mark.one_version
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_found_out(mutation: str, workers: dict[str, Worker]) -> None:
    """Within 2,000 steps."""
    import lifecycle

    steps = workers[MIXED].call(lifecycle.hunt, mutation, 2000)
    print(f"{mutation}: found out in step {steps}")
    assert 0 < steps <= 2000
