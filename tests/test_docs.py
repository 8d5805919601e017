"""What the documents take from code agrees with the code."""

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from functools import cache
from types import ModuleType, SimpleNamespace

import pytest
from pages import PAGES, ROOT, blocks

from locks_sglang.benchmarks.decode import MODELS
from locks_sglang.config import variable_name
from locks_sglang.kernels.build_page_summaries import RecordLayout
from locks_sglang.patches.memory_sizing import summary_bytes_per_page
from locks_sglang.support import FEATURES

TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """The program that writes the generated sections."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_sections_have_not_drifted(generate: ModuleType) -> None:
    marked = {page for page in PAGES if re.search(r"^<!-- [\w-]+ -->$", page.read_text(), re.MULTILINE)}
    assert marked == set(generate.SECTIONS)
    for page in generate.SECTIONS:
        assert generate.render(page) == page.read_text(), f"{page.name}: run python docs/generate.py"
    for picture, text in generate.frontier_drawings().items():
        assert picture.read_text() == text, f"{picture.name}: run python docs/generate.py"


def test_links_of_the_documents_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_short_matrix_leaves_no_feature_out(generate: ModuleType) -> None:
    text = generate.short_matrix()
    works, dense, refused = text.split("\n\n")
    for status, part in (("works", works), ("dense", dense), ("refused", refused)):
        assert part.count(";") + 1 == sum(feature.status == status for feature in FEATURES)
        assert all(feature.name in part for feature in FEATURES if feature.status == status)


@pytest.mark.parametrize("name", sorted(folder.name for folder in MODELS.iterdir()))
@pytest.mark.parametrize("rank", [8, 4, 2])
def test_memory_of_the_table_is_what_a_server_plans(
    generate: ModuleType, name: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable_name("rank"), str(rank))
    shape = generate.shape_of(generate.MODELS / name)
    config = json.loads((MODELS / name / "config.json").read_text())
    told = SimpleNamespace(
        head_dim=config["head_dim"],
        v_head_dim=config["head_dim"],
        get_num_kv_heads=lambda tp_size: config["num_key_value_heads"] // tp_size,
    )
    planned = summary_bytes_per_page(told, config["num_hidden_layers"], 1)
    assert generate.summary_bytes(shape, rank) == planned
    assert f"| {-(-planned // 16):,} (" in (ROOT / "docs" / "serving.md").read_text()


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("rank", [2, 4, 6, 8])
def test_formula_of_the_serving_guide(dim: int, rank: int) -> None:
    (formula,) = re.findall(r"^    record +=(.*?)   ", (ROOT / "docs" / "serving.md").read_text(), re.MULTILINE)
    used = eval(formula, {"r": rank, "D": dim})
    assert RecordLayout(dim, dim, rank).record_bytes == -(-used // 64) * 64


# --- messages ---------------------------------------------------------------------------------------------------------


def pattern(node: ast.expr) -> str | None:
    """What a string of the sources can become: a regular expression, with what is filled in left open."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        parts = re.split(r"%[.\d]*[sdf]|\{\w+\}", node.value)
        return ".+".join(re.escape(part) for part in parts)
    if isinstance(node, ast.JoinedStr):
        return "".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".*" for part in node.values)
    return None


def sources() -> Iterator[ast.AST]:
    for folder in ("locks_sglang", "patches", "benchmarks"):
        for file in sorted((ROOT / folder).glob("*.py")):
            yield ast.parse(file.read_text())


def telling(found: str | None) -> bool:
    """Whether a pattern says enough to be recognised by: two words that follow each other."""
    return found is not None and re.search(r"[A-Za-z]{2,}\\ [A-Za-z]{2,}", found) is not None


@cache
def messages() -> set[str]:
    """Every message that the package can give, as regular expressions."""
    found = {pattern(node) for tree in sources() for node in ast.walk(tree) if isinstance(node, ast.expr)}
    return {one for one in found if one is not None and telling(one)}


def doctors() -> set[str]:
    """Every problem that `locks-sglang doctor` can name, as regular expressions."""
    found = set()
    for file in ("doctor.py", "packages.py"):
        for node in ast.walk(ast.parse((ROOT / "locks_sglang" / file).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Problem":
                found.add(pattern(node.args[0]))
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "what":
                found.add(pattern(node.value))
    return {one for one in found if one is not None and telling(one)}


QUOTED = [line for block in blocks(TROUBLESHOOTING, "text") for line in block.splitlines()]


@pytest.mark.parametrize("line", QUOTED)
def test_quoted_messages_are_the_codes_own(line: str) -> None:
    said = re.sub(r"^(PROBLEM|FIX) +", "", line)
    assert any(re.fullmatch(message, said) for message in messages()), f"nothing in the code says: {line}"


def test_every_problem_of_the_doctor_is_on_the_page() -> None:
    shown = [line.removeprefix("PROBLEM").strip() for line in QUOTED if line.startswith("PROBLEM")]
    known = doctors()
    assert len(known) >= 12
    for message in known:
        assert any(re.fullmatch(message, said) for said in shown), f"{TROUBLESHOOTING.name} does not have: {message}"


def test_refused_features_are_quoted_as_they_are() -> None:
    quoted = [line for line in QUOTED if re.match(r"locks does not support (?!SGLang)", line)]
    assert quoted
    for line in quoted:
        found = re.search(r"\((.*?)\): ", line)
        assert found is not None
        assert line in {feature.message(found[1]) for feature in FEATURES}


def test_published_mass_is_of_every_layer_and_above_the_bound() -> None:
    """The table of `docs/quality.md`: what a short run in the tests cannot show, a whole one must have shown."""
    result = json.loads((ROOT / "benchmarks" / "results" / "eval_mass_smollm2_prose.json").read_text())
    assert result["layers"] == list(range(result["model"]["layers"]))
    assert result["failures"] == []
    shares = dict(zip(result["budgets"], result["ratio"], strict=True))
    assert {128, 256, 512, 1024, 2048} <= set(shares)
    assert all(share >= 0.98 for budget, share in shares.items() if 128 <= budget <= 2048)


def test_what_is_not_as_required_stands_on_the_page() -> None:
    """Every failure of a published run, and every cell in which the page basis is behind."""
    page = (ROOT / "docs" / "quality.md").read_text()
    files = sorted((ROOT / "benchmarks" / "results").glob("eval_mass_*.json"))
    assert len({json.loads(file.read_text())["model"]["name"] for file in files}) >= 2
    for file in files:
        result = json.loads(file.read_text())
        assert result["commit"][-1] != "+", file.name
        for sentence in result["failures"] + result["behind"]:
            assert f"- {sentence}\n" in page, file.name
