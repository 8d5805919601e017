"""A child process that holds one real SGLang scheduler and runs functions of `scenarios.py` on it.

SGLang keeps process-wide state, so every configuration needs a process of its own; the tests of one configuration share it.
"""

import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class ScenarioError(AssertionError):
    """A scenario failed in the child; carries its traceback."""


class Worker:
    """Start a scheduler with these server arguments in a child, on CPU in float32 by default; `call` runs functions on it."""

    def __init__(self, model_path: str, environment: dict[str, str] | None = None, **arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, model_path, environment or {}, arguments))
        self._process.start()
        child.close()
        self._receive()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(server, *args)` in the child; raises `ScenarioError` with the child's traceback."""
        self._pipe.send((function, args))
        return self._receive()

    def _receive(self) -> Any:
        try:
            good, value = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise ScenarioError(f"the scheduler process ended with code {self._process.exitcode}") from None
        if not good:
            raise ScenarioError(value)
        return value

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the child."""
        self._process.kill()
        self._process.join()


def end_with_parent() -> None:
    """A child in the middle of a scenario would outlive a test run that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _serve(pipe: Connection, model_path: str, environment: dict[str, str], arguments: dict[str, Any]) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.update(environment, HF_HUB_OFFLINE="1")
    for entry in reversed(environment.get("PYTHONPATH", "").split(os.pathsep)):
        if entry:
            sys.path.insert(0, entry)
    try:
        from locks_sglang.inprocess import InProcessServer

        server = InProcessServer(model_path, **{"device": "cpu", "dtype": "float32", **arguments})
        pipe.send((True, None))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            result = (True, function(server, *args))
        except BaseException:
            result = (False, traceback.format_exc())
        pipe.send(result)
