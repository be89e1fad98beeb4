"""The sections and keys of a run file, as frozen and checked pydantic models (`runfile.py` reads the file).

Precedence: defaults < file < `--set section.key=value`. Environment variables never change a run. An unknown key is
an error that names the nearest known one. The string under a field is its help text; `cuadrilla train --show-config`
prints it. A component receives its own section, never `Config`.
"""

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from cuadrilla.messages import Message

SCHEMA = 1

# Layers, heads, width, context. `micro` and `mini` are ours (about 1 and 10 million parameters with a small
# vocabulary); the others are GPT-2's: https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
PRESETS: dict[str, tuple[int, int, int, int]] = {
    "micro": (4, 4, 128, 256),
    "mini": (6, 5, 320, 512),
    "small": (12, 12, 768, 1024),
    "medium": (24, 16, 1024, 1024),
    "large": (36, 20, 1280, 1024),
    "xl": (48, 25, 1600, 1024),
}

CountOrZero = Annotated[int, Field(ge=0, le=10**15)]
Rate = Annotated[float, Field(gt=0, le=100)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Speed = Annotated[float, Field(gt=0, le=1000)]
DEVICE = r"cpu|mps|cuda(:\d+)?|xpu(:\d+)?"
LINK_SHAPE = r"^((?P<rate>\d*[1-9]\d*(\.\d+)?|0+\.0*[1-9]\d*)(?P<unit>[kmg])bit(\+(?P<delay>\d+(\.\d+)?)ms)?)?$"


class Section(BaseModel):
    """Frozen, keyword-only, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class RunSection(Section):
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides the initial weights, the order of the data and every random number."""


class LanguageTaskSection(Section):
    kind: Literal["language"] = "language"
    """The built-in task: a GPT-2 language model on a prepared data folder."""


class FileTaskSection(Section):
    kind: Literal["file"]
    """A model of your own."""
    path: Annotated[str, Field(pattern=r".+:[A-Za-z_]\w*$")]
    """`file.py:name`: a function in that file that returns a Task. Without `data` it is called without arguments."""
    data: str = ""
    """A file or a folder, relative to the run file: its path is that function's argument. Other machines fetch it from
    the coordinator, and the function gets its path there."""

    @property
    def file(self) -> str:
        return self.path.rpartition(":")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(":")[2]


class DataSection(Section):
    folder: str = ""
    """A folder written by `cuadrilla data prepare`, relative to the run file."""


class ModelSection(Section):
    preset: Literal["micro", "mini", "small", "medium", "large", "xl"] = "micro"
    """micro, mini, small (124M), medium, large, xl; layers, heads, width, context override it."""
    layers: Annotated[int, Field(ge=0, le=1000)] = 0
    heads: Annotated[int, Field(ge=0, le=1000)] = 0
    width: Annotated[int, Field(ge=0, le=100_000)] = 0
    context: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Tokens in a sequence."""
    vocab: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Rows of the embedding (0: as many as the tokenizer has tokens); imported models may have more."""
    init: str = ""
    """A folder in Hugging Face's layout, relative to the run file, whose weights a new run begins with (empty: random
    weights from the seed). `cuadrilla import` writes one."""
    exact_gelu: bool = False
    """Compute GELU with the error function instead of tanh, as some imported models do."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    gradient_checkpointing: bool = False
    """Recompute activations of the model's blocks in the backward pass: less memory, about 30 % more time, the same
    result."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        _, heads, width, _ = self.shape
        if width % heads:
            raise ValueError(Message("width {width} is not divisible by {heads} heads", width=width, heads=heads))
        return self

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(layers, heads, width, context) with the preset filled in."""
        layers, heads, width, context = PRESETS[self.preset]
        return self.layers or layers, self.heads or heads, self.width or width, self.context or context


def _as_list(value: object) -> object:
    """The value; a text becomes a list of one, and the empty text an empty list."""
    return ([value] if value else []) if isinstance(value, str) else value


class TrainSection(Section):
    tokens: CountOrZero = 0
    """How long to train, in tokens of text. Instead of it, set `epochs` or `steps`."""
    epochs: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """How long to train, in passes over the training data."""
    steps: CountOrZero = 0
    """How long to train, in optimizer steps."""
    batch_sequences: CountOrZero = 0
    """Sequences (examples) in a step, over all workers (0: for text chosen, otherwise 32)."""
    unit_sequences: CountOrZero = 0
    """Sequences in a unit, the atom of work. Must divide `batch_sequences` (0: for text at most an eighth of it,
    otherwise 8)."""
    pass_sequences: CountOrZero = 0
    """Maximum number of sequences in one forward and backward pass (0: on a CPU as many as make 2,048 or 4,096 tokens,
    elsewhere as many as memory allows). In strict mode and with BatchNorm, a pass is always a unit."""
    device: Annotated[str, Field(pattern=rf"^(auto|{DEVICE})$")] = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1, mps, xpu."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of the passes: auto, fp32, bf16, fp16. Weights and optimizer stay in fp32."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads for each worker and the coordinator (0: all cores, divided among the workers of this machine)."""
    compile: bool = False
    """Use torch.compile: slower start, faster steps on CUDA."""
    teacher: Annotated[list[str], BeforeValidator(_as_list), Field(max_length=16)] = []
    """Runs, or folders in Hugging Face's layout, with the same tokenizer, relative to the run file. Half of the loss
    is the distance of the model from their mean probabilities. The run keeps a copy."""
    clip_norm: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Largest global gradient norm; larger ones are scaled down (0: never)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        batch, unit = self.batch_sequences, self.unit_sequences
        if unit and batch % unit:
            template = "batch_sequences {batch} is not a multiple of unit_sequences {unit}"
            raise ValueError(Message(template, batch=batch, unit=unit))
        if sum(value > 0 for value in (self.tokens, self.epochs, self.steps)) > 1:
            raise ValueError(Message("set only one of tokens, epochs and steps"))
        return self


class MuonSection(Section):
    kind: Literal["muon"] = "muon"
    """muon: Muon for the matrices of the blocks, AdamW for the rest. Other kinds: adamw, sgd."""
    lr: Rate = 0.02
    """Muon's learning rate; AdamW's is `adamw_lr`."""
    momentum: Fraction = 0.95
    weight_decay: Annotated[float, Field(ge=0, le=10)] | None = None
    """It is multiplied by the learning rate. Default: 0. For a language model that reads its text at least twice: so
    much that the weights average the updates of about one epoch, at most 2."""
    adamw_lr: Rate = 0.006
    """AdamW's learning rate for everything except the matrices of the blocks."""
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95


class AdamWSection(Section):
    kind: Literal["adamw"]
    """adamw: AdamW for everything. Other kinds: muon, sgd."""
    lr: Rate = 0.001
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1


class SGDSection(Section):
    kind: Literal["sgd"]
    """Gradient steps with Nesterov momentum."""
    lr: Rate = 0.05
    momentum: Fraction = 0.9
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Added to the gradients of matrices."""


class ScheduleSection(Section):
    warmup: Fraction = 0.02
    """Part of the run over which the learning rate rises from 0."""
    cooldown: Fraction = 0.6
    """Last part of the run, over which it falls to `final`."""
    final: Fraction = 0.0
    """Where the learning rate ends, as a part of its highest value."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.warmup + self.cooldown > 1:
            raise ValueError(
                Message(
                    "warmup {warmup} and cooldown {cooldown} together exceed 1",
                    warmup=self.warmup,
                    cooldown=self.cooldown,
                )
            )
        return self


class ExactSync(Section):
    kind: Literal["exact"] = "exact"
    """exact: synchronous, any number of workers gives the result of one."""
    strict: bool = False
    """The same bits for any number of workers, any split, any fault; slower, and only on identical machines."""


class WindowsSync(Section):
    kind: Literal["windows"]
    """Each machine takes several optimizer steps by itself, then weights and the optimizer's state are merged: for
    networks that cannot carry every step. exact: a merge at each step."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 8
    """Optimizer steps of a window. `train.steps` and `train.batch_sequences` count as without windows."""
    bits: Literal[8, 32] = 8
    """Bits of most numbers sent over the network. With 8, weights are sent in 16, and a window needs a third of the
    bytes."""
    strict: bool = False
    """The same bits for any crew and any fault, on identical machines: it does not matter which computes a lane."""
    lanes: Annotated[list[Speed], Field(min_length=1, max_length=64)] = [1.0, 1.0, 1.0, 1.0]
    """With strict: the relative sizes of the lanes into which each step is cut. A machine computes one or several."""


class AutoSync(Section):
    kind: Literal["auto"] = "auto"
    """auto: each round is exact, or over a network a window of any length, whichever trains sooner by the measured
    times. exact: a merge after every step. windows: a merge once in several steps."""
    strict: bool = False
    """The same bits for any number of workers, any split, any fault; slower, and only on identical machines."""


class LocalEngine(Section):
    kind: Literal["local"] = "local"
    """One worker, in the process that coordinates."""
    workers: ClassVar[list[float]] = [1.0]


class CrewEngine(Section):
    kind: Literal["crew"]
    """crew: workers are processes, here and on other machines, that dial in over the crew link."""
    listen: str = "127.0.0.1:0"
    """Address and port of the coordinator; port 0 takes a free one. Other machines need an address on the LAN."""
    workers: Annotated[list[Speed], Field(max_length=128)] = [1.0]
    """Relative speeds of the workers of this machine, a process each ([]: it only coordinates)."""
    devices: Annotated[str, Field(pattern=rf"^(auto| *({DEVICE}) *(, *({DEVICE}) *)*)$")] = "auto"
    """Devices of this machine when it coordinates a crew, one process for each: such as "cuda:0,cuda:1,cpu".
    auto: train.device, or each accelerator, or the processor if there is none."""
    link: Annotated[str, Field(pattern=LINK_SHAPE)] = ""
    """Practice: slow down the link of these processes, such as "100mbit+20ms" (empty: do not)."""
    lost_after_seconds: Annotated[float, Field(ge=1, le=3600)] = 5.0
    """A worker that is silent for this long counts as lost, and its units go to the others. It may come back."""


class CheckpointSection(Section):
    every_seconds: Annotated[float, Field(ge=0, le=10**7)] = 60.0
    """Save after this many seconds, at the end of a step (0: only at the end of the run)."""
    every_steps: CountOrZero = 0
    """Also save at every step whose number is a multiple of this (0: do not)."""
    keep: Annotated[int, Field(ge=2, le=10_000)] = 2
    """How many of the newest checkpoints to keep, besides the best."""
    journal: Literal["auto", "on", "off"] = "auto"
    """Write every merged update to a redo log, so that a killed coordinator loses no step.
    auto: if there is more than one worker."""


class EvaluateSection(Section):
    every_tokens: CountOrZero = 0
    """Evaluate on held-out data each time this many tokens have been seen (0: ten times in the run)."""
    sequences: CountOrZero = 64
    """Held-out sequences to use during training (0: all of them)."""
    patience: CountOrZero = 0
    """Stop when held-out loss has not fallen for this many evaluations (0: never)."""


TOP_P = 0.95
"""With this, 98.5 % of the words that a small model writes exist; without, 97.0 % (temperature 0.8; experiments.md)."""


class SampleSection(Section):
    """The text that the model writes at each evaluation."""

    prompt: str = ""
    """Samples written during training continue this text (empty: they begin a new one)."""
    tokens: Annotated[int, Field(ge=0, le=10**6)] = 120
    """Length of a sample (0: none)."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.8


class GuardSection(Section):
    spike_sigmas: Annotated[float, Field(ge=0, le=1000)] = 6.0
    """Skip an update whose loss or gradient norm is this many standard deviations above its running mean (0: never)."""
    rollbacks: Annotated[int, Field(ge=0, le=100)] = 2
    """How often to go back to the last checkpoint after three skipped updates in fifty steps, before giving up."""


class AlarmSection(Section):
    """How alarms are sent. Only the coordinator's machine has this section; workers, standbys, checkpoints never."""

    command: Annotated[list[str], BeforeValidator(_as_list), Field(max_length=64)] = []
    """A program and its arguments, started without a shell. It reads the message from its standard input: JSON with
    event, title, text, run and time. See docs/watch.md."""


Scalar = bool | int | float | str


def _by_key(value: object) -> object:
    """Dimensions by `section.key`, from nested tables or from quoted keys."""
    if not isinstance(value, dict):
        return value
    found: dict[str, object] = {}
    for key, inner in value.items():
        nested = isinstance(inner, dict) and inner and not set(inner) & set(DimensionSection.model_fields)
        below = _by_key(inner) if nested else None
        found |= {f"{key}.{rest}": each for rest, each in below.items()} if isinstance(below, dict) else {key: inner}
    return found


class DimensionSection(Section):
    """The values to try for a setting: a list of choices, or numbers from `low` to `high`, integers if both are."""

    choices: Annotated[list[Scalar], Field(max_length=1000)] = []
    low: int | float | None = None
    high: int | float | None = None
    log: bool = False
    """Draw the logarithm evenly."""
    step: Annotated[float, Field(ge=0)] = 0.0
    """Only multiples of this above `low` (0: any number)."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        if bool(self.choices) == (self.low is not None and self.high is not None):
            raise ValueError(Message("needs either choices, or low and high"))
        if self.low is None or self.high is None:
            return self
        if not self.low < self.high:
            raise ValueError(Message("low {low} is not below high {high}", low=self.low, high=self.high))
        if self.log and (self.low <= 0 or self.step):
            raise ValueError(Message("log needs a low above 0, and no step"))
        if self.step and (round((self.high - self.low) / self.step, 9) % 1 or (self.is_whole and self.step % 1)):
            raise ValueError(Message("step {step} does not fit from low to high", step=self.step))
        return self

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


class TuneSection(Section):
    """A search for better settings, by `cuadrilla tune`. Training ignores it."""

    space: Annotated[dict[str, DimensionSection], BeforeValidator(_by_key), Field(max_length=100)] = {}
    """Settings to choose, by section.key: `optim.lr = {low = 0.002, high = 0.2, log = true}`, `train.batch_sequences =
    {choices = [8, 16, 32]}`."""
    sampler: Literal["grid", "random", "tpe"] = "tpe"
    """grid: all combinations; random: each trial by itself; tpe: from what earlier trials have shown."""
    trials: Annotated[int, Field(ge=0, le=100_000)] = 0
    """How many combinations to try (0: a grid's whole, otherwise 20)."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Decides what is tried. The trials' own seeds are run.seed."""
    prune: bool = False
    """Stop a trial that is worse than the median of the others at the same part of its run."""
    metric: str = ""
    """What decides, as metrics.jsonl calls it (empty: val_bits_per_byte, or val_loss)."""
    maximize: bool = False
    """Higher is better."""


class Config(Section):
    """One run. Only `train(config, ...)` and the CLI see it whole."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    run: RunSection = RunSection()
    task: Annotated[LanguageTaskSection | FileTaskSection, Field(discriminator="kind")] = LanguageTaskSection()
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
    optim: Annotated[MuonSection | AdamWSection | SGDSection, Field(discriminator="kind")] = MuonSection()
    schedule: ScheduleSection = ScheduleSection()
    sync: Annotated[AutoSync | ExactSync | WindowsSync, Field(discriminator="kind")] = AutoSync()
    engine: Annotated[LocalEngine | CrewEngine, Field(discriminator="kind")] = LocalEngine()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluate: EvaluateSection = EvaluateSection()
    sample: SampleSection = SampleSection()
    guard: GuardSection = GuardSection()
    alarm: AlarmSection = AlarmSection()
    tune: TuneSection = TuneSection()

    @model_validator(mode="after")
    def _task_has_data(self) -> Self:
        if self.task.kind == "file" and (self.model.init or self.model.gradient_checkpointing):
            raise ValueError(
                Message("model.init and model.gradient_checkpointing are only for the model of the language task")
            )
        if self.task.kind == "language" and not self.data.folder:
            raise ValueError(
                Message("data.folder is not set; prepare one with `cuadrilla data prepare` and name it here")
            )
        if not (self.train.tokens or self.train.epochs or self.train.steps):
            raise ValueError(Message("train.tokens, train.epochs or train.steps must say how long to train"))
        return self

    def moved(self, move: Callable[[str], str]) -> "Config":
        """The same configuration with other paths of code and data. `move` returns the new path for each old one."""
        task, data = self.task, self.data.model_copy(update={"folder": move(self.data.folder)})
        if isinstance(task, FileTaskSection):
            paths = {"path": f"{move(task.file)}:{task.name}", "data": task.data and move(task.data)}
            task, data = task.model_copy(update=paths), self.data
        return self.model_copy(update={"task": task, "data": data})

    def for_others(self) -> "Config":
        """The configuration for other machines and checkpoints: without `alarm`, since they send none, and `tune`."""
        return self.model_copy(update={"alarm": AlarmSection(), "tune": TuneSection()})
