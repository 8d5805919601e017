"""`locks-sglang eval`: quality measured on real served runs."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..benchmarks.kernels import whole
from ..config import TAIL_CORRECTIONS, ConfigError
from ..models import ModelError
from . import SELECTORS, WITHOUT_TAIL

DEFAULT_MAP = Path("attention_map.json")
RULER_TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")


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
    text = "divergence of next-token distributions from dense decoding, after the same tokens"
    of_agreement = commands.add_parser("agreement", help=text, description=f"Measure the {text}, by method and budget.")
    _add_run_options(of_agreement)
    _add_agreement_options(of_agreement)
    text = "six RULER tasks through a running server, with dense attention and with selections of pages"
    of_ruler = commands.add_parser("ruler", help=text, description=f"Ask {text}; exit code 1 where quality is missed.")
    _add_server_options(of_ruler)
    _add_ruler_options(of_ruler)
    for name, sets in (("longbench", "LongBench-v1"), ("math", "MATH-500 and AIME")):
        text = f"{sets} through a running server, by lm-eval or from a local file of the same form"
        of_public = commands.add_parser(name, help=text, description=f"Ask {text}.")
        _add_server_options(of_public)
        _add_public_options(of_public, name)
    arguments = sys.argv[1:] if argv is None else list(argv)
    given = parser.parse_args(arguments)
    if given.evaluation == "ruler" and given.resume and given.json is None:
        of_ruler.error("--resume needs --json FILE, the file of the run that was cut off")
    given.command = shlex.join(["locks-sglang", "eval", *arguments])

    run, refusals = _evaluation(given.evaluation)
    try:
        return run(given)
    except refusals as error:
        print(f"locks-sglang eval {given.evaluation}: {error}", file=sys.stderr)
        return 2


def _evaluation(name: str) -> tuple[Callable[[argparse.Namespace], int], tuple[type[Exception], ...]]:
    """What runs an evaluation, and the errors with which it says that it could not run."""
    # Imported only now, so that --help needs neither torch nor SGLang, and those that ask a server need no SGLang.
    from .text import TextError

    if name in ("mass", "output", "map", "agreement"):
        from . import agreement, attention_map, mass, output
        from .capture import CaptureError

        runs = {"mass": mass.run, "output": output.run, "map": attention_map.run, "agreement": agreement.run}
        return runs[name], (ConfigError, ModelError, TextError, CaptureError)
    from .client import ClientError
    from .public import PublicError

    if name == "ruler":
        from . import ruler
        from .ruler_tasks import TaskError

        return ruler.run, (ConfigError, TextError, ClientError, TaskError)
    from . import longbench, math_problems

    return (longbench.run if name == "longbench" else math_problems.run), (ClientError, PublicError)


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


def _add_agreement_options(parser: argparse.ArgumentParser) -> None:
    """Options of what decodes forced tokens."""
    parser.add_argument(
        "--selectors",
        type=_selectors,
        default=[("oracle", None), ("locks", None), *(("locks", tail) for tail in TAIL_CORRECTIONS)],
        metavar="NAME,...",
        help=f"{','.join(SELECTORS)}; /off, /qmu or /flat behind a name is a tail correction (default: oracle,locks and locks "
        "with every tail correction)",
    )
    parser.add_argument(
        "--budgets",
        type=_budgets,
        default=[256, 512, 1024, 2048],
        metavar="TOKENS,...",
        help="tokens that a KV head may read (default: 256,512,1024,2048)",
    )
    parser.add_argument(
        "--positions",
        type=whole(1, 65536),
        default=1000,
        metavar="N",
        help="last tokens of the text that are forced (%(default)s)",
    )
    parser.add_argument("--rows", type=whole(1, 64), default=8, metavar="N", help="that are decoded together (%(default)s)")
    parser.add_argument(
        "--answer",
        type=whole(0, 65536),
        default=0,
        metavar="N",
        help="force the model's own greedy answers of N tokens instead, "
        "to as many prompts, into which the text is cut, as there are rows",
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16", "auto"),
        help="of model and cache; float32 keeps rounding out of the comparison (default %(default)s)",
    )


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    """Options of every evaluation that asks a running server."""
    parser.add_argument("url", metavar="URL", help="address of the server, e.g. http://127.0.0.1:30000")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="of the model, where the server's own path does not lead to it here"
    )
    parser.add_argument("--concurrency", type=whole(1, 1024), default=64, metavar="N", help="requests at a time (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything drawn by lot (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results, with all that led to them")


def _add_ruler_options(parser: argparse.ArgumentParser) -> None:
    """Options of the RULER tasks. The server is switched between settings, so it must be one for evaluation."""
    parser.epilog = (
        "The server must have been started with --attention-backend locks --locks-evaluation on --locks-min-context-tokens 0, "
        "and on a GPU with --disable-cuda-graph, and must have no other client meanwhile."
    )
    parser.add_argument(
        "--tasks",
        type=_names(RULER_TASKS),
        default=list(RULER_TASKS),
        metavar="NAME,...",
        help=f"{','.join(RULER_TASKS)} (all)",
    )
    parser.add_argument(
        "--lengths",
        type=_lengths,
        default=[4096, 8192],
        metavar="TOKENS,...",
        help="of prompt and answer together (default: 4096,8192)",
    )
    parser.add_argument(
        "--samples", type=whole(1, 100_000), default=100, metavar="N", help="of a task and length (%(default)s)"
    )
    parser.add_argument(
        "--budgets", type=_budgets, default=[512, 2048], metavar="TOKENS,...", help="of every selector (default: 512,2048)"
    )
    parser.add_argument(
        "--selectors",
        type=_selectors,
        default=[("dense", None), ("locks", None), ("oracle", None)],
        metavar="NAME,...",
        help=f"{','.join(SELECTORS)}, of which dense is always asked; /off, /qmu or /flat behind a name is a tail "
        "correction (default: locks,oracle)",
    )
    parser.add_argument(
        "--text",
        default="prose",
        metavar="TEXT",
        help="that keys and listed words are from: prose, code or a UTF-8 file (default %(default)s)",
    )
    parser.add_argument(
        "--order-seed", type=int, metavar="N", help="draw the order of settings and questions (default: as listed)"
    )
    parser.add_argument("--time-limit", type=whole(1, 10**6), metavar="SECONDS", help="ask nothing more after this time")
    parser.add_argument("--resume", action="store_true", help="go on where the run that wrote --json FILE was cut off")


def _add_public_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Options of public sets."""
    parser.add_argument(
        "--file", type=Path, metavar="FILE", help="JSON lines of the set's form, asked and scored here, without lm-eval"
    )
    parser.add_argument(
        "--samples", type=whole(1, 100_000), metavar="N", help="only the first N (of every task, or of the file)"
    )
    parser.add_argument("--thinking", action="store_true", help="let a model that can think do so before it answers")
    parser.add_argument("--lm-eval", default="lm_eval", metavar="COMMAND", help="lm-eval's command (%(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build") / f"eval-{name}",
        metavar="FOLDER",
        help="for lm-eval's own files (%(default)s)",
    )
    text = "most of an answer (default: as the task says)" if name == "longbench" else "most of an answer (%(default)s)"
    default = None if name == "longbench" else 4096
    parser.add_argument("--new-tokens", type=whole(1, 1 << 20), default=default, metavar="N", help=text)


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Type of an argument: some of the known names, each once."""

    def parse(value: str) -> list[str]:
        names = value.split(",")
        unknown = [name for name in names if name not in known]
        if unknown or len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"{value!r} is not a list of some of {','.join(known)}, each once")
        return names

    return parse


def _selectors(value: str) -> list[tuple[str, str | None]]:
    """Selectors, each alone or with a tail correction behind a slash."""
    found: list[tuple[str, str | None]] = []
    for name in value.split(","):
        selector, slash, tail = name.partition("/")
        if selector not in SELECTORS or (slash and (tail not in TAIL_CORRECTIONS or selector in WITHOUT_TAIL)):
            raise argparse.ArgumentTypeError(
                f"{name!r} is none of {','.join(SELECTORS)}, nor one but {', '.join(WITHOUT_TAIL)} with "
                f"/{', /'.join(TAIL_CORRECTIONS)} behind it"
            )
        found.append((selector, tail or None))
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{value!r} names one twice")
    return found


def _lengths(value: str) -> list[int]:
    """Ascending lengths from comma-separated numbers."""
    return sorted({whole(64, 1 << 22)(part) for part in value.split(",")})


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
