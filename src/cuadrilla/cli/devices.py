"""`cuadrilla devices`: what this machine can train on."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from cuadrilla.cli.output import emit_json, emit_table, options, say
from cuadrilla.host.devices import Device, probe_devices

GIB = 2**30


def devices(
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, max=600, help="Seconds to wait for a driver that does not answer.")
    ] = 20.0,
    json: Annotated[bool, typer.Option("--json", help="The same as JSON, with sizes in bytes.")] = False,
) -> None:
    """Show the devices of this machine; a broken one with the reason and the remedy."""
    found = probe_devices(timeout_seconds=timeout)
    if json or options.json:
        emit_json([asdict(device) for device in found])
        return
    emit_table([_row(device) for device in found])
    for device in found:
        if device.error:
            say("\n{device}: {error}", device=device.label, error=device.error)
            say("hint: {hint}", hint=device.hint)


def _row(device: Device) -> dict[str, Any]:
    capability = device.capability
    return {
        "device": device.label,
        "state": "sick" if device.error else "ok",
        "name": device.name,
        "memory": _size(device.memory_bytes),
        "free": _size(device.free_bytes),
        "CUDA": f"{capability[0]}.{capability[1]}" if capability else None,
        "GFLOP/s": None if device.gflops is None else f"{device.gflops:,.0f}",
        "driver": device.driver,
        "torch": device.torch_version,
    }


def _size(value_bytes: int | None) -> str | None:
    return None if value_bytes is None else f"{value_bytes / GIB:.1f} GiB"
