"""`cuadrilla data prepare` as a user runs it: interrupted, killed, out of disk, twice at once, with odd input."""

import hashlib
import json
import os
import shutil
import signal
import subprocess

import pytest

from cuadrilla.data.folder import TOKENIZER, open_tokens, read_manifest, verify_folder
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import DataError
from tests.books import write_books
from tests.commands import COMMAND, begin
from tests.inside import cuadrilla


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    return write_books(tmp_path_factory.mktemp("text") / "libros")


@pytest.fixture(scope="module")
def big_books(tmp_path_factory):
    return write_books(tmp_path_factory.mktemp("text") / "grandes", characters=1_000_000)


def run(*arguments, env=None, prefix=(), code=None):
    """Run the command in this interpreter, or in a process if `env` or `prefix` is given."""
    if not (env or prefix):
        return cuadrilla(*arguments, code=code)
    command = [*prefix, *COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env={**os.environ, **(env or {})})


def prepare(*sources, out, vocab=300, **options):
    return run("data", "prepare", *sources, "--out", out, "--vocab", vocab, **options)


def contents(folder):
    """Every file of a folder with its hash, hidden ones included; no folders."""
    files = (path for path in folder.iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def is_whole(folder):
    """Whether all files have the lengths and hashes that the manifest says."""
    verify_folder(folder, manifest := read_manifest(folder))
    return manifest.files().items() <= contents(folder).items()


def start(*sources, out, stage):
    """Start the command in a child process, and wait until it announces `stage`."""
    child = begin("data", "prepare", *sources, "--out", out, "--vocab", 300)
    for line in child.stderr:
        if line.strip() == stage:
            return child
    raise AssertionError(f"ended with {child.wait()} before {stage!r}")


def fail(done, code):
    """The error and hint lines of a command that must fail with `code`, without a traceback."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "hint:" in done.stderr
    return done.stderr


def texts_of(folder, split):
    """The documents of a split, decoded from its tokens."""
    tokenizer = Tokenizer.load(folder / TOKENIZER, sha256=read_manifest(folder).tokenizer_sha256)
    text = tokenizer.decode(open_tokens(folder, split).tolist())
    *documents, rest = text.split("<|endoftext|>")
    assert rest == ""
    return documents


def test_the_same_input_gives_the_same_bytes_and_is_recognised(books, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    assert prepare(books, out=one, env={"RAYON_NUM_THREADS": "1"}).returncode == 0
    moved = tmp_path / "elsewhere" / "libros"
    moved.mkdir(parents=True)
    for name in ("libro2.txt", "libro0.txt", "libro1.txt"):
        shutil.copy(books / name, moved)
    assert prepare(moved, moved / "libro1.txt", out=other).returncode == 0
    files = contents(one)
    assert sorted(files) == ["manifest.json", "tokenizer.json", "train.bin", "val.bin"]
    assert {k: v for k, v in contents(other).items() if k != "manifest.json"} == {
        k: v for k, v in files.items() if k != "manifest.json"
    }
    shutil.rmtree(other)
    assert prepare(moved, out=other).returncode == 0
    assert contents(other) == files
    times = {path.name: path.stat().st_mtime_ns for path in one.iterdir()}
    assert "prepared already" in prepare(books, out=one, code=0).stderr
    assert {path.name: path.stat().st_mtime_ns for path in one.iterdir()} == times


def test_whole_texts_are_held_out_where_there_are_enough(books, tmp_path):
    def sides(out):
        sources = read_manifest(out).sources
        return {source.name: set(source.documents) for source in sources}

    few = prepare(books, out=tmp_path / "few")
    assert "held out: parts of texts (only 3 in all" in few.stderr
    many = tmp_path / "muchos"
    many.mkdir()
    paragraphs = (books / "libro0.txt").read_text().split("\n\n")
    for number in range(24):
        text = "\n\n".join(f"{number} {paragraph}" for paragraph in paragraphs[number::24])
        (many / f"{number:02}.txt").write_text(text)
    done = prepare(many, out=tmp_path / "many")
    assert "of 24 texts, whole" in done.stderr
    assert all(len(each) == 1 for each in sides(tmp_path / "many").values())


def test_no_text_is_in_both_splits_and_none_is_lost(books, tmp_path):
    assert prepare(books, out=tmp_path / "out").returncode == 0
    train, val = texts_of(tmp_path / "out", "train"), texts_of(tmp_path / "out", "val")
    assert train
    assert val
    assert not set(train) & set(val)
    words = sorted(" ".join(train + val).split())
    assert words == sorted(" ".join(path.read_text() for path in books.iterdir()).split())
    manifest = read_manifest(tmp_path / "out")
    for split, texts in (("train", train), ("val", val)):
        assert manifest.splits[split].num_documents == len(texts)
        assert manifest.splits[split].num_bytes == sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize(("stage", "is_replaced"), [("cleaning", False), ("writing tokens", True)])
def test_killed_at_any_stage_the_folder_is_whole_or_refused(books, big_books, tmp_path, stage, is_replaced):
    out = tmp_path / "out"
    assert not is_replaced or prepare(books, out=out).returncode == 0
    child = start(big_books, "--force", out=out, stage=stage)
    child.kill()
    child.communicate()
    if is_replaced or (out / "manifest.json").exists():  # it may have ended before the kill
        assert is_whole(out)
    assert prepare(big_books, "--force", out=out).returncode == 0
    assert is_whole(out)
    assert not {".work", "lock"} & {path.name for path in out.iterdir()}


def test_after_ctrl_c_the_folder_is_as_it_was(big_books, books, tmp_path):
    child = start(big_books, out=tmp_path / "new", stage="cleaning")
    child.send_signal(signal.SIGINT)
    _, said = child.communicate()
    assert child.returncode == 130
    assert "Traceback" not in said
    assert not (tmp_path / "new").exists()

    assert prepare(books, out=tmp_path / "old").returncode == 0
    before = contents(tmp_path / "old")
    child = start(big_books, "--force", out=tmp_path / "old", stage="cleaning")
    child.send_signal(signal.SIGINT)
    child.communicate()
    assert child.returncode == 130
    assert contents(tmp_path / "old") == before
    assert not (tmp_path / "old" / ".work").exists()


@pytest.mark.parametrize("blocks", [1, 150])
def test_a_full_disk_is_exit_8_and_leaves_nothing(books, tmp_path, blocks):
    limit = ("sh", "-c", f'ulimit -f {blocks}; exec "$@"', "sh")
    done = prepare(books, out=tmp_path / "out", prefix=limit)
    assert "cannot write" in fail(done, 8)
    assert not (tmp_path / "out").exists()


def test_a_second_preparation_at_once_is_refused_and_a_dead_one_is_not(books, big_books, tmp_path):
    out = tmp_path / "out"
    child = start(big_books, out=out, stage="cleaning")
    child.send_signal(signal.SIGSTOP)
    try:
        assert f"process {child.pid}" in fail(prepare(books, out=out), 2)
    finally:
        child.kill()
        child.communicate()
    assert prepare(books, out=out).returncode == 0


def test_other_text_or_options_do_not_replace_a_folder_without_force(books, tmp_path):
    out = tmp_path / "out"
    assert prepare(books, out=out).returncode == 0
    before = contents(out)
    assert "from other text, or with other options" in fail(prepare(books / "libro0.txt", out=out), 4)
    fail(prepare(books, out=out, vocab=301), 4)
    fail(run("data", "prepare", books, "--out", out, "--vocab", 300, "--val-fraction", 0.2), 4)
    assert contents(out) == before
    assert prepare(books / "libro0.txt", "--force", out=out).returncode == 0
    assert len(read_manifest(out).sources) == 1


def test_a_damaged_folder_is_prepared_again(books, tmp_path):
    out = tmp_path / "out"
    assert prepare(books, out=out).returncode == 0
    before = contents(out)
    for name in ("train.bin", "tokenizer.json"):
        raw = (out / name).read_bytes()
        (out / name).write_bytes(raw[:-2])
        with pytest.raises(DataError, match=name):
            verify_folder(out, read_manifest(out))
        assert prepare(books, out=out).returncode == 0
        assert contents(out) == before


def test_a_folder_with_other_things_is_not_written_into(books, tmp_path):
    (tmp_path / "thesis.odt").write_text("years of work")
    assert "thesis.odt" in fail(prepare(books, out=tmp_path), 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.odt"]
    (tmp_path / "file").write_text("")
    fail(prepare(books, out=tmp_path / "file"), 8)


@pytest.mark.parametrize("text", [None, "", " \n" * 5000, "palabra " * 20])
def test_too_little_text_is_refused_with_the_minimum(tmp_path, text):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "foto.jpg").write_text("x")
    if text is not None:
        (folder / "a.txt").write_text(text)
    reason = f"there is no text in {folder}" if text is None else "the minimum is 1,000 characters"
    assert reason in fail(prepare(folder, out=tmp_path / "out"), 4)
    assert not (tmp_path / "out").exists()


def test_the_named_field_of_records_is_read_and_those_without_it_are_counted(tmp_path):
    lines = [json.dumps({"cuerpo": f"Una frase, la número {n}, y otra."}) for n in range(90)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"titulo": "x"}', '{"cuerpo": "roto']), encoding="utf-8")
    assert "(it has: 'cuerpo')" in fail(prepare(tmp_path / "a.jsonl", out=tmp_path / "out"), 4)
    options = ("--out", tmp_path / "out", "--field", "cuerpo", "--vocab", 300)
    done = run("--json", "data", "prepare", tmp_path / "a.jsonl", *options)
    assert json.loads(done.stdout)["counts"]["records_without_text"] == 2


def test_one_small_file_is_cut_fine_enough_to_be_split(tmp_path):
    lines = [f"Frase número {n}, distinta de la anterior." for n in range(60)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    assert prepare(tmp_path / "a.txt", out=tmp_path / "out").returncode == 0
    assert "\n".join(sorted(lines)) == "\n".join(
        sorted("\n".join(texts_of(tmp_path / "out", "train") + texts_of(tmp_path / "out", "val")).split("\n"))
    )


def test_json_is_the_manifest(books, tmp_path):
    out = tmp_path / "out"
    for already in (False, True):
        done = run("--json", "data", "prepare", books, "--out", out, "--vocab", 300, code=0)
        head = {"folder": str(out), "already_prepared": already, "skipped": []}
        shown = {"schema": 2, **json.loads(done.stdout)}
        assert shown == json.loads((out / "manifest.json").read_text()) | head | {
            "manifest_hash": read_manifest(out).hash()
        }
    assert sum(split["num_documents"] for split in shown["splits"].values()) == sum(
        sum(source["documents"].values()) for source in shown["sources"]
    )
    with pytest.raises(DataError, match="not a finished data folder"):
        read_manifest(books)
