"""The model that a run has trained, ready to use: with its task, or as a language model without its data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from cuadrilla.config import Config, LanguageTaskSection
from cuadrilla.data.folder import TOKENIZER, read_manifest
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import CheckpointError, ConfigError
from cuadrilla.model.generate import generate_text
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.hf import load_hf, require_rows
from cuadrilla.model.inference import InferenceModel
from cuadrilla.model.language import shape_of
from cuadrilla.model.pretrained import read_pretrained
from cuadrilla.model.sampling import Sampling
from cuadrilla.model.task import Task
from cuadrilla.model.weights import WEIGHTS, read_tensors
from cuadrilla.rundir import RunDir, typed
from cuadrilla.runfile import read_run_config
from cuadrilla.train.checkpoint import CHECKPOINT_NAME, Step, check_shapes, choose_step, copy_into, model_tensors
from cuadrilla.train.evaluate import evaluate, evaluate_texts
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
    """Load a model from its run directory, in the precision that the run asks for. `newest`: see `choose_step`.

    Raises ConfigError, DataError, CheckpointError.
    """
    config = read_run_config(run)
    task = make_task(config, run.path)
    step = choose_step(run, newest=newest)
    model = make_model(task, seed=config.run.seed)
    if step.path is None and config.model.init:
        load_initial(model, run.path / config.model.init, task=task)
    else:
        path, weights = _weights(run, config, step)
        copy_into(model_tensors(model), weights, path=path)
    chosen = choose_device(device)
    arithmetic = _precision(config.train.precision, device=chosen)
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
class LanguageModel:
    """A GPT-2 with its tokenizer, on its device. `run`, `config` and `step` are None if the model is not a run's."""

    model: GPT2
    tokenizer: Tokenizer
    tokenizer_path: Path
    device: torch.device
    precision: Precision
    run: RunDir | None = None
    config: Config | None = None
    step: Step | None = None

    def generate(self, prompt: str = "", *, sampling: Sampling = USUAL_SAMPLING) -> Iterator[str]:
        """Continue a text; yields pieces as they are generated. An empty prompt begins a new text."""
        return generate_text(self.ready, self.tokenizer, prompt, sampling=sampling)

    def evaluate(self, texts: Sequence[str]) -> dict[str, float]:
        """`loss` and `bits_per_byte` of documents, measured as a training measures its held-out text. Raises DataError
        if they are empty."""
        return evaluate_texts(self.model, self.tokenizer, texts, device=self.device)

    @cached_property
    def ready(self) -> InferenceModel:
        """A copy that generates as fast as this machine can."""
        return InferenceModel(self.model)


def open_model(path: Path, *, device: str = "auto", newest: bool = False, precision: str = "auto") -> LanguageModel:
    """Open a run (its folder or run file, or one of its checkpoints) or a folder in Hugging Face's layout. `newest`:
    see `choose_step`.

    `precision` auto: what the run asks for, or what is best here. Raises ConfigError, DataError, CheckpointError,
    DeviceError.
    """
    chosen = choose_device(device)
    if (run := run_of(path)) is not None:
        opened = _open_run(run, device=chosen, newest=newest)
    elif (path / "config.json").is_file():
        found, arithmetic = read_pretrained(path, trust=False), _precision("auto", device=chosen)
        opened = LanguageModel(
            model=found.model,
            tokenizer=found.tokenizer,
            tokenizer_path=path / TOKENIZER,
            device=chosen,
            precision=arithmetic,
        )
    else:
        raise ConfigError(
            "{path} does not exist"
            if not path.exists()
            else "{path} is neither a run nor a model in Hugging Face's layout",
            path=path,
            hint="name a folder that holds run.toml, or config.json and model.safetensors",
        )
    if precision != "auto":
        opened = replace(opened, precision=choose_precision(precision, device=chosen))
    opened.precision.apply(opened.model)
    opened.model.to(chosen).eval()
    return opened


def run_of(path: Path) -> RunDir | None:
    """The run that a path names, by its folder, its run file or the folder of one of its checkpoints; None if it is
    something else."""
    named = CHECKPOINT_NAME.fullmatch(path.name)
    if named is not None and path.parent.name == "checkpoints" and path.is_dir():
        return RunDir(path.parent.parent, version=int(named[1]))
    folder = RunDir(path)
    return folder if folder.run_file.is_file() or folder.checkpoints.is_dir() else None


def _open_run(run: RunDir, *, device: torch.device, newest: bool) -> LanguageModel:
    """Open a run's model in fp32 on the CPU. Its tokenizer is the imported model's, the run's copy or the data's."""
    config = read_run_config(run)
    if not isinstance(config.task, LanguageTaskSection):
        hint = "name a run with task.kind = language"
        raise ConfigError("{path} is not a language model", path=run.path, hint=hint)
    init, data = run.path / config.model.init, run.path / config.data.folder
    kept = [path for path in (init / TOKENIZER, run.tokenizer) if path.is_file()]
    path = kept[0] if kept else data / TOKENIZER
    tokenizer = Tokenizer.load(path, sha256=None if kept else read_manifest(data).tokenizer_sha256)
    step = choose_step(run, newest=newest)
    with torch.device("meta"):
        model = GPT2(shape_of(config.model, tokens=tokenizer.vocab_size))
    require_rows(tokenizer.vocab_size, rows=model.config.vocab_size)
    origin, weights = _weights(run, config, step)
    check_shapes(model.state_dict(), weights, path=origin)
    model.load_state_dict(weights, assign=True)
    return LanguageModel(
        model=model,
        tokenizer=tokenizer,
        tokenizer_path=path,
        device=device,
        precision=_precision(config.train.precision, device=device),
        run=run,
        config=config,
        step=step,
    )


def _weights(run: RunDir, config: Config, step: Step) -> tuple[Path, dict[str, Tensor]]:
    """The weights of a step, or those that an untrained run begins with, and their folder. Raises CheckpointError."""
    if step.path is not None:
        return step.path, read_tensors(step.path / WEIGHTS)
    if config.model.init:
        init = run.path / config.model.init
        return init, load_hf(init).state_dict()
    raise CheckpointError(
        "{path} has no checkpoint yet",
        path=run.path,
        hint="train it: cuadrilla train {run_file}",
        run_file=typed(run.run_file),
    )


def _precision(asked: str, *, device: torch.device) -> Precision:
    return choose_precision(asked if asked in ("fp32", "bf16") else "auto", device=device)  # not all devices have fp16
