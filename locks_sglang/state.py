"""`locks-sglang state URL`: what `locks` tells of itself on a running server."""

import argparse
import json
import sys
from collections.abc import Sequence

from .admin import KEY_VARIABLE, AdminError, states

TIMEOUT_S = 60.0


def main(argv: Sequence[str]) -> int:
    """Print it.

    Returns:
        0, or 2 where the server could not be asked.
    """
    parser = argparse.ArgumentParser(
        prog="locks-sglang state",
        description="Print, as JSON, what locks tells of itself on a running server: settings, sizes, counters and the last "
        "audit, an entry a scheduler. It is a small part of the server's /server_info. A server with an admin key wants it in "
        f"{KEY_VARIABLE}.",
    )
    parser.add_argument("url", metavar="URL", help="address of the server, e.g. http://127.0.0.1:30000")
    given = parser.parse_args(argv)
    try:
        print(json.dumps(states(given.url.rstrip("/"), TIMEOUT_S), indent=2))
    except AdminError as error:
        print(f"locks-sglang state: {error}", file=sys.stderr)
        return 2
    return 0
