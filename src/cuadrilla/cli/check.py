"""`cuadrilla check`: try things out before they are needed."""

import dataclasses
from typing import Annotated

import typer

from cuadrilla.cli.output import emit, emit_json, error_data, options, report_error, say
from cuadrilla.errors import LinkError
from cuadrilla.home import Home, Joined
from cuadrilla.link.address import Address
from cuadrilla.messages import Message

MAX_SECONDS = 20.0
OK = "ok      {step:12} {reason}  [{seconds:.3f} s]"
BROKEN = "BROKEN  {step:12} {reason}  [{seconds:.3f} s]"

app = typer.Typer(no_args_is_help=True)


@app.callback()
def group() -> None:
    """Test what training will need."""


@app.command()
def link(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS:PORT", help="Default: the last known address of the crew.")
    ] = "",
    seconds: Annotated[
        float, typer.Option(min=0.1, max=MAX_SECONDS, help="How many seconds to measure the bandwidth each way.")
    ] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Test the connection from this machine to its crew's coordinator; name the first step that fails and its remedy.

    For a machine that has joined. Exit code 5 if a step fails.
    """
    options.json = options.json or as_json
    crew = joined_crew(address)
    from cuadrilla.link.check import Target, check_link

    target = Target(address=Address.parse(crew.address), folder=crew.folder, seconds=seconds)
    say("as {name} to {address}", name=crew.name, address=crew.address)
    rows = []
    for row in check_link(target):
        rows.append(row)
        if not options.json:
            line = OK if row.ok else BROKEN
            emit(line, step=row.step, reason=row.reason, seconds=row.seconds)
            if row.ok and row.hint:
                say("                     {hint}", hint=row.hint)
    broken = next((row for row in rows if not row.ok), None)
    error = (
        LinkError("{step}: {reason}", step=broken.step, reason=broken.reason, hint=Message("{hint}", hint=broken.hint))
        if broken
        else None
    )
    if options.json:
        result = {"address": crew.address, "node": crew.name, "ok": error is None}
        result["steps"] = [dataclasses.asdict(row) for row in rows]
        if error is not None:
            result |= error_data(error)
        emit_json(result)
        options.json = False  # what follows has been said as data
    if error is not None:
        report_error(error)
        raise typer.Exit(error.exit_code)


@app.command()
def island(
    address: Annotated[str, typer.Argument(metavar="ADDRESS:PORT", help="Machine 0, as all of them call it.")],
    machines: Annotated[int, typer.Option(min=2, max=10_000, help="How many there are.")],
    number: Annotated[int, typer.Option(min=0, help="Of this one, from 0.")],
    seconds: Annotated[float, typer.Option(min=1, max=86_400, help="How long to wait for the others.")] = 300.0,
) -> None:
    """Try whether machines reach each other in both directions, as torchrun needs; type it on all of them.

    Prints the network card that leads to the others. Exit code 5 when a way is closed.
    """
    from cuadrilla.host.meeting import Meeting, meet

    place = Address.parse(address)
    meeting = Meeting(address=place.host, port=place.port, machines=machines, number=number, seconds=seconds)
    say("machine {number} of {machines}: waiting for the others", number=number, machines=machines)
    emit(meet(meeting))


def joined_crew(address: str) -> Joined:
    """The crew to check. Raises LinkError when this machine has joined none, or several and no address is given."""
    home = Home.of_user()
    if not address and len(joined := home.joined()) > 1:
        raise LinkError(
            "this machine has joined {number} crews: {addresses}",
            number=len(joined),
            addresses=", ".join(crew.address for crew in joined),
            hint="name one: cuadrilla check link ADDRESS:PORT",
        )
    crew = home.find_crew(address)
    if crew is None:
        raise LinkError(
            "this machine has not joined a crew at {address}" if address else "this machine has not joined a crew",
            address=address,
            hint="join one first: `cuadrilla invite` on the coordinator's machine, then here: cuadrilla join",
        )
    return crew
