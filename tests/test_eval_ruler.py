"""`locks-sglang eval ruler`: the tasks with a real tokenizer, statistics, the exit rule, and the command on a real server."""

import argparse
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from live import SERVE

from locks_sglang.evaluation import cli, ruler
from locks_sglang.evaluation.client import ClientError, Completion, Prompt, PromptFormat
from locks_sglang.evaluation.ruler import Answer, Cell, Comparison, Interval, Setting, interval, settings_of, verdicts
from locks_sglang.evaluation.ruler_tasks import NOISE, TASKS, Draft, Sample, TaskError, Words, load_words, make_samples, score
from locks_sglang.evaluation.served import SELECTORS
from locks_sglang.serving import serving

WORDS = load_words("prose")
SHORTEST = {"niah_single_1": 512, "niah_multikey_2": 512, "niah_multikey_3": 1024, "vt": 1024, "cwe": 4096, "fwe": 512}


@pytest.fixture(scope="module")
def form(model_path: str) -> PromptFormat:
    from transformers import AutoTokenizer

    return PromptFormat(AutoTokenizer.from_pretrained(model_path))


def draft(task: str, size: int, seed: int = 0) -> Draft:
    return TASKS[task].write(random.Random(seed), WORDS, size)


# --- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_samples_fill_their_length(form: PromptFormat, name: str) -> None:
    """Prompt and longest answer fit, and with one unit more they would not, unless nothing is left."""
    task, length = TASKS[name], SHORTEST[name]
    for number, sample in enumerate(make_samples(task, WORDS, length, 3, range(4), form.encode)):
        room = length - task.new_tokens
        rng = f"3/{name}/{length}/{number}"
        (exact, longer) = (task.write(random.Random(rng), WORDS, sample.size + more) for more in (0, 1))
        ids, too_many = form.encode([exact.prompt, longer.prompt])
        assert sample == Sample(ids, exact.answers, sample.size)
        assert len(ids) == room or len(ids) < room < len(too_many)


def test_samples_repeat_and_differ(form: PromptFormat) -> None:
    """A sample depends on its number and seed, and on no other sample."""

    def make(seed: int, numbers: Sequence[int], words: Words = WORDS) -> list[Sample]:
        return make_samples(TASKS["niah_multikey_2"], words, 512, seed, numbers, form.encode)

    first = make(0, [0, 1, 2])
    assert make(0, [2, 0]) == [first[2], first[0]]
    others = [*first, *make(1, [0, 1, 2]), *make(0, [0, 1, 2], load_words("code"))]
    assert len({tuple(sample.ids) for sample in others}) == 9
    # Another text has other keys for the same numbers.
    assert len({sample.answers for sample in others}) == 6


@pytest.mark.parametrize(("length", "name"), [(128, "niah_single_1"), (512, "vt"), (2048, "cwe")])
def test_lengths_that_are_too_short_are_refused(form: PromptFormat, length: int, name: str) -> None:
    with pytest.raises(TaskError, match=rf"^{name} has \d+ tokens and more with this tokenizer; {length} are too few"):
        make_samples(TASKS[name], WORDS, length, 0, [0], form.encode)


def test_a_text_may_have_too_few_words(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"3000 different words are needed and prose has \d+"):
        WORDS.draw(random.Random(0), 3000)
    (tmp_path / "text").write_text("just these fewer words")
    with pytest.raises(TaskError, match="has 4 different words; 40 and more are needed"):
        load_words(str(tmp_path / "text"))


def test_words_are_whole_and_in_order(tmp_path: Path) -> None:
    listed = [f"word{'abcdefghij'[i // 10]}{'abcdefghij'[i % 10]}" for i in range(60)]
    (tmp_path / "text").write_text(" ".join(reversed(listed)) + " A Capital, don't, well-known, cat x2two waytoolongforaword")
    assert load_words(str(tmp_path / "text")).words == tuple(sorted([*listed]))


def test_one_needle_lies_between_lines_of_noise() -> None:
    depths = []
    for seed in range(60):
        made = draft("niah_single_1", 9, seed)
        lines = made.prompt.text.splitlines()
        assert Counter(lines)[NOISE] == 9
        (at,) = (i for i, line in enumerate(lines) if made.answers[0] in line)
        (key,) = re.findall(rf"^One of the special magic numbers for ([a-z]+-[a-z]+) is: {made.answers[0]}\.$", lines[at])
        assert re.fullmatch(r"\d{7}", made.answers[0])
        assert key in lines[-1]
        assert key in made.prompt.begun
        assert made.answers[0] not in made.prompt.begun
        depths.append(at - 1)
    assert set(depths) == set(range(10))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("niah_multikey_2", "[a-z]+-[a-z]+", r"\d{7}"), ("niah_multikey_3", "[0-9a-f-]{36}", "[0-9a-f-]{36}")],
)
def test_the_asked_needle_is_one_among_many(name: str, key: str, value: str) -> None:
    depths = []
    for seed in range(60):
        made = draft(name, 5, seed)
        found = re.findall(rf"^One of the special magic \w+ for ({key}) is: ({value})\.$", made.prompt.text, re.M)
        assert len(dict(found)) == len({of for _, of in found}) == 5
        (at,) = (i for i, (of, _) in enumerate(found) if of in made.prompt.text.splitlines()[-1])
        assert made.answers == (found[at][1],)
        depths.append(at)
    assert set(depths) == set(range(5))


def test_a_value_passes_through_five_variables() -> None:
    made = draft("vt", 30)
    example, asked = made.prompt.text.split("\n\nFollow ", 1)
    (value,) = re.findall(r"assigned the value (\d{5}) in", asked)
    steps = re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w+)$", asked, re.M)
    holding = [value]
    for name, of in steps:
        assert of == holding[-1]
        holding.append(name)
    assert tuple(holding[1:]) == made.answers
    assert len(made.answers) == 5
    assert Counter(asked.splitlines())[NOISE] == 30
    shown = re.findall(r"^VAR ([A-Z]{5}) =", example, re.M)
    assert len(shown) == 5
    assert example.endswith(f"they are: {' '.join(shown)}")
    assert not set(shown) & set(made.answers)
    assert made.prompt.begun.endswith(f"5 variables are assigned the value {value}, they are:")


def test_ten_words_are_common() -> None:
    made = draft("cwe", 50)
    example, listed = (part.splitlines()[1] for part in made.prompt.text.split("\n\n"))
    counted = Counter(re.findall(r"\d+\. (\w+)", listed))
    assert Counter(counted.values()) == {30: 10, 3: 50}
    assert {word for word, times in counted.items() if times == 30} == set(made.answers)
    assert re.findall(r"(\d+)\.", listed) == [str(number) for number in range(1, 451)]
    assert Counter(Counter(re.findall(r"\d+\. (\w+)", example)).values()) == {10: 10, 3: 30}


@pytest.mark.parametrize("size", [60, 1000, 16_000])
def test_frequencies_of_coded_words_follow_zeta(size: int) -> None:
    made = draft("fwe", size)
    text = made.prompt.text.splitlines()[1].split()
    counts = Counter(text).most_common()
    assert counts[0] == ("....", int(size * 6 / np.pi**2))
    assert tuple(word for word, _ in counts[1:4]) == made.answers
    assert counts[3][1] > counts[4][1]
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in counts[1:])
    for rank, (_, times) in enumerate(counts, 1):
        assert times == int(size * 6 / np.pi**2 / rank**2)


def test_score_is_the_share_of_answers_that_are_there() -> None:
    assert score("It is ABCDE, then fghij.", ("abcde", "FGHIJ")) == 100
    assert score("abcde", ("abcde", "fghij", "klmno", "pqrst")) == 25
    assert score("", ("abcde",)) == 0


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_bos_is_as_template_and_tokenizer_define_it(form: PromptFormat) -> None:
    messages = [{"role": "user", "content": "Where?"}]
    wanted = form.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    here, begun, bare = form.encode([Prompt("Where?"), Prompt("Where?", "Here"), Prompt("Where?", "Here", chat=False)])
    assert here == wanted
    assert form.tokenizer.decode(begun) == form.tokenizer.decode(here) + "Here"
    assert bare == form.tokenizer("Where?\nHere")["input_ids"]
    assert form.identity()["begins_with_bos"]


def test_two_bos_are_refused(form: PromptFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    bos = form.tokenizer.bos_token
    monkeypatch.setattr(form.tokenizer, "chat_template", bos + "{{ messages[0]['content'] }}")
    assert form.encode([Prompt("Where?")])
    with pytest.raises(ClientError, match="twice"):
        form.encode([Prompt(f"{bos}Where?")])


# --- statistics and verdicts ------------------------------------------------------------------------------------------


def cell(task: str, length: int, dense: Sequence[float], **others: Sequence[float | None]) -> Cell:
    """A cell with these points; names of settings have an underscore for their space."""
    made = Cell(task, length, len(dense))
    for name, points in {"dense": dense, **others}.items():
        made.answers[name.replace("_", " ")] = [None if of is None else Answer(of, 5, of < 50) for of in points]
    return made


def test_interval_covers_the_mean_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 draws of two groups whose true mean is known: about 95 % of the intervals hold it; fixed seeds."""
    monkeypatch.setattr(ruler, "RESAMPLES", 500)
    rng = np.random.default_rng(5)
    held = 0
    for seed in range(200):
        groups = [100.0 * (rng.random(100) < p) for p in (0.3, 0.8)]
        found = interval(groups, seed)
        held += found.low <= 55 <= found.high
        assert found.mean == pytest.approx(np.mean([group.mean() for group in groups]))
    assert 181 <= held <= 198


def test_groups_have_equal_weight_whatever_their_size() -> None:
    assert interval([np.zeros(50), np.full(10, -10.0)], 0) == Interval(-5, -5, -5)


def test_differences_are_of_samples_that_both_answered() -> None:
    made = cell("vt", 512, [100, 80, 60, 40], locks_512=[100, None, 80, 0])
    assert made.differences("locks 512").tolist() == [0, 20, -40]
    assert made.missing([Setting("dense"), Setting("locks", 512)]) == [1]
    assert made.missing([Setting("dense")]) == []
    assert Cell.from_json(json.loads(json.dumps(made.as_json()))) == made


def test_only_tasks_that_dense_can_do_are_compared() -> None:
    settings = settings_of([("locks", None)], [512])
    good = cell("vt", 512, [20] * 4, locks_512=[10] * 4)
    bad = cell("fwe", 512, [19.9] * 4, locks_512=[100] * 4)
    (found,) = ruler.compare([good, bad], settings, 0)
    assert (found.tasks, found.samples, found.difference) == (("vt",), 4, Interval(-10, -10, -10))
    (found,) = ruler.compare([bad], settings, 0)
    assert (found.tasks, found.difference) == ((), None)
    (found,) = ruler.compare([cell("vt", 512, [20] * 2, locks_512=[None] * 2)], settings, 0)
    assert (found.tasks, found.difference) == ((), None)


@pytest.mark.parametrize(
    ("setting", "low", "high", "samples", "met", "said"),
    [
        (Setting("locks", 2048), -1.9, 0.0, 100, [True], "a lower bound of -2 is required"),
        (Setting("locks", 2048), -2.1, 0.0, 100, [False], "a lower bound of -2 is required"),
        (Setting("locks", 512), -2.9, 0.0, 100, [True], "a lower bound of -3 is required"),
        (Setting("locks", 512), -3.1, 0.0, 100, [False], "a lower bound of -3 is required"),
        (Setting("locks", 512, "off"), -3.1, 0.0, 100, [False], "locks/off 512 at 4096 tokens"),
        (Setting("locks", 512), -1.0, 0.0, 99, [None], "with 100 samples a task, not 99"),
        (
            Setting("locks", 1024),
            -9.0,
            0.0,
            100,
            [None],
            "of locks at budgets of 2048 and 512 tokens, and neither was asked for",
        ),
        (Setting("oracle", 512), -9.0, 0.0, 100, [None], "and neither was asked for"),
        (Setting("oracle", 512), 0.1, 2.0, 100, [False, None], "above it by more than the spread"),
        (Setting("locks", 512), 0.1, 2.0, 100, [False, True], "above it by more than the spread"),
    ],
)
def test_verdicts(setting: Setting, low: float, high: float, samples: int, met: list[bool | None], said: str) -> None:
    comparison = Comparison(setting, 4096, ("vt",), samples, Interval((low + high) / 2, low, high))
    found = verdicts([comparison], {}, 0)
    assert [verdict.met for verdict in found] == met
    assert said in " ".join(verdict.sentence for verdict in found)


def test_what_was_not_judged_is_not_met() -> None:
    nowhere = Comparison(Setting("locks", 512), 4096, (), 0, None)
    assert [verdict.met for verdict in verdicts([nowhere], {}, 7)] == [None, None]
    told = {"locks 512": {"sparse_rows": 9, "dense_rows": {"mixed": 2, "short": 0}}, "dense": {"dense_rows": {"short": 5}}}
    _, found = verdicts([], told, 0)
    assert (found.met, found.sentence) == (False, "locks 512: 2 rows beside 9 sparse ones decoded dense (2 mixed)")


# --- the command ------------------------------------------------------------------------------------------------------


class Switched:
    """A server of its own: answers what the setting in force makes of the right answer."""

    pool, context, model, url = 4096, 2048, "model", "http://server"

    def __init__(self, form: PromptFormat, answers: dict[str, Any]) -> None:
        self.form, self.answers = form, answers
        self.asked: list[tuple[str, int]] = []
        self.selector, self.budget = "locks", 2048
        self.counters: dict[str, Any] = {"decode_steps": 0, "sparse_rows": 0, "dense_rows": {"short": 0}}
        self.counters |= {"pages_held": 0, "pages_read": 0, "invalid_pages": 0}

    def switch(self, url: str, *, selector: str, budget_tokens: int | None, tail_correction: str | None) -> None:
        self.selector, self.budget = selector, budget_tokens or 2048

    def tokenizer(self, path: str | None) -> Any:
        return self.form.tokenizer

    def locks(self) -> dict[str, Any]:
        config = {"budget_tokens": self.budget, "tail_correction": "qmu"}
        return {
            "selector": self.selector,
            "config": config,
            "config_digest": "digest",
            "counters": json.loads(json.dumps(self.counters)),
        }

    def identity(self) -> dict[str, Any]:
        return {"model": {"name": "model"}, "server": {}, "versions": {"sglang": "0"}, "commit": None}

    def complete(
        self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int], concurrency: int
    ) -> Iterator[tuple[int, Completion]]:
        if self.selector == "dense":
            self.counters["dense_rows"]["short"] += len(prompts)
        else:
            self.counters["sparse_rows"] += len(prompts)
        for i in reversed(range(len(prompts))):
            text = self.form.tokenizer.decode(prompts[i])
            self.asked.append((f"{self.selector} {self.budget}", hash(text)))
            key = re.findall(r"for ([a-z]+-[a-z]+) that the text mentions", text)[0]
            (right,) = re.findall(rf"for {key} is: (\d+)\.", text)
            yield i, Completion(f"Well, {self.answers[self.selector](right)}", 7, self.selector == "oracle")


@pytest.fixture
def switched(form: PromptFormat, monkeypatch: pytest.MonkeyPatch) -> Switched:
    server = Switched(form, {"dense": str, "locks": str, "oracle": str})
    module = ModuleType("locks_sglang.evaluation.switch")
    monkeypatch.setattr(module, "SwitchError", RuntimeError, raising=False)
    monkeypatch.setattr(module, "switch", lambda url, **setting: server.switch(url, **setting), raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(ruler, "Server", lambda url: server)
    return server


BASE = [
    "ruler",
    "http://server",
    "--tasks",
    "niah_single_1,niah_multikey_2",
    "--lengths",
    "512",
    "--samples",
    "4",
    "--budgets",
    "512",
]


def test_all_settings_answer_the_same_prompts(switched: Switched, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Group by group; the order of questions, when drawn by lot, changes nothing else in the file."""
    files = []
    for number, more in enumerate(([], ["--order-seed", "1"])):
        switched.asked.clear()
        switched.counters["dense_rows"]["short"] = switched.counters["sparse_rows"] = 0
        files.append(tmp_path / f"{number}.json")
        assert cli.main([*BASE, *more, "--json", str(files[-1])]) == 1
        by_setting: dict[str, list[int]] = {}
        for name, text in switched.asked:
            by_setting.setdefault(name, []).append(text)
        assert set(by_setting) == {"dense 2048", "locks 512", "oracle 512"}
        assert len({frozenset(texts) for texts in by_setting.values()}) == 1
        # 4096 tokens of cache hold six prompts of 512: one group a task, every setting after the other.
        assert [len({name for name, _ in switched.asked[at : at + 4]}) for at in range(0, 24, 4)] == [1] * 6
    first, second = (json.loads(file.read_text()) for file in files)
    assert first["cells"] == second["cells"]
    assert first["kind"] == "ruler"
    assert first["unanswered"] == 0
    assert first["told"]["locks 512"]["sparse_rows"] == 8
    for told in first["cells"]:
        assert told["answers"]["locks 512"]["points"] == [100] * 4
        assert told["answers"]["oracle 512"]["truncated"] == 4
        assert told["answers"]["dense"]["truncated"] == 0
    said = capsys.readouterr().out
    assert "2 of RULER's 13 tasks" in said
    assert "NOT JUDGED  locks 512 at 512 tokens: +0.0 [+0.0, +0.0] points from dense in 2 tasks" in said
    assert re.search(r"truncated +0 of 8 +0 of 8 +8 of 8", said)


def test_exit_codes(switched: Switched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ruler, "FEWEST_SAMPLES", 4)
    assert cli.main(BASE) == 0
    assert "MET         locks 512" in capsys.readouterr().out
    switched.answers["locks"] = lambda right: "nothing"
    assert cli.main(BASE) == 1
    assert "MISSED      locks 512 at 512 tokens: -100.0" in capsys.readouterr().out
    switched.answers |= {"dense": lambda right: right if int(right) % 2 else "nothing", "locks": str}
    assert cli.main([*BASE, "--samples", "40"]) == 1
    assert "a fault of the harness until it is explained" in capsys.readouterr().out


def test_a_run_that_is_cut_off_goes_on(switched: Switched, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    complete = switched.complete

    def fail_at_second_oracle(prompts: Any, new_tokens: Any, concurrency: int) -> Any:
        if switched.selector == "oracle" and len(switched.asked) > 16:
            raise ClientError("the server is gone")
        return complete(prompts, new_tokens, concurrency)

    switched.complete = fail_at_second_oracle  # type: ignore[method-assign]
    arguments = [*BASE, "--json", str(out)]
    assert cli.main(arguments) == 2
    assert "the server is gone" in capsys.readouterr().err
    cut = json.loads(out.read_text())
    assert cut["unanswered"] == 4
    assert [told["answers"]["oracle 512"]["answered"] for told in cut["cells"]] == [4, 0]

    switched.complete = complete  # type: ignore[method-assign]
    switched.asked.clear()
    assert cli.main([*arguments, "--resume", "--seed", "1"]) == 2
    assert "is of a run with another seed" in capsys.readouterr().err
    assert cli.main([*arguments, "--resume"]) == 1
    assert len(switched.asked) == 4
    assert json.loads(out.read_text())["unanswered"] == 0


def test_nothing_is_asked_after_the_time(switched: Switched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    assert cli.main([*BASE, "--time-limit", "25", "--json", str(out)]) == 1
    told = json.loads(out.read_text())
    assert told["unanswered"] == 2 * 3 * 4 - len(switched.asked)
    assert told["unanswered"] > 0
    assert told["verdicts"][-1]["met"] is None


def test_a_server_that_decodes_otherwise_is_a_fault(switched: Switched, capsys: pytest.CaptureFixture[str]) -> None:
    switched.switch = lambda url, **settings: None  # type: ignore[method-assign]
    assert cli.main(BASE) == 2
    assert "the server was switched to dense and decoded with locks" in capsys.readouterr().err


def test_rows_must_be_decoded_as_the_setting_says() -> None:
    counters = {"sparse_rows": 5, "invalid_pages": 0, "decode_steps": 1, "pages_held": 9, "pages_read": 3, "dense_rows": {}}
    state = {"selector": "locks", "config": {"budget_tokens": 512}, "config_digest": "", "counters": counters}

    def record(setting: Setting, **changed: Any) -> dict[str, Any]:
        told: dict[str, Any] = {}
        ruler._record(
            told,
            setting,
            state | {"selector": setting.selector},
            state | {"selector": setting.selector, "counters": counters | changed},
        )
        return told

    assert record(Setting("locks", 512), sparse_rows=8)["sparse_rows"] == 3
    with pytest.raises(ClientError, match="start the server with --locks-min-context-tokens 0"):
        record(Setting("locks", 512))
    with pytest.raises(ClientError, match="with the setting dense the server decoded 1 rows sparse"):
        record(Setting("dense"), sparse_rows=6)
    with pytest.raises(ClientError, match="met pages without a summary"):
        record(Setting("locks", 512), sparse_rows=8, invalid_pages=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "qa_1"], "'qa_1' is not a list of some of niah_single_1,"),
        (["--tasks", "vt,vt"], "each once"),
        (["--lengths", "4k"], "must be a whole number from 64 to 4194304, got '4k'"),
        (["--selectors", "quest"], "'quest' is none of locks,dense,oracle"),
        (["--selectors", "dense/off"], "'dense/off' is none of"),
        (["--selectors", "locks,locks"], "names one twice"),
        (["--resume"], "--resume needs --json FILE"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["ruler", "http://127.0.0.1:9", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_runs_that_cannot_begin_say_why(switched: Switched, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*BASE, "--lengths", "512,4096"]) == 2
    assert "--lengths 4096: the server takes 2048 tokens" in capsys.readouterr().err
    assert cli.main([*BASE, "--budgets", "100"]) == 2
    assert "budget_tokens = 100 is not allowed" in capsys.readouterr().err


def test_names_on_the_command_line_are_those_of_the_code() -> None:
    assert tuple(TASKS) == cli.RULER_TASKS
    assert set(cli.SELECTORS) == set(SELECTORS)
    defaults = argparse.Namespace(selectors=[("dense", None), ("locks", "off"), ("oracle", None)])
    names = [setting.name for setting in settings_of(defaults.selectors, [512, 2048])]
    assert names == ["dense", "locks/off 512", "locks/off 2048", "oracle 512", "oracle 2048"]
    assert dataclasses.astuple(Setting("locks", 512, "off")) == ("locks", 512, "off")


@pytest.mark.server
@pytest.mark.one_version
def test_ruler_on_a_real_server(model_path: str, tmp_path: Path) -> None:
    """Two tasks of 512 tokens. With a budget that holds the prompt the oracle reads what dense reads, and answers alike."""
    out = tmp_path / "ruler.json"
    command = [*SERVE, "--model-path", model_path, "--locks-evaluation", "on", "--max-total-tokens", "4096"]
    with serving(command, tmp_path / "log", {**os.environ, "HF_HUB_OFFLINE": "1"}, lambda phase: None) as url:
        asked = [sys.executable, "-m", "locks_sglang", "eval", "ruler", url, "--tasks", "niah_single_1,niah_multikey_2"]
        asked += ["--lengths", "512", "--samples", "2", "--budgets", "128,1024", "--concurrency", "4", "--json", str(out)]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stdout + done.stderr
    told = json.loads(out.read_text())
    assert told["unanswered"] == 0
    assert told["asked"]["settings"] == ["dense", "locks 128", "locks 1024", "oracle 128", "oracle 1024"]
    for made in told["cells"]:
        answers = made["answers"]
        assert answers["oracle 1024"] == answers["dense"]
        assert all(0 < tokens <= made["new_tokens"] for of in answers.values() for tokens in of["tokens"])
    counted = told["told"]
    assert counted["dense"]["sparse_rows"] == 0 < counted["dense"]["dense_rows"]["short"]
    assert counted["locks 1024"]["pages_read"] == counted["locks 1024"]["pages_held"]
    assert counted["locks 128"]["pages_read"] == 8 * counted["locks 128"]["sparse_rows"] < counted["locks 128"]["pages_held"]
    assert counted["locks 128"]["config"]["budget_tokens"] == 128
    assert told["format"] == {"chat_template": True, "bos_token": "<|im_start|>", "begins_with_bos": True}
    assert told["commit"]
    assert "special magic" not in out.read_text()
