"""Files of results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_results(file: Path | None, record: Mapping[str, Any]) -> None:
    """Put a record into a JSON file, if there is to be one. In one step: a run that is killed leaves the file as it was."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_name(f".{file.name}.part")
    scratch.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
    scratch.rename(file)
