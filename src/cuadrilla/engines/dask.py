"""A Dask cluster does the jobs of a preparation (`data prepare --engine dask`), or calls a user's function (`tune
--scheduler`).

Invariants
* Workers need none of our files: a job travels with the bytes that it reads, and those of its result come back, sealed.
  A job depends on nothing else, so Dask may repeat it elsewhere when a worker dies. A call travels with the user's
  files and is repeated by who asked for it.
* This process dials the scheduler and nothing else, and listens on nothing.
* Who reaches a scheduler can run programs on its workers, and who has taken one over can on this machine, because
  Dask's messages are pickles. So it must be a scheduler with TLS, which knows its members by their certificates, one
  on this machine, or one on a private network that the user calls insecure.
* All take the same program: a worker that differs in what decides the bytes is refused and named, also one that joins
  later.
"""

import hashlib
import ipaddress
import platform
import re
import socket
import ssl
import time
import unicodedata
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import dask
import distributed
from distributed.scheduler import KilledWorker

from cuadrilla.data import work
from cuadrilla.data.chunks import place_chunk
from cuadrilla.data.encode import FAST, PLAIN
from cuadrilla.data.pool import AHEAD, Jobs, error_of, in_order
from cuadrilla.data.work import Job, LoadJob, files_of, request, run_apart
from cuadrilla.engines.calls import call_apart, packages_here
from cuadrilla.errors import ConfigError, CuadrillaError, EnvironmentProblem, LinkError, ResourceError
from cuadrilla.link.address import Address
from cuadrilla.log import to_files_only
from cuadrilla.messages import Message
from cuadrilla.printable import one_line
from cuadrilla.version import __version__

LOOK_SECONDS, SILENT_SECONDS, CLOSE_SECONDS = 2.0, 30.0, 5.0
ALONE_SECONDS = 60.0
"""So long may there be no worker: Dask needs some seconds to start one again that was killed."""
INSTALL_THERE = 'install it there: pip install "cuadrilla[dask]=={version}", then restart it'
SHARED = "tokenizer"
"""The file that all jobs of a stage read: it is sent once."""
_LOGGERS = ("distributed", "distributed.client", "distributed.gc", "tornado", "tornado.application")
_SHOWN_DIGITS = 12
_URL = re.compile(r"(?P<scheme>[a-z]+)://(?P<address>[^/]+)/?")


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """The cluster's authority, and what this machine shows, as PEM."""

    ca: Path
    certificate: Path
    key: Path


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    address: Address
    tls: TlsFiles | None

    def __str__(self) -> str:
        return f"{'tls' if self.tls else 'tcp'}://{self.address}"


def parse_scheduler(text: str, *, tls: TlsFiles | None, insecure: bool) -> Scheduler:
    """What `--scheduler` names. Raises ConfigError, LinkError."""
    parts = _URL.fullmatch(text)
    if not parts or parts["scheme"] not in ("tls", "tcp"):
        raise ConfigError(
            "--scheduler {text!r} is no address of a Dask scheduler", text=text[:80], hint="tls://192.168.1.50:8786"
        )
    address = Address.parse(parts["address"])
    address.check_dialled()
    if parts["scheme"] == "tls":
        return _encrypted(address, tls, insecure=insecure)
    if tls:
        raise ConfigError("tcp:// is not encrypted and takes no certificate", hint="write tls://{to}", to=address)
    if address.is_loopback:
        return Scheduler(address=address, tls=None)
    if not insecure:
        raise ConfigError(
            "{text} is not encrypted: whoever is on that network can run programs on its machines, and on this one",
            text=text,
            hint="start the scheduler with TLS (docs/dask.md) and write tls://{to}; on a private network of machines"
            " that are all yours --insecure-scheduler allows it",
            to=address,
        )
    return Scheduler(address=_private(address), tls=None)


def _encrypted(address: Address, tls: TlsFiles | None, *, insecure: bool) -> Scheduler:
    if insecure:
        raise ConfigError("--insecure-scheduler is for tcp://, and this is tls://", hint="leave it out")
    if not tls:
        raise ConfigError(
            "tls:// needs the cluster's authority and a certificate with its key",
            hint="--tls-ca-file FILE --tls-cert FILE --tls-key FILE",
        )
    _check_files(tls)
    return Scheduler(address=address, tls=tls)


def _check_files(tls: TlsFiles) -> None:
    """Raises ConfigError. A key with a passphrase is refused: OpenSSL would ask for it on the terminal."""
    for path in (tls.ca, tls.certificate, tls.key):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(
                "cannot read {path}: {reason}",
                path=path,
                reason=error.strerror,
                hint="--tls-ca-file, --tls-cert and --tls-key name files in PEM",
            ) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(tls.ca)
    except ssl.SSLError as error:
        raise _unusable(str(tls.ca), error) from None
    try:
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")
    except ssl.SSLError as error:
        both = Message("{certificate} with {key}", certificate=tls.certificate, key=tls.key)
        raise _unusable(both, error) from None


def _unusable(files: str, error: ssl.SSLError) -> ConfigError:
    return ConfigError(
        "{files} cannot be used for TLS: {reason}",
        files=files,
        reason=one_line(error.reason or str(error)),
        hint="certificates and keys in PEM that belong together, the key without a passphrase",
    )


def _private(address: Address) -> Address:
    """The number of an address that is not public: what is dialled is what was checked. Raises ConfigError."""
    try:
        found = ipaddress.ip_address(socket.getaddrinfo(address.host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError) as error:
        raise LinkError(
            "{host} is not known: {reason}", host=address.host, reason=error, hint="give its number on your network"
        ) from None
    if found.is_global or found.is_unspecified or found.is_multicast:
        raise ConfigError(
            "{host} is a public address: without TLS whoever finds it can run programs on its machines and on this one",
            host=address.host,
            hint="start the scheduler with TLS (docs/dask.md)",
        )
    return Address(str(found), address.port)


# -- what runs on a worker -------------------------------------------------------------------------------------------


@cache
def program() -> dict[str, str]:
    """What decides the bytes that a job makes on this machine, and what Dask itself needs to be equal."""
    folder = Path(work.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    found = {
        "cuadrilla": __version__,
        "code of the preparation": digest.hexdigest()[:_SHOWN_DIGITS],
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "Unicode": unicodedata.unidata_version,
        "distributed": distributed.__version__,
    }
    for library in (PLAIN, FAST):
        with suppress(metadata.PackageNotFoundError):
            found[library] = metadata.version(library)
    return found


def differences(ours: Mapping[str, str]) -> dict[str, list[str]]:
    """Where this machine's program is another: what, and [theirs, ours]."""
    here = program()
    return {name: [here.get(name, "-"), value] for name, value in ours.items() if here.get(name) != value}


def _given(raw: bytes) -> bytes:
    return raw


def _work(
    ours: dict[str, str], asked: dict[str, Any], payload: bytes, names: list[str], *files: bytes
) -> tuple[dict[str, Any], bytes]:
    """One job. A worker that joined late has not been looked at before."""
    if differs := differences(ours):
        answer, raw = {"differs": differs}, b""
    else:
        answer, raw = run_apart(asked, payload, dict(zip(names, files, strict=True)))
    return ({**answer, "worker": distributed.get_worker().address} if answer else {}), raw


# -- what runs here --------------------------------------------------------------------------------------------------


@contextmanager
def dask_pool(scheduler: Scheduler, *, encoder: str) -> Iterator["DaskPool"]:
    """Who does jobs on the workers of a cluster. `encoder`: as in `PrepareOptions`.

    Raises LinkError (no scheduler, no workers), EnvironmentProblem (they have another program).
    """
    wanted = {name: value for name, value in program().items() if name != FAST or encoder != PLAIN}
    with _connected(scheduler) as client:
        pool = DaskPool(client, scheduler, wanted)
        pool.check_workers()
        yield pool


@contextmanager
def _connected(scheduler: Scheduler) -> Iterator[distributed.Client]:
    with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 GiB"}):
        client = _connect(scheduler)
        try:
            yield client
        finally:
            with suppress(TimeoutError, OSError):
                client.close(timeout=CLOSE_SECONDS)


def _connect(scheduler: Scheduler) -> distributed.Client:
    for name in _LOGGERS:
        to_files_only(name)
    tls = scheduler.tls
    files = {"tls_ca_file": tls.ca, "tls_client_cert": tls.certificate, "tls_client_key": tls.key} if tls else {}
    security = distributed.Security(
        require_encryption=tls is not None,
        tls_min_version=ssl.TLSVersion.TLSv1_3,
        **{name: str(path) for name, path in files.items()},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", distributed.versions.VersionMismatchWarning)  # `check_workers` says more
        try:
            return distributed.Client(str(scheduler), security=security, set_as_default=False, name="cuadrilla")
        except OSError as error:
            raise LinkError(
                "no Dask scheduler answers at {scheduler}: {reason}",
                scheduler=scheduler,
                reason=one_line(str(_first_cause(error))),
                hint="is it running, and with certificates of the same authority? docs/dask.md says how to start it",
            ) from None


def _first_cause(error: BaseException) -> BaseException:
    return _first_cause(error.__cause__) if error.__cause__ else error


class DaskPool:
    """A `Pool`. Jobs are done in any order and repeated if a worker dies; their files come in order."""

    def __init__(self, client: distributed.Client, scheduler: Scheduler, wanted: dict[str, str]) -> None:
        self._client = client
        self._scheduler = scheduler
        self._wanted = wanted
        self._num_threads = 0
        self._shared: dict[str, distributed.Future] = {}
        self._last_worker = time.monotonic()

    def run(self, jobs: Jobs) -> Iterator[None]:
        self._look()
        yield from in_order(jobs, submit=self._submit, ahead=lambda: AHEAD * max(1, self._num_threads))

    def warm(self, job: LoadJob) -> None:
        """Nothing: which workers get the jobs is not known before."""

    def check_workers(self) -> None:
        """Raises LinkError if there is none, EnvironmentProblem for those with another program.

        The scheduler counts as one: it unpacks the jobs that it hands on.
        """
        with _answering(self._scheduler):
            try:
                found = {str(self._scheduler): self._client.run_on_scheduler(differences, self._wanted)}
            except ImportError as error:
                found = {str(self._scheduler): error}
            workers = self._client.run(differences, self._wanted, on_error="return")
        if problems := [problem for each in (found | workers).items() if (problem := _problem(*each))]:
            raise problems[0]
        if not workers:
            raise _no_workers(self._scheduler)

    def _submit(self, job: Job, payload: bytes) -> Callable[[], None]:
        files = {name: path.read_bytes() for name, path in files_of(job).items()}
        given = [self._send_once(raw) if name == SHARED else raw for name, raw in files.items()]
        with _answering(self._scheduler):
            future = self._client.submit(
                _work, self._wanted, request(job), payload, list(files), *given, pure=False, key=None
            )
        return lambda: self._finish(job, future)

    def _send_once(self, raw: bytes) -> distributed.Future:
        """As a job's result, so that Dask can make it again when the workers that have it are gone."""
        key = hashlib.sha256(raw).hexdigest()
        if key not in self._shared:
            self._shared[key] = self._client.submit(_given, raw, pure=False)
        return self._shared[key]

    def _finish(self, job: Job, future: distributed.Future) -> None:
        with _answering(self._scheduler):
            while not future.done():
                try:
                    future.exception(timeout=LOOK_SECONDS)  # waits, and does not fetch the result yet
                except TimeoutError:
                    self._look()
            answer, raw = future.result()
        if "differs" in answer:
            raise _other_program(answer["worker"], answer["differs"])
        if answer:
            where = Message("worker {worker}: {error}", worker=answer["worker"], error=answer["message"])
            raise error_of({**answer, "message": where})
        assert not isinstance(job, LoadJob)
        place_chunk(Path(job.out), raw)

    def _look(self) -> None:
        """How many threads the workers have now. Raises LinkError if there has been none for too long."""
        with _answering(self._scheduler):
            self._num_threads = sum(self._client.nthreads(callback_timeout=SILENT_SECONDS).values())
        self._last_worker = _last_worker(self._scheduler, self._last_worker, is_there=self._num_threads > 0)


@contextmanager
def _answering(scheduler: Scheduler) -> Iterator[None]:
    """What may go wrong between a scheduler and us, as errors of ours."""
    try:
        yield
    except CuadrillaError:
        raise
    except KilledWorker as error:
        raise ResourceError(
            "{deaths} workers ended during the same piece of work, the last one was {worker};"
            " they may have run out of memory",
            deaths=error.allowed_failures + 1,
            worker=error.last_worker.address,
            hint="give each worker more memory (--nworkers smaller, --memory-limit larger), then run the same"
            " command again; finished work is kept",
        ) from None
    except ImportError as error:
        raise EnvironmentProblem(
            "a worker cannot run cuadrilla: {reason}",
            reason=one_line(str(error)),
            hint=INSTALL_THERE,
            version=__version__,
        ) from None
    except (CancelledError, OSError) as error:
        raise LinkError(
            "the scheduler {scheduler} is gone: {reason}",
            scheduler=scheduler,
            reason=one_line(str(error) or type(error).__name__),
            hint="start it and its workers, then run the same command again; finished work is kept",
        ) from None


def _no_workers(scheduler: Scheduler) -> LinkError:
    return LinkError(
        "the scheduler {scheduler} has no workers",
        scheduler=scheduler,
        hint="start one on each machine: dask worker {scheduler}, with the options in docs/dask.md",
    )


def _last_worker(scheduler: Scheduler, before: float, *, is_there: bool) -> float:
    """When there was a worker last. Raises LinkError if that is too long ago."""
    now = time.monotonic()
    if is_there:
        return now
    if now - before > ALONE_SECONDS:
        raise LinkError(
            "the scheduler {scheduler} has had no workers for {seconds:.0f} s",
            scheduler=scheduler,
            seconds=ALONE_SECONDS,
            hint="start some, then run the same command again; finished work is kept",
        )
    return before


def _problem(address: str, answer: object) -> EnvironmentProblem | None:
    """What `differences` said, or why it could not."""
    if isinstance(answer, Exception):
        return _unable(address, answer)
    return _other_program(address, answer) if isinstance(answer, dict) and answer else None


def _unable(address: str, error: Exception) -> EnvironmentProblem:
    return EnvironmentProblem(
        "Dask's process {address} cannot run cuadrilla: {reason}",
        address=address,
        reason=one_line(str(error)),
        hint=INSTALL_THERE,
        version=__version__,
    )


def _in_lines(differs: Mapping[str, list[str]]) -> list[Message]:
    return [
        Message("{name}: {theirs} there, {ours} here", name=name, theirs=theirs, ours=ours)
        for name, (theirs, ours) in differs.items()
    ]


def _other_program(address: str, differs: Mapping[str, list[str]]) -> EnvironmentProblem:
    return EnvironmentProblem(
        "Dask's process {address} has another program than this machine and might make other bytes",
        address=address,
        details=_in_lines(differs),
        hint="install the same there and restart it (without gigatoken: --encoder tokenizers)"
        if FAST in differs
        else "install the same on all machines and restart the workers",
    )


# -- calls of a user's function --------------------------------------------------------------------------------------


def calls_program(packages: Collection[str]) -> dict[str, str]:
    """What may decide a function's results on this machine: among others the versions of what it imports."""
    found = {
        "cuadrilla": __version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "distributed": distributed.__version__,
    }
    return found | packages_here(packages)


def _call(
    wanted: dict[str, str], packages: list[str], request: dict[str, Any], code: dict[str, bytes]
) -> dict[str, Any]:
    """One call. A worker that joined late has not been looked at before."""
    worker = distributed.get_worker()
    if differs := _differing(calls_program(packages), wanted):
        return {"worker": worker.address, "differs": differs}
    key = worker.get_current_task()

    def is_wanted() -> bool:
        """Dask cancels what runs by calling it so: when who asked has gone, too."""
        task = worker.state.tasks.get(key)
        return task is not None and task.state in ("executing", "long-running")

    threads, where = worker.state.nthreads, worker.local_directory
    return call_apart(request, code, threads=threads, where=where, is_wanted=is_wanted)


def _differing(theirs: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, list[str]]:
    return {name: [theirs.get(name, "-"), value] for name, value in wanted.items() if theirs.get(name) != value}


@dataclass(frozen=True, kw_only=True)
class CallEnd:
    """How a call on a worker ended: exit code, answer, and what it printed. `is_lost`: it has to be made elsewhere."""

    code: int = 0
    said: str = ""
    talk: bytes = b""
    is_lost: bool = False


@contextmanager
def dask_calls(scheduler: Scheduler, *, packages: Collection[str]) -> Iterator["DaskCalls"]:
    """Who makes calls of a function that imports `packages`.

    Raises LinkError (no scheduler, no workers), EnvironmentProblem (workers that differ from this machine, or, in what
    this machine lacks, from each other).
    """
    with _connected(scheduler) as client:
        calls = DaskCalls(client, scheduler, sorted(packages))
        try:
            calls.check_workers()
            yield calls
        finally:
            calls.cancel()


class DaskCalls:
    """One call at a time on each worker. Used by one thread."""

    def __init__(self, client: distributed.Client, scheduler: Scheduler, packages: list[str]) -> None:
        self.workers: list[str] = []
        """Their addresses, as they were a moment ago."""
        self._client, self._scheduler, self._packages = client, scheduler, packages
        self._wanted: dict[str, str] = {}
        self._running: dict[str, distributed.Future] = {}
        self._last_look = -LOOK_SECONDS
        self._last_worker = time.monotonic()

    def check_workers(self) -> None:
        """The scheduler needs to have cuadrilla, too: it unpacks what it hands on. Raises LinkError,
        EnvironmentProblem."""
        with _answering(self._scheduler):
            try:
                self._client.run_on_scheduler(calls_program, [])
            except ImportError as error:
                raise _unable(str(self._scheduler), error) from None
            found = self._client.run(calls_program, self._packages, on_error="return")
        if not found:
            raise _no_workers(self._scheduler)
        for address, answer in sorted(found.items()):
            if isinstance(answer, Exception):
                raise _unable(address, answer)
        here = calls_program(self._packages)
        self._wanted = next(program for _, program in sorted(found.items())) | here
        for address, theirs in sorted(found.items()):
            if differs := _differing(theirs, self._wanted):
                raise _other_versions(address, differs)
        self._look_around()

    def begin(self, worker: str, request: dict[str, Any], code: dict[str, bytes]) -> None:
        with _answering(self._scheduler):
            self._running[worker] = self._client.submit(
                _call, self._wanted, self._packages, request, code, workers=[worker], allow_other_workers=False,
                pure=False, key=None,
            )  # fmt: skip

    def look(self) -> dict[str, CallEnd]:
        """Whose call has ended since, by worker. Raises LinkError, EnvironmentProblem."""
        states = {worker: future.status for worker, future in self._running.items()}
        self._look_around(now=any(state in ("cancelled", "lost") for state in states.values()))
        ended = {}
        for worker, state in states.items():
            if state != "pending" or worker not in self.workers:
                ended[worker] = self._end_of(self._running.pop(worker), state)
        return ended

    def cancel(self) -> None:
        """Have no call go on; `look` tells of them."""
        if self._running and self._client.status == "running":
            with suppress(OSError, TimeoutError, CancelledError):
                self._client.cancel(list(self._running.values()), force=True)

    def _end_of(self, future: distributed.Future, state: str) -> CallEnd:
        with _answering(self._scheduler):
            if state == "finished":
                answer = future.result()
                if "differs" in answer:
                    raise _other_versions(answer["worker"], answer["differs"])
                return CallEnd(**answer)
            if state == "error" and not isinstance(error := future.exception(), KilledWorker):
                raise error
            if state == "pending":
                future.cancel()
        return CallEnd(is_lost=True)

    def _look_around(self, *, now: bool = False) -> None:
        """Who is there. Raises LinkError if there has been nobody for too long."""
        if not now and time.monotonic() - self._last_look < LOOK_SECONDS:
            return
        with _answering(self._scheduler):
            self.workers = sorted(self._client.nthreads(callback_timeout=SILENT_SECONDS))
        self._last_look = time.monotonic()
        self._last_worker = _last_worker(self._scheduler, self._last_worker, is_there=bool(self.workers))


def _other_versions(address: str, differs: Mapping[str, list[str]]) -> EnvironmentProblem:
    return EnvironmentProblem(
        "Dask's process {address} has other versions and might give other results",
        address=address,
        details=_in_lines(differs),
        hint="install the same on all machines and restart the workers",
    )
