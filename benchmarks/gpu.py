"""What does qattn do on this machine's GPU: do the tests pass, how exact and how fast is it?

    make gpu

With a CUDA device: the tests marked gpu, the error and speed of every backend beside the figures that a model of the
machine code gave (gpu_model.py), passes over a million points, and training steps, in one report, gpu_report.md, to
attach to an issue. Without one it says what it would do.
"""

import argparse
import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import qattn
from qattn.attention.triton import why_not_this_gpu
from qattn.doctor import choices
from qattn.nn import QDiffNet

MODEL = Path(__file__).parent / "records" / "gpu_model.json"
REPORT = Path("gpu_report.md")
DEVICE = "cuda"
POINTS, MANY_POINTS, TRAINED = 200_000, 1_000_000, (10_000, 100_000)
# Passes as the model calls them: channels, and the tolerance, which decides whether points are lifted.
PASSES = {
    "lse, d = 3": (0, 1e-6),
    "lse, d = 3, lifted": (0, 1e-3),
    "8 channels, float32": (8, 1e-6),
    "8 channels, float32, lifted": (8, 1e-3),
}
DIRECT = 1e-4  # bound on errors of passes by differences
BAD = "**"  # marks what the verdict tells


def milliseconds(run: Callable[[], object], count: int = 5) -> float:
    """The best of a few runs, after one that compiles."""
    run()
    durations = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        durations.append(time.perf_counter() - start)
    return 1e3 * min(durations)


def machine() -> list[str]:
    """The machine and the versions of what matters."""
    properties = torch.cuda.get_device_properties(0)
    triton = importlib.util.find_spec("triton") and importlib.import_module("triton").__version__
    lines = [
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB",
        f"qattn {qattn.__version__}, torch {torch.__version__}, CUDA {torch.version.cuda or torch.version.hip}, "
        f"Triton {triton or 'missing'}",
    ]
    return [f"- {line}" for line in lines]


def tests() -> list[str]:
    """The tests that need a GPU, with the lines of those that fail."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-q", "--tb=line", "tests/test_gpu.py"]
    run = subprocess.run(command, capture_output=True, text=True)
    verdict = [] if run.returncode == 0 else [f"{BAD}failed{BAD}: pytest ended with {run.returncode}", ""]
    return [*verdict, "```", *(run.stdout + run.stderr).strip().splitlines()[-40:], "```"]


def backends() -> list[str]:
    """Errors and speed of every backend on the GPU, and what `backend="auto"` selects."""
    lines = [
        "| backend | dtype | lse error | out error | bound | 10¹² pairs/s, lse | with 8 channels | remark |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for report in qattn.backends():
        if report.device != DEVICE:
            continue
        dtype = str(report.dtype).removeprefix("torch.")
        if not report.is_usable:
            reasons = "; ".join(report.reasons)
            mark = BAD if reasons.startswith("failed here") else ""
            lines.append(f"| {report.name} | {dtype} | | | | | | {mark}{reasons}{mark} |")
            continue
        speeds = [f"{1e-3 / ns:.2g}" for ns in (report.lse_ns, report.out_ns) if ns is not None]
        remark = "" if report.is_exact else f"{BAD}above its bound{BAD}"
        errors = f"{report.lse_error:.1e} | {report.out_error:.1e} | {report.tolerance:.1e}"
        lines.append(f"| {report.name} | {dtype} | {errors} | {' | '.join(speeds)} | {remark} |")
    lines += ["", *(f"- {inputs}: `{name}`" for inputs, name in choices() if inputs.startswith(DEVICE))]
    return lines


def rows(heads: list[str], cells: dict[str, Callable[[], list[str]]]) -> list[str]:
    """A table with a row for each function, which may fail."""
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, make in cells.items():
        try:
            made = make()
        except Exception as error:  # a row of what fails is worth more than none
            made = [f"{BAD}failed{BAD}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
        lines.append(f"| {' | '.join([name, *made, *[''] * (len(heads) - 1 - len(made))])} |")
    return lines


def large_clouds() -> list[str]:
    """Passes of the `triton` backend over clouds that fill the GPU, beside the model."""
    if reason := why_not_this_gpu(torch.device(DEVICE)):
        return [f"Not run, as `triton` refuses this GPU: {reason}."]
    modeled = {(row["what"], row["gpu"]): row["pairs"] for row in json.loads(MODEL.read_text())["triton"]}
    points = qattn.shapes.ball(POINTS).to(DEVICE) / 0.05

    def measured(name: str, channels: int, tol: float) -> list[str]:
        value = torch.randn(len(points), channels, device=DEVICE) if channels else None
        exact = None if value is None else value.double()
        expected = qattn.attend(points[:256].double(), points.double(), exact, backend="reference")

        def attend() -> qattn.Attended:
            return qattn.attend(points, points, value, backend="triton", tol=tol)

        out, lse = attend()
        error = float((lse[:256] - expected.lse).abs().amax())
        if out is not None:
            error = max(error, float((out[:256] - expected.out).abs().amax()))
        mark = "" if error <= max(tol, DIRECT) else BAD
        duration = milliseconds(attend)
        rate = len(points) ** 2 / duration * 1e3 / 1e12
        said = " / ".join(f"{modeled[name, gpu] / 1e12:.2f}" for gpu in ("A100", "H100"))
        return [f"{mark}{error:.1e}{mark}", f"{duration:.1f}", f"{rate:.2f}", said]

    heads = [f"pass over {POINTS:,} points", "largest error", "milliseconds", "10¹² pairs/s", "modeled, A100 / H100"]
    return rows(heads, {name: partial(measured, name, *options) for name, options in PASSES.items()})


def many_points() -> list[str]:
    """Near tiles of a million points: a pass, a normalization, and what `method="auto"` says."""
    points = qattn.shapes.ball(MANY_POINTS).to(DEVICE)
    sigma = 2.2 * (4.19 / MANY_POINTS) ** (1 / 3)  # 2.2 mean spacings

    def one_pass() -> list[str]:
        kernel, bias = qattn.GaussianKernel(points, sigma, method="tiles"), torch.zeros(MANY_POINTS, device=DEVICE)
        return [f"{milliseconds(lambda: kernel.attend(bias, None, all_rows=False)):.1f}", "under 50 ms was the goal"]

    def normalized() -> list[str]:
        start = time.perf_counter()
        q = qattn.diffusion(points, sigma, method="tiles")
        torch.cuda.synchronize()
        duration, error = 1e3 * (time.perf_counter() - start), float(q.kernel_error().amax())
        mark = "" if error <= 1e-3 else BAD
        return [f"{duration:.0f}", f"{int(q.num_iter)} passes, row errors {mark}{error:.1e}{mark}"]

    def chosen() -> list[str]:
        start = time.perf_counter()
        text = str(qattn.GaussianKernel(points, sigma))
        return [f"{1e3 * (time.perf_counter() - start):.0f}", "; ".join(text.split("\n"))]

    cells = {"lse by tiles": one_pass, "diffusion by tiles, points sorted": normalized, "choice of a method": chosen}
    return rows([f"{MANY_POINTS:,} points, σ of 2.2 spacings", "milliseconds", ""], cells)


def training() -> list[str]:
    """Steps of a network under autocast, with their memory."""

    def measured(size: int) -> list[str]:
        points = qattn.shapes.sphere(size).to(DEVICE)
        network = QDiffNet(3, 8).to(DEVICE)
        optimizer = torch.optim.Adam(network.parameters())

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                loss = network(points, points).float().square().mean()
            loss.backward()
            optimizer.step()

        torch.cuda.reset_peak_memory_stats()
        duration = milliseconds(step, count=3)
        return [f"{duration:.0f}", f"{torch.cuda.max_memory_allocated() / 2**30:.2f}"]

    heads = ["step of QDiffNet, bfloat16 autocast", "milliseconds", "peak memory, GiB"]
    return rows(heads, {f"{size:,} points": partial(measured, size) for size in TRAINED})


SECTIONS = {
    "Machine": machine,
    "Backends": backends,
    "Large clouds": large_clouds,
    "A million points": many_points,
    "Training": training,
    "Tests": tests,
}


def main() -> None:
    """Write the report, and end with 1 if something in it is wrong."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device here. On a machine with one, this would write gpu_report.md, with")
        for title, section in SECTIONS.items():
            print(f"  {title}: {section.__doc__}")
        if shutil.which("nvidia-smi") or shutil.which("rocm-smi"):
            build = torch.version.cuda or torch.version.hip or "CPUs"
            print(f"There is a driver, but torch {torch.__version__}, built for {build}, finds no device with it.")
        return
    lines: list[str] = []
    for title, section in SECTIONS.items():
        print(title, flush=True)
        lines += ["", f"## {title}", ""]
        try:
            lines += section()
        except Exception as error:
            lines.append(f"{BAD}failed{BAD}: {type(error).__name__}: {error}")
        wrong = [line for line in lines if BAD in line]
        verdict = ["Wrong:", "", *(f"- {line}" for line in wrong)] if wrong else ["Nothing is wrong."]
        REPORT.write_text("\n".join(["# qattn on a GPU", "", *verdict, *lines]) + "\n")
    print(f"written to {REPORT}: {len(wrong)} things are wrong" if wrong else f"written to {REPORT}: nothing is wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
