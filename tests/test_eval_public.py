"""`locks-sglang eval longbench` and `math`: files of their form, metrics, commands of lm-eval, and a run with a real server."""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from live import SERVE

from locks_sglang.evaluation import cli, longbench, math_problems, public
from locks_sglang.evaluation.client import Completion, Prompt, PromptFormat
from locks_sglang.evaluation.public import Item, PublicError, fitted, read_items, summary
from locks_sglang.serving import serving

PASSAGE = "The harbour of Esk was dug in 1784 by Anna Falk. It has two lighthouses {north and south}."
LONGBENCH = [
    {"dataset": "qasper", "input": "Who dug it?", "context": PASSAGE, "answers": ["Anna Falk", "Falk"], "all_classes": None},
    {"dataset": "trec_e", "input": "Question: Who?\nType:", "context": "Question: Where?\nType: place", "answers": ["person"]},
    {"dataset": "lcc", "input": "", "context": "def f(x):\n", "answers": ["    return x"], "all_classes": None},
    {"dataset": "passage_retrieval_en", "input": "A dig.", "context": "Paragraph 1: x", "answers": ["Paragraph 12"]},
]
LONGBENCH[1]["all_classes"] = ["place", "person", "per"]
MATH = [
    {"problem": "What is 1/2 + 1/4?", "answer": "\\frac{3}{4}", "subject": "Prealgebra", "solution": "...", "level": 1},
    {"Problem": "Find n.", "Answer": "073", "ID": "2024-I-1"},
]


def lines(folder: Path, rows: Sequence[Any]) -> Path:
    file = folder / "set.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_words_are_compared_without_case_articles_and_punctuation() -> None:
    assert longbench.qa_f1("The Anna, falk!", "anna falk", ()) == 1
    assert longbench.qa_f1("Anna Falk dug it", "Anna Falk", ()) == pytest.approx(2 * 0.5 * 1 / 1.5)
    assert longbench.qa_f1("a a b", "a b b", ()) == pytest.approx(2 * 1 * 0.5 / 1.5)
    assert longbench.qa_f1("", "Anna", ()) == 0


def test_classes_that_are_named_beside_the_right_one_share() -> None:
    classes = ["place", "person", "per", "event"]
    assert longbench.classification("person", "person", classes) == 1
    assert longbench.classification("person or place", "person", classes) == 0.5
    assert longbench.classification("place", "person", classes) == 0


def test_numbers() -> None:
    assert longbench.retrieval("Paragraph 12, not 3", "Paragraph 12", ()) == 0.5
    assert longbench.retrieval("12", "Paragraph 1", ()) == 0
    assert longbench.count("There are 7.", "7", ()) == 1
    assert longbench.count("none", "7", ()) == 0


def test_first_line_of_code_counts() -> None:
    assert longbench.code_similarity("```python\n\n    return x\n    more", "    return x", ()) == 1
    assert longbench.code_similarity("# a remark", "    return x", ()) == 0
    assert 0 < longbench.code_similarity("return y", "return x", ()) < 1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so \\boxed{\\frac{3}{4}}.", "\\frac{3}{4}"),
        ("\\boxed{1} and then \\boxed {2}", "2"),
        ("\\fbox{1} or \\boxed{\\text{a {b}}} \\boxed{cut", "\\text{a {b}}"),
        ("nothing", None),
    ],
)
def test_the_last_complete_box_is_the_answer(text: str, found: str | None) -> None:
    assert math_problems.boxed(text) == found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("\\dfrac{3}{4}", "\\frac{3}{4}"),
        ("\\frac34", "\\frac{3}{4}"),
        ("\\left( 1, 2 \\right)", "(1,2)"),
        ("$x = 5$", "5"),
        ("12,345", "12345"),
        ("073", "73"),
        ("90^\\circ", "90"),
        ("50\\%", "50"),
        ("5\\text{ cm}", "5"),
        ("\\text{Monday}", "Monday"),
        ("3\\!\\cdot 4", "3\\cdot4"),
        ("7.", "7"),
    ],
)
def test_spellings_that_are_the_same(one: str, other: str) -> None:
    assert math_problems.normalised(one) == math_problems.normalised(other)


@pytest.mark.parametrize(
    ("one", "other"), [("1,2", "12"), ("\\frac{1}{2}", "0.5"), ("-5", "5"), ("x", "y"), ("12,3456", "123456")]
)
def test_spellings_that_are_not(one: str, other: str) -> None:
    assert math_problems.normalised(one) != math_problems.normalised(other)


# --- files ------------------------------------------------------------------------------------------------------------


def test_longbench_lines_become_prompts(tmp_path: Path) -> None:
    items = read_items(lines(tmp_path, LONGBENCH), longbench.read_item, None)
    assert [(item.group, item.new_tokens, item.prompt.chat) for item in items] == [
        ("qasper", 128, True),
        ("trec", 64, False),
        ("lcc", 64, False),
        ("passage_retrieval_en", 32, True),
    ]
    assert PASSAGE in items[0].prompt.text
    assert items[0].prompt.text.endswith("Who dug it?")
    assert items[0].points("It was Falk") == pytest.approx(100 * 2 * (1 / 3) / (1 / 3 + 1))
    assert items[0].points("falk") == 100
    assert items[1].points("person\nplace") == 100
    assert items[1].points("\nplace\nperson") == 0
    assert items[2].points("    return x") == 100
    assert items[3].points("Paragraph 12") == 100


def test_math_lines_become_prompts(tmp_path: Path) -> None:
    first, second = read_items(lines(tmp_path, MATH), lambda line, place: math_problems.read_item(line, place, 99), None)
    assert (first.group, second.group, first.new_tokens) == ("Prealgebra", "all", 99)
    assert first.prompt.text.endswith("What is 1/2 + 1/4?")
    assert first.points("thus \\boxed{\\dfrac{3}{4}}") == 100
    assert first.points("thus \\frac{3}{4}") == 0
    assert second.points("\\boxed{73}") == 100


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"dataset": "qasper", "input": ""}], "line 1 has no field context; it has dataset, input"),
        ([LONGBENCH[0], {"dataset": "dureader"}], "line 2: the dataset 'dureader' is not scored here; narrativeqa,"),
        ([[1]], "line 1 is no JSON object"),
        ([], "has no lines"),
    ],
)
def test_lines_of_another_form_are_refused(rows: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PublicError, match=re.escape(message)):
        read_items(lines(tmp_path, rows), longbench.read_item, None)


def test_rouge_is_asked_for_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        PublicError, match="gov_report is scored with ROUGE-L, which needs the package rouge: pip install rouge"
    ):
        read_items(lines(tmp_path, [{"dataset": "gov_report"}]), longbench.read_item, None)


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["math", "http://127.0.0.1:9", "--file", str(tmp_path / "none")]) == 2
    assert "none cannot be read" in capsys.readouterr().err
    (tmp_path / "none").write_text("{")
    assert cli.main(["math", "http://127.0.0.1:9", "--file", str(tmp_path / "none")]) == 2
    assert "line 1 is no JSON" in capsys.readouterr().err


def test_means_have_their_spread() -> None:
    items = [Item(group, Prompt(""), 1, len) for group in ("a", "a", "b")]
    answers = [Completion("", 1, cut) for cut in (True, False, False)]
    assert summary(items, answers, [0.0, 100.0, 30.0]) == {
        "a": {"answered": 2, "mean": 50.0, "standard_error": 50.0, "truncated": 1},
        "b": {"answered": 1, "mean": 30.0, "standard_error": None, "truncated": 0},
    }


class Letters:
    """A tokenizer whose tokens are characters, without a chat format."""

    chat_template, bos_token, bos_token_id = None, None, None

    def __call__(self, texts: Any, **options: Any) -> dict[str, Any]:
        ids = [list(map(ord, text)) for text in ([texts] if isinstance(texts, str) else texts)]
        return {"input_ids": ids[0] if isinstance(texts, str) else ids}

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def test_long_prompts_lose_their_middle() -> None:
    items = [Item("a", Prompt(text, begun="!"), 4, len) for text in ("abc", "abcdefghijkl")]
    encoded, cut = fitted(items, PromptFormat(Letters()), 12)
    assert ["".join(map(chr, ids)) for ids in encoded] == ["abc\n!", "abcjkl\n!"]
    assert cut == 1
    with pytest.raises(PublicError, match="answers of 4 tokens do not fit the server's context of 4"):
        fitted(items, PromptFormat(Letters()), 4)
    with pytest.raises(PublicError, match="no part of a prompt fits"):
        fitted(items, PromptFormat(Letters()), 6)


# --- lm-eval ----------------------------------------------------------------------------------------------------------


class Told:
    """A server, as far as lm-eval's commands need one."""

    url, model, context = "http://host:1", "the/model", 4096

    def __init__(self, url: str) -> None:
        assert url == self.url

    def identity(self) -> dict[str, Any]:
        return {"model": {"name": "model"}}


LM_EVAL = """#!{python}
import json, pathlib, sys
words = sys.argv[1:]
out = pathlib.Path(words[words.index("--output_path") + 1]) / "the__model"
out.mkdir(parents=True, exist_ok=True)
if "{fails}" not in words:
    told = {{"task": {{"score,none": 0.5, "score_stderr,none": 0.1}}}}
    (out / "results_2026.json").write_text(json.dumps({{"results": told, "versions": words}}))
"""


@pytest.fixture
def lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tool = tmp_path / "lm_eval"
    tool.write_text(LM_EVAL.format(python=sys.executable, fails="--limit"))
    tool.chmod(0o755)
    monkeypatch.setattr(public, "Server", Told)
    return tool


def test_longbench_runs_lm_eval_with_and_without_the_chat_format(lm_eval: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    asked = ["longbench", "http://host:1", "--lm-eval", str(lm_eval), "--out", str(tmp_path / "runs"), "--json", str(out)]
    assert cli.main([*asked, "--concurrency", "8", "--seed", "3"]) == 0
    told = json.loads(out.read_text())
    assert told["results"]["chat"]["results"] == {"task": {"score,none": 0.5, "score_stderr,none": 0.1}}
    chat, bare = (shlex.split(command) for command in told["lm_eval"])
    assert told["results"]["bare"]["versions"] == bare[1:]
    model = "model=the/model,base_url=http://host:1/v1/{},max_length=4096,num_concurrent=8,timeout=3600,"
    model += "tokenizer_backend=none,tokenized_requests=False"
    assert chat[1:5] == ["--model", "local-chat-completions", "--model_args", model.format("chat/completions")]
    assert bare[1:5] == ["--model", "local-completions", "--model_args", model.format("completions")]
    assert set(",".join([chat[6], bare[6]]).split(",")) == {*longbench.CHAT_TASKS, *longbench.BARE_TASKS}
    assert "--apply_chat_template" in chat
    assert "--apply_chat_template" not in bare
    wanted = {"chat_template_kwargs": {"enable_thinking": False}, "repetition_penalty": 1.0}
    assert json.loads(chat[chat.index("--gen_kwargs") + 1]) == wanted
    assert chat[chat.index("--seed") + 1] == "3"


def test_math_may_think(lm_eval: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    asked = ["math", "http://host:1", "--lm-eval", str(lm_eval), "--out", str(tmp_path / "runs"), "--json", str(out)]
    assert cli.main([*asked, "--thinking", "--new-tokens", "32768"]) == 0
    (command,) = map(shlex.split, json.loads(out.read_text())["lm_eval"])
    options = json.loads(command[command.index("--gen_kwargs") + 1])
    assert options["chat_template_kwargs"] == {"enable_thinking": True}
    assert options["max_gen_toks"] == 32768
    assert command[command.index("--tasks") + 1] == "minerva_math500,aime24,aime25"


def test_what_is_missing_is_named(lm_eval: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["math", "http://host:1", "--lm-eval", "no-such-command"]) == 2
    said = capsys.readouterr().err
    assert "the command no-such-command is not there" in said
    assert "pip install 'lm-eval[api,longbench,math]==0.4.13'" in said
    asked = ["math", "http://host:1", "--lm-eval", str(lm_eval), "--out", str(tmp_path / "runs"), "--samples", "2"]
    assert cli.main(asked) == 2
    said = capsys.readouterr().err
    assert "ended with 0 and 0 files of results" in said
    assert "with --file" in said


# --- a real server ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = [*SERVE, "--model-path", model_path, "--max-total-tokens", "2048"]
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(command, log, {**os.environ, "HF_HUB_OFFLINE": "1"}, lambda phase: None) as address:
        yield address


@pytest.mark.server
@pytest.mark.one_version
def test_files_are_asked_and_scored(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second question is longer than the server's context, and loses its middle."""
    out = tmp_path / "out.json"
    long = LONGBENCH[0] | {"context": PASSAGE + " Nothing else is known of it." * 400}
    assert (
        cli.main(["longbench", url, "--file", str(lines(tmp_path, [LONGBENCH[0], long, LONGBENCH[2]])), "--json", str(out)])
        == 0
    )
    told = json.loads(out.read_text())
    assert (told["kind"], told["prompts_cut"], len(told["points"])) == ("longbench", 1, 3)
    assert told["groups"]["qasper"]["answered"] == 2
    assert told["points"][0] > 0
    assert told["server"]["locks"]["config"]["budget_tokens"] == 2048
    assert cli.main(["math", url, "--file", str(lines(tmp_path, MATH)), "--new-tokens", "8", "--json", str(out)]) == 0
    told = json.loads(out.read_text())
    assert told["cut_off"] == [True, True]
    assert "2 questions, 0 prompts cut in the middle" in capsys.readouterr().out


def test_the_page_says_how_lm_eval_is_installed() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "evaluation.md").read_text()
    assert public.INSTALL in page
