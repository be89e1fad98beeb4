"""What a run has trained, ready to use: with its task, or as a language model without its data."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from cuadrilla.config import Config, LanguageTaskSection, TrainSection
from cuadrilla.data.shards import TOKENIZER, read_manifest
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import CheckpointError, ConfigError
from cuadrilla.model.generate import for_inference, generate_text
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.hf import load_hf
from cuadrilla.model.language import shape_of
from cuadrilla.model.pretrained import read_pretrained
from cuadrilla.model.sampling import Sampling
from cuadrilla.model.task import Task
from cuadrilla.rundir import RunDir, typed
from cuadrilla.runfile import read_run_config
from cuadrilla.train.checkpoint import CHECKPOINT_NAME, Step, check_shapes, choose_step, read_model, take_over
from cuadrilla.train.coordinate import model_tensors
from cuadrilla.train.evaluate import evaluate
from cuadrilla.train.precision import Precision, choose_device, choose_precision
from cuadrilla.train.setup import load_initial, make_model, make_task

USUAL_SAMPLING = Sampling(temperature=0.8, max_tokens=200)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The best verified checkpoint of a run, ready to use."""

    config: Config
    task: Task
    model: nn.Module
    device: torch.device
    precision: Precision
    step: Step

    def evaluate(self, *, sequences: int = 0) -> dict[str, float]:
        """The task's own measures over so many held-out sequences (0: all)."""
        return evaluate(self.task, self.model, sequences=sequences, device=self.device, precision=self.precision)


def load_trained(run: RunDir, *, device: str = "auto", newest: bool = False) -> Trained:
    """A model from its run directory, in the precision it asks for. `newest`: see `choose_step`.

    Raises ConfigError, DataError, CheckpointError.
    """
    config = read_run_config(run)
    task = make_task(config, run.path)
    step = choose_step(run, newest=newest)
    model = make_model(task, seed=config.run.seed)
    if step.path is not None:
        take_over(model_tensors(model), read_model(step.path), path=step.path)
    elif config.model.init:
        load_initial(model, run.path / config.model.init, task=task)
    else:
        raise _untrained(run)
    chosen = choose_device(device)
    arithmetic = _precision(config.train, device=chosen)
    arithmetic.apply(model)
    return Trained(
        config=config,
        task=task,
        model=model.to(chosen).eval(),
        device=chosen,
        precision=arithmetic,
        step=step,
    )


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A run's language model where it lies on disk: a verified checkpoint, or what the run is to begin with."""

    run: RunDir
    run_config: Config
    config: GPT2Config
    tokenizer_path: Path
    step: Step

    @property
    def name(self) -> str:
        return self.run.path.resolve().name

    def load(self) -> GPT2:
        """The whole model, in fp32 on the CPU. Raises CheckpointError."""
        if self.step.path is None:
            return load_hf(self.run.path / self.run_config.model.init)
        with torch.device("meta"):
            model = GPT2(self.config)
        found = read_model(self.step.path)
        check_shapes(model.state_dict(), found, path=self.step.path)
        model.load_state_dict(found, assign=True)
        return model


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A GPT-2 with its tokenizer on its device; `step` is None for one that is not a run's."""

    model: GPT2
    tokenizer: Tokenizer
    device: torch.device
    precision: Precision
    step: Step | None

    def generate(self, prompt: str = "", *, sampling: Sampling = USUAL_SAMPLING) -> Iterator[str]:
        """Continue a text, in pieces as they come; an empty one begins anew."""
        return generate_text(self.ready, self.tokenizer, prompt, sampling=sampling)

    @cached_property
    def ready(self) -> GPT2:
        """A copy that generates as fast as this machine can."""
        return for_inference(self.model)


def open_model(path: Path, *, device: str = "auto", newest: bool = False, precision: str = "auto") -> LanguageModel:
    """Of a run (its folder or run file, or one of its checkpoints), or of a folder in Hugging Face's layout. `newest`:
    see `choose_step`.

    `precision` auto: what the run asks for, or what is best here. Raises ConfigError, DataError, CheckpointError,
    DeviceError.
    """
    chosen = choose_device(device)
    if (run := run_of(path)) is not None:
        stored = find_stored(run, newest=newest)
        model, tokenizer = stored.load(), Tokenizer.load(stored.tokenizer_path)
        arithmetic, step = _precision(stored.run_config.train, device=chosen), stored.step
    else:
        if not (path / "config.json").is_file():
            raise ConfigError(
                "{path} is neither a run nor a model in Hugging Face's layout",
                path=path,
                hint="name a folder that holds run.toml, or config.json and model.safetensors",
            )
        found = read_pretrained(path, trust=False)
        model, tokenizer = found.model, Tokenizer(found.tokenizer)
        arithmetic, step = choose_precision("auto", device=chosen), None
    if precision != "auto":
        arithmetic = choose_precision(precision, device=chosen)
    arithmetic.apply(model)
    return LanguageModel(
        model=model.to(chosen).eval(), tokenizer=tokenizer, device=chosen, precision=arithmetic, step=step
    )


def run_of(path: Path) -> RunDir | None:
    """The run that a path names, by its folder, its run file or the folder of one of its checkpoints; None if it is
    something else."""
    named = CHECKPOINT_NAME.fullmatch(path.name)
    if named is not None and path.parent.name == "checkpoints" and path.is_dir():
        return RunDir(path.parent.parent, version=int(named[1]))
    folder = RunDir(path.parent if path.is_file() else path)
    return folder if folder.run_file.is_file() or folder.checkpoints.is_dir() else None


def find_stored(run: RunDir, *, newest: bool = False) -> Stored:
    """Of a language model, without loading it. `newest`: see `choose_step`.

    Raises ConfigError, DataError, CheckpointError.
    """
    config = read_run_config(run)
    if not isinstance(config.task, LanguageTaskSection):
        hint = "name a run with task.kind = language"
        raise ConfigError("{path} is not a language model", path=run.path, hint=hint)
    tokenizer_path, tokens = _tokenizer_of(run, config)
    step = choose_step(run, newest=newest)
    if step.path is None and not config.model.init:
        raise _untrained(run)
    return Stored(
        run=run,
        run_config=config,
        config=shape_of(config.model, tokens=tokens),
        tokenizer_path=tokenizer_path,
        step=step,
    )


def _tokenizer_of(run: RunDir, config: Config) -> tuple[Path, int]:
    """Where it is, and how many tokens it has. An imported model brings it along, and training keeps a copy."""
    imported = run.path / config.model.init / TOKENIZER
    for own in (imported, run.tokenizer) if config.model.init else (run.tokenizer,):
        if own.is_file():
            return own, Tokenizer.load(own).vocab_size
    data = run.path / config.data.folder
    manifest = read_manifest(data)
    Tokenizer.load(data / TOKENIZER, sha256=manifest.tokenizer_sha256)
    return data / TOKENIZER, manifest.vocab_size


def _untrained(run: RunDir) -> CheckpointError:
    return CheckpointError(
        "{path} has no checkpoint yet",
        path=run.path,
        hint="train it: cuadrilla train {run_file}",
        run_file=typed(run.run_file),
    )


def _precision(section: TrainSection, *, device: torch.device) -> Precision:
    asked = section.precision if section.precision in ("fp32", "bf16") else "auto"  # fp16: not everywhere
    return choose_precision(asked, device=device)
