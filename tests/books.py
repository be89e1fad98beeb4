"""Books to prepare."""

import random
from pathlib import Path


def write_books(folder: Path, *, num_books: int = 3, characters: int = 60_000, seed: int = 0) -> Path:
    """Write books of invented Spanish words; no two paragraphs are the same."""
    rng = random.Random(seed)
    syllables = ["ca", "sa", "ñu", "ló", "pe", "rro", "qué", "ti", "mar", "ía", "sol", "güe", "na", "dor"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(800)]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_books):
        size, paragraphs = 0, []
        while size < characters:
            paragraphs.append(" ".join(rng.choices(words, k=rng.randint(20, 120))).capitalize() + ".")
            size += len(paragraphs[-1])
        (folder / f"libro{number}.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    return folder
