"""`locks-sglang report`: one HTML page from results files."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..admin import KEY_VARIABLE, AdminError

WRITTEN = Path("benchmarks/results")
"""Where `bench` and `eval map` write, under the working directory."""
CHECKOUT = Path(__file__).resolve().parents[2] / WRITTEN


def main(argv: Sequence[str]) -> int:
    """Draw the page; 2 where that cannot be done."""
    parser = argparse.ArgumentParser(
        prog="locks-sglang report",
        description="Draw one HTML page, which needs no network, from results files: speed, quality, memory, time to first "
        "token, and where one request looked. `locks-sglang bench` and `locks-sglang eval` make such files.",
    )
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
        metavar="RESULTS",
        help=f"files, or folders with some (default: {WRITTEN} here, else of the checkout)",
    )
    parser.add_argument(
        "--server",
        metavar="URL",
        help=f"also ask a running server for its settings and counters; a server with an admin key wants it in {KEY_VARIABLE}",
    )
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page (%(default)s)")
    given = parser.parse_args(argv)

    # Imported only now, so that --help needs neither torch nor SGLang.
    from .data import ReportError, read
    from .page import render
    from .server import ask, live

    try:
        results = read(given.results or _default())
        section = None
        if given.server:
            url = given.server.rstrip("/")
            section = live(ask(url), url, time.strftime("%Y-%m-%d %H:%M:%S %Z"))
        page = render(results, live=section)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(page, encoding="utf-8")
    except (ReportError, AdminError) as error:
        print(f"locks-sglang report: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"locks-sglang report: --out {given.out} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    rows = sum(map(len, results.rows.values()))
    print(f"{given.out}: {len(page.encode()) / 1024:.0f} KiB, from {rows} rows of results")
    return 0


def _default() -> list[Path]:
    """The folder of results, if there is one; a page without any says how to make them."""
    return [folder for folder in (WRITTEN, CHECKOUT) if folder.is_dir()][:1]
