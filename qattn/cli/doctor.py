"""The command `qattn doctor`."""

import sys

import torch
import typer
from rich.console import Console
from rich.table import Table

import qattn
from qattn._types import dtype_name
from qattn.cli.command import counted
from qattn.doctor import BackendReport, backends, choices

__all__ = ["doctor"]


def doctor() -> None:
    """Test every attention backend on this machine: availability, accuracy and speed.

    Errors are the largest deviations from the reference in float64. Times are nanoseconds per pair of points. The exit
    code is 1 if a backend exceeds its tolerance.
    """
    console = Console(width=None if sys.stdout.isatty() else 140)
    with Console(stderr=True).status("testing the backends") as status:
        reports = backends(lambda name: status.update(f"testing {name}"))
    threads = counted(torch.get_num_threads(), "thread")
    console.print(f"qattn {qattn.__version__}, torch {torch.__version__}, {threads}")
    for device in dict.fromkeys(report.device for report in reports):
        table = Table("backend", "dtype", "usable", title=f"Attention backends on {device}", title_justify="left")
        for heading in ("lse error", "out error", "ns/pair, lse", "ns/pair, C = 8"):
            table.add_column(heading, justify="right")
        table.add_column("remark", overflow="fold")
        for name in dict.fromkeys(report.name for report in reports):
            for row in _rows([report for report in reports if (report.name, report.device) == (name, device)]):
                table.add_row(*row)
        console.print(table)
    table = Table("inputs", "backend", title='Backend that backend="auto" selects', title_justify="left")
    for inputs, name in choices():
        table.add_row(inputs, name)
    console.print(table)
    if not all(report.is_exact for report in reports if report.is_usable):
        raise typer.Exit(1)


def _rows(reports: list[BackendReport]) -> list[list[str]]:
    """Return one row per dtype that a backend supports, or one row with the reasons if it supports none."""
    usable = [report for report in reports if report.is_usable]
    if not usable:
        return [[reports[0].name, "", "[dim]no[/]", "", "", "", "", f"[dim]{'; '.join(reports[0].reasons)}[/]"]]
    rows = []
    for report in usable:
        dtype = dtype_name(report.dtype)
        numbers = [f"{report.lse_error:.0e}", f"{report.out_error:.0e}", f"{report.lse_ns:.3g}", f"{report.out_ns:.3g}"]
        remark = "" if report.is_exact else f"[red]error above its tolerance of {report.tolerance:.0e}[/]"
        rows.append([report.name, dtype, "[green]yes[/]", *numbers, remark])
    return rows
