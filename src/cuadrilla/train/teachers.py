"""The teacher models of a run. They are copied into it when it begins, so that they cannot change.

A model that learns from a small text and from a teacher becomes better than a model that learns from the text alone
(Kim et al. 2025, arXiv 2509.14786, distil ensembles; here the teacher may be one model). A run is resumed, and a
machine joins it, only with copies of the same SHA-256.
"""

import os
import shutil
from pathlib import Path

from cuadrilla.config import Config
from cuadrilla.errors import ConfigError, DataError
from cuadrilla.model.hf import save_hf
from cuadrilla.model.language import LanguageTask
from cuadrilla.model.task import Task
from cuadrilla.rundir import RunDir, make_private, storage_errors, typed
from cuadrilla.train.trained import LanguageModel, open_model


def keep_teachers(config: Config, run: RunDir, *, task: Task) -> None:
    """Copy the teachers of a run that begins. Raises ConfigError, DataError, CheckpointError, ResourceError."""
    names = config.train.teacher
    if not names or run.teachers.exists():
        return
    if not isinstance(task, LanguageTask):
        raise ConfigError("train.teacher is for language models", hint="leave it out")
    work = run.path / f".teachers.{os.getpid()}.tmp"
    try:
        for number, name in enumerate(names):
            path = run.path / name
            if not path.exists():
                raise ConfigError(
                    "the teacher {path} does not exist", path=path, hint="name a trained run, as seen from run.toml"
                )
            found = open_model(path, device="cpu")
            _check(found, task, path=path)
            make_private(work)
            save_hf(found.model, work / str(number))
        with storage_errors(run.teachers):
            os.rename(work, run.teachers)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check(found: LanguageModel, task: LanguageTask, *, path: Path) -> None:
    if found.tokenizer.sha256() != task.manifest.tokenizer_sha256:
        raise DataError(
            "the tokenizer of the teacher {path} is not that of {data}",
            path=path,
            data=task.folder,
            hint="prepare the text with the teacher's: cuadrilla data prepare --tokenizer {tokenizer}",
            tokenizer=typed(path / "tokenizer.json"),
        )
    student, theirs = task.model().config, found.model.config
    if theirs.vocab_size != student.vocab_size or theirs.context < student.context:
        raise DataError(
            "the teacher {path} has another vocabulary, or a shorter context ({context})",
            path=path,
            context=theirs.context,
            hint="a teacher needs the same vocabulary and a context at least as long",
        )
