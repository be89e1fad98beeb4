"""How much text stays twice, and how much is lost, when novels come in several editions.

    python -m bench.duplicates NOVELAS EDITIONS     # files, and other editions of some of them
    python -m bench.duplicates NOVELAS --made 20    # editions of 20 of the files, made here

A made edition has other line breaks (every line a paragraph of some 70 letters, or no paragraphs at all), no accents on
every third word, a preface of its own and a running title every thirty lines. What is left and what is dropped is
compared by all of its sets of five words in a row, without accents: a stretch of `RUN` words or more that a kept
document before it has stays twice; one that no kept document has is lost. Prints one JSON object.
"""

import argparse
import random
import re
import tempfile
import textwrap
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.common import report
from cuadrilla.data.corpus import Corpus, CorpusRules, clean_corpus
from cuadrilla.data.duplicates import DEFAULT_SIMILARITY, SHINGLE_WORDS
from cuadrilla.data.options import PrepareOptions
from cuadrilla.data.pool import Processes
from cuadrilla.data.prepare import no_progress
from cuadrilla.data.sources import open_sources
from cuadrilla.data.work import DROP

RUN = 50
"""Words; shorter stretches are turns of phrase, and single words that an editor changed."""
LINES_ON_A_PAGE = 30


def plain(text: str) -> str:
    """Lower case, no accents."""
    return "".join(c for c in unicodedata.normalize("NFD", text.lower()) if not unicodedata.combining(c))


def edition(text: str, *, seed: int) -> str:
    """Another edition of a book."""
    rng = random.Random(seed)
    words = [plain(word) if rng.random() < 1 / 3 else word for word in text.split()]
    lines = textwrap.wrap(" ".join(words), 70)
    for place in range(0, len(lines), LINES_ON_A_PAGE):
        lines[place] = f"NOVELA {seed}   {place // LINES_ON_A_PAGE + 5}\n" + lines[place]
    preface = " ".join(rng.choices(sorted(set(words)), k=400))
    return f"{preface}\n\n" + ("\n\n" if seed % 2 else "\n").join(lines)


def make_editions(folder: Path, files: list[Path]) -> None:
    for number, path in enumerate(files):
        text = edition(path.read_text(encoding="utf-8"), seed=number)
        (folder / f"{path.stem}-otra.txt").write_text(text, encoding="utf-8")


def shingles(words: list[str]) -> NDArray[np.int64]:
    """A number for each five words in a row."""
    return np.array([hash(tuple(words[n : n + SHINGLE_WORDS])) for n in range(len(words) - SHINGLE_WORDS + 1)])


def words_in_runs(is_in: NDArray[np.bool_]) -> int:
    """How many lie in stretches of `RUN` or more."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_in, [False]]).astype(np.int8)))
    lengths = edges[1::2] - edges[::2]
    return int(lengths[lengths >= RUN].sum())


def measure(corpus: Corpus) -> dict[str, Any]:
    """What stays twice and what is lost, in shares of the words that are kept."""
    documents = [shingles(re.findall(r"\w+", plain(corpus.text(n)))) for n in range(len(corpus.splits))]
    is_kept = corpus.splits != DROP
    seen: set[int] = set()
    kept = twice = 0
    for number in np.flatnonzero(is_kept).tolist():
        mine = documents[number]
        twice += words_in_runs(np.array([value in seen for value in mine.tolist()], dtype=np.bool_))
        kept += len(mine)
        seen.update(mine.tolist())
    lost = 0
    for number in np.flatnonzero(~is_kept).tolist():
        mine = documents[number]
        lost += words_in_runs(np.array([value not in seen for value in mine.tolist()], dtype=np.bool_))
    dropped = sum(len(documents[n]) for n in np.flatnonzero(~is_kept).tolist())
    return {"words_kept": kept, "words_dropped": dropped, "stays_twice": twice / kept, "lost": lost / kept}


def corpus_of(sources: list[str], work: Path) -> tuple[Corpus, list[str]]:
    options = PrepareOptions()
    rules = CorpusRules(
        recipe=0,
        maximum=20_000,
        min_characters=options.min_characters,
        filter=options.filter,
        similarity=DEFAULT_SIMILARITY,
        val_fraction=options.val_fraction,
        val_by=options.val_by,
    )
    found = open_sources(sources, exclude=work, progress=no_progress)
    with Processes(1) as pool:
        corpus = clean_corpus(work, found=found, rules=rules, pool=pool, progress=no_progress)
    return corpus, [source.name for source in found.sources]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--made", type=int, default=0, help="editions to make of the files of the first folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made, work = Path(folder) / "made", Path(folder) / "work"
        made.mkdir()
        work.mkdir()
        make_editions(made, sorted(arguments.sources[0].glob("*.txt"))[: arguments.made])
        corpus, names = corpus_of([*map(str, arguments.sources), *([str(made)] if arguments.made else [])], work)
        repeats = [f"{names[r.source]} is {r.share:.1%} in {names[r.other]}" for r in corpus.repeats()]
        report("duplicates", **measure(corpus), counts=dict(corpus.counts), repeats=repeats)


if __name__ == "__main__":
    main()
