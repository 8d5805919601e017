"""The `locks-sglang` command. The module of a subcommand is imported only when it runs, so that `doctor` works in a broken
environment."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from . import __version__

COMMANDS = {
    "doctor": (".doctor", "check this installation; names the fix for every problem"),
    "demo": (".demo", "serve a small model with locks and hold a chat over a long document"),
    "eval": (".evaluation.cli", "measure the method on real keys"),
    "bench": (".benchmarks.cli", "time every kernel, whole models' decode, or the real server"),
    "report": (".report.cli", "draw one HTML page from results: speed, quality, memory, where a request looked"),
    "audit": (".audit", "have a running server check its summaries against their pages"),
    "state": (".state", "print the settings and counters of a running server"),
    "run": (".run", "run a module, e.g. sglang.benchmark.one_batch, with SGLang's plugins loaded"),
}
DEMO_PACKAGES = ("openai", "rich", "tokenizers")
"""What `demo` imports beyond SGLang's own needs; the extra of that name brings them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: the arguments after the program's name; those of the process when None.

    Returns:
        The exit code.
    """
    lines = [f"  {name:<8}{text}" for name, (_, text) in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="locks-sglang",
        description="LOCKS for SGLang: page-local compact key summaries for long-context decoding.",
        epilog="\n".join(["commands:", *lines, "", "`locks-sglang COMMAND --help` lists the options of a command."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"locks-sglang {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=", ".join(COMMANDS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the command")
    given = parser.parse_args(argv)
    module, _ = COMMANDS[given.command]
    try:
        command = importlib.import_module(module, __package__)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if given.command != "demo" or package not in DEMO_PACKAGES:
            raise
        print(f"locks-sglang demo needs the package {package}: pip install 'locks-sglang[demo]'", file=sys.stderr)
        return 2
    return int(command.main(given.arguments) or 0)
