"""A run that begins with the weights of another model generates, trains and resumes, or is refused where it must be."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from cuadrilla.cli.evaluate import evaluate
from cuadrilla.cli.model import export_gguf, export_hf, generate, import_model
from cuadrilla.crew import bundle
from cuadrilla.crew.run import train_run
from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import CheckpointError, ConfigError, DataError
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.hf import load_hf, save_hf
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import read_run_file
from cuadrilla.train.checkpoint import choose_step
from tests.runs import final

QUICK = ("train.epochs=0", "train.batch_sequences=4", "train.unit_sequences=2", "sample.tokens=0",
         "train.precision=fp32", "train.threads=1", "checkpoint.every_seconds=0")  # fmt: skip


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A model with an odd vocabulary, and more rows in its embedding than tokens."""
    tokenizer = Tokenizer.train(["la niña come pan y el niño bebe agua en la plaza"] * 4, vocab_size=301)
    tokenizer.save(tmp_path / "tokenizer.json")
    torch.manual_seed(5)
    model = GPT2(GPT2Config(vocab_size=307, context=24, layers=1, heads=2, width=12))
    save_hf(model, tmp_path / "published", tokenizer=tokenizer)
    return tmp_path / "published"


def prepare_data(folder: Path, tokenizer: Path | None) -> None:
    prepare(["cuentos:40"], out=folder, options=PrepareOptions(vocab=300, tokenizer=tokenizer, val_fraction=0.1))


@pytest.fixture
def run(published: Path, tmp_path: Path) -> RunDir:
    """A run that imports the model, with data that its tokenizer has encoded."""
    made = RunDir(tmp_path / "run")
    import_model(published, to=made.path)
    prepare_data(tmp_path / "data", made.path / "model" / "tokenizer.json")
    return made


CREW = ('engine.kind="crew"', "engine.workers=[1.0, 0.5]")


def train(run: RunDir, *sets: str) -> None:
    train_run(read_run_file(run.run_file, sets=[*QUICK, *sets]), run)


def test_training_goes_on_from_the_imported_weights(published: Path, run: RunDir) -> None:
    began = load_hf(published).state_dict()
    # Two workers of unequal speed: the second one's own initial weights must not matter.
    train(run, "train.steps=2", "optim.lr=1e-9", *CREW)
    weights = final(run.path)
    assert all(torch.allclose(weights[name], began[name], atol=1e-6) for name in began)
    assert choose_step(run).newest == 2
    shutil.rmtree(run.path / "model")  # read once, when the run began
    longer = [*QUICK, "train.steps=3", "optim.lr=1e-9", *CREW]
    train_run(read_run_file(run.run_file, sets=longer), run, allow_changes=True)
    assert choose_step(run).newest == 3


def test_it_writes_and_is_exported_before_it_is_trained(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    import_model(published, to=run)
    texts = []
    for path in (published, run):
        generate(path, ["la niña"], tokens=5, temperature=0, device="cpu")
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    export_hf(run, to=tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (published / "model.safetensors").read_bytes()
    assert "begun from | published/model.safetensors (licence unknown" in (tmp_path / "again" / "README.md").read_text()
    prepare_data(tmp_path / "elsewhere", run / "model" / "tokenizer.json")
    (run / "run.toml").write_text((run / "run.toml").read_text().replace('"../data"', '"../elsewhere"'))
    evaluate([run], device="cpu")
    assert "bits per byte" in capsys.readouterr().out


def test_what_is_not_plain_about_it_stays_so(published: Path, tmp_path: Path) -> None:
    peculiar = GPT2Config(vocab_size=307, context=24, layers=1, heads=2, width=12, exact_gelu=True)
    save_hf(GPT2(peculiar), published, tokenizer=Tokenizer.load(published / "tokenizer.json"))
    run = RunDir(tmp_path / "run")
    import_model(published, to=run.path)
    prepare_data(tmp_path / "data", run.path / "model" / "tokenizer.json")
    train(run, "train.steps=2", "optim.kind=muon")
    export_hf(run.path, to=tmp_path / "again")
    again = load_hf(tmp_path / "again")
    assert again.config == peculiar
    with pytest.raises(CheckpointError, match="exact GELU"):
        export_gguf(run.path, to=tmp_path / "model.gguf")


def test_a_tokenizer_that_takes_all_memory_is_refused(published: Path, tmp_path: Path) -> None:
    """Sixteen steps of the normaliser, each of which replaces one letter by four, make 4 GiB of one letter."""
    path = published / "tokenizer.json"
    value = json.loads(path.read_bytes())
    fourfold = {"type": "Replace", "pattern": {"String": "q"}, "content": "qqqq"}
    value["normalizer"] = {"type": "Sequence", "normalizers": [fourfold] * 16}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    value["added_tokens"].append({"id": len(value["model"]["vocab"]), "content": "q", **flags})
    path.write_text(json.dumps(value))
    with pytest.raises(DataError, match="loses or changes text"):
        import_model(published, to=tmp_path / "new")


def test_data_of_another_tokenizer_is_refused(published: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    import_model(published, to=run.path)
    prepare_data(tmp_path / "data", None)
    with pytest.raises(DataError, match="was not prepared with the tokenizer") as caught:
        train(run, "train.steps=1")
    assert "--tokenizer" in caught.value.hint


def test_sizes_that_are_not_the_models_are_refused(run: RunDir) -> None:
    with pytest.raises(CheckpointError, match="belongs to another model"):
        train(run, "train.steps=1", "model.layers=2")
    with pytest.raises(DataError, match="tokens, the model 260"):
        train(run, "train.steps=1", "model.vocab=260")


def test_a_folder_that_is_there_is_left_alone(published: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.txt").write_text("precious")
    with pytest.raises(ConfigError, match="exists"):
        import_model(published, to=tmp_path / "mine")
    for name in (Path(), Path("..")):
        with pytest.raises(ConfigError, match="exists"):
            import_model(published, to=name)
    (published / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(CheckpointError):
        import_model(published, to=tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "published", "tokenizer.json"]


def test_another_machine_is_offered_all_that_the_weights_lie_in(published: Path, run: RunDir, tmp_path: Path) -> None:
    config, model = read_run_file(run.run_file).config, run.path / "model"
    offered = bundle.offer(config, run.path, initial=True)
    assert {".initial/config.json", ".initial/tokenizer.json", ".initial/model.safetensors"} < set(offered.files)
    sent = tmp_path / "sent"
    for name, (path, _) in offered.files.items():
        assert bundle.FILE.fullmatch(name)
        (sent / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, sent / name)
    found, expected = load_hf(sent / ".initial").state_dict(), load_hf(published).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    shutil.rmtree(model)
    with pytest.raises(CheckpointError, match="does not exist"):
        bundle.offer(config, run.path, initial=True)
    assert not any(name.startswith(".initial") for name in bundle.offer(config, run.path).files)


def test_a_machine_that_was_sent_no_weights_reads_none_of_its_own(run: RunDir) -> None:
    run.initial.mkdir()
    with pytest.raises(CheckpointError, match=r"\.initial"):
        train(run, "train.steps=1")
