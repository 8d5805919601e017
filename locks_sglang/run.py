"""`locks-sglang run MODULE ARGS...`: a module as `python -m` runs it, with SGLang's plugins loaded first.

SGLang's benchmark modules parse `--attention-backend` before they load plugins, so that `locks` is not a choice there yet.
"""

import argparse
import importlib.util
import runpy
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run the module named by `argv[0]` as `__main__`, with the rest of `argv` as its arguments."""
    parser = argparse.ArgumentParser(prog="locks-sglang run", description="Run a module with SGLang's plugins loaded.")
    parser.add_argument("module", metavar="MODULE", help="e.g. sglang.benchmark.one_batch")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the module")
    given = parser.parse_args(argv)
    try:
        from sglang.srt.plugins import load_plugins
    except ImportError as error:
        from .packages import missing_package

        what, fix = missing_package(error)
        parser.exit(1, f"locks-sglang run: {what}. {fix}\n")
    if not _exists(given.module):
        parser.error(f"there is no module {given.module}")
    load_plugins()
    sys.argv = [given.module, *given.arguments]
    runpy.run_module(given.module, run_name="__main__", alter_sys=True)
    return 0


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if not module.startswith(f"{error.name}."):
            raise
        return False
