"""Run files: every bad value is refused with its key and a remedy; every good one survives a round trip."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.config import Config
from cuadrilla.errors import ConfigError
from cuadrilla.runfile import SIZES, differences, dump, gpt2_settings, read_run_file, resolve, run_file_text, to_toml

BASE = '[data]\nfolder = "x"\n[train]\ntokens = 10\n'


def refused(text: str, *sets: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(text, sets=sets)
    assert caught.value.exit_code == 2
    return caught.value


@pytest.mark.parametrize(
    ("item", "message", "hint"),
    [
        ("optim.weight_deca=1", "unknown key optim.weight_deca", "did you mean weight_decay?"),
        ("trian.steps=1", "unknown key trian", "did you mean train?"),
        ("optim.learning_rate=1", "unknown key optim.learning_rate", "known here: "),
        ("optim.lr='1e-4'", "valid number", ""),
        ("optim.lr=nan", "finite", ""),
        ("optim.lr=-1", "> 0", ""),
        ("train.tokens=1000000000000000000000000000000", "≤", ""),
        ("train.compile=yes", "valid boolean", ""),
        ("run.seed=-1", "≥ 0", ""),
        ("model.heads=5", "128 is not divisible by 5 heads", ""),
        ("model.preset=gigantic", "'micro', 'mini'", ""),
        ("train={tokens = 10, batch_sequences = 7, unit_sequences = 2}", "not a multiple of unit_sequences", ""),
        ("train.device=gpu", "should be auto, or a device such as cpu", ""),
        ("optim.kind=lion", "kind should be one of 'muon', 'adamw'", ""),
        ("engine.workers=[1, 0.5]", "unknown key engine.workers", "another kind"),
        ("engine={kind = 'crew', devices = 'auto,cpu'}", "should be auto, or devices such as", ""),
        ("schedule.cooldown=0.99", "exceed 1", ""),
        ("train=3", "should be a table", ""),
        ("data.folder.x=3", "is a value, not a section", ""),
        ("no equals sign", "not of the form", "optim.lr"),
        ("schema=99", "schema: should be one of 1", ""),
    ],
)
def test_refused(item: str, message: str, hint: str) -> None:
    error = refused(BASE, item)
    assert message in error.message
    assert hint in error.hint


@pytest.mark.parametrize("text", ["", "a = [1", "a=1\na=2", "[" * 100_000])
def test_broken_files(text: str) -> None:
    refused(text)


def test_files_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "ñandú 🐦 run.toml"
    path.write_bytes(BASE.encode("utf-16"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_run_file(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_run_file(tmp_path / "nothing.toml")
    path.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert read_run_file(path).config.train.tokens == 10


def test_precedence_and_origins() -> None:
    resolved = resolve(BASE + "[optim]\nlr = 0.5\n", sets=["optim.momentum=0.8", "train.tokens=20"])
    assert resolved.origins["optim.lr"] == "file"
    assert resolved.origins["optim.momentum"] == resolved.origins["train.tokens"] == "--set"
    assert resolved.origins["optim.beta1"] == "default"
    assert resolved.config.train.tokens == 20


TOML_VALUES = st.one_of(
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.booleans(),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=3),
)
SECTIONS = {name: inner for name, inner in dump(resolve(BASE).config).items() if isinstance(inner, dict)}
KEYS = sorted(f"{section}.{key}" for section, inner in SECTIONS.items() for key in inner)


@given(key=st.sampled_from(KEYS), value=TOML_VALUES)
def test_any_value_for_any_key_is_accepted_or_refused(key: str, value: Any) -> None:
    import tomli_w

    item = tomli_w.dumps({"x": value}).removeprefix("x = ").strip()
    try:
        config = resolve(BASE, sets=[f"{key}={item}"]).config
    except ConfigError as error:
        assert key.split(".")[0] in error.message
    else:
        assert Config.model_validate(dump(config)) == config


def test_dump_and_toml_round_trip() -> None:
    config = resolve(BASE, sets=["optim.kind=adamw", 'engine.kind="crew"', "engine.workers=[1, 0.5]"]).config
    assert resolve(to_toml(config)).config == config
    other = resolve(BASE, sets=["optim.lr=0.7"]).config
    assert differences(dump(resolve(BASE).config), dump(other)) == {"optim.lr": (0.02, 0.7)}


@given(size=st.sampled_from([*SIZES]), data=st.text(min_size=1))
def test_every_file_that_new_writes_says_what_it_was_given(size: str, data: str) -> None:
    found = resolve(run_file_text(gpt2_settings(size, data=data, tokens=1_000_000))).config
    assert (found.model.preset, found.data.folder) == (size, data.replace("\\", "/"))


def test_of_the_lengths_the_one_said_last_holds() -> None:
    assert resolve(BASE, sets=["train.steps=5"]).config.train.model_dump(include={"tokens", "steps"}) == {
        "tokens": 0,
        "steps": 5,
    }
    assert "only one of tokens, epochs and steps" in refused(BASE, "train.steps=5", "train.epochs=2").message
    assert resolve(BASE, sets=["train.steps=0"]).config.train.tokens == 10
