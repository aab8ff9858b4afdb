"""Tables for notebooks: what they say, that everything is escaped, and that showing them computes nothing."""

from html.parser import HTMLParser

import pytest
import torch
from cases import sphere

import qattn
from qattn import GaussianKernel, GraphKernel, MatrixKernel, check_axioms, diffusion, eigsh
from qattn._html import table

PATH = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4], [1, 0, 2, 1, 3, 2, 4, 3]])


class Parsed(HTMLParser):
    """The texts of a page, and whether every tag is closed in its order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.texts = [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def texts(shown):
    return Parsed(shown._repr_html_()).texts


def test_everything_is_escaped():
    page = table("<b>", [("a & b", "<script>alert(1)</script>\nsecond line")], header=["<i>", '"'])
    assert "<script>" not in page
    assert Parsed(page).texts == ["<b>", "<i>", '"', "a & b", "<script>alert(1)</script>", "second line"]


@pytest.mark.parametrize("normalization", ["sinkhorn", "row", "symmetric", "none"])
def test_an_operator_and_its_kernel_show_without_a_pass(normalization, monkeypatch):
    q = diffusion(sphere(40), [0.5, 0.7], normalization=normalization)
    monkeypatch.setattr(GaussianKernel, "attend", lambda *_, **__: pytest.fail("a pass of the kernel"))
    shown = texts(q)
    assert shown[0] == "Diffusion"
    assert "2 × 40 × 40, never formed" in shown
    assert repr(q.kernel) in shown
    assert f"{float(q.marginal_error.max()):.1e}" in shown[-1]
    assert any(text.startswith(normalization) for text in shown)
    shown = texts(q.kernel)
    assert {"GaussianKernel", repr(q.kernel), "methods, σ = 0.5", "methods, σ = 0.7"} <= set(shown)


def test_a_missed_tolerance_is_said():
    with pytest.warns(UserWarning, match="tol"):
        q = diffusion(sphere(40), 0.5, tol=1e-9, solver=qattn.Solver(max_iter=2))
    assert "above the tolerance" in texts(q)[-1]
    assert "above the tolerance" not in texts(diffusion(sphere(40), 0.5))[-1]


@pytest.mark.parametrize(
    "kernel",
    [
        MatrixKernel(torch.eye(5)),
        GraphKernel(PATH),
        qattn.ExponentialKernel(torch.zeros(4, 2), 1.0),
        qattn.VoxelKernel(torch.ones(3, 3), 1.0),
        qattn.MixtureKernel(torch.zeros(4, 2), torch.eye(2).expand(4, 2, 2), 1.0),
        2 * GaussianKernel(torch.zeros(4, 2), 1.0) + GaussianKernel(torch.zeros(4, 2), 3.0),
    ],
    ids=lambda kernel: type(kernel).__name__,
)
def test_kernels_show_what_they_are(kernel):
    shown = texts(kernel)
    assert shown[0] == type(kernel).__name__
    assert repr(kernel) in shown


def test_a_spectrum_shows_its_first_modes():
    spectrum = eigsh(diffusion(sphere(200), 0.4), 12)
    shown = texts(spectrum)
    assert shown[0] == "Spectrum: 12 eigenpairs, 200 sites, σ = 0.4"
    assert f"{float(spectrum.frequencies[7]):.4g}" in shown
    assert f"{float(spectrum.values[7]):.6f}" in shown
    assert f"{float(spectrum.values[8]):.6f}" not in shown
    assert texts(spectrum.numpy()) == shown
    graph = eigsh(diffusion(GraphKernel(PATH, eps=0.1)), 3)
    assert "frequency" not in texts(graph)


def test_a_report_shows_its_verdicts():
    report = check_axioms(diffusion(sphere(100), 0.4, normalization="row"))
    shown = texts(report)
    assert shown[0] == "Not a diffusion operator, to 0.01"
    assert [shown[shown.index(name) - 1] for name in report.verdicts] == [
        "yes" if holds else "NO" for holds in report.verdicts.values()
    ]
    for text in shown:
        assert text in str(report) or text == "NO"
