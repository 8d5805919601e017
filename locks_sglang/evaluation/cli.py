"""`locks-sglang eval`: quality measured on real served runs."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ..benchmarks.kernels import whole
from ..config import ConfigError
from ..models import ModelError

DEFAULT_MAP = Path("attention_map.json")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one evaluation.

    Args:
        argv: the arguments after `eval`; those of the process when None.

    Returns:
        0; 1 where the result is not what is required; 2 where the evaluation could not run.
    """
    parser = argparse.ArgumentParser(prog="locks-sglang eval", description=__doc__)
    commands = parser.add_subparsers(dest="evaluation", required=True)
    text = "attention mass that page selection captures, by method and budget"
    of_mass = commands.add_parser("mass", help=text, description=f"Measure the {text}, on keys and queries of a served run.")
    _add_run_options(of_mass)
    _add_capture_options(of_mass)
    text = "relative error of the attention output, with and without tail correction"
    of_output = commands.add_parser("output", help=text, description=f"Measure the {text}, on a served run.")
    _add_run_options(of_output)
    _add_capture_options(of_output)
    text = "pages that each KV head reads while one request is answered"
    told = (
        f"Record the {text}, for `locks-sglang report`. The file ({DEFAULT_MAP} without --json) holds the text of the request."
    )
    of_map = commands.add_parser("map", help=text, description=told)
    _add_run_options(of_map)
    _add_map_options(of_map)
    arguments = sys.argv[1:] if argv is None else list(argv)
    given = parser.parse_args(arguments)
    given.command = shlex.join(["locks-sglang", "eval", *arguments])

    # Imported only now, so that --help needs neither torch nor SGLang.
    from . import attention_map, mass, output
    from .capture import CaptureError
    from .text import TextError

    try:
        return {"mass": mass.run, "output": output.run, "map": attention_map.run}[given.evaluation](given)
    except (ConfigError, ModelError, TextError, CaptureError) as error:
        print(f"locks-sglang eval {given.evaluation}: {error}", file=sys.stderr)
        return 2


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    """Options of every evaluation that serves a text."""
    parser.add_argument(
        "--model", metavar="PATH", help="folder of the model (default: SmolLM2-135M-Instruct, fetched into build/models)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is a GPU")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="length of the prompt (default: 8000, or all of a shorter text)"
    )
    parser.add_argument(
        "--text",
        default="prose",
        metavar="TEXT",
        help="prose (CPython's documentation topics), code (CPython's sources) or a UTF-8 file (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything drawn by lot (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results, with all that led to them")


def _add_capture_options(parser: argparse.ArgumentParser) -> None:
    """Options of evaluations that work layer by layer on what was captured of a run."""
    parser.add_argument(
        "--calibration",
        metavar="TEXT",
        help="another text, on which methods that need it are calibrated (default: code for prose, prose for all else)",
    )
    parser.add_argument(
        "--queries", type=whole(2, 64), default=8, metavar="N", help="last positions whose queries are kept (%(default)s)"
    )
    parser.add_argument(
        "--capture", type=Path, metavar="FILE", help="take the served run from this file, or keep it there if there is none"
    )
    parser.add_argument("--layers", type=_layer_step, default=1, metavar="all|every:N", help="layers to measure (default: all)")
    parser.add_argument(
        "--budgets",
        type=_budgets,
        metavar="TOKENS,...",
        help="tokens that a KV head may read (default: 64, 128 and so on to 4096, as far as they are fewer than the prompt's)",
    )


def _add_map_options(parser: argparse.ArgumentParser) -> None:
    """Options of the map of pages, which is worth nothing without its file."""
    parser.add_argument("--question", default="", metavar="TEXT", help="ask this about the text (default: have it continued)")
    parser.add_argument("--new-tokens", type=whole(2, 4096), default=64, metavar="N", help="most of the answer (%(default)s)")
    parser.add_argument("--budget", type=int, metavar="TOKENS", help="that a KV head may read (default: as configured)")
    parser.set_defaults(json=DEFAULT_MAP)


def _layer_step(value: str) -> int:
    """The N of "every:N"; 1 for "all"."""
    step = value.removeprefix("every:")
    if value == "all":
        return 1
    if step == value or not step.isdecimal() or int(step) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is neither all nor every:N with N of 1 or more")
    return int(step)


def _budgets(value: str) -> list[int]:
    """Ascending budgets from comma-separated numbers; their range is the configuration's business."""
    try:
        return sorted({int(part) for part in value.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a list of whole numbers such as 128,512,2048") from None
