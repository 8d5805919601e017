"""Ask a running server for greedy answers over its OpenAI endpoint, many at a time.

Prompts go to `/v1/completions` as token ids, made here by the model's own chat template and tokenizer. A prompt that went as
text would be tokenized by the server, which adds the tokenizer's BOS in front of the one that the template has written.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai

from .. import __version__
from ..admin import AdminError, call
from ..benchmarks.kernels import commit

KEY = "none"
REQUEST_S = 1800.0
"""Most seconds of one request: at the end of a long queue of long prompts."""
INFO_S = 60.0


class ClientError(RuntimeError):
    """A server that cannot be asked, or whose answer is not one to the prompt that was sent."""


@dataclass(frozen=True)
class Prompt:
    """What is asked.

    Attributes:
        text: the user's message. begun: words with which the answer begins, "" where the model begins it.
        chat: in the model's chat format, where it has one; else the bare text.
    """

    text: str
    begun: str = ""
    chat: bool = True


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        text: what follows the prompt. tokens: of it. truncated: cut off at the most tokens that were allowed.
    """

    text: str
    tokens: int
    truncated: bool


class PromptFormat:
    """Prompts as token ids: the BOS is there once where tokenizer or template define one, and not at all elsewhere.

    Args:
        tokenizer: of the served model, as transformers loads it.
        thinking: let a model that can think do so before it answers; templates without such a switch do not read it.
    """

    def __init__(self, tokenizer: Any, thinking: bool = False) -> None:
        self.tokenizer, self.thinking = tokenizer, thinking

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of every prompt.

        Raises:
            ClientError: one would begin with two BOS tokens.
        """
        chat = [prompt.chat and self.tokenizer.chat_template is not None for prompt in prompts]
        encoded: list[list[int]] = [[] for _ in prompts]
        for in_chat in (True, False):
            at = [i for i, of in enumerate(chat) if of is in_chat]
            if not at:
                continue
            texts = [self._chat(prompts[i]) if in_chat else _bare(prompts[i]) for i in at]
            # One call for all: the tokenizer then works on all cores.
            ids = self.tokenizer(texts, add_special_tokens=not in_chat, return_attention_mask=False, verbose=False)["input_ids"]
            for i, found in zip(at, ids, strict=True):
                encoded[i] = found
        bos = self.tokenizer.bos_token_id
        if any(bos is not None and ids[:2] == [bos, bos] for ids in encoded):
            raise ClientError(
                f"prompts would begin with {self.tokenizer.bos_token} twice; the model's chat template is at fault"
            )
        return encoded

    def _chat(self, prompt: Prompt) -> str:
        messages = [{"role": "user", "content": prompt.text}]
        opened = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=self.thinking
        )
        return str(opened) + prompt.begun

    def identity(self) -> dict[str, Any]:
        """What the format is, ready for JSON."""
        ids = self.encode([Prompt("text")])[0]
        bos = self.tokenizer.bos_token_id
        return {
            "chat_template": self.tokenizer.chat_template is not None,
            "bos_token": self.tokenizer.bos_token,
            "begins_with_bos": bos is not None and ids[:1] == [bos],
        }


def _bare(prompt: Prompt) -> str:
    return f"{prompt.text}\n{prompt.begun}" if prompt.begun else prompt.text


class Server:
    """A server that runs.

    Args:
        url: its address, e.g. http://127.0.0.1:30000.

    Attributes:
        model: name under which it serves. tokenizer_path: folder or name of its tokenizer.
        context: most tokens of a prompt and its answer together. pool: tokens that its KV cache holds.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        info = self.info()
        if "served_model_name" not in info:
            raise ClientError(f"{self.url} is not SGLang: its /server_info names no served_model_name")
        self.model = str(info["served_model_name"])
        self.tokenizer_path = str(info["tokenizer_path"])
        self.pool = int(info["max_total_num_tokens"])
        self._trusted = bool(info["trust_remote_code"])
        (served,) = (model for model in self._get("/v1/models")["data"] if model["id"] == self.model)
        self.context = min(int(served["max_model_len"]), self.pool)
        self._client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, timeout=REQUEST_S, max_retries=0)

    def info(self) -> dict[str, Any]:
        """What `/server_info` tells."""
        return dict(self._get("/server_info"))

    def locks(self) -> dict[str, Any] | None:
        """What `locks` tells of itself on the first scheduler: settings and counters; None where it does not serve."""
        state = self.info()["internal_states"][0]
        return dict(state["locks"]) if "locks" in state else None

    def identity(self) -> dict[str, Any]:
        """What identifies this server, the model that it serves and this package, ready for JSON."""
        info = self.info()
        told = ("attention_backend", "dtype", "kv_cache_dtype", "device", "page_size", "tp_size", "disable_cuda_graph")
        return {
            "model": {"name": Path(self.model).name, "context": self.context},
            "server": {name: info.get(name) for name in told} | {"pool_tokens": self.pool, "locks": self.locks()},
            "versions": {
                "locks-sglang": __version__,
                "sglang": info["version"],
                **{name: version(name) for name in ("transformers", "openai")},
            },
            "commit": commit(),
        }

    def tokenizer(self, path: str | None) -> Any:
        """The tokenizer at `path`, or where it is None the one that the server uses.

        Raises:
            ClientError: it cannot be loaded here.
        """
        from transformers import AutoTokenizer

        place = path or self.tokenizer_path
        try:
            return AutoTokenizer.from_pretrained(place, trust_remote_code=self._trusted)
        except (OSError, ValueError) as error:
            raise ClientError(f"no tokenizer at {place} ({error}); --tokenizer names another place") from None

    def complete(
        self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int], concurrency: int
    ) -> Iterator[tuple[int, Completion]]:
        """Answer prompts greedily, `concurrency` at a time.

        Args:
            prompts: token ids. new_tokens: most tokens of each answer.

        Yields:
            The number of a prompt and its answer, as they come.

        Raises:
            ClientError: a request failed, or the server counts other tokens in a prompt than were sent. What has not begun by
                then is not asked any more.
        """
        stopped = threading.Event()

        def ask(ids: Sequence[int], most: int) -> Completion | None:
            return None if stopped.is_set() else self._ask(ids, most)

        with ThreadPoolExecutor(concurrency) as pool:
            asked = {pool.submit(ask, ids, most): i for i, (ids, most) in enumerate(zip(prompts, new_tokens, strict=True))}
            try:
                for done in as_completed(asked):
                    answer = done.result()
                    assert answer is not None
                    yield asked[done], answer
            finally:
                stopped.set()

    def _ask(self, ids: Sequence[int], most: int) -> Completion:
        try:
            answer: Any = self._client.completions.create(
                model=self.model,
                prompt=list(ids),
                max_tokens=most,
                temperature=0,
                # SGLang takes what is not given here from the model's generation_config.json.
                extra_body={"repetition_penalty": 1.0},
            )
        except openai.OpenAIError as error:
            raise ClientError(f"a request of {len(ids)} tokens failed: {error}") from error
        if answer.usage.prompt_tokens != len(ids):
            raise ClientError(f"the server counts {answer.usage.prompt_tokens} tokens in a prompt of {len(ids)}")
        (choice,) = answer.choices
        return Completion(choice.text, answer.usage.completion_tokens, choice.finish_reason == "length")

    def _get(self, path: str) -> Mapping[str, Any]:
        try:
            return dict(call(self.url + path, INFO_S))
        except AdminError as error:
            raise ClientError(str(error)) from None


def gather(
    server: Server,
    prompts: Sequence[Sequence[int]],
    new_tokens: Sequence[int],
    concurrency: int,
    on_answer: Callable[[], object],
) -> list[Completion]:
    """All answers, in the order of the prompts; see `Server.complete`. `on_answer` is called at each."""
    found: dict[int, Completion] = {}
    for i, answer in server.complete(prompts, new_tokens, concurrency):
        found[i] = answer
        on_answer()
    return [found[i] for i in range(len(prompts))]
