"""From a checked configuration to the parts of a run: task, model, coordinator. Used by every engine."""

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cuadrilla.config import Config, CrewEngine, FileTaskSection, LanguageTaskSection, LocalEngine
from cuadrilla.data.folder import TOKENIZER
from cuadrilla.data.loader import UnitLoader
from cuadrilla.errors import CheckpointError, ConfigError, DataError, TaskError
from cuadrilla.host.torchrun import find_place
from cuadrilla.link.base import Link, Stop
from cuadrilla.link.wire import Layout
from cuadrilla.messages import Message
from cuadrilla.model.gpt2 import GPT2
from cuadrilla.model.hf import load_hf
from cuadrilla.model.language import LanguageTask, not_training
from cuadrilla.model.task import Task, load_task, loss_of
from cuadrilla.rundir import RunDir, file_sha256, typed, write_atomic
from cuadrilla.runfile import differences, dump
from cuadrilla.sync.coordinator import Coordinator
from cuadrilla.sync.kinds import Strategy, make_strategy
from cuadrilla.sync.membership import Rules
from cuadrilla.sync.strategy import Recipe, trainable
from cuadrilla.train.checkpoint import copy_into, list_checkpoints, model_tensors
from cuadrilla.train.evaluate import evaluate, sample
from cuadrilla.train.fingerprint import code_fingerprint
from cuadrilla.train.guard import Guard
from cuadrilla.train.loop import WorkerSettings, is_out_of_memory, train
from cuadrilla.train.nodelog import NodeLogs
from cuadrilla.train.optim import make_optimizer
from cuadrilla.train.precision import Precision, choose_device, choose_precision, set_up_kernels
from cuadrilla.train.runtime import CoordinatorRuntime
from cuadrilla.train.schedule import make_schedule
from cuadrilla.train.sinks import Scalars, Sink
from cuadrilla.train.store import Store

# Settings that may change when a run is resumed: the first ones freely, the second ones with --allow-changes.
FREE_ON_RESUME = ("alarm.", "tune.", "checkpoint.", "evaluate.", "sample.", "engine.", "guard.", "train.device",
                  "train.threads", "train.compile", "train.pass_sequences", "data.folder", "task.path",
                  "task.data", "model.gradient_checkpointing")  # fmt: skip
ALLOWED_ON_RESUME = ("optim.lr", "optim.adamw_lr", "optim.momentum", "optim.beta", "optim.weight_decay", "schedule.",
                     "train.clip_norm", "train.tokens", "train.epochs", "train.steps", "train.precision")  # fmt: skip
EVALUATIONS_PER_RUN = 10

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Length:
    """Length of a run. `unit_tokens`: planned tokens of a unit, which may hold fewer or more. `max_unit_tokens`: limit
    of tokens in a unit, if the task knows one.
    """

    num_steps: int
    units_per_step: int
    unit_tokens: int
    max_unit_tokens: int | None = None

    @property
    def step_tokens(self) -> int:
        return self.units_per_step * self.unit_tokens

    @property
    def total_tokens(self) -> int:
        return self.num_steps * self.step_tokens


@dataclass(frozen=True, kw_only=True)
class Equipment:
    """The parts that every machine of a run trains with. `speed`: how fast this worker is expected to be."""

    config: Config
    task: Task
    model: nn.Module
    device: torch.device
    precision: Precision
    pass_tokens: int
    length: Length
    strategy: Strategy
    recipe: Recipe
    speed: float = 1.0

    @property
    def parameters(self) -> tuple[Layout, ...]:
        """Layouts that an arriving version may have."""
        return tuple(Layout.of(form.version) for form in self.strategy.forms(self.model, self.recipe))

    def work(self, link: Link) -> Stop:
        """One session of a worker, from Hello to Stop. Raises what `train` raises."""
        settings = WorkerSettings(
            run=self.config.run,
            train=self.config.train,
            device=self.device,
            precision=self.precision,
            speed_hint=self.speed,
            pass_tokens=self.pass_tokens,
        )
        sync = self.strategy.worker(self.model, self.recipe)
        return train(link, task=self.task, model=self.model, sync=sync, worker=settings)

    def observe(self, version: int, steps: int) -> Scalars:
        """Held-out measures and a sample, if the planned tokens passed a multiple of the interval in the last `steps`
        steps, or the run's end; else {}."""
        every = self.config.evaluate.every_tokens or max(self.length.total_tokens // EVALUATIONS_PER_RUN, 1)
        tokens, before = version * self.length.step_tokens, (version - steps) * self.length.step_tokens
        if tokens < self.length.total_tokens and tokens // every == before // every:
            return {}
        number = self.config.evaluate.sequences
        measures = evaluate(self.task, self.model, sequences=number, device=self.device, precision=self.precision)
        text = sample(self.task, self.model, section=self.config.sample, seed=version)
        return {**{f"val_{name}": value for name, value in measures.items()}, **({"sample": text} if text else {})}


@dataclass(frozen=True, kw_only=True)
class RunContext(Equipment):
    """The parts on the coordinator's machine, where `model` holds the weights of record."""

    coordination: CoordinatorRuntime
    store: Store
    resumed_at: int


def equip(
    config: Config, task: Task, *, device: str = "", speed: float = 1.0, strategy: Strategy | None = None
) -> Equipment:
    """The parts with initial weights. `device` "": as the run says. Raises DeviceError, DataError, TaskError."""
    place = choose_device(device or config.train.device)
    model, precision = make_model(task, seed=config.run.seed), choose_precision(config.train.precision, device=place)
    precision.apply(model)
    length = measure_length(config, task)
    recipe = make_recipe(config, task=task, length=length, precision=precision)
    return Equipment(
        config=config,
        task=task,
        model=model.to(place),
        device=place,
        precision=precision,
        pass_tokens=set_up_kernels(model, device=place, dtype=precision.dtype, strict=config.sync.strict),
        length=length,
        strategy=strategy or make_strategy(config.sync, model),
        recipe=recipe,
        speed=speed,
    )


def make_task(config: Config, folder: Path) -> Task:
    """The task of the run in `folder`. Raises TaskError, DataError, ConfigError."""
    match config.task:
        case LanguageTaskSection():
            teachers = [RunDir(folder).teachers / str(number) for number in range(len(config.train.teacher))]
            return LanguageTask(folder / config.data.folder, model=config.model, teachers=teachers)
        case FileTaskSection(path=path, data=data):
            return load_task(path, folder=folder, data=data)


def make_model(task: Task, *, seed: int) -> nn.Module:
    """The task's model with initial weights that depend on the seed only (made on the CPU in fp32)."""
    torch.manual_seed(seed)
    return task.model()


def load_initial(model: nn.Module, folder: Path, *, task: Task) -> None:
    """Load the weights of a folder in Hugging Face's layout into a language model.

    Raises CheckpointError for weights of another model, DataError for another tokenizer.
    """
    assert isinstance(task, LanguageTask)
    copy_into(model_tensors(model), load_hf(folder).state_dict(), path=folder)
    tokenizer = folder / TOKENIZER
    if tokenizer.is_file() and file_sha256(tokenizer) != task.manifest.tokenizer_sha256:
        raise DataError(
            "{data} was not prepared with the tokenizer of {folder}",
            data=task.folder,
            folder=folder,
            hint="cuadrilla data prepare YOUR_TEXTS --out {out} --tokenizer {tokenizer}",
            out=typed(task.folder),
            tokenizer=typed(tokenizer),
        )


def measure_length(config: Config, task: Task) -> Length:
    """Steps and planned tokens of the whole run. The tokens that a unit really holds may be known only when it is read.

    Raises DataError for a text without a single sequence.
    """
    section = config.train
    num_sequences, shape = len(task.data("train")), task.defaults
    if num_sequences == 0:
        raise DataError("the training data holds no complete sequence", hint="more text, or a shorter context")
    if section.steps:
        num_steps = section.steps
    elif section.tokens:
        num_steps = math.ceil(section.tokens / (section.batch_sequences * shape.length))
    else:
        num_steps = math.ceil(section.epochs * num_sequences / section.batch_sequences)
    return Length(
        num_steps=max(num_steps, 1),
        units_per_step=section.batch_sequences // section.unit_sequences,
        unit_tokens=section.unit_sequences * shape.length,
        max_unit_tokens=None if shape.max_length is None else section.unit_sequences * shape.max_length,
    )


def assemble(
    config: Config,
    run: RunDir,
    *,
    task: Task,
    sinks: Sequence[Sink],
    strategy: Strategy | None = None,
    allow_changes: bool = False,
    stop_at: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> RunContext:
    """Build the coordinator's side of a run and bring it back from its checkpoints if it has any.

    `config` has no gaps (`plan/decide.py`). `strategy` replaces the one that `sync.kind` names. `stop_at`: checkpoint
    and stop at this step (0: at the end). `clock` returns seconds; it decides when a silent worker is lost, and when a
    checkpoint is due. Raises CheckpointError, ConfigError, ResourceError.
    """
    equipment = equip(config, task, strategy=strategy)
    model, length = equipment.model, equipment.length
    if config.model.init and not list_checkpoints(run.checkpoints):
        load_initial(model, run.initial if run.initial.is_dir() else run.path / config.model.init, task=task)
    _check_supported(config, model, equipment.precision)
    if isinstance(config.task, FileTaskSection) and isinstance(config.engine, LocalEngine) and find_place() is None:
        _check_loss(equipment)
    merge, guard = equipment.strategy.merge(model, equipment.recipe), Guard(section=config.guard)
    crew = isinstance(config.engine, CrewEngine)  # others can join it at any time
    store = Store(
        run=run,
        section=config.checkpoint,
        merge=merge,
        tensors=model_tensors(model),
        with_journal=config.checkpoint.journal == "on" or (config.checkpoint.journal == "auto" and crew),
        identity={"config": dump(config.for_others()), "data": task.data_hash()},
        clock=clock,
    )
    state = store.recover(guard, check=lambda old: check_identity(old, store.identity, allow_changes=allow_changes))
    if isinstance(task, LanguageTask) and (state is None or not run.tokenizer.exists()):
        # The data folder may be removed later.
        write_atomic(run.tokenizer, (task.folder / TOKENIZER).read_bytes(), private=True)
    coordinator = make_coordinator(equipment, state)
    coordination = CoordinatorRuntime(
        coordinator=coordinator,
        merge=merge,
        guard=guard,
        store=store,
        sinks=sinks,
        observe=equipment.observe,
        stop_at=stop_at,
        patience=config.evaluate.patience,
        max_unit_tokens=length.max_unit_tokens,
        node_logs=NodeLogs(run.nodes),
        clock=clock,
    )
    return RunContext(**vars(equipment), coordination=coordination, store=store, resumed_at=coordinator.version)


def make_coordinator(equipment: Equipment, state: Mapping[str, Any] | None) -> Coordinator:
    """The coordinator's state machine, with the rounds of the run's strategy; restored from `state` if there is one."""
    config, length = equipment.config, equipment.length
    crew = config.engine if isinstance(config.engine, CrewEngine) else None
    rules = Rules(
        units_per_step=length.units_per_step,
        step_tokens=length.step_tokens,
        num_steps=length.num_steps,
        quorum=len(config.engine.workers),
        fingerprint=code_fingerprint(equipment.task, equipment.model) if crew else {},  # one process is one program
        same_environment=config.sync.strict,
        lost_after_seconds=crew.lost_after_seconds if crew else None,
    )
    made = Coordinator(rules=rules, rounds=equipment.strategy.rounds(), state=state)
    # An answer to a lease of an earlier process must never match a lease of this one.
    made.work.next_lease_id = 1 + secrets.randbits(48)
    return made


def compile_blocks(model: nn.Module) -> None:
    """torch.compile for the blocks of our GPT-2 one by one (one compilation serves all), else for the whole model.

    In place: parameters and their names stay.
    """
    if isinstance(model, GPT2):
        for block in model.transformer.h:
            block.compile()
    else:
        model.compile()


def make_recipe(config: Config, *, task: Task, length: Length, precision: Precision) -> Recipe:
    """How this run's parameters are updated: the same on the coordinator's machine and on a worker's."""
    return Recipe(
        make_optimizer=make_optimizer(config.optim, dtype=precision.dtype, not_matrices=task.defaults.not_matrices),
        lr_factor=make_schedule(config.schedule, num_steps=length.num_steps),
        clip_norm=config.train.clip_norm,
    )


def _check_supported(config: Config, model: nn.Module, precision: Precision) -> None:
    """Refuse what this version would compute wrongly, before anything is trained."""
    if config.sync.strict and precision.loss_scale != 1:
        raise ConfigError("strict mode and fp16 exclude each other", hint='set train.precision = "fp32"')
    if not trainable(model):
        raise TaskError(
            "every parameter of the model is frozen", hint="leave requires_grad on for what is to be trained"
        )


def _check_loss(equipment: Equipment) -> None:
    """Try a user's loss before anything is written. Warn if it is a mean: unequal shares would be weighted wrongly."""
    task, model, device = equipment.task, equipment.model, equipment.device
    data = task.data("train")
    loader, last = UnitLoader(data, seed=0, unit_sequences=1, device=device), len(data) - 1
    with not_training(model), equipment.precision.around(model, device):
        try:
            losses = [loss_of(task, model, loader.batch(some))[0].item() for some in ([0], [last], [0, last])]
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):  # the passes of a training shrink until they fit
                return
            raise
    first, second, both = losses
    if both and math.isclose(both, (first + second) / 2, rel_tol=0.01):
        template = "`loss` must return a sum: two examples have {both:.3g}, each of them {first:.3g} and {second:.3g}"
        log.warning("%s", Message(template, both=both, first=first, second=second))


def check_identity(old: Mapping[str, Any], new: Mapping[str, Any], *, allow_changes: bool) -> bool:
    """Compare a checkpoint's settings and data with the present ones; True if settings that decide updates changed.

    Raises ConfigError for settings that must not change, CheckpointError for other data.
    """
    pairs = differences(old["config"], new["config"])
    changed = {key: pair for key, pair in pairs.items() if not key.startswith(FREE_ON_RESUME)}
    can_change = all(key.startswith(ALLOWED_ON_RESUME) for key in changed)
    if changed and not (can_change and allow_changes):
        raise ConfigError(
            "changed since this run began: {changes}",
            changes=", ".join(f"{key} ({before} → {now})" for key, (before, now) in changed.items()),
            hint="add --allow-changes if you mean it, or put the old values back"
            if can_change
            else "put the old values back, or start a new run in another folder",
        )
    if old.get("data") != new.get("data"):
        raise CheckpointError(
            "the training data, or a teacher, is not the one this run began with",
            hint="restore the folder, or start a new run in a new folder",
        )
    return bool(changed)
