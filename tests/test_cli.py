"""The commands: their numbers are those of the library, and errors take one line."""

import errno

import nibabel
import nrrd
import numpy as np
import pytest
import torch
from cases import slow
from test_io import SPHERE, UTM, WHOLE, saved, splats
from typer.testing import CliRunner

import qattn
from qattn import io
from qattn.cli import app
from qattn.io.lengths import parse_sigma

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*command):
    result = CliRunner().invoke(app, [str(word) for word in command])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def arrays(path):
    with np.load(path) as archive:
        return dict(archive)


def cloud(n=300, **attributes):
    x = torch.nn.functional.normalize(torch.randn(n, 3), dim=-1).numpy()
    made = io.Cloud(x.astype(np.float64)).with_attributes(**attributes)
    io.write("in.ply", made)
    return made


def sphere():
    io.write("in.ply", io.Cloud(SPHERE.vertices.view(np.ndarray).copy(), SPHERE.faces.view(np.ndarray).copy()))
    return io.read("in.ply")


def test_a_reader_that_goes_away_is_no_error(monkeypatch):
    """Pipe into a command that reads one line: `qattn info in.ply | head -1`."""

    def gone(*_):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("qattn.cli.info.read_shape", gone)
    result = CliRunner().invoke(app, ["info", "in.ply"])
    assert result.exit_code == 1
    assert not result.output


def test_a_bandwidth_is_a_length_spacings_or_a_part_of_the_extent():
    made = cloud()
    assert parse_sigma("0.05", made) == 0.05
    assert parse_sigma("5e-2", made) == 0.05
    assert parse_sigma("3x", made) == 3 * made.spacing
    assert parse_sigma("2.5 %", made) == pytest.approx(0.025 * made.extent)
    assert parse_sigma("2x", io.Grid(np.ones((2, 2), bool), (1.0, 3.0))) == 4
    for wrong in ("0", "-1", "x", "3y", "%", "1.2.3", "nan", "inf", "", "1e999", "3x%"):
        with pytest.raises(ValueError, match="--sigma should be a positive length"):
            parse_sigma(wrong, made)
    with pytest.raises(ValueError, match="All points coincide"):
        parse_sigma("3x", io.Cloud(np.ones((2, 3))))


def test_info_tells_what_there_is(tmp_path):
    made = sphere()
    text = run("info", "in.ply")
    for fact in ("type mesh", "points 42", "faces 80", f"spacing {made.spacing:.4g}", f"extent {made.extent:.4g}"):
        assert fact in text
    assert f"suggested σ {2 * made.spacing:.3g} (2x)" in text
    for name, facts in {
        "splats.ply": ["type splats", "points 20", "nx, ny, nz", "… rot_3 (float32)"],
        "scan.las": ["offset (500123.499, 5412345.5", "return_number", "height (float32)"],
        "mask.nii": ["type grid, mask", "24 of 4 × 5 × 6", "spacing 1 × 2 × 3"],
    }.items():
        (tmp_path / name).write_bytes(WHOLE[name])
        text = run("info", name)
        for fact in facts:
            assert fact in text
    io.write("one.npz", io.Cloud(np.ones((3, 2))))
    assert "all points coincide" in run("info", "one.npz")


@pytest.mark.parametrize("ending", ["ply", "npz"])
def test_diffuse_moves_points_as_the_operator_does(ending):
    made = cloud(heat=np.arange(300.0))
    text = run("diffuse", "in.ply", "--sigma", "3x", "--steps", 2, "-o", f"out.{ending}")
    out = io.read(f"out.{ending}")
    expected = qattn.diffusion(made.points, 3 * made.spacing, tol=1e-6).power(2, made.points)
    assert np.abs(out.points - expected).max() < 1e-3
    assert (out.attributes["heat"] == made.attributes["heat"]).all()
    assert f"σ = {3 * made.spacing:.4g}, 2 times; points moved by" in text
    run("diffuse", "in.ply", "--sigma", repr(3 * made.spacing), "--steps", 2, "-o", "same.ply")
    assert (io.read("same.ply").coordinates == out.coordinates).all()


def test_diffuse_smooths_attributes_and_leaves_the_rest():
    height = np.random.default_rng(0).normal(size=300).astype(np.float32)
    made = cloud(
        height=height, flat=np.full(300, 7.25), red=np.full(300, 200, np.uint8), big=1e9 + height.astype(float)
    )
    run("diffuse", "in.ply", "--sigma", "0.3", *(f"--signal={name}" for name in made.attributes), "-o", "out.ply")
    out = io.read("out.ply")
    assert (out.coordinates == made.coordinates).all()
    assert (out.attributes["flat"] == 7.25).all()
    assert (out.attributes["red"] == 200).all()
    assert out.attributes["red"].dtype == np.uint8
    expected = qattn.diffusion(made.points, 0.3, tol=1e-6) @ height
    assert np.abs(out.attributes["height"] - expected).max() < 1e-3
    assert np.abs(out.attributes["big"] - 1e9 - expected).max() < 1e-3  # the mean is subtracted before float32
    assert out.attributes["height"].std() < 0.5 * height.std()


def test_diffuse_weighs_the_vertices_of_a_mesh_by_area():
    made = sphere()
    run("diffuse", "in.ply", "--sigma", 0.5, "-o", "out.ply")
    out = io.read("out.ply")
    expected = qattn.diffusion(made.points, 0.5, qattn.mass.vertex_areas(made.points, made.faces), tol=1e-6)
    assert np.abs(out.points - expected @ made.points).max() < 1e-3
    assert (out.faces == made.faces).all()


def test_diffuse_far_from_the_origin_keeps_the_origin(tmp_path):
    (tmp_path / "scan.laz").write_bytes(WHOLE["scan.laz"])
    run("diffuse", "scan.laz", "--sigma", "1e-3", "-o", "out.ply")  # below the spacing: nothing moves
    assert np.abs(io.read("out.ply").coordinates - io.read("scan.laz").coordinates).max() < 1e-4
    run("diffuse", "scan.laz", "--sigma", "50%", "-o", "out.ply")
    assert np.abs(io.read("out.ply").coordinates.mean(0) - UTM - 0.5).max() < 0.1


def test_diffuse_takes_splats_as_the_mixture_that_they_are(tmp_path):
    (tmp_path / "in.ply").write_bytes(splats()[0])
    run("diffuse", "in.ply", "--sigma", 0.5, "--signal", "f_dc_0", "-o", "out.ply")
    before, after = io.read("in.ply"), io.read("out.ply")
    q = qattn.diffusion(qattn.MixtureKernel.from_splats(*before.splats, sigma=0.5), tol=1e-6)
    assert np.abs(after.attributes["f_dc_0"] - q @ before.attributes["f_dc_0"]).max() < 1e-3
    assert list(after.attributes) == list(before.attributes)


@pytest.mark.parametrize("name", ["classification", slow("Label"), slow("kind")])
@pytest.mark.parametrize("many", [2, slow(40)])
def test_labels_are_put_to_the_vote_and_never_averaged(name, many):
    made = cloud(2000)
    bins = np.floor((made.points[:, 2] + 1) / 2 * many)
    truth = np.where(made.points[:, 0] > 0, 2, 6 + bins).astype(np.uint16)
    noisy = truth.copy()
    noisy[::10] = 2 + 4 * (truth[::10] == 2)
    made = made.with_attributes(**{name: noisy, "height": made.points[:, 2]})
    io.write("in.npz", made)
    text = run(
        *("diffuse", "in.npz", "--sigma", 0.1, "--signal", name, "-o", "out.npz"),
        *(["--labels"] if name == "kind" else ["--signal", "height"]),
    )
    voted = io.read("out.npz").attributes[name]
    assert voted.dtype == np.uint16
    assert set(voted) <= set(noisy)
    q = qattn.diffusion(made.points, 0.1, tol=1e-6).to_dense()
    labels = np.unique(noisy)
    votes = q @ (noisy[:, None] == labels)
    best = np.sort(votes, axis=1)
    is_clear = best[:, -1] > best[:, -2] + 1e-3
    assert is_clear.mean() > 0.8
    assert (voted == labels[votes.argmax(1)])[is_clear].all()
    assert f"{(voted != noisy).sum():,} of 2,000 points change their {name}" in text
    if name != "kind":
        assert np.abs(io.read("out.npz").attributes["height"] - q @ made.points[:, 2]).max() < 1e-3


@pytest.mark.parametrize("ending", ["nii", "nii.gz", "nrrd", "npy", "npz"])
def test_diffuse_smooths_the_values_of_a_grid(ending):
    values = np.random.default_rng(0).random((7, 8, 9)).astype(np.float32)
    values[:3, :4] = 0
    spacing = (1.0, 1.0, 1.0) if ending == "npy" else (1.0, 2.0, 3.0)
    io.write(f"in.{ending}", io.Grid(values, spacing))
    text = run("diffuse", f"in.{ending}", "--sigma", 2, "--steps", 2, "-o", f"out.{ending}")
    out = io.read(f"out.{ending}")
    kernel = qattn.VoxelKernel(values > 0, 2.0, spacing)
    expected = kernel.to_grid(qattn.diffusion(kernel, tol=1e-6).power(2, kernel.from_grid(values)))
    assert np.abs(out.values - expected).max() < 1e-3
    assert (out.values[:3, :4] == 0).all()
    assert (out.values.dtype, out.spacing) == (np.float32, spacing)
    assert "values diffused with σ = 2, 2 times; 396 of 396 voxels changed" in text
    run("diffuse", f"in.{ending}", "--sigma", "2", "--box", "-o", f"out.{ending}")
    box = qattn.VoxelKernel(np.ones((7, 8, 9), bool), 2.0, spacing)
    expected = box.to_grid(qattn.diffusion(box, tol=1e-6) @ box.from_grid(values))
    assert np.abs(io.read(f"out.{ending}").values - expected).max() < 1e-3


def test_diffuse_votes_on_the_labels_of_a_grid_and_rounds_its_masks():
    labels = np.zeros((9, 9, 9), np.int16)
    labels[:, :, 1:5], labels[:, :, 5:8] = 3, 8
    labels[4, 4, 2], labels[4, 4, 7] = 8, 5
    io.write("in.nii.gz", io.Grid(labels, (1.0, 1.0, 1.0)))
    run("diffuse", "in.nii.gz", "--sigma", 1, "--labels", "-o", "out.nii.gz")
    expected = labels.copy()
    expected[4, 4, 2], expected[4, 4, 7] = 3, 8
    assert (io.read("out.nii.gz").values == expected).all()
    mask = labels > 0
    mask[4, 4, 4] = False
    io.write("in.npy", io.Grid(mask, (1.0, 1.0, 1.0)))
    run("diffuse", "in.npy", "--sigma", 1, "--box", "-o", "out.npy")
    out = io.read("out.npy").values
    assert out.dtype == bool
    assert out[4, 4, 4]


def test_a_grid_stays_where_it_was_in_the_world(tmp_path):
    affine = np.array([[0, -2, 0, 5], [1, 0, 0, -7], [0, 0, 3, 11], [0, 0, 0, 1.0]])
    values = np.random.default_rng(0).random((4, 5, 6)).astype(np.float32)
    nibabel.Nifti1Image(values, affine).to_filename("in.nii.gz")
    run("diffuse", "in.nii.gz", "--sigma", 2, "-o", "out.nii.gz")
    assert (nibabel.load("out.nii.gz").affine == affine).all()
    directions = {"space": "left-posterior-superior", "space directions": affine[:3, :3], "space origin": affine[:3, 3]}
    nrrd.write("in.nrrd", values, directions)
    run("diffuse", "in.nrrd", "--sigma", 2, "-o", "out.nrrd")
    header = nrrd.read_header("out.nrrd")
    assert (header["space directions"] == affine[:3, :3]).all()
    assert (header["space origin"] == affine[:3, 3]).all()


def test_spectrum_is_that_of_eigsh():
    made = sphere()
    text = run("spectrum", "in.ply", "-k", 9, "--sigma", "1x", "-o", "out.npz")
    result = arrays("out.npz")
    q = qattn.diffusion(made.points, made.spacing, made.mass, tol=1e-4)
    expected = qattn.eigsh(q, k=9)
    assert np.abs(result["values"] - expected.values).max() < 1e-5
    assert result["frequencies"][0] == 0
    assert np.allclose(result["frequencies"], -2 / made.spacing**2 * np.log(result["values"]), atol=1e-4)
    gram = result["vectors"].T @ (result["mass"][:, None] * result["vectors"])
    assert np.abs(gram - np.eye(9)).max() < 1e-4
    assert result["sigma"] == pytest.approx(made.spacing)
    assert (result["points"] == made.coordinates).all()
    assert (result["faces"] == made.faces).all()
    assert "9 eigenpairs of 42 points" in text
    assert io.read("out.npz").attributes["vectors"].shape == (42, 9)


def test_spectrum_without_a_bandwidth_is_that_of_the_points(tmp_path):
    points = torch.nn.functional.normalize(torch.randn(500, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    io.write("in.ply", io.Cloud(points.numpy()))
    text = run("spectrum", "in.ply", "-k", 4, "-o", "out.npz")
    expected = qattn.spectrum(points.numpy(), 4)
    result = arrays("out.npz")
    assert np.allclose(result["frequencies"], expected.frequencies, rtol=1e-4, atol=1e-6)
    assert result["sigma"] == pytest.approx(expected.sigma)
    assert all(choice in text.replace("\n", " ") for choice in expected.choices.values())


def test_spectrum_of_grids_and_splats(tmp_path):
    (tmp_path / "mask.nii").write_bytes(WHOLE["mask.nii"])
    run("spectrum", "mask.nii", "-k", 4, "--sigma", 2, "-o", "out.npz")
    grid = io.read("mask.nii")
    expected = qattn.eigsh(qattn.diffusion(grid.kernel(2.0), tol=1e-4), k=4)
    assert np.abs(arrays("out.npz")["values"] - expected.values.numpy()).max() < 1e-5
    assert arrays("out.npz")["points"].shape == (24, 3)
    (tmp_path / "splats.ply").write_bytes(WHOLE["splats.ply"])
    run("spectrum", "splats.ply", "-k", 3, "--sigma", 1, "-o", "out.npz")
    width = io.read("splats.ply").kernel(1.0).effective_sigma(2)
    result = arrays("out.npz")
    assert np.allclose(result["frequencies"], -2 / width**2 * np.log(result["values"]), atol=1e-4)


@pytest.mark.parametrize("k", [slow(1), 4])
def test_spectrum_draws(tmp_path, k):
    sphere()
    run("spectrum", "in.ply", "-k", k, "-o", "out.npz", "--plot", "out.png")
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


def test_mass_of_meshes_is_area_and_of_clouds_one_over_density():
    made = sphere()
    text = run("mass", "in.ply", "-o", "out.ply")
    out = io.read("out.ply")
    assert out.attributes["mass"].sum(dtype=np.float64) == pytest.approx(SPHERE.area, rel=1e-5)
    assert f"sum {SPHERE.area:.4g}" in text
    assert (out.faces == made.faces).all()
    run("mass", "in.ply", "--sigma", 0.4, "-o", "out.npz")
    assert np.allclose(io.read("out.npz").mass, qattn.mass.density(made.points, 0.4))
    made = cloud()
    run("mass", "in.ply", "-o", "out.ply")
    assert np.allclose(io.read("out.ply").mass, qattn.mass.density(made.points, 3 * made.spacing))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("info none.ply", "none.ply: No such file or directory."),
        ("info cut.ply", "cut.ply is damaged, truncated or not a PLY file (ValueError: fewer face rows than"),
        ("diffuse in.ply --sigma 3y -o out.ply", "--sigma should be a positive length"),
        ("diffuse in.ply --sigma 3x -o out.stl", "out.stl cannot be written: its name should end in .ply or .npz"),
        ("diffuse in.ply --sigma 3x -o no/out.ply", "there is no directory no"),
        ("diffuse in.ply --sigma 3x -o out.ply --signal red", "--signal should be one of xyz, hole, rough; got 'red'."),
        ("diffuse in.ply --sigma 3x -o out.ply --signal hole", "`hole` is NaN or infinite at 1 of the 300 points"),
        ("diffuse in.ply --sigma 3x -o out.ply --steps 0", "`--steps` should be an integer of at least 1"),
        ("diffuse in.ply --sigma 3x -o out.nii", "out.nii cannot be written: its name should end in .ply or .npz"),
        ("diffuse in.ply --sigma 3x -o out.ply --box", "in.ply holds points, and --box is for grids"),
        ("diffuse in.ply --sigma 3x -o out.ply --labels", "--labels needs --signal with the name of an attribute"),
        ("diffuse in.ply --sigma 3x -o out.ply --labels --signal rough", "`rough` should be labels"),
        ("diffuse mask.npy --sigma 3x -o out.ply", "its name should end in .nii or .nii.gz or .nrrd or .npy or .npz"),
        ("diffuse mask.npy --sigma 3x -o out.npy", "All occupied voxels have the same value"),
        ("diffuse mask.npy --sigma 3x -o out.npy --signal red", "mask.npy holds a grid, whose values are diffused."),
        ("diffuse signed.npy --sigma 3x -o out.npy", "Some values of the grid are below 0"),
        ("diffuse signed.npy --sigma 3x -o out.npy --box", "1 of the 8 voxels are NaN or infinite"),
        ("diffuse parts.npy --sigma 3x -o out.npy --labels", "`values` should be labels"),
        ("spectrum in.ply -k 301 -o out.npz", "`k` should be at most the number of points"),
        ("spectrum in.ply -o out.ply", "out.ply cannot be written: its name should end in .npz"),
        ("spectrum in.ply -o out.npz --plot out.gif", "out.gif cannot be written: its name should end in .png"),
        ("mass mask.npy -o out.ply", "mask.npy holds a grid"),
        ("bench mask.npy", "mask.npy holds a grid"),
        ("bench --points 10", "`--points` should be an integer of at least 1000"),
        ("bench --limit 0", "--limit should be positive"),
        ("demo -o out.gif", "out.gif cannot be written: its name should end in .png"),
        ("demo --points 10", "`--points` should be an integer of at least 1000"),
    ],
)
def test_what_is_wrong_takes_one_line_and_exit_code_2(tmp_path, command, message):
    hole = np.zeros(300)
    hole[0] = np.nan
    cloud(hole=hole, rough=np.linspace(0, 1, 300))
    (tmp_path / "cut.ply").write_bytes(WHOLE["binary.ply"][:-5])
    (tmp_path / "mask.npy").write_bytes(saved(np.save, np.ones((2, 2, 2), bool)))
    (tmp_path / "signed.npy").write_bytes(saved(np.save, np.array([-1, 0, 1, 2, 3, 4, 5, np.nan]).reshape(2, 2, 2)))
    (tmp_path / "parts.npy").write_bytes(saved(np.save, np.linspace(0, 1, 8).reshape(2, 2, 2)))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_warnings_take_one_line_each(monkeypatch):
    monkeypatch.setattr("qattn.cli.spectrum.TOL", 0.0)  # unreachable
    cloud()
    result = CliRunner().invoke(app, ["spectrum", "in.ply", "-k", "299", "--sigma", "200%", "-o", "out.npz"])
    assert result.exit_code == 0
    assert "Warning: " in result.stderr
    assert "eigenvalues of Q are 0 or less" in result.stderr
    assert all(line.startswith("Warning: ") for line in result.stderr.splitlines())


def test_every_command_explains_itself():
    for command in ("info", "diffuse", "spectrum", "mass", "bench"):
        text = run(command, "--help")
        assert "FILE" in text
        assert "--help" in text
    for command in ("", "doctor", "demo", "info", "diffuse", "spectrum", "mass", "bench"):
        assert "<bool>" not in run(*command.split(), "--help")


def test_one_is_singular(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    monkeypatch.setattr("qattn.cli.doctor.backends", lambda _: [])
    assert "1 thread " in f"{run('doctor')} "
    text = run("bench", "--points", 1000, "--sigma", "3x", "--limit", 1e-6)
    assert "1,000 points, 1 thread," in text
    sphere()
    assert "1 eigenpair of 42 points" in run("spectrum", "in.ply", "-k", 1, "-o", "out.npz")


@pytest.mark.slow
def test_bench_compares_the_methods(tmp_path):
    text = run("bench", "--points", 6000, "--sigma", "3x", "--sigma", "10%")
    for fact in ("6,000 points", "← auto", "exact", "tiles", "fourier", "1×"):
        assert fact in text
    cloud(5000, mass=torch.rand(5000).numpy())
    text = run("bench", "in.ply", "--sigma", "3x", "--limit", 1e-6)
    assert text.count("skipped") == 2  # all but the selected one
    assert len(list(tmp_path.iterdir())) == 1  # no file is written


def test_demo_prints_figures_and_draws(tmp_path):
    text = run("demo", "--points", 3000, "-o", "out.png")
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    for fact in ("points", "error", "3,000", "16 modes", "out.png: written"):
        assert fact in text
