"""One server process: started, waited for, and stopped with everything that it started."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

PHASES = {
    "Load weight begin": "loading the model",
    "KV Cache is allocated": "preparing memory",
    "Uvicorn running": "warming up",
}
"""What SGLang's log says when a phase of its start begins, and what that phase is."""

SCHEDULER_FAILED = "SIGQUIT received"
"""What the log says then; the server waits a minute more, for dumps of a GPU, before it ends."""

PATIENCE_S = 10.0
"""Seconds that a server gets to end by itself."""


class ServerError(RuntimeError):
    """A server that ended by itself or answered with nothing usable."""


@contextmanager
def serving(
    command: Sequence[str], log: Path, environment: Mapping[str, str], on_phase: Callable[[str], None]
) -> Iterator[str]:
    """Run a server on a free local port until the block ends, however it ends.

    Args:
        command: the server's command, to which `--host` and `--port` are added.
        log: file for what the server prints.
        environment: the server's variables.
        on_phase: told, about twice a second, what the start is doing.

    Yields:
        The server's address, once its `/health` answers.

    Raises:
        ServerError: the server ended before the block did, or its scheduler failed before it was up; with the last lines of
            its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        while not _healthy(url):
            if process.poll() is not None:
                raise ConnectionError("it did not start")
            text = log.read_text(errors="replace")
            if SCHEDULER_FAILED in text:
                raise ServerError(f"the server's scheduler failed; the end of {log}:\n{end_of_log(log)}")
            on_phase(next((phase for mark, phase in reversed(PHASES.items()) if mark in text), "loading SGLang"))
            time.sleep(0.5)
        yield url
    except Exception as error:
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)  # a connection breaks a moment before its process is gone
        if process.returncode is None:
            raise
        raise ServerError(f"the server ended with code {process.returncode}; the end of {log}:\n{end_of_log(log)}") from error
    finally:
        _stop(process)


def end_of_log(log: Path) -> str:
    """The last lines of a log, indented."""
    lines = log.read_text(errors="replace").strip().splitlines()[-15:]
    return "\n".join("  " + line[:240] for line in lines)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Make a terminal that closes or a job that is stopped a KeyboardInterrupt in the block, so that its server ends too.

    What nohup ignores stays ignored.
    """
    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, _interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End a process group: politely, then for certain, also when the wait is interrupted."""
    try:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and _group_lives(process):
            time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _group_lives(process: "subprocess.Popen[bytes]") -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
