"""`cuadrilla tune`: a search for better settings, by trials that are runs."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from cuadrilla.cli.calls import Elsewhere, call_places, dask_places
from cuadrilla.cli.config import RunFile, Sets
from cuadrilla.cli.crew import DialledAddress, ListenAddress, Uses
from cuadrilla.cli.jobs import crew_places, local_places, read_wants, require_crew
from cuadrilla.cli.output import emit_table, options, say, stderr
from cuadrilla.cli.pools import CaOption, CertificateOption, InsecureOption, KeyOption, SchedulerOption
from cuadrilla.cli.progress import in_words
from cuadrilla.cli.stopping import stopping
from cuadrilla.config import Config
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, ConfigError
from cuadrilla.home import read_object
from cuadrilla.log import set_up_logging
from cuadrilla.messages import Message, language, shown
from cuadrilla.printable import one_line
from cuadrilla.rundir import typed, write_atomic
from cuadrilla.runfile import read_run_file

if TYPE_CHECKING:
    from cuadrilla.jobs.places import Doing, DoingRuns
    from cuadrilla.jobs.ray_places import RayPlaces
    from cuadrilla.tune.run import Searching
    from cuadrilla.tune.search import Job, Search, TrialResult

SHOWN_BEST, LIVE_BEST = 5, 3
REDRAW_SECONDS = 1.0
LOOK_SECONDS = 0.2


def tune(
    run: RunFile = Path("run.toml"),
    sets: Sets = None,
    together: Annotated[
        int,
        typer.Option(
            min=0,
            max=64,
            help="Trials at the same time on this machine (0: one on each accelerator, or one). Cores are divided.",
        ),
    ] = 0,
    crew: Annotated[
        bool, typer.Option("--crew", help="Machines that join do trials, too; prints what to type on them.")
    ] = False,
    listen: ListenAddress = "",
    address: DialledAddress = "",
    uses: Uses = 1,
    here: Annotated[bool, typer.Option("--here/--not-here", help="With --crew: this machine does trials, too.")] = True,
    on: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With --crew or --ray: a machine that does trials (default: all)."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(metavar="KIND", help="With --crew or --ray: cuda, mps, xpu or cpu, which a machine must have."),
    ] = "",
    ray: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="A Ray cluster whose machines do the trials, instead of this one."),
    ] = "",
    scheduler: SchedulerOption = None,
    tls_ca_file: CaOption = None,
    tls_cert: CertificateOption = None,
    tls_key: KeyOption = None,
    insecure_scheduler: InsecureOption = False,
) -> None:
    """Try combinations of settings, as the section `tune` of the run file says, and name the best.

    Each trial is a run in RUN/tune, or a call of `tune.function`, which the workers of a Dask cluster can do, too.
    With --crew the machines that join with `cuadrilla join` do trials, each as fast as it can.
    With --ray the machines of a Ray cluster do them, and this one does not.
    Ctrl-C saves and stops; the same command goes on.
    """
    from cuadrilla.jobs.places import AllPlaces
    from cuadrilla.tune.run import open_search

    run_file = run / "run.toml" if run.is_dir() else run
    config = read_run_file(run_file, sets=sets or [], to_train=False).config
    elsewhere = Elsewhere(scheduler, (tls_ca_file, tls_cert, tls_key), insecure_scheduler)
    with ExitStack() as stack:
        watched = stack.enter_context(_Watched())
        require_crew(crew, listen=listen, address=address)
        _require_others(crew=crew, ray=bool(ray), here=here, says=bool(on or device))
        wants = read_wants(on or [], device=device)
        elsewhere.check(config, ray=bool(ray), crew=crew)
        folder = run_file.parent.resolve()
        places: Doing[Job]
        if ray:
            _require_alone(together=together, crew=crew)
            places = AllPlaces([stack.enter_context(_ray_places(ray, config, folder=folder / "tune"))], wants=wants)
        elif elsewhere.scheduler is not None:
            places = stack.enter_context(dask_places(config, folder=folder, together=together, elsewhere=elsewhere))
        else:
            parts: list[DoingRuns[Job]] = []
            if here:
                is_function = bool(config.tune.function)
                own = call_places(config, together=together) if is_function else None
                parts.append(own or local_places(run_file, sets or [], together=together))
            if crew:
                opened = crew_places(folder / "tune", listen=listen, address=address, uses=uses)
                parts.append(stack.enter_context(opened))
            places = AllPlaces(parts, wants=wants)
        searching = stack.enter_context(open_search(run_file, sets=sets or [], places=places, hears=watched))
        stack.enter_context(stopping(searching.stop, answer=_answer(searching)))
        searching.run()
    _write_page(searching)
    _report(searching)


def _require_others(*, crew: bool, ray: bool, here: bool, says: bool) -> None:
    """Raises ConfigError where other machines are named and none are asked."""
    if not here and not crew:
        raise ConfigError("--not-here is for --crew", hint="add --crew, or leave it out")
    if says and not (crew or ray):
        raise ConfigError("--on and --device are for --crew and --ray", hint="add one of them, or leave them out")


def _require_alone(*, together: int, crew: bool) -> None:
    """What --ray does not go with. Raises ConfigError."""
    if together or crew:
        raise ConfigError(
            "--ray excludes {option}: each device that the cluster offers does one trial at a time",
            option="--crew" if crew else "--together",
            hint="for more at once, a machine offers more than one: docs/ray.md",
        )


@contextmanager
def _ray_places(address: str, config: Config, *, folder: Path) -> Iterator["RayPlaces[Any]"]:
    """Raises ConfigError, EnvironmentProblem, LinkError."""
    from cuadrilla.jobs.ray_places import open_ray_places

    set_up_logging(None, verbose=options.debug)
    without_token = config.engine.kind != "local" and config.engine.ray_without_token
    with open_ray_places(address, folder=folder, without_token=without_token) as places:
        yield places


def _answer(searching: "Searching") -> Message:
    """To Ctrl-C."""
    if searching.base.section.function:
        return Message("stopping   calls under way are made again by the next start")
    return Message("stopping   trials save after this pass; once more: at once, without saving")


class _Watched:
    """What a person sees meanwhile: a line for each trial that ends, and below it, on a terminal, what is going on."""

    def __init__(self) -> None:
        self._searching: Searching | None = None
        self._live: Live | None = None
        self._drawn = 0.0
        self._best: list[tuple[Job, TrialResult]] = []
        """The first of those that have ended."""

    def __enter__(self) -> "_Watched":
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def opened(self, searching: "Searching") -> None:
        self._searching = searching
        search, section = searching.search, searching.base.section
        say(
            "search     {number} trials of {settings} settings by {sampler}, in {folder}",
            number=search.num_trials,
            settings=len(section.space),
            sampler=section.sampler,
            folder=typed(searching.folder.path),
        )
        if section.function:
            say("calls      of {function}", function=section.function)
        elif section.rungs > 1:
            steps = ", ".join(f"{steps:,}" for steps in searching.rung_steps)
            say("rungs      runs of {steps} steps; one in {factor} goes on", steps=steps, factor=section.factor)
        else:
            say("runs       of {steps:,} steps each", steps=searching.rung_steps[0])
        if search.results:
            say("resumed    {number} runs are finished", number=len(search.results))
            self._find_best(search)
        if section.sampler == "tpe" and len(searching.places.places) > section.ahead:
            say(
                "note       tune.ahead = {ahead} lets {ahead} of {places} places work",
                ahead=section.ahead,
                places=len(searching.places.places),
            )
        if stderr.is_terminal and not options.json:
            self._live = Live(console=stderr, auto_refresh=False, transient=True)
            self._live.start()

    def _find_best(self, search: "Search") -> None:
        self._best = [
            (job, found) for job in search.ranked()[:LIVE_BEST] if (found := search.results[job.key]).score is not None
        ]

    def began(self, job: "Job", place: str) -> None:
        pass

    def ended(self, job: "Job", found: "TrialResult") -> None:
        from cuadrilla.tune.folder import counted
        from cuadrilla.tune.trial import describe

        assert self._searching is not None
        search = self._searching.search
        best = search.best
        self._find_best(search)
        say(
            "{name}   {outcome}{mark}   {values}   ({done} of at most {most}, {left})",
            name=job.name,
            outcome=counted(found),
            mark=Message("  best so far") if best is not None and best.key == job.key else "",
            values=describe(job.values),
            done=len(search.results),
            most=search.most_jobs,
            left=self._time_left(),
        )

    def looked(self) -> None:
        if self._live is None or time.monotonic() - self._drawn < REDRAW_SECONDS:
            return
        self._drawn = time.monotonic()
        self._live.update(Group(*map(_line, self._lines())), refresh=True)

    def _lines(self) -> Iterator[str]:
        from cuadrilla.tune.folder import counted
        from cuadrilla.tune.trial import describe

        assert self._searching is not None
        searching = self._searching
        if not searching.places.places:
            yield Message("waiting for a machine that may do a trial")
        for place, job in sorted(searching.places.busy.items()):
            status = read_object(searching.folder.run(job).status)
            yield Message(
                "{place}  {name}  {part:4.0%}  {values}",
                place=place,
                name=job.name,
                part=_part(status, searching.rung_steps[job.rung]),
                values=describe(job.values),
            )
        for number, (job, found) in enumerate(self._best, start=1):
            yield Message(
                "best {number}  {name}  {score}  {values}",
                number=number,
                name=job.name,
                score=counted(found),
                values=describe(job.values),
            )
        yield self._time_left()

    def _time_left(self) -> Message:
        assert self._searching is not None
        seconds = self._searching.seconds_left()
        if seconds is None:
            return Message("measuring how long it takes")
        return Message("about {time} more", time=in_words(seconds))


def _line(text: str) -> Text:
    return Text(one_line(shown(text, language())), no_wrap=True, overflow="ellipsis")


def _part(status: Mapping[str, Any], steps: int) -> float:
    version = status.get("version")
    return min(version / steps, 1.0) if isinstance(version, int | float) else 0.0


def _write_page(searching: "Searching") -> None:
    from cuadrilla.monitor.search_report import read_search, render_search

    if searching.search.jobs:
        write_atomic(searching.folder.report, render_search(read_search(searching.folder)), private=True)
        say("report     {page}", page=typed(searching.folder.report))


def _readable(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}


def _report(searching: "Searching") -> None:
    """The best trials, and what to type next. Raises typer.Exit when the search was interrupted."""
    rows = searching.table()
    emit_table(rows if options.json else list(map(_readable, rows[:SHOWN_BEST])))
    search, best = searching.search, searching.search.best
    if best is None and search.results and all(found.score is None for found in search.results.values()):
        say("\nall trials that have ended have failed; the reasons stand above, and in the report")
    elif best is None and search.results:
        say("\nno trial that has finished meets all constraints")
    elif best is None:
        say("\nno trial has finished yet")
    elif searching.base.section.function:
        say("\nthe best values are in {file}", file=typed(searching.folder.best_values))
    elif best.rung == search.num_rungs - 1:
        say("\nnext: cuadrilla eval {run}", run=typed(searching.folder.run(best).path))
    if best is not None and not searching.base.section.function:
        say(
            "      cuadrilla train {run}    (a run of its own with these settings)",
            run=typed(searching.best_run.path),
        )
    if searching.stop.is_set():
        say("\nthe search was stopped; the same command goes on")
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
