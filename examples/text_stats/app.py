"""Statistics over texts: work for the processor, one job per file."""

from __future__ import annotations

import math
import pathlib
import random
import re
from collections import Counter
from dataclasses import dataclass

from taskq import TaskQ

app = TaskQ("sqlite:///texts.db")


@dataclass
class Stats:
    """What one text is like."""

    name: str
    words: int
    sentences: int
    distinct: int
    mean_sentence: float  #: words
    entropy: float  #: bits per word
    richness: float  #: distinct words in an average sample of a hundred
    common: list[tuple[str, int]]  #: the commonest words of five letters and more


@app.task(queue="texts", max_retries=1, visibility_timeout=120)
def measure(path: str, samples: int = 2000) -> Stats:
    """Read a file and count; fails for one that is not there or is not text."""
    text = pathlib.Path(path).read_text(encoding="utf-8")
    words = [word.lower() for word in re.findall(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*", text)]
    sentences = max(1, len(re.findall(r"[.!?…]+(?=\s|$)", text)))
    counts = Counter(words)
    return Stats(
        name=pathlib.Path(path).name,
        words=len(words),
        sentences=sentences,
        distinct=len(counts),
        mean_sentence=len(words) / sentences,
        entropy=entropy(counts),
        richness=richness(words, samples),
        common=Counter({word: n for word, n in counts.items() if len(word) > 4}).most_common(3),
    )


def entropy(counts: Counter[str]) -> float:
    """How many bits a word carries, were each drawn by its frequency."""
    total = counts.total()
    return -sum(n / total * math.log2(n / total) for n in counts.values())


def richness(words: list[str], samples: int) -> float:
    """Distinct words in a hundred drawn at random, over many draws: comparable between long and short texts."""
    draw = random.Random(0)
    size = min(100, len(words))
    return sum(len(set(draw.sample(words, size))) for _ in range(samples)) / samples if words else 0.0
