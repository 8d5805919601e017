"""Write the parts of the documents that come from code and results: `python docs/generate.py`. A test fails when they drift."""

import dataclasses
import json
from pathlib import Path

from locks_sglang import metrics
from locks_sglang.config import LocksConfig, flag_name, variable_name
from locks_sglang.support import GPU_VERIFIED, markdown_matrix

ROOT = Path(__file__).resolve().parent.parent
MASS = ROOT / "benchmarks" / "results" / "eval_mass_smollm2_prose.json"


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


def mass_table() -> str:
    """Attention mass captured by each selector, from the results file."""
    result = json.loads(MASS.read_text())
    versions, text, model = result["versions"], result["text"], result["model"]
    budgets = result["budgets"]
    rows = [
        f"| selector | bytes a page and head | {' | '.join(str(budget) for budget in budgets)} |",
        "|---|---|" + "---|" * len(budgets),
    ]
    for method in result["methods"]:
        mass = " | ".join(f"{value:.3f}" for value in method["mass"])
        rows.append(f"| {method['label']} | {method['bytes_per_page']} | {mass} |")
    worst = "; ".join(
        f"layer {entry['layer']} {entry['ratio']:.3f} at {budget}"
        for budget, entry in zip(budgets, result["worst_layer"], strict=True)
    )
    what = (
        f"{model['name']}, {text['tokens']} tokens of {text['description']}, mean over all {model['layers']} layers, "
        f"all query heads and the last {result['late_queries']} positions"
    )
    where = f"SGLang {versions['sglang']}, torch {versions['torch']}, {result['device']}, {model['dtype']}"
    how = f"`locks-sglang eval mass --tokens {text['tokens']} --text {text['name']} --json FILE`"
    return (
        f"Share of the attention mass that the chosen pages hold, by budget in tokens: {what}. {where}; made by {how}, kept in "
        f"`{MASS.relative_to(ROOT)}`.\n\n" + "\n".join(rows) + f"\n\nWorst layers of r = 8 against the oracle: {worst}."
    )


SECTIONS = {
    ROOT / "README.md": {"settings": settings_table, "matrix": markdown_matrix, "gpu-line": gpu_line},
    ROOT / "docs" / "method.md": {"measured": mass_table},
    ROOT / "docs" / "metrics.md": {"metrics": metrics.markdown_table},
}


def render(page: Path) -> str:
    """A document with its generated sections filled in."""
    text = page.read_text()
    for name, make in SECTIONS[page].items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text


if __name__ == "__main__":
    for page in SECTIONS:
        page.write_text(render(page))
