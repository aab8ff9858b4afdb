"""What does qattn do on this machine's GPU: do the tests pass, how exact and how fast is it?

    make gpu

With a CUDA device: the tests marked gpu, the error and speed of every backend beside the figures that a model of the
machine code gave (gpu_model.py), passes over a million points, and training steps, in one report, gpu_report.md, to
attach to an issue. Without one it says what it would do.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import qattn
from qattn.doctor import choices
from qattn.nn import QDiffNet

MODEL = Path(__file__).parent / "records" / "gpu_model.json"
REPORT = Path("gpu_report.md")
# Passes as the model calls them: channels, and the tolerance, which decides whether points are lifted.
PASSES = {"lse, d = 3": (0, 1e-6), "lse, d = 3, lifted": (0, 1e-3), "8 channels, float32": (8, 1e-3)}


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
    lines = [
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB",
        f"qattn {qattn.__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}",
    ]
    return [f"- {line}" for line in lines]


def tests() -> list[str]:
    """The tests that need a GPU, with the lines of those that fail."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-q", "--tb=line", "tests/test_gpu.py"]
    run = subprocess.run(command, capture_output=True, text=True)
    return ["```", *run.stdout.strip().splitlines()[-40:], "```"]


def backends() -> list[str]:
    """Errors and speed of every backend on the GPU, and what `backend="auto"` selects."""
    lines = [
        "| backend | dtype | lse error | out error | bound | 10¹² pairs/s, lse | with 8 channels | remark |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for report in qattn.backends():
        if report.device != "cuda":
            continue
        dtype = str(report.dtype).removeprefix("torch.")
        if not report.is_usable:
            lines.append(f"| {report.name} | {dtype} | | | | | | {'; '.join(report.reasons)} |")
            continue
        speeds = [f"{1e-3 / ns:.3f}" for ns in (report.lse_ns, report.out_ns) if ns is not None]
        remark = "" if report.is_exact else "**above its bound**"
        errors = f"{report.lse_error:.1e} | {report.out_error:.1e} | {report.tolerance:.1e}"
        lines.append(f"| {report.name} | {dtype} | {errors} | {' | '.join(speeds)} | {remark} |")
    lines += ["", *(f"- {inputs}: `{name}`" for inputs, name in choices() if inputs.startswith("cuda"))]
    return lines


def large_clouds() -> list[str]:
    """Passes of the `triton` backend over clouds that fill the GPU, beside the model."""
    modeled = {(row["what"], row["gpu"]): row["pairs"] for row in json.loads(MODEL.read_text())["triton"]}
    lines = [
        "| pass | lse error | milliseconds | 10¹² pairs/s | the model says, A100 / H100 |",
        "|---|---|---|---|---|",
    ]
    points = qattn.shapes.ball(200_000).cuda() / 0.05
    _, expected = qattn.attend(points[:256].double(), points.double(), backend="reference")
    for name, (channels, tol) in PASSES.items():
        value = torch.randn(len(points), channels, device="cuda") if channels else None

        def attend(value: torch.Tensor | None = value, tol: float = tol) -> qattn.attended.Attended:
            return qattn.attend(points, points, value, backend="triton", tol=tol)

        error, duration = float((attend().lse[:256] - expected).abs().amax()), milliseconds(attend)
        said = " / ".join(f"{modeled[name, gpu] / 1e12:.2f}" for gpu in ("A100", "H100"))
        rate = len(points) ** 2 / duration * 1e3 / 1e12
        lines.append(f"| 200,000 points, {name} | {error:.1e} | {duration:.1f} | {rate:.2f} | {said} |")
    million = qattn.shapes.ball(1_000_000).cuda()
    sigma = 2.2 * (4.19 / 1_000_000) ** (1 / 3)  # 2.2 mean spacings
    kernel, bias = qattn.GaussianKernel(million, sigma, method="tiles"), torch.zeros(1_000_000, device="cuda")
    duration = milliseconds(lambda: kernel.attend(bias, None, all_rows=False))
    lines.append(
        f"| a million points by tiles, σ = 2.2 spacings, lse | | {duration:.1f} | | under 50 ms was the goal |"
    )
    start = time.perf_counter()
    q = qattn.diffusion(million, sigma, method="tiles")
    torch.cuda.synchronize()
    lines.append(
        f"| the same, normalized, in {int(q.num_iter)} passes | | {1e3 * (time.perf_counter() - start):.0f} | | |"
    )
    return lines


def training() -> list[str]:
    """Steps of a network under autocast, with their memory."""
    lines = ["| step of QDiffNet, bfloat16 autocast | milliseconds | peak memory, GiB |", "|---|---|---|"]
    for size in (10_000, 100_000):
        points = qattn.shapes.sphere(size).cuda()
        network = QDiffNet(3, 8).cuda()
        optimizer = torch.optim.Adam(network.parameters())

        def step(points=points, network=network, optimizer=optimizer) -> None:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = network(points, points).float().square().mean()
            loss.backward()
            optimizer.step()

        torch.cuda.reset_peak_memory_stats()
        duration = milliseconds(step, count=3)
        lines.append(f"| {size:,} points | {duration:.0f} | {torch.cuda.max_memory_allocated() / 2**30:.2f} |")
    return lines


SECTIONS = {
    "Machine": machine,
    "Backends": backends,
    "Large clouds": large_clouds,
    "Training": training,
    "Tests": tests,
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device here. On a machine with one, this would write gpu_report.md, with")
        for title, section in SECTIONS.items():
            print(f"  {title}: {section.__doc__}")
        return
    lines = ["# qattn on a GPU"]
    for title, section in SECTIONS.items():
        print(title, flush=True)
        try:
            lines += ["", f"## {title}", "", *section()]
        except Exception as error:  # a report of what fails is worth more than none
            lines += ["", f"## {title}", "", f"**failed**: {type(error).__name__}: {error}"]
        REPORT.write_text("\n".join(lines) + "\n")
    print(f"written to {REPORT}")


if __name__ == "__main__":
    main()
