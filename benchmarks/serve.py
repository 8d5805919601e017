"""`locks-sglang bench serve`: multi-turn chat of many users over shared long prefixes, against the real server.

Every backend gets a server of its own, one after the other, started as users start it. SGLang's own benchmark,
`sglang.benchmark.serving`, is its client: data set `generated-shared-prefix` in several turns over the chat endpoint. A user
holds one conversation after the other and sends the next question as soon as the answer is complete; all users begin at the
same time, with an empty cache. A conversation's first question stands behind a prefix that `--share` conversations have in
common; later turns carry all that was said before. Answers have a fixed length. So the first turn's times hold waiting for
others' prefills, and turns of different users overlap: throughput and the counts of `locks` are those of a whole run.

With `--config` the model has a published shape, SGLang's dummy weights, and a tokenizer of one word a token, with which texts
have exactly the lengths asked for. Dummy weights give queries and keys of nearly zero and so page scores that are nearly alike,
which can make single kernels faster or slower than they are on a trained model; every row says which weights it had.

Results are appended to a file of JSON lines, one a backend, number of users and turn.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..serving import ServerError, end_of_log, serving, stopped_by_signals
from ..support import DENSE_BACKENDS
from .decode import GPU_BACKENDS, LOCKS, MODELS, end_of_results, machine, models, percentiles, report, shape_of
from .kernels import PAGE_SIZE, brief, whole

CPU_BACKENDS = ("torch_native",)
OWN_FLAGS = ("--model", "--model-path", "--attention-backend", "--device", "--host", "--port", "--locks-budget-tokens")
"""Arguments of the server that this command sets itself."""
SEED = 1
"""Of SGLang's random prompts and their order: every backend gets the same ones."""
FLUSH_S = 60
"""Seconds in which a server whose requests have all ended must be idle."""
REQUEST_S = 120
MOST_PREFIX = 1 << 22
ROLES = ("system", "user", "assistant")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@dataclass(frozen=True)
class Load:
    """The load of every run, in tokens and conversations.

    Attributes:
        users: numbers of users, one run each. conversations: fewest of a run. share: conversations with the same prefix.
        prefix, question, answer: tokens. turns: of a conversation.
    """

    users: list[int]
    conversations: int
    share: int
    turns: int
    prefix: int
    question: int
    answer: int

    def prefixes(self, users: int) -> int:
        """Different prefixes of a run; each has `share` conversations."""
        return -(-max(users, self.conversations) // self.share)

    @property
    def longest(self) -> int:
        """Tokens of a whole conversation, without those of the chat's format."""
        return self.prefix + self.turns * (self.question + self.answer)


@dataclass(frozen=True)
class Run:
    """What one client process asks of one server.

    Attributes:
        url: of the server. model: folder that it serves. backend: name as on the command line. device: as SGLang takes it.
        load: the fields of a `Load`. facts: what every row says besides. out: file of results. log: file for what SGLang's
            benchmark prints. command: the command that asked.
    """

    url: str
    model: str
    backend: str
    device: str
    load: dict[str, Any]
    facts: dict[str, Any]
    out: str
    log: str
    command: str


def main(argv: Sequence[str]) -> int:
    """Serve and ask with every backend; 1 where something failed, 2 where nothing could start, 130 when interrupted."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        import torch
    except ImportError as error:
        print(f"locks-sglang bench needs torch, which cannot be imported: {error}", file=sys.stderr)
        return 2
    device = "cuda" if torch.cuda.is_available() else "cpu"
    load = Load(given.users, given.conversations, given.share, given.turns, given.prefix, given.question, given.answer)
    dense = GPU_BACKENDS if device == "cuda" else CPU_BACKENDS
    backends = given.backends or [LOCKS, *dense]
    folder = MODELS / given.config if given.config else given.model
    complaint = _complaint(given, backends, dense, folder, load)
    if complaint:
        parser.error(complaint)
    begin = end_of_results(parser, given.out)
    command = shlex.join(["locks-sglang", "bench", "serve", *argv])
    failed = []
    try:
        with stopped_by_signals(), tempfile.TemporaryDirectory() as scratch:
            if given.config:
                folder = dressed(folder, Path(scratch) / given.config)
            for backend in backends:
                if not _serve_and_ask(backend, folder, device, load, given, command, Path(scratch)):
                    failed.append(backend)
    except KeyboardInterrupt:
        print("interrupted; the server is stopped", file=sys.stderr)
        return 130
    return report(given.out, begin, summary, failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="locks-sglang bench serve",
        description="Multi-turn chat over shared long prefixes against the real server, with locks and with dense backends.",
    )
    served = parser.add_mutually_exclusive_group(required=True)
    served.add_argument("--model", type=Path, metavar="PATH", help="folder of a model")
    served.add_argument(
        "--config", choices=models(), metavar="NAME", help=f"a published shape with dummy weights: {', '.join(models())}"
    )
    names = (LOCKS, *DENSE_BACKENDS)
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=names,
        metavar="NAME",
        help=f"{LOCKS} {' '.join(GPU_BACKENDS)}, without a GPU {LOCKS} {' '.join(CPU_BACKENDS)}",
    )
    parser.add_argument("--users", nargs="+", type=whole(1, 1024), default=[1, 4, 16, 64], metavar="N", help="1 4 16 64")
    parser.add_argument("--turns", type=whole(2, 64), default=3, metavar="N", help="of a conversation (3)")
    parser.add_argument("--prefix", type=whole(1, MOST_PREFIX), default=32768, metavar="TOKENS", help="shared (32768)")
    parser.add_argument("--question", type=whole(1, 1 << 20), default=128, metavar="TOKENS", help="of every turn (128)")
    parser.add_argument("--answer", type=whole(2, 1 << 16), default=128, metavar="TOKENS", help="of every turn (128)")
    parser.add_argument("--conversations", type=whole(1, 4096), default=8, metavar="N", help="fewest a run (8)")
    parser.add_argument("--share", type=whole(1, 1024), default=4, metavar="N", help="conversations with the same prefix (4)")
    parser.add_argument("--budget", type=whole(3 * PAGE_SIZE, 1 << 20), default=2048, metavar="TOKENS", help="of locks (2048)")
    parser.add_argument("--timeout", type=whole(1, 86_400), default=900, metavar="SECONDS", help="most for a backend (900)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/serve.jsonl"), metavar="FILE")
    parser.add_argument(
        "--server-args",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="...",
        help="for every server, everything up to the end of the line",
    )
    return parser


def _complaint(given: argparse.Namespace, backends: Sequence[str], dense: Sequence[str], folder: Path, load: Load) -> str:
    """What is wrong with the arguments together, "" if nothing is."""
    if given.budget % PAGE_SIZE:
        return f"--budget must be a multiple of {PAGE_SIZE} tokens, got {given.budget}"
    if len(set(backends)) < len(backends):
        return "--backends names one twice"
    absent = [name for name in backends if name != LOCKS and name in GPU_BACKENDS and name not in dense]
    if absent:
        return f"{', '.join(absent)}: needs a GPU, and torch finds none; without one there are {LOCKS} and {', '.join(dense)}"
    own = [word for word in given.server_args if word.split("=")[0] in OWN_FLAGS]
    if own:
        return f"--server-args must leave {own[0]} to this command"
    try:
        config = json.loads((folder / "config.json").read_text())
        shape_of(folder)
    except (OSError, ValueError) as error:
        return f"{folder} is no model's folder: {error}"
    except KeyError as error:
        return f"{folder / 'config.json'} has no {error.args[0]}: no model that {LOCKS} serves"
    if given.model and not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return f"{folder} has no tokenizer; --config serves a published shape without one"
    most = config.get("max_position_embeddings")
    if most and load.longest > most and not any(word.startswith("--context-length") for word in given.server_args):
        return f"a conversation has {load.longest} tokens and more, {folder.name} takes {most}; lower --prefix or --turns"
    return ""


def dressed(shape: Path, folder: Path) -> Path:
    """A model's folder for a configuration alone: with a tokenizer whose every token is one word, and a chat template.

    Text made of tokens becomes these tokens again, so answers are found in the cache when they come back in a prompt.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    folder.mkdir()
    shutil.copy(shape / "config.json", folder)
    size = json.loads((shape / "config.json").read_text())["vocab_size"]
    words = [*(f"w{number}" for number in range(size - len(ROLES))), *ROLES]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def server_command(backend: str, model: Path, device: str, load: Load, given: argparse.Namespace) -> list[str]:
    """Command of a server; decode graphs for as many requests as there are users."""
    words = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--attention-backend", backend]
    if given.config:
        words += ["--load-format", "dummy"]
    if device == "cpu":
        words += ["--device", "cpu", "--dtype", "float32"]
    else:
        words += ["--cuda-graph-max-bs-decode", str(max(load.users))]
    if backend == LOCKS:
        words += ["--locks-budget-tokens", str(given.budget)]
    return [*words, *given.server_args]


def _serve_and_ask(
    backend: str, model: Path, device: str, load: Load, given: argparse.Namespace, command: str, scratch: Path
) -> bool:
    """One backend from its server's start to its end; whether all of it went well."""
    words = server_command(backend, model, device, load, given)
    log = given.out.with_name(f"{given.out.stem}-{backend}.log")
    client_log = log.with_name(f"{log.stem}-client.log")
    client_log.write_text("")
    began = time.monotonic()
    print(f"{backend}: $ {shlex.join(['python', *words[1:]])}; its log is {log}", flush=True)

    def left() -> float:
        return given.timeout - (time.monotonic() - began)

    def in_time(phase: str) -> None:
        if left() <= 0:
            raise ServerError(f"no answer after {given.timeout} s, still {phase}:\n{end_of_log(log)}")

    facts = {
        "weights": "dummy" if given.config else "real",
        "load": {name: value for name, value in asdict(load).items() if name != "users"},
        "server": shlex.join(["python", *words[1:]]),
    }
    code = None
    try:
        with _client(scratch) as client, serving(words, log, _server_environment(backend, device, scratch), in_time) as url:
            print(f"{backend}: up after {time.monotonic() - began:.0f} s", flush=True)
            run = Run(url, str(model), backend, device, asdict(load), facts, str(given.out), str(client_log), command)
            client.communicate(json.dumps(asdict(run)), timeout=max(left(), 1))
            code = client.returncode
    except subprocess.TimeoutExpired:
        print(f"{backend}: stopped after {given.timeout} s", flush=True)
    except (ServerError, OSError) as error:
        print(f"{backend}: {error}", flush=True)
    if code:
        print(f"{backend}: the end of {log}:\n{end_of_log(log)}", flush=True)
    ended = "done" if code == 0 else "failed"
    print(f"{backend}: {time.monotonic() - began:.0f} s, {ended}", flush=True)
    return code == 0


def _server_environment(backend: str, device: str, scratch: Path) -> dict[str, str]:
    """A server's variables: it must not look for models elsewhere."""
    if device == "cpu" and backend != LOCKS:
        from ..dense_cpu import dense_environment

        return dense_environment(scratch) | {"HF_HUB_OFFLINE": "1"}
    return {**os.environ, "HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def _client(scratch: Path) -> Iterator["subprocess.Popen[str]"]:
    """A client that loads SGLang's benchmark while the server starts, and waits for its `Run`; killed when the block ends."""
    command = [sys.executable, "-m", "locks_sglang.benchmarks.serve"]
    environment = client_environment(scratch / "client", {**os.environ, "HF_HUB_OFFLINE": "1"})
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, text=True, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def client_environment(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for `sglang.benchmark.serving`, which imports the package `datasets` for data sets that are not used here.

    Where that is not installed, a module in its place is put into `folder`.
    """
    variables = dict(environment)
    if find_spec("datasets") is None:
        folder.mkdir(exist_ok=True)
        (folder / "datasets.py").write_text("def load_dataset(*args, **kwargs):\n    raise RuntimeError('not installed')\n")
        variables["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [variables.get("PYTHONPATH")])])
    return variables


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a number of users and turn: medians of every backend side by side."""
    lines = []
    for users, turn in sorted({(row["users"], row["turn"]) for row in rows}):
        found = [row for row in rows if (row["users"], row["turn"]) == (users, turn)]
        parts = [
            f"{row['backend']} {row['first_token_ms']['p50']:.0f} ms, {row['token_ms']['p50']:.2f} ms a token, "
            f"{row['run']['output_tokens_per_s']:.0f} tokens/s"
            for row in found
        ]
        lines.append(f"users {users} turn {turn}: {'; '.join(parts)}")
    return lines


# --- a client process -------------------------------------------------------------------------------------------------------


def benchmark_arguments(run: Run, load: Load, prefixes: int, users: int, seed: int, out: Path) -> list[str]:
    """The command line of `sglang.benchmark.serving`."""
    options = {
        "backend": "sglang-oai-chat",
        "base-url": run.url,
        "model": run.model,
        "tokenizer": run.model,
        "dataset-name": "generated-shared-prefix",
        "gsp-num-groups": prefixes,
        "gsp-prompts-per-group": load.share,
        "gsp-system-prompt-len": load.prefix,
        "gsp-question-len": load.question,
        "gsp-output-len": load.answer,
        "gsp-num-turns": load.turns,
        "max-concurrency": users,
        "warmup-requests": 0,
        "seed": seed,
        "output-file": out,
        "extra-request-body": json.dumps({"stream_options": {"include_usage": True}}),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*words, "--gsp-fast-prepare", "--output-details", "--cache-report", "--disable-tqdm"]


def rows_of(result: Mapping[str, Any], turns: int) -> list[dict[str, Any]]:
    """What SGLang's benchmark reports, by turn. It lists the requests of a conversation one after the other.

    Returns:
        One entry a turn in which a request was answered.
    """
    run = {
        "seconds": round(result["duration"], 3),
        "completed": result["completed"],
        "requests": len(result["ttfts"]),
        "output_tokens": result["total_output_tokens"],
        "output_tokens_per_s": round(result["output_throughput"], 2),
    }
    rows = []
    for turn in range(turns):
        asked = range(turn, len(result["ttfts"]), turns)
        done = [i for i in asked if result["output_lens"][i] > 0 and not result["errors"][i]]
        # The time of a token is that from the first to the last piece of an answer, which may hold several tokens.
        tokens = [1e3 * sum(result["itls"][i]) / (result["output_lens"][i] - 1) for i in done if result["output_lens"][i] > 1]
        gaps = [1e3 * gap for i in done for gap in result["itls"][i]]
        if not tokens or not gaps:
            continue
        rows.append(
            {
                "turn": turn + 1,
                "requests": len(asked),
                "completed": len(done),
                "prompt_tokens": percentiles([result["input_lens"][i] for i in done]),
                "cached_tokens": percentiles([result["cached_tokens"][i] for i in done]),
                "answer_tokens": sum(result["output_lens"][i] for i in done),
                "first_token_ms": percentiles([1e3 * result["ttfts"][i] for i in done]),
                "token_ms": percentiles(tokens),
                "gap_ms": percentiles(gaps),
                "run": run,
            }
        )
    return rows


def counts(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What `locks` did between two snapshots of its counters; pages held and read are means of a request's decode step."""

    def grown(name: str) -> int:
        return int(after[name] - before[name])

    rows = grown("sparse_rows")
    built = [count - before["summaries_built"].get(layer, 0) for layer, count in after["summaries_built"].items()]
    dense = {reason: count - before["dense_rows"].get(reason, 0) for reason, count in after["dense_rows"].items()}
    return {
        "decode_steps": grown("decode_steps"),
        "sparse_rows": rows,
        "dense_rows": dense,
        "pages_held": round(grown("pages_held") / max(rows, 1), 2),
        "pages_read": round(grown("pages_read") / max(rows, 1), 2),
        "built": [min(built, default=0), max(built, default=0)],
        "reused": grown("summaries_reused"),
        "rebuilt": grown("summaries_rebuilt"),
        "invalid_pages": int(after["invalid_pages"]),
    }


class Client:
    """Asks one server, with SGLang's benchmark (the module `benchmark`) in this process: its imports are paid for once."""

    def __init__(self, run: Run, benchmark: Any) -> None:
        self.run, self.load, self.benchmark = run, Load(**run.load), benchmark
        if not hasattr(benchmark, "_record_server_prompt_len"):
            _record_prompt_tokens(benchmark)

    def all(self) -> bool:
        """A warm-up and one run for every number of users, appending their rows; whether none failed."""
        good = True
        # Kernels are compiled and libraries loaded by conversations of the same lengths that are not measured.
        self._benchmark(1, min(self.load.share, max(self.load.users)), SEED + 1)
        facts = {**machine(self.run.model, self.run.backend, self.run.device, self.run.command), **self.run.facts}
        for users in self.load.users:
            try:
                good &= self._measure(users, facts)
            except Exception as error:
                traceback.print_exc()
                self._say(f"users {users}: failed: {type(error).__name__}: {brief(error)}")
                good = False
        return good

    def _measure(self, users: int, facts: Mapping[str, Any]) -> bool:
        self._flush()
        before = self._state()
        result = self._benchmark(self.load.prefixes(users), users, SEED)
        after = self._state()
        rows = rows_of(result, self.load.turns)
        locks = {}
        if self.run.backend == LOCKS:
            locks = {"settings": after["config"], "counted": counts(before["counters"], after["counters"])}
        with Path(self.run.out).open("a") as out:
            for row in rows:
                out.write(json.dumps({**facts, "users": users, **row, **locks}) + "\n")
        for row in rows:
            self._say(
                f"users {users} turn {row['turn']}: first token {row['first_token_ms']['p50']:.0f} ms "
                f"(p99 {row['first_token_ms']['p99']:.0f}), {row['token_ms']['p50']:.2f} ms a token "
                f"(p99 {row['token_ms']['p99']:.2f}), {row['run']['output_tokens_per_s']:.0f} tokens/s, prompt "
                f"{row['prompt_tokens']['p50']} with {row['cached_tokens']['p50']} cached, "
                f"{row['completed']} of {row['requests']}"
            )
        if locks:
            self._say(f"users {users}: {json.dumps(locks['counted'])}")
        failures = [error for error in result["errors"] if error]
        if failures:
            self._say(f"users {users}: {len(failures)} requests failed: {failures[0].strip().splitlines()[-1][:400]}")
        invalid = locks["counted"]["invalid_pages"] if locks else 0
        if invalid:
            self._say(f"users {users}: failed: {invalid} pages met without a summary")
        return not invalid and all(result["output_lens"])

    def _benchmark(self, prefixes: int, users: int, seed: int) -> dict[str, Any]:
        """Run SGLang's benchmark; what it prints goes to the log."""
        with tempfile.TemporaryDirectory() as folder, Path(self.run.log).open("a") as log:
            out = Path(folder) / "result.jsonl"
            arguments = benchmark_arguments(self.run, self.load, prefixes, users, seed, out)
            given, sys.argv = sys.argv, ["sglang.benchmark.serving", *arguments]
            try:
                with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                    self.benchmark.cli_main()
            except SystemExit as error:
                raise RuntimeError(f"SGLang's benchmark ended with {error.code}; see {self.run.log}") from error
            finally:
                sys.argv = given
            (line,) = out.read_text().splitlines()
            return dict(json.loads(line))

    def _flush(self) -> None:
        """Empty the server's cache, once it is idle."""
        request = urllib.request.Request(f"{self.run.url}/flush_cache?timeout={FLUSH_S}", method="POST")
        try:
            with urllib.request.urlopen(request, timeout=FLUSH_S + REQUEST_S):
                pass
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"the cache was not flushed: {error.read().decode(errors='replace').strip()}") from error

    def _state(self) -> dict[str, Any]:
        """What `locks` reports; nothing for other backends."""
        if self.run.backend != LOCKS:
            return {}
        with urllib.request.urlopen(f"{self.run.url}/server_info", timeout=REQUEST_S) as answer:
            return dict(json.load(answer)["internal_states"][0][LOCKS])

    def _say(self, text: str) -> None:
        print(f"{self.run.backend}: {text}", flush=True)


def _record_prompt_tokens(benchmark: Any) -> None:
    """Take prompt lengths from the server, as later releases do: SGLang 0.5.17 repeats the first turn's for all turns."""
    extract = benchmark._extract_cache_from_sglext

    def record(data: Mapping[str, Any], output: Any) -> None:
        extract(data, output)
        output.prompt_len = (data.get("usage") or {}).get("prompt_tokens") or output.prompt_len

    benchmark._extract_cache_from_sglext = record


def child() -> int:
    """Entry of a client process, which is told a `Run` as JSON; nothing where the server did not start."""
    try:
        from sglang.benchmark import serving as benchmark

        text = sys.stdin.read()
        return 0 if not text or Client(Run(**json.loads(text)), benchmark).all() else 1
    except Exception as error:
        traceback.print_exc()
        print(f"failed: {type(error).__name__}: {brief(error)}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(child())
