"""Six RULER tasks that need no download, written anew from their published definitions (Hsieh et al., 2024, arXiv 2404.06654).

Per definition: the haystacks (a repeated line of short sentences, or a line a needle), the sentence of a needle, numbers of
seven digits and UUIDs as values, two words joined by a hyphen as a key, chains of four hops between variables of five capital
letters, ten common words that stand 30 times each among uncommon ones that stand three times, coded words of six letters
whose counts follow a zeta distribution with exponent 2 and whose commonest "word" is dots, a worked example before
the question in vt and cwe, the question last, an answer that is begun for the model, the most tokens of an answer, the rule
of scoring, and lengths that count prompt and answer.

Ours: the generator, the wording around these (instructions, questions, the words with which an answer begins), the words (from
a text that every machine has, instead of a packaged list), and the sizes of the worked example of vt. Scores are therefore to
be compared with each other and not with published ones. Six tasks are no substitute for the mean of RULER's 13.
"""

import hashlib
import math
import random
import re
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .client import Prompt
from .text import load_text

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
HOPS = 4
COMMON, COMMON_TIMES, UNCOMMON_TIMES = 10, 30, 3
EXAMPLE_COMMON_TIMES, EXAMPLE_UNCOMMON = 10, 30
ZETA_2 = math.pi**2 / 6
DOTS = "...."
FREQUENT = 3
EXAMPLE_LINES = 10
"""Lines of noise in the worked example of vt."""
FIRST_STEP = 16
"""Units more in the second probe of a sample's size than in the first."""


class TaskError(ValueError):
    """A task that cannot be made: a length too short, or a text with too few words."""


@dataclass(frozen=True)
class Words:
    """Distinct words for keys and lists.

    Attributes:
        name, description: of the text that they are from. words: in alphabetical order.
    """

    name: str
    description: str
    words: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the words, one a line."""
        return hashlib.sha256("\n".join(self.words).encode()).hexdigest()

    def draw(self, rng: random.Random, count: int) -> list[str]:
        """`count` different words.

        Raises:
            TaskError: there are fewer.
        """
        if count > len(self.words):
            raise TaskError(
                f"{count} different words are needed and {self.name} has {len(self.words)}; shorten --lengths or change --text"
            )
        return rng.sample(self.words, count)

    def keys(self, rng: random.Random, count: int) -> list[str]:
        """`count` different pairs of words, each joined by a hyphen."""
        pairs = rng.sample(range(len(self.words) ** 2), count)
        return [f"{self.words[pair // len(self.words)]}-{self.words[pair % len(self.words)]}" for pair in pairs]


def load_words(name: str) -> Words:
    """The words of four to twelve lower-case letters in a text.

    Args:
        name: as for `load_text`.

    Raises:
        TextError: the text cannot be read. TaskError: it has hardly any words.
    """
    text, description = load_text(name)
    words = tuple(sorted(set(re.findall(r"(?<![\w'-])[a-z]{4,12}(?![\w'-])", text))))
    if len(words) < COMMON + EXAMPLE_UNCOMMON:
        raise TaskError(f"{description} has {len(words)} different words; {COMMON + EXAMPLE_UNCOMMON} and more are needed")
    return Words(name, description, words)


@dataclass(frozen=True)
class Draft:
    """A prompt, and what a right answer contains."""

    prompt: Prompt
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """One kind of question.

    Attributes:
        new_tokens: most tokens of an answer. chance: score in points of an answer that does not depend on the context.
        unit: of what a larger sample has more. least: fewest units.
        write: a sample of so many units.
    """

    name: str
    new_tokens: int
    unit: str
    least: int
    write: Callable[[random.Random, Words, int], Draft]
    chance: float = 0.0


def _needle(what: str, key: str, value: str) -> str:
    return f"One of the special magic {what} for {key} is: {value}."


def _needle_draft(what: str, lines: Sequence[str], key: str, value: str) -> Draft:
    """A question for the one value of a key; `what` is the plural of its kind."""
    kind = what.removesuffix("s")
    text = (
        f"A special magic {kind} is hidden in the text below. Remember it: you will be asked for the {kind} afterwards.\n"
        + "\n".join(lines)
        + f"\nWhat is the special magic {kind} for {key} that the text mentions?"
    )
    return Draft(Prompt(text, f"The special magic {kind} for {key} that the text mentions is"), (value,))


def _numbers(rng: random.Random, count: int) -> list[str]:
    return [str(number) for number in rng.sample(range(10**6, 10**7), count)]


def _uuids(rng: random.Random, count: int) -> list[str]:
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(count)]


def _depth(rng: random.Random, lines: int) -> int:
    """Lines before something that is put between `lines` of them, every place equally likely."""
    return int(rng.random() * (lines + 1))


def _niah_single_1(rng: random.Random, words: Words, size: int) -> Draft:
    depth, (key,), (value,) = _depth(rng, size), words.keys(rng, 1), _numbers(rng, 1)
    lines = [NOISE] * size
    lines.insert(depth, _needle("numbers", key, value))
    return _needle_draft("numbers", lines, key, value)


def _niah_multikey(rng: random.Random, what: str, keys: Sequence[str], values: Sequence[str]) -> Draft:
    lines = [_needle(what, key, value) for key, value in zip(keys, values, strict=True)]
    asked = _depth(rng, len(keys) - 1)
    return _needle_draft(what, lines, keys[asked], values[asked])


def _niah_multikey_2(rng: random.Random, words: Words, size: int) -> Draft:
    return _niah_multikey(rng, "numbers", words.keys(rng, size), _numbers(rng, size))


def _niah_multikey_3(rng: random.Random, words: Words, size: int) -> Draft:
    return _niah_multikey(rng, "uuids", _uuids(rng, size), _uuids(rng, size))


def _chain(rng: random.Random, names: Sequence[str], lines: int) -> tuple[str, str]:
    """Noise in which a value is handed from variable to variable, and the value."""
    value = str(rng.randrange(10**4, 10**5))
    steps = [f"VAR {names[0]} = {value}", *(f"VAR {to} = VAR {of}" for of, to in pairwise(names))]
    text = [NOISE] * lines
    depths = sorted(_depth(rng, lines) for _ in steps)
    for depth, step in reversed(list(zip(depths, steps, strict=True))):
        text.insert(depth, step)
    return "\n".join(text), value


def _vt_asked(text: str, value: str) -> tuple[str, str]:
    """A question about a chain, and the words with which its answer begins."""
    asked = (
        "Follow the chain of variable assignments that is hidden in the text below, and remember it.\n\n"
        f"{text}\nQuestion: Which variables have been assigned the value {value} in the text above? Find all of them."
    )
    begun = (
        f"Answer: According to the chain of variable assignments in the text above, {HOPS + 1} variables are assigned the "
        f"value {value}, they are:"
    )
    return asked, begun


def _vt(rng: random.Random, words: Words, size: int) -> Draft:
    names: list[str] = []
    while len(names) < 2 * (HOPS + 1):
        name = "".join(rng.choices(string.ascii_uppercase, k=5))
        if name not in names:
            names.append(name)
    names, example_names = names[: HOPS + 1], names[HOPS + 1 :]
    example, example_begun = _vt_asked(*_chain(rng, example_names, EXAMPLE_LINES))
    asked, begun = _vt_asked(*_chain(rng, names, size))
    text = f"{example}\n{example_begun} {' '.join(example_names)}\n\n{asked}"
    return Draft(Prompt(text, begun), tuple(names))


def _cwe_asked(rng: random.Random, common: Sequence[str], times: int, uncommon: Sequence[str]) -> str:
    entries = [*common] * times + [*uncommon] * UNCOMMON_TIMES
    rng.shuffle(entries)
    numbered = " ".join(f"{number}. {word}" for number, word in enumerate(entries, 1))
    return (
        "The text below is a numbered list of words, some of which stand in it more often than others. Remember those that "
        f"stand in it most often.\n{numbered}\nQuestion: Which {COMMON} words are the most common in the list above?"
    )


def _cwe(rng: random.Random, words: Words, size: int) -> Draft:
    drawn = words.draw(rng, COMMON + size)
    common, uncommon = drawn[:COMMON], drawn[COMMON:]
    example = words.draw(rng, COMMON + EXAMPLE_UNCOMMON)
    begun = f"Answer: The {COMMON} words that stand in the list most often are:"
    shown = _cwe_asked(rng, example[:COMMON], EXAMPLE_COMMON_TIMES, example[COMMON:])
    listed = " ".join(f"{number}. {word}" for number, word in enumerate(example[:COMMON], 1))
    text = f"{shown}\n{begun} {listed}\n\n{_cwe_asked(rng, common, COMMON_TIMES, uncommon)}"
    return Draft(Prompt(text, begun), tuple(common))


def _fwe(rng: random.Random, words: Words, size: int) -> Draft:
    """`size` words are shared out: the word of rank k stands size / (k^2 zeta(2)) times, rounded down."""
    counts = [int(size / (rank**2 * ZETA_2)) for rank in range(1, math.isqrt(size) + 1)]
    counts = [count for count in counts if count]
    coded: list[str] = []
    while len(coded) < len(counts) - 1:
        word = "".join(rng.choices(string.ascii_lowercase, k=6))
        if word not in coded:
            coded.append(word)
    entries = [word for word, count in zip([DOTS, *coded], counts, strict=True) for _ in range(count)]
    rng.shuffle(entries)
    text = (
        "Read the coded text below and count how often each coded word stands in it. Find the three coded words that stand in "
        f"it most often.\n{' '.join(entries)}\nQuestion: Which three coded words stand in the text above most often? Give no "
        f"explanation, and leave out the dots '{DOTS}'."
    )
    begun = "Answer: According to the coded text above, the three words that stand in it most often are:"
    return Draft(Prompt(text, begun), tuple(coded[:FREQUENT]))


TASKS = {
    task.name: task
    for task in (
        Task("niah_single_1", 128, "lines of noise", 1, _niah_single_1),
        Task("niah_multikey_2", 128, "needles", 2, _niah_multikey_2),
        Task("niah_multikey_3", 128, "needles", 2, _niah_multikey_3),
        Task("vt", 30, "lines of noise", 5, _vt),
        Task("cwe", 120, "uncommon words", 10, _cwe),
        # From 60 words on, the four commonest have counts of their own.
        Task("fwe", 50, "words", 60, _fwe),
    )
}


def score(text: str, answers: Sequence[str]) -> float:
    """Share of the expected answers that a text contains, whatever their case, in points (0 to 100)."""
    return 100 * sum(answer.lower() in text.lower() for answer in answers) / len(answers)


@dataclass(frozen=True)
class Sample:
    """One question of a length.

    Attributes:
        ids: the prompt. answers: what a right answer contains. size: in the task's units.
    """

    ids: list[int]
    answers: tuple[str, ...]
    size: int


def make_samples(
    task: Task,
    words: Words,
    length: int,
    seed: int,
    numbers: Sequence[int],
    encode: Callable[[Sequence[Prompt]], list[list[int]]],
) -> list[Sample]:
    """Samples whose prompt and longest answer have `length` tokens, or fewer where one unit more would be too many.

    A sample depends on nothing but task, words, length, seed, its number and the tokenizer.

    Args:
        numbers: which samples. encode: token ids of prompts.

    Raises:
        TaskError: the smallest sample is longer, or the words do not suffice.
    """
    fits = [_Fit(task, words, length, f"{seed}/{task.name}/{length}/{number}") for number in numbers]
    while open_fits := [fit for fit in fits if not fit.done]:
        drafts = [fit.draft() for fit in open_fits]
        for fit, draft, ids in zip(open_fits, drafts, encode([draft.prompt for draft in drafts]), strict=True):
            fit.learn(draft, ids)
    return [fit.sample for fit in fits]


class _Fit:
    """Search for the size of one sample: two small probes tell tokens a unit, further ones close in from both sides."""

    def __init__(self, task: Task, words: Words, length: int, seed: str) -> None:
        self.task, self.words, self.length, self.seed = task, words, length, seed
        self.room = length - task.new_tokens
        self.size = task.least
        self.fitting: tuple[int, Draft, list[int]] | None = None
        """The largest size that fits, and what it became."""
        self.above: tuple[int, int] | None = None
        """The smallest size that does not, and its tokens."""
        self.smallest = 0
        """Tokens of the smallest sample."""
        self.rounds = 0

    @property
    def done(self) -> bool:
        if self.fitting is None:
            return False
        size, _, ids = self.fitting
        return len(ids) == self.room or (self.above is not None and self.above[0] == size + 1)

    @property
    def sample(self) -> Sample:
        assert self.fitting is not None
        size, draft, ids = self.fitting
        return Sample(ids, draft.answers, size)

    def draft(self) -> Draft:
        return self.task.write(random.Random(self.seed), self.words, self.size)

    def learn(self, draft: Draft, ids: list[int]) -> None:
        """Take what the draft of `size` became, and choose the next size."""
        self.rounds += 1
        if len(ids) <= self.room:
            self.smallest = self.smallest or len(ids)
            self.fitting = self.size, draft, ids
        elif self.fitting is None:
            raise TaskError(
                f"{self.task.name} has {len(ids) + self.task.new_tokens} tokens and more with this tokenizer; "
                f"{self.length} are too few"
            )
        else:
            self.above = self.size, len(ids)
        size, _, fitting_ids = self.fitting
        tokens = len(fitting_ids)
        if self.above is None:
            grown = tokens - self.smallest
            # One more than would fit by the tokens a unit so far: the next probes then close in from both sides.
            step = (self.room - tokens) * (size - self.task.least) // grown + 1 if grown else FIRST_STEP
            self.size = size + step
            return
        above, above_tokens = self.above
        share = (self.room - tokens) / (above_tokens - tokens) if self.rounds % 4 else 0.5
        self.size = min(max(size + int(share * (above - size)), size + 1), above - 1)
