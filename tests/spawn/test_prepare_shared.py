"""A preparation by several processes gives the bytes of one, also if interrupted, killed or extended."""

import json
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from cuadrilla.data.executor import in_order, processes
from cuadrilla.data.folder import TOKENIZER, read_manifest
from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import DataError
from tests.books import write_books
from tests.commands import wait_for
from tests.spawn.test_prepare import contents, fail, run, start, texts_of

TIMEOUT_SECONDS = 60


def test_the_number_of_processes_changes_nothing(library, prepared, tmp_path):
    for count in (2, 5):
        out = tmp_path / str(count)
        prepare([str(library)], out=out, options=PrepareOptions(vocab=300, processes=count))
        assert contents(out) == contents(prepared)
    manifest = read_manifest(prepared)
    assert manifest.counts["documents_contained"] == 1
    assert manifest.splits["train"].num_documents > 100


def processes_of_jobs(pid):
    """The processes that prepare. (Python's other child only tracks shared resources.)"""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


@pytest.mark.thorough
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_the_processes_end_with_the_command_and_it_begins_anew(library, prepared, tmp_path, stop):
    out = tmp_path / "out"
    child = start(library, out=out, stage="cleaning")
    wait_for(lambda: list(out.glob(".work/*.npz")))
    others = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(stop)
    child.communicate()
    assert psutil.wait_procs(others, timeout=TIMEOUT_SECONDS)[1] == []
    assert not (out / "manifest.json").exists()
    prepare([str(library)], out=out, options=PrepareOptions(vocab=300))
    assert contents(out) == contents(prepared)


def test_a_process_that_is_killed_is_named(tmp_path):
    many = write_books(tmp_path / "libros", num_books=300)  # more than are cleaned before one is killed
    out = tmp_path / "out"
    child = start(many, out=out, stage="cleaning")
    wait_for(lambda: list(out.glob(".work/*.npz")))  # all have been started
    processes_of_jobs(child.pid)[0].kill()
    _, said = child.communicate()
    assert child.returncode == 8, said
    assert "fewer --processes" in said
    assert "Traceback" not in said
    assert not out.exists()


def test_a_script_without_a_main_guard_may_prepare(library, prepared, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\n"
        "from cuadrilla.data.prepare import PrepareOptions\nfrom cuadrilla.data.prepare import prepare\n"
        "prepare([sys.argv[1]], out=Path(sys.argv[2]), options=PrepareOptions(vocab=300, processes=2))\n"
    )
    command = [sys.executable, str(script), str(library), str(tmp_path / "out")]
    assert subprocess.run(command, timeout=150, check=False).returncode == 0
    assert contents(tmp_path / "out") == contents(prepared)


def test_text_is_added_with_the_old_tokenizer(library, tmp_path):
    out = tmp_path / "out"
    prepare([str(library / "cortos")], out=out, options=PrepareOptions(vocab=300))
    tokenizer = (out / TOKENIZER).read_bytes()
    more = (library / "cortos", library / "libro1.txt")
    said = fail(run("data", "prepare", *more, "--out", out, "--vocab", 300), 4)
    assert f"--tokenizer {out / TOKENIZER}" in said.replace("\n", " ")
    assert run("data", "prepare", *more, "--out", out, "--force", "--tokenizer", out / TOKENIZER).returncode == 0
    assert (out / TOKENIZER).read_bytes() == tokenizer
    assert len(read_manifest(out).sources) == 22


def test_what_is_dropped_is_counted(library, tmp_path):
    text = tmp_path / "paginas"
    shutil.copytree(library / "cortos", text)
    (text / "cifras.txt").write_text("\n".join(f"{n} {n * n} {n % 7}" for n in range(400)))
    (text / "igual.txt").write_text((text / "libro7.txt").read_text())
    (text / "corto.txt").write_text("Fin.")
    out = tmp_path / "out"
    done = run("data", "prepare", text, "--out", out, "--vocab", 300, "--json", code=0)
    assert json.loads(done.stdout)["counts"] == {
        "documents_contained": 1,  # libro3b.txt, a changed libro3.txt
        "documents_duplicate": 1,  # libro7.txt: igual.txt comes first
        "documents_too_short": 1,
        "filtered_few_letters": 1,
    }
    assert run("data", "prepare", text, "--out", tmp_path / "all", "--vocab", 300, "--keep-all").returncode == 0
    assert read_manifest(tmp_path / "all").counts == {"documents_duplicate": 1, "documents_too_short": 1}
    assert len(texts_of(tmp_path / "all", "train")) > len(texts_of(out, "train"))


def test_an_error_in_a_process_is_the_error_of_all():
    for count in (1, 2):
        with processes(count) as jobs, pytest.raises(DataError, match="surrogate") as caught:
            list(in_order(jobs, [encode_surrogate], ahead=1))
        assert caught.value.hint == "save it again as UTF-8"


def encode_surrogate():
    return Tokenizer.train(["la casa"], vocab_size=260).encode("\ud800")
