"""Ask a running server, with its admin key where it has one."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

AUDIT = "locks_audit"
"""Name under which `/set_internal_state` takes the request for an audit; its value is the most pages to look at, 0 for all."""
SWITCH = "locks_evaluation"
"""Name under which it takes the request to choose pages otherwise, with settings beside it: see `evaluation.served`."""
KEY_VARIABLE = "SGLANG_ADMIN_API_KEY"


class AdminError(RuntimeError):
    """A server that cannot be asked, or serves without `locks`."""


def call(url: str, timeout: float, body: dict[str, Any] | None = None) -> Any:
    """The JSON that an address answers: to a GET, or to a POST of `body`.

    Args:
        url: whole address. timeout: seconds.

    Raises:
        AdminError: no address of a server, no answer, or an error for one.
    """
    headers = {"Content-Type": "application/json"}
    key = os.environ.get(KEY_VARIABLE)
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    if not url.startswith(("http://", "https://")):
        raise AdminError(f"{url} is no address of a server: it begins with http:// or https://, as in http://127.0.0.1:30000")
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        hint = f"; put the server's admin key into {KEY_VARIABLE}" if error.code in (401, 403) else ""
        raise AdminError(f"{url} answered {error.code} {error.reason}{hint}") from None
    except (OSError, ValueError) as error:
        raise AdminError(f"{url} gave no answer: {error}") from None


def states(url: str, timeout: float) -> list[dict[str, Any]]:
    """What `locks` tells of itself on a running server, scheduler by scheduler: settings, sizes, counters, the last audit.

    Raises:
        AdminError: the server cannot be asked, or serves without `locks`.
    """
    told = call(f"{url}/server_info", timeout)["internal_states"]
    if not all("locks" in state for state in told):
        raise AdminError("this server does not run --attention-backend locks")
    return [dict(state["locks"]) for state in told]


def change(url: str, timeout: float, asked: Mapping[str, int]) -> bool:
    """Have every scheduler do what requests of ours under `/set_internal_state` ask for; whether all of them did.

    Raises:
        AdminError: the server cannot be asked, or serves without `locks`, to which it would mean nothing.
    """
    states(url, timeout)
    done = call(f"{url}/set_internal_state", timeout, {"server_args": dict(asked)})
    return isinstance(done, list) and all(done)
