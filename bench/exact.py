"""Exactness on a GPT-2: the weights of two equal and of three unequal workers beside those of one.

    python -m bench.exact [--steps 20] [--settings "adamw fp32" ...]

Each crew trains `micro` on the built-in stories twice, with and without strict mode. `strict` has the SHA-256 of each
crew over weights and optimizer state; all must be equal. `relative_difference` compares the weights of the runs without
strict mode: ‖θ_crew − θ_one‖ / ‖θ_one‖ over all parameters.
"""

import tempfile
from pathlib import Path

from bench.common import options, report, run_text, stories
from cuadrilla.crew.run import train_run
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import read_run_file
from tests.runs import UNEQUAL, final, final_sha256, relative_difference

SETTINGS = ["adamw fp32", "muon fp32", "adamw bf16", "muon bf16"]
RUN = {
    "model.preset": "micro",
    "train.batch_sequences": 16,
    "train.unit_sequences": 2,
    "checkpoint.every_seconds": 0,
    "checkpoint.journal": "off",
    "evaluate.sequences": 8,
}


def compare(data: Path, folder: Path, *, steps: int, setting: str) -> dict[str, object]:
    optimizer, precision = setting.split()

    def trained(name: str, *, strict: bool) -> Path:
        run = RunDir(folder / f"{name} {strict}")
        run.path.mkdir(parents=True)
        own = {"data.folder": data, "train.steps": steps, "train.precision": precision, "optim.kind": optimizer}
        run.run_file.write_text(run_text(RUN | own | {"sync.strict": strict}))
        crew = ['engine.kind="crew"', f"engine.workers={UNEQUAL[name]}"] if name != "one" else []
        train_run(read_run_file(run.run_file, sets=crew), run)
        return run.path

    strict = {name: final_sha256(trained(name, strict=True)) for name in UNEQUAL}
    loose = {name: final(trained(name, strict=False)) for name in UNEQUAL}
    return {
        "strict": strict,
        "strict_equal": len(set(strict.values())) == 1,
        "relative_difference": {name: relative_difference(loose[name], loose["one"]) for name in UNEQUAL},
    }


def main() -> None:
    given = options(__doc__, steps=20, stories=4000, settings=SETTINGS)
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        stories(data, number=given.stories)
        results = {
            setting: compare(data, Path(name) / setting, steps=given.steps, setting=setting)
            for setting in given.settings
        }
    report("exact", steps=given.steps, crews=UNEQUAL, results=results)


if __name__ == "__main__":
    main()
