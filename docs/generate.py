"""Write the parts of the README that come from code: `python docs/generate.py`. A test fails when they drift."""

import dataclasses
from pathlib import Path

from locks_sglang.config import LocksConfig, flag_name, variable_name
from locks_sglang.support import GPU_VERIFIED, markdown_matrix

README = Path(__file__).resolve().parent.parent / "README.md"


def settings_table() -> str:
    """Every setting with flag, variable, default and range."""
    rows = ["| flag | variable | default | allowed | |", "|---|---|---|---|---|"]
    for spec in dataclasses.fields(LocksConfig):
        name, meta = spec.name, spec.metadata
        names = f"| `{flag_name(name)}` | `{variable_name(name)}` "
        rows.append(f"{names}| `{spec.default}` | {meta['allowed']} | {meta['help']} |")
    return "\n".join(rows)


def gpu_line() -> str:
    """Which SGLang versions were run on a GPU."""
    if GPU_VERIFIED:
        return f"Verified on a GPU with SGLang {', '.join(GPU_VERIFIED)}; other versions log one warning there."
    return "No SGLang version has been verified on a GPU with this release; a GPU start logs one warning."


SECTIONS = {"settings": settings_table, "matrix": markdown_matrix, "gpu-line": gpu_line}


def render(text: str) -> str:
    """The README with its generated sections filled in."""
    for name, make in SECTIONS.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text


if __name__ == "__main__":
    README.write_text(render(README.read_text()))
