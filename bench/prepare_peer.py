"""The usual way from text to ids: `datasets.map` with the library `tokenizers`. Run by bench/prepare.py.

python bench/prepare_peer.py TEXT_FOLDER TOKENIZER OUT PROCESSES
"""

import os
import sys
from pathlib import Path

os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def main() -> None:
    import datasets
    import numpy as np
    from tokenizers import Tokenizer

    folder, tokenizer_path, out, processes = sys.argv[1:]
    files = sorted(str(path) for path in Path(folder).glob("*.txt"))
    tokenizer = Tokenizer.from_file(tokenizer_path)
    end = tokenizer.token_to_id("<|endoftext|>")

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": [[*encoding.ids, end] for encoding in tokenizer.encode_batch_fast(batch["text"])]}

    text = datasets.load_dataset(
        "text", data_files=files, sample_by="document", split="train", cache_dir=str(Path(out) / "cache")
    )
    found = text.map(encode, batched=True, batch_size=8, num_proc=int(processes), remove_columns=["text"])
    with open(Path(out) / "train.bin", "wb") as file:
        for row in found.with_format("numpy"):
            file.write(np.asarray(row["ids"]).astype("<u2").tobytes())


if __name__ == "__main__":
    main()
