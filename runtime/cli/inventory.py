"""``hwplan models`` and ``hwplan devices``: what ships with hwplan."""

from __future__ import annotations

from runtime.cli.options import AsJson
from runtime.cli.output import write_json, write_report


def models(as_json: AsJson = False) -> None:
    """List the built-in models.

    Also says which can be trained and which only planned.

    In Python: planner.report.inventory.model_rows().
    """
    from planner.report.inventory import model_rows, render_models

    rows = model_rows()
    if as_json:
        write_json({"models": rows})
    else:
        write_report(lambda console: render_models(rows, console))


def devices(as_json: AsJson = False) -> None:
    """List the known device types.

    With their main numbers, and how many of their constants were measured, fitted or published.

    In Python: planner.report.inventory.device_rows().
    """
    from planner.report.inventory import device_rows, render_devices

    rows = device_rows()
    if as_json:
        write_json({"devices": rows})
    else:
        write_report(lambda console: render_devices(rows, console))
