"""What the documents take from code agrees with the code."""

import importlib.util
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_generated_sections_have_not_drifted() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for page in generate.SECTIONS:
        assert generate.render(page) == page.read_text(), f"{page.name}: run python docs/generate.py"


def test_links_of_the_documents_exist() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_published_mass_is_of_every_layer_and_above_the_bound() -> None:
    """The table of `docs/method.md`: what a short run in the tests cannot show, a whole one must have shown."""
    result = json.loads((ROOT / "benchmarks" / "results" / "eval_mass_smollm2_prose.json").read_text())
    assert result["layers"] == list(range(result["model"]["layers"]))
    assert result["failures"] == []
    shares = dict(zip(result["budgets"], result["ratio"], strict=True))
    assert {128, 256, 512, 1024, 2048} <= set(shares)
    assert all(share >= 0.97 for budget, share in shares.items() if budget >= 128)
