"""`cuadrilla train TEXT…`: from texts to a model in a given time."""

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cuadrilla.cli.data import fetched, report_left_out
from cuadrilla.cli.output import say
from cuadrilla.cli.progress import shown_progress
from cuadrilla.data.catalogue import CATALOGUE
from cuadrilla.data.prepare import OtherTextError, Prepared, PrepareOptions, prepare
from cuadrilla.errors import ConfigError, CuadrillaError, DataError
from cuadrilla.monitor.screen import duration
from cuadrilla.plan.decide import block_weights, decide
from cuadrilla.plan.predict import MachineSpec, predict_alone
from cuadrilla.plan.size import SizeChoice, choose
from cuadrilla.rundir import RunDir, make_private, typed
from cuadrilla.runfile import LENGTHS, SIZES, gpt2_settings, make_run, read_run_config, resolve, run_file_text

DATA, BUILT_IN, MUCH_LESS = "data", "cuentos:", 0.8
_TIME = re.compile(r"(?=\d)(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def is_text(name: str) -> bool:
    """Whether `name` is text to train on (a file, a folder, or the name of a corpus), and not a run."""
    path = Path(name)
    if path.suffix == ".toml" or (path / "run.toml").exists():
        return False
    return path.is_file() or (path.is_dir() and any(path.iterdir())) or name.startswith(BUILT_IN) or name in CATALOGUE


def run_of_texts(texts: Sequence[str], *, name: str, within: str, size: str, settings: Mapping[str, float]) -> RunDir:
    """Prepare the texts, measure this machine, and write the run file. If there is a run file, it stays as it is.

    `within`: a time such as 20m or 1h30m. `size`: micro, mini, small, or "" to choose. `settings`: written, too; a
    length takes the place of the time. Raises ConfigError, DataError, LinkError, ResourceError, DeviceError.
    """
    deadline = time.monotonic() + seconds_of(within)
    if bad := [text for text in texts if not is_text(text)]:
        raise ConfigError("{name} is no text", name=bad[0], hint="name files and folders with text, or one run")
    folder = Path(name or re.sub(r"\W+", "-", Path(texts[0]).stem.partition(":")[0]).strip("-") + "-gpt2")
    make_private(folder)
    run = RunDir(folder)
    try:
        prepared = _prepared([_here(text, run) for text in texts], run)
    except CuadrillaError:
        with suppress(OSError):  # not empty
            run.path.rmdir()
        raise
    report_left_out(prepared)
    tokens = prepared.manifest.splits["train"].num_tokens
    say("text       {train:,} tokens to train on, {val:,} held out", train=tokens, val=prepared.manifest.num_held_out)
    if run.run_file.exists():
        if size and size != (preset := read_run_config(run).model.preset):
            hint = "with --name you make another model"
            raise ConfigError("{run} is of gpt2-{preset}", run=typed(run.path), preset=preset, hint=hint)
        return run
    say("measuring  this machine: about ten seconds")
    chosen = _chosen(run, text=tokens, sizes=[size] if size else list(SIZES), deadline=deadline)
    written: dict[str, Any] = gpt2_settings(chosen.size, data=DATA, tokens=chosen.tokens)
    if any(f"train.{length}" in settings for length in LENGTHS):
        del written["train.tokens"]
        say("plan       gpt2-{size} at {rate:,.0f} tokens/s", size=chosen.size, rate=chosen.tokens_per_second)
    else:
        _say_plan(chosen, seconds_left=deadline - time.monotonic())
    make_run(run.path, run_file_text({**written, **settings}))
    say("wrote      {file}; Ctrl-C saves and stops, the same command continues", file=typed(run.run_file))
    return run


def _say_plan(chosen: SizeChoice, *, seconds_left: float) -> None:
    say(
        "plan       gpt2-{size} reads the text {readings:.1f} times at {rate:,.0f} tokens/s: about {time}",
        size=chosen.size,
        readings=chosen.readings,
        rate=chosen.tokens_per_second,
        time=duration(chosen.seconds),
    )
    if chosen.seconds < MUCH_LESS * seconds_left:
        say("           with so little text, more time would not improve the model")


def seconds_of(text: str) -> float:
    """The seconds in a time such as 90s, 20m or 1h30m. Raises ConfigError."""
    if not (found := _TIME.fullmatch(text)):
        raise ConfigError("{text!r} is not a time", text=text, hint="write it as 90s, 20m or 1h30m")
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return 3600.0 * hours + 60 * minutes + seconds


def _here(text: str, run: RunDir) -> str:
    """The file or folder that `text` stands for. A corpus is fetched."""
    if Path(text).exists() or text.startswith(BUILT_IN):
        return text
    fetched([text], to=run.path / "texts")
    return str(run.path / "texts" / text)


def _prepared(sources: Sequence[str], run: RunDir) -> Prepared:
    try:
        with shown_progress() as progress:
            return prepare(sources, out=run.path / DATA, options=PrepareOptions(), progress=progress)
    except OtherTextError as error:
        hint = "with --name you make another model; without texts, `cuadrilla train {run}` goes on with this one"
        raise DataError("{reason}", reason=error.message, hint=hint, run=typed(run.path)) from None


def speed_here(run: RunDir, run_file: str) -> tuple[float, int]:
    """Tokens per second of this machine, optimizer steps included, and the number of tokens to train on."""
    from cuadrilla.train.measure import measure

    config, _ = decide(resolve(run_file).config, run)
    found = measure(config, run.path)
    here = MachineSpec(name="here", tokens_per_second=found.tokens_per_second)
    return predict_alone(here, found.work).tokens_per_second, found.total_tokens


def _chosen(run: RunDir, *, text: int, sizes: Sequence[str], deadline: float) -> SizeChoice:
    def rate(size: str, tokens: int) -> float:
        return speed_here(run, run_file_text(gpt2_settings(size, data=DATA, tokens=tokens)))[0]

    weights = {
        size: block_weights(resolve(run_file_text(gpt2_settings(size, data=DATA, tokens=text))).config)
        for size in sizes
    }
    return choose(weights, text=text, seconds_left=lambda: deadline - time.monotonic(), rate=rate)
