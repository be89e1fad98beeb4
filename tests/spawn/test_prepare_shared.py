"""A preparation shared by several processes: the same bytes as by one, interrupted, killed, continued, added to."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cuadrilla.data import prepare as prepare_module
from cuadrilla.data.options import PrepareOptions
from cuadrilla.data.pool import Processes
from cuadrilla.data.prepare import prepare
from cuadrilla.data.shards import TOKENIZER, read_manifest, verify_folder
from cuadrilla.data.work import CleanJob
from cuadrilla.errors import ConfigError, DataError, ResourceError
from tests.spawn.test_prepare import contents, fail, run, start, texts_of, write_books

pytestmark = pytest.mark.spawn

TIMEOUT_SECONDS = 60


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Books of a batch each, some short ones, and a copy with small changes."""
    folder = tmp_path_factory.mktemp("text") / "libros"
    write_books(folder, num_books=30, characters=80_000, seed=1)
    write_books(folder / "cortos", num_books=20, characters=8_000, seed=2)
    changed = (folder / "cortos" / "libro3.txt").read_text().replace("sol", "luna", 3)
    (folder / "cortos" / "libro3b.txt").write_text(changed)
    return folder


@pytest.fixture(scope="module")
def prepared(library, tmp_path_factory):
    """The library, prepared by one process."""
    out = tmp_path_factory.mktemp("one") / "out"
    prepare([str(library)], out=out, options=PrepareOptions(vocab=300, processes=1))
    return out


def test_the_number_of_processes_changes_nothing(library, prepared, tmp_path):
    for processes in (2, 5):
        out = tmp_path / str(processes)
        prepare([str(library)], out=out, options=PrepareOptions(vocab=300, processes=processes))
        assert contents(out) == contents(prepared)
    manifest = read_manifest(prepared)
    assert manifest.counts["documents_near_duplicate"] == 1
    assert manifest.splits["train"].num_documents > 100


def wait_for(condition):
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def finished(out, kind):
    return sorted(path.name for path in (out / ".work").glob(f"*.{kind}")) if (out / ".work").exists() else []


@pytest.mark.thorough
@pytest.mark.parametrize(("stop", "kind"), [(signal.SIGKILL, "clean"), (signal.SIGINT, "tokens")])
def test_what_was_finished_is_not_done_again_and_the_processes_end(library, prepared, tmp_path, stop, kind):
    out = tmp_path / "out"
    child = start(library, out=out, stage="cleaning")
    wait_for(lambda: finished(out, kind))
    others = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(stop)
    child.communicate()
    assert psutil.wait_procs(others, timeout=TIMEOUT_SECONDS)[1] == []
    assert not (out / "manifest.json").exists()
    before = {name: (out / ".work" / name).stat().st_ino for name in finished(out, kind)}
    damaged = (out / ".work" / min(before)).read_bytes()
    (out / ".work" / min(before)).write_bytes(damaged[:-1])
    again = start(library, out=out, stage="training the tokenizer" if kind == "clean" else "writing tokens")
    again.send_signal(signal.SIGSTOP)
    kept = {name: (out / ".work" / name).stat().st_ino for name in before}
    again.send_signal(signal.SIGCONT)
    again.communicate()
    assert again.returncode == 0
    untouched = [name for name in before if name != min(before)]
    assert [kept[name] for name in untouched] == [before[name] for name in untouched]
    assert contents(out) == contents(prepared)
    assert not (out / ".work").exists()


def test_a_process_that_is_killed_is_named_and_its_work_is_done_later(library, prepared, tmp_path):
    out = tmp_path / "out"
    child = start(library, out=out, stage="cleaning")
    wait_for(lambda: psutil.Process(child.pid).children())
    psutil.Process(child.pid).children()[0].kill()
    _, said = child.communicate()
    assert child.returncode == 8, said
    assert "fewer --processes" in said
    assert "Traceback" not in said
    prepare([str(library)], out=out, options=PrepareOptions(vocab=300))
    assert contents(out) == contents(prepared)


def test_a_script_without_a_main_guard_may_prepare(library, prepared, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\n"
        "from cuadrilla.data.options import PrepareOptions\nfrom cuadrilla.data.prepare import prepare\n"
        "prepare([sys.argv[1]], out=Path(sys.argv[2]), options=PrepareOptions(vocab=300, processes=2))\n"
    )
    command = [sys.executable, str(script), str(library), str(tmp_path / "out")]
    assert subprocess.run(command, timeout=150, check=False).returncode == 0
    assert contents(tmp_path / "out") == contents(prepared)


def test_adding_files_is_preparing_all_with_the_old_tokenizer(library, tmp_path):
    text = tmp_path / "libros"
    shutil.copytree(library / "cortos", text)
    for number in range(5):
        shutil.copy(library / f"libro{number}.txt", text / f"largo{number}.txt")
    out = tmp_path / "out"
    prepare([str(text)], out=out, options=PrepareOptions(vocab=300, keep_work=True))
    tokenizer = (out / TOKENIZER).read_bytes()
    kept = {path.name: path.stat().st_mtime_ns for path in (out / ".kept").iterdir()}
    assert {Path(name).suffix for name in kept} == {".clean", ".tokens"}
    for name in ("aún otro.txt", "largo3b.txt"):
        shutil.copy(library / f"libro{len(name)}.txt", text / name)
    assert "--add" in fail(run("data", "prepare", text, "--out", out, "--vocab", 300), 4)

    added = prepare([str(text)], out=out, options=PrepareOptions(add=True))
    assert not added.already
    assert (out / TOKENIZER).read_bytes() == tokenizer
    now = {path.name: path.stat().st_mtime_ns for path in (out / ".kept").iterdir()}
    assert len({name for name in now if kept.get(name) == now[name]}) >= len(kept) - 1
    assert len(now) >= len(kept) + 4
    (tmp_path / "tokenizer.json").write_bytes(tokenizer)
    prepare([str(text)], out=tmp_path / "fresh", options=PrepareOptions(tokenizer=tmp_path / "tokenizer.json"))
    assert contents(out) == contents(tmp_path / "fresh")
    assert prepare([str(text)], out=out, options=PrepareOptions(add=True)).already

    (text / "libro5.txt").unlink()
    with pytest.raises(DataError, match=r"libro5\.txt, which is missing"):
        prepare([str(text)], out=out, options=PrepareOptions(add=True))
    assert contents(out) == contents(tmp_path / "fresh")


def test_nothing_can_be_added_to_no_folder_or_with_another_tokenizer(library, tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        prepare([str(library)], out=tmp_path / "out", options=PrepareOptions(add=True))
    assert not (tmp_path / "out").exists()
    for options in ({"vocab": 300}, {"force": True}, {"tokenizer": tmp_path / "t.json"}):
        with pytest.raises(ConfigError, match="--add excludes"):
            PrepareOptions(add=True, **options)


def test_what_is_dropped_is_counted_and_shown(library, tmp_path):
    text = tmp_path / "paginas"
    shutil.copytree(library / "cortos", text)
    (text / "cifras.txt").write_text("\n".join(f"{n} {n * n} {n % 7}" for n in range(400)))
    (text / "igual.txt").write_text((text / "libro7.txt").read_text())
    (text / "corto.txt").write_text("Fin.")
    out = tmp_path / "out"
    done = run("data", "prepare", text, "--out", out, "--vocab", 300, "--show-dropped", "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert {row["reason"]: row["source"] for row in shown["dropped"]} == {
        "filtered_few_letters": "paginas/cifras.txt",
        "documents_too_short": "paginas/corto.txt",
        "documents_duplicate": "paginas/libro7.txt",  # igual.txt comes first
        "documents_near_duplicate": "paginas/libro3b.txt",
    }
    assert all(shown["counts"][row["reason"]] == 1 for row in shown["dropped"])
    assert {row["source"]: row["like"] for row in shown["dropped"] if "like" in row} == {
        "paginas/libro7.txt": "paginas/igual.txt",
        "paginas/libro3b.txt": "paginas/libro3.txt",
    }
    table = run("data", "prepare", text, "--out", out, "--vocab", 300, "--show-dropped")
    assert "filtered few letters: paginas/cifras.txt" in table.stdout
    assert "already prepared" in table.stderr
    everything = ("--filter", "none", "--near-duplicates", 0, "--min-characters", 1)
    assert run("data", "prepare", text, "--out", tmp_path / "all", "--vocab", 300, *everything).returncode == 0
    assert sorted(read_manifest(tmp_path / "all").counts) == ["documents_duplicate", "val_windows_checked"]
    assert len(texts_of(tmp_path / "all", "train")) > len(texts_of(out, "train"))


def test_text_that_should_be_new_and_is_not_is_warned_of(library, prepared, tmp_path):
    old = (library / "libro4.txt").read_text()
    (tmp_path / "viejo.txt").write_text(old[:20_000])
    write_books(tmp_path, num_books=1, characters=20_000, seed=99)
    done = run(
        *("data", "stats", prepared, "--json", "--compare-tokenizer", prepared / TOKENIZER),
        *("--held-out", tmp_path / "viejo.txt", "--held-out", tmp_path / "libro0.txt"),
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    shares = {row["name"]: row["share"] for row in shown["overlap"]}
    assert shares["val"] == 0
    assert shares["viejo.txt"] > 0.6  # what is left of it is held out
    assert shares["libro0.txt"] < 0.01
    assert "of viejo.txt is in the training text" in done.stderr
    assert done.stderr.count("warning") == 1
    own, other = shown["tokenizers"]
    assert {**own, "name": ""} == {**other, "name": ""}
    assert own["tokens_per_word"] > 1
    assert own["bytes_per_token"] == pytest.approx(shown["splits"][1]["bytes_per_token"], rel=0.02)
    assert "of viejo.txt" in run("data", "stats", prepared, "--held-out", tmp_path / "viejo.txt").stderr


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--filter", "web"), 4),  # the words are invented
        (("--filter", "wen"), 2),
        (("--near-duplicates", 0.3), 2),
        (("--near-duplicates", "nan"), 2),
        (("--processes", 0), 2),
        (("--processes", 100_000), 2),
        (("--encoder", "fastest"), 2),
    ],
)
def test_wrong_options_of_the_pipeline_change_nothing(library, tmp_path, options, code):
    said = fail(run("data", "prepare", library / "cortos", "--out", tmp_path / "out", *options), code)
    assert "--filter none keeps all" in said or code == 2
    assert not (tmp_path / "out").exists()


def test_an_error_in_a_process_is_the_error_of_all(tmp_path):
    job = CleanJob(
        out=str(tmp_path / "missing" / "a.clean"),
        maximum=1000,
        min_characters=1,
        filter="none",
        near=False,
        keep_indentation=False,
        is_whole=[True],
        sizes=[4],
    )
    for processes in (1, 2):
        with Processes(processes) as pool, pytest.raises(ResourceError, match="cannot write"):
            list(pool.run([(job, b"hola"), None]))


def test_a_damaged_tokenizer_of_an_interruption_is_not_used(library, prepared, tmp_path):
    out = tmp_path / "out"
    child = start(library, out=out, stage="writing tokens")
    child.kill()
    child.communicate()
    if (out / "manifest.json").exists():
        pytest.skip("it was faster than the kill")
    (path,) = (out / ".work").glob("*.tokenizer.json")
    assert path.read_bytes() == (prepared / TOKENIZER).read_bytes()
    prepare([str(library)], out=out, options=PrepareOptions(vocab=300))
    verify_folder(out, read_manifest(out), hashes=True)
    assert os.listdir(out).count(prepare_module.WORK) == 0
