"""Files: formats as other programs write them, coordinates far from 0, damaged files, and failing writes."""

import bz2
import contextlib
import gzip
import json
import os
import struct
import sys
import tracemalloc
from io import BytesIO
from zipfile import ZIP_DEFLATED, ZipFile

import laspy
import nibabel
import nrrd
import numpy as np
import pytest
import trimesh
from cases import slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import qattn
from qattn import io

UTM = np.array([500_123.0, 5_412_345.0, 120.0])
X = np.random.default_rng(0).random((40, 3))
HEIGHT = np.linspace(-1, 1, 40, dtype=np.float32)
SPHERE = trimesh.creation.icosphere(1)
COLORS = np.random.default_rng(0).integers(0, 255, (len(SPHERE.vertices), 4)).astype(np.uint8)
BOX = np.zeros((4, 5, 6), np.uint8)
BOX[1:3, 1:4, 1:5] = 2


def colored():
    mesh = SPHERE.copy()
    mesh.visual.vertex_colors = COLORS
    return mesh


def splats(n=20):
    """Return a PLY file as Gaussian splatting programs write it: binary, float32, zero normals, color coefficients."""
    names = ["x", "y", "z", "nx", "ny", "nz", "f_dc_0", "f_dc_1", "f_dc_2", *(f"f_rest_{i}" for i in range(9))]
    names += ["opacity", "scale_0", "scale_1", "scale_2", "rot_0", "rot_1", "rot_2", "rot_3"]
    rows = np.random.default_rng(1).normal(size=(n, len(names))).astype("<f4")
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {n}"]
    header += [f"property float {name}" for name in names]
    return "\n".join([*header, "end_header\n"]).encode() + rows.tobytes(), dict(zip(names, rows.T, strict=True))


def las(version="1.2", point_format=3, compress=False):
    header = laspy.LasHeader(point_format=point_format, version=version)
    header.offsets, header.scales = [5e5, 5.4e6, 0.0], [1e-4] * 3
    header.add_extra_dim(laspy.ExtraBytesParams("height", "f4"))
    data = laspy.LasData(header)
    data.x, data.y, data.z = (UTM + X).T
    data.intensity, data.height = np.arange(40), HEIGHT
    target = BytesIO()
    data.write(target, do_compress=compress)
    return target.getvalue()


def saved(save, *args, **kwargs):
    target = BytesIO()
    save(target, *args, **kwargs)
    return target.getvalue()


def nrrd_file(encoding):
    data = {"gzip": gzip.compress(BOX.tobytes("F"), mtime=0), "raw": BOX.tobytes("F")}[encoding]
    header = f"NRRD0004\ntype: uint8\ndimension: 3\nsizes: 4 5 6\nspacings: 1 2 3\nencoding: {encoding}\n\n"
    return header.encode() + data


def pcd(encoding):
    """A PCD file as the Point Cloud Library writes it: padding, and colors in one number."""
    rows = np.zeros(40, [("xyz", "<f8", 3), ("pad", "u1", 4), ("height", "<f4"), ("rgb", "<u4")])
    rows["xyz"], rows["height"], rows["rgb"] = X, HEIGHT, 0xFF0A0B0C
    header = "# .PCD v0.7\nVERSION 0.7\nFIELDS x y z _ height rgb\nSIZE 8 8 8 1 4 4\nTYPE F F F U F U\n"
    header += f"COUNT 1 1 1 4 1 1\nWIDTH 40\nHEIGHT 1\nVIEWPOINT 0 0 0 1 0 0 0\nPOINTS 40\nDATA {encoding}\n"
    if encoding == "ascii":
        lines = [" ".join(f"{n:.17g}" for name in rows.dtype.names for n in np.ravel(row[name])) for row in rows]
        return (header + "\n".join(lines) + "\n").encode()
    if encoding == "binary":
        return header.encode() + rows.tobytes()
    columns = [*X.T.astype("<f8"), *(np.ascontiguousarray(rows[name]) for name in rows.dtype.names[1:])]
    content = b"".join(column.tobytes() for column in columns)
    packed = b"".join(bytes([len(run) - 1]) + run for run in (content[i : i + 32] for i in range(0, len(content), 32)))
    return header.encode() + np.array([len(packed), len(content)], "<u4").tobytes() + packed


def text(separator, header=""):
    rows = [separator.join(f"{number:.17g}" for number in [*x, h]) for x, h in zip(X, HEIGHT, strict=True)]
    return "\n".join([header, *rows] if header else rows).encode()


def exported(mesh, kind, **options):
    data = mesh.export(file_type=kind, **options)
    return data if isinstance(data, bytes) else data.encode()


IMAGE = nibabel.Nifti1Image(BOX, np.diag([1.0, 2.0, 3.0, 1.0]))
WHOLE = {
    "binary.ply": exported(colored(), "ply"),
    "ascii.ply": exported(colored(), "ply", encoding="ascii"),
    "splats.ply": splats()[0],
    "mesh.obj": exported(colored(), "obj"),
    "mesh.off": exported(SPHERE, "off"),
    "mesh.stl": exported(SPHERE, "stl"),
    "ascii.stl": exported(SPHERE, "stl_ascii"),
    "mesh.glb": exported(colored(), "glb"),
    "ascii.pcd": pcd("ascii"),
    "binary.pcd": pcd("binary"),
    "packed.pcd": pcd("binary_compressed"),
    "scan.las": las(),
    "new.las": las("1.4", 6),
    "scan.laz": las(compress=True),
    "named.csv": text(",", "X,Y,Z,height"),
    "comment.txt": text(" ", "# x y z height"),
    "bare.xyz": text("\t"),
    "array.npy": saved(np.save, X),
    "arrays.npz": saved(np.savez, points=X, height=HEIGHT, faces=np.array([[0, 1, 2]]), title="none of these"),
    "mask.npy": saved(np.save, BOX > 0),
    "mask.npz": saved(np.savez, mask=BOX > 0, spacing=np.array([1.0, 2.0, 3.0])),
    "mask.nii": IMAGE.to_bytes(),
    "mask.nii.gz": gzip.compress(IMAGE.to_bytes(), mtime=0),
    "second.nii": nibabel.Nifti2Image(BOX, IMAGE.affine).to_bytes(),
    "raw.nrrd": nrrd_file("raw"),
    "gzip.nrrd": nrrd_file("gzip"),
}
GRIDS = [name for name in WHOLE if name.split(".")[0] in ("mask", "second", "raw", "gzip")]


def read(tmp_path, name, data=None):
    (tmp_path / name).write_bytes(WHOLE[name] if data is None else data)
    return io.read(tmp_path / name)


@pytest.mark.parametrize("name", ["binary.ply", "ascii.ply", "mesh.obj", "mesh.off", "mesh.glb"])
def test_meshes_keep_the_order_of_their_vertices(tmp_path, name):
    cloud = read(tmp_path, name)
    assert np.allclose(cloud.points, SPHERE.vertices, atol=1e-6)
    assert (cloud.faces == SPHERE.faces).all()
    assert np.isclose(cloud.mass.sum(), SPHERE.area, rtol=1e-5)
    colors = [cloud.attributes[key] for key in ("red", "green", "blue") if key in cloud.attributes]
    assert name == "mesh.off" or (np.column_stack(colors) == COLORS[:, :3]).all()


@pytest.mark.parametrize("name", ["mesh.stl", "ascii.stl"])
def test_corners_in_one_place_are_one_vertex(tmp_path, name):
    cloud = read(tmp_path, name)
    assert len(cloud) == len(SPHERE.vertices)
    assert np.isclose(cloud.mass.sum(), SPHERE.area, rtol=1e-5)


def test_a_scene_is_one_cloud_where_its_parts_are(tmp_path):
    scene = trimesh.Scene([SPHERE, trimesh.PointCloud(X)])
    scene.add_geometry(SPHERE, transform=trimesh.transformations.translation_matrix([5, 0, 0]))
    cloud = read(tmp_path, "scene.glb", exported(scene, "glb"))
    assert len(cloud) == 2 * len(SPHERE.vertices) + 40
    assert len(cloud.faces) == 2 * len(SPHERE.faces)
    assert np.isclose(cloud.points[:, 0].max(), 6, atol=1e-5)
    assert np.isclose(np.asarray(qattn.mass.vertex_areas(cloud.points, cloud.faces)).sum(), 2 * SPHERE.area, rtol=1e-5)


def test_a_cloud_without_faces_is_no_mesh(tmp_path):
    cloud = read(tmp_path, "cloud.obj", b"v 0 0 0\nv 1 0 0\nv 0 1 0\n")
    assert cloud.faces is None
    assert cloud.mass is None
    assert len(read(tmp_path, "cloud.off", b"OFF\n2 0 0\n0 0 0\n1 0 0\n")) == 2


def test_splats_give_what_their_kernel_takes(tmp_path):
    cloud, columns = read(tmp_path, "splats.ply"), splats()[1]
    means, scales, turns, logits = cloud.splats
    assert (means == np.column_stack([columns[axis] for axis in "xyz"])).all()
    assert (scales[:, 1] == columns["scale_1"]).all()
    assert (turns[:, 3] == columns["rot_3"]).all()
    assert (logits == columns["opacity"]).all()
    assert isinstance(cloud.kernel(0.5), qattn.MixtureKernel)
    assert list(cloud.attributes) == [name for name in columns if name not in "xyz"]
    assert read(tmp_path, "array.npy").splats is None


@pytest.mark.parametrize("name", ["scan.las", "new.las", "scan.laz"])
def test_las_coordinates_keep_their_millimeters(tmp_path, name):
    cloud = read(tmp_path, name)
    assert np.abs(cloud.coordinates - (UTM + X)).max() < 1e-4
    assert np.abs(cloud.points + cloud.offset - (UTM + X)).max() < 1e-4
    assert cloud.points.dtype == np.float32
    assert (cloud.attributes["intensity"] == np.arange(40)).all()
    assert (cloud.attributes["height"] == HEIGHT).all()


@pytest.mark.parametrize("ending", ["ply", "npz"])
def test_what_is_far_from_0_is_shifted_and_put_back(tmp_path, ending):
    x = UTM + X
    x[1] = x[0] + [0, 1e-4, 0]  # a tenth of a millimeter; float32 has steps of half a meter there
    cloud = io.Cloud(x)
    assert np.isclose((cloud.points[1] - cloud.points[0])[1], 1e-4, rtol=1e-2)
    path = tmp_path / f"out.{ending}"
    io.write(path, cloud)
    assert (io.read(path).coordinates == x).all()
    io.write(path, cloud.with_points(cloud.points + np.float32(0.25)))
    assert np.abs(io.read(path).coordinates - x - 0.25).max() < 1e-6
    near = io.Cloud(X)
    assert (near.offset == 0).all()
    assert (near.points == X.astype(np.float32)).all()


@pytest.mark.parametrize("name", ["named.csv", "comment.txt", "bare.xyz"])
def test_columns_of_text(tmp_path, name):
    cloud = read(tmp_path, name)
    assert (cloud.coordinates == X).all()
    assert (cloud.attributes["column_4" if name == "bare.xyz" else "height"] == HEIGHT).all()


def test_columns_are_found_by_name(tmp_path):
    cloud = read(tmp_path, "a.csv", b"id;z;x;y\n7;3;1;2\n8;6;4;5\n")
    assert cloud.coordinates.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert cloud.attributes["id"].tolist() == [7, 8]
    assert read(tmp_path, "plane.txt", b"0 1\n2 3\n").points.shape == (2, 2)
    assert read(tmp_path, "counted.xyz", b"2\n0 1 2\n2 3 4\n").points.shape == (2, 3)


def test_arrays(tmp_path):
    assert (read(tmp_path, "array.npy").coordinates == X).all()
    cloud = read(tmp_path, "arrays.npz")
    assert list(cloud.attributes) == ["height"]
    assert cloud.faces.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("name", GRIDS)
def test_grids(tmp_path, name):
    grid = read(tmp_path, name)
    assert grid.weights.dtype == bool
    assert (grid.weights == (BOX > 0)).all()
    assert grid.spacing == ((1, 1, 1) if name == "mask.npy" else (1, 2, 3))
    assert np.isclose(grid.extent, np.linalg.norm([h * n for h, n in zip(grid.spacing, (1, 2, 3), strict=True)]))
    assert grid.kernel(1.0).shape == (24, 24)


def test_a_grid_of_floating_point_is_weights(tmp_path):
    weights = BOX * np.float32(0.25)
    image = nibabel.Nifti1Image(weights[..., None], IMAGE.affine)  # with a time axis, as some programs write it
    assert (read(tmp_path, "w.nii", image.to_bytes()).values == weights).all()
    turned = {"space dimension": 3, "space directions": np.array([[0, 1, 0], [2, 0, 0], [0, 0, 3.0]])}
    nrrd.write(str(tmp_path / "w.nrrd"), weights, turned)
    assert io.read(tmp_path / "w.nrrd").spacing == (1, 2, 3)
    signed = read(tmp_path, "w.npy", saved(np.save, 0.25 - weights))  # an image with values below 0
    with pytest.raises(ValueError, match="should not be negative"):
        signed.kernel(1.0)


@pytest.mark.parametrize("ending", ["ply", "npz"])
@pytest.mark.parametrize("name", [name for name in WHOLE if name not in GRIDS])
def test_what_was_read_is_written_and_read_again(tmp_path, name, ending):
    cloud = read(tmp_path, name)
    io.write(tmp_path / f"out.{ending}", cloud.with_attributes(heat=HEIGHT[:1].repeat(len(cloud)), wide=cloud.points))
    again = io.read(tmp_path / f"out.{ending}")
    assert again.coordinates.dtype == cloud.coordinates.dtype
    assert (again.coordinates == cloud.coordinates).all()
    assert (cloud.faces is None and again.faces is None) or (again.faces == cloud.faces).all()
    for key, values in cloud.attributes.items():
        assert (again.attributes[key] == values).all()
        assert again.attributes[key].dtype == values.dtype
    assert (again.attributes["heat"] == HEIGHT[0]).all()
    wide = again.attributes["wide"] if ending == "npz" else np.column_stack(list(again.attributes.values())[-3:])
    assert (wide == cloud.points).all()


def test_trimesh_reads_what_is_written(tmp_path):
    io.write(tmp_path / "out.ply", io.Cloud(SPHERE.vertices.view(np.ndarray), SPHERE.faces.view(np.ndarray)))
    mesh = trimesh.load_mesh(tmp_path / "out.ply", process=False)
    assert np.allclose(mesh.vertices, SPHERE.vertices)
    assert (mesh.faces == SPHERE.faces).all()


def test_types_that_ply_lacks_become_others(tmp_path):
    attributes = {
        "is it": X[:, 0] > 0.5,
        "half": HEIGHT.astype(np.float16),
        "long": np.arange(40),
        "longer": np.arange(40) + 2**40,
    }
    io.write(tmp_path / "out.ply", io.Cloud(X).with_attributes(**attributes))
    result = io.read(tmp_path / "out.ply").attributes
    assert [str(result[key].dtype) for key in ("is_it", "half", "long", "longer")] == [
        "uint8",
        "float32",
        "int32",
        "float64",
    ]
    for key, values in attributes.items():
        assert (result["_".join(key.split())] == values).all()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.ply", b"", "is empty"),
        ("a.doc", b"text", "one of ply, obj"),
        ("a.ply", b"ply\nformat ascii 1.0\nelement vertex 0\nproperty float x\nend_header\n", "holds no points"),
        ("a.ply", WHOLE["binary.ply"][:-5], "fewer face rows than the header declares"),
        ("a.ply", WHOLE["ascii.ply"][:-300], "fewer face rows"),
        ("a.obj", b"v 0 0 0\nv 1 0 0\nv 0 nan 0\nf 1 2 3\n", "1 of the 3 points are not finite"),
        ("a.las", WHOLE["scan.las"][:-200], "damaged, truncated or not a LAS file"),
        ("a.xyz", b"C H O\nH 1 text\n", "none of its lines holds two numbers"),
        ("a.csv", b"x,y,z\n0,0,0\n1,1\n", "row 2 has 2 columns where others have 3"),
        ("a.npy", saved(np.save, np.array(["text"])), "an array of real numbers"),
        ("a.npy", saved(np.save, X[0]), "should have shape"),
        ("a.npz", saved(np.savez, other=X), "it holds other"),
        ("a.npz", saved(np.savez, points=X * 1j), "should be real numbers"),
        ("a.npz", saved(np.savez, points=X, faces=np.array([[0, 1, 40]])), "points from 0 to 39; got 0 to 40"),
        ("a.npy", saved(np.save, np.zeros((2, 2, 2), bool)), "at least one occupied voxel"),
        ("a.nrrd", WHOLE["raw.nrrd"].replace(b"spacings", b"data file: other.raw\nspacings"), "in another file"),
        ("a.nrrd", WHOLE["raw.nrrd"].replace(b"spacings", b"line skip: 99999999999\nspacings"), "fewer lines"),
        ("a.nrrd", WHOLE["gzip.nrrd"].replace(b"sizes: 4", b"sizes: 3"), "more voxels than the header declares"),
        ("a.nrrd", WHOLE["gzip.nrrd"].replace(b"sizes: 4", b"sizes: 5"), "damaged, truncated or not a NRRD file"),
        ("a.las", las()[:100] + b"\xff" * 4 + las()[104:], "fewer records than the header declares"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path, name, data, message):
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path, name, data)
    assert "\n" not in str(error.value)
    assert str(tmp_path / name) in str(error.value)


def member(header, content):
    """Return an NPY file with any header."""
    text = f"{header}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content


def zipped(**members):
    target = BytesIO()
    with ZipFile(target, "w", ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return target.getvalue()


MIB = 2**20
ZEROS = bytes(64 * MIB)
FLOATS = "{'descr': '<f8', 'fortran_order': False, 'shape': (%d, 3)}"


def big_nifti():
    header = nibabel.Nifti1Header()
    header.set_data_dtype(np.uint8)
    header.set_data_shape((400, 400, 400))
    header["vox_offset"], header["magic"] = 352, b"n+1"
    return header.binaryblock + bytes(4) + ZEROS


def scaled_nifti():
    image = nibabel.Nifti1Image(np.ones((200, 200, 200), np.uint8), np.eye(4))
    image.header.set_slope_inter(2.0, 0.0)
    return image.to_bytes()


def nrrd_of(sizes, packed, encoding):
    header = f"NRRD0004\ntype: uint8\ndimension: 3\nsizes: {sizes}\nencoding: {encoding}\n\n"
    return header.encode() + packed


def glb(header):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 4)
    return struct.pack("<4sIIII", b"glTF", 2, 20 + len(text), len(text), 0x4E4F534A) + text


def scene_of(nodes, count):
    """Return a scene with several instances of a mesh, whose accessor has no data and stands for zeros."""
    return {
        "asset": {"version": "2.0"},
        "scenes": [{"nodes": list(range(nodes))}],
        "nodes": nodes * [{"mesh": 0}],
        "meshes": [{"primitives": [{"attributes": {"POSITION": 0}, "mode": 0}]}],
        "accessors": [{"componentType": 5126, "count": count, "type": "VEC3"}],
        "bufferViews": [],
        "buffers": [],
    }


def all_equal_laz(count):
    header = laspy.LasHeader(point_format=0, version="1.2")
    data = laspy.LasData(header)
    data.x = data.y = data.z = np.ones(count)
    target = BytesIO()
    data.write(target, do_compress=True)
    return target.getvalue()


BOMBS = {
    "points.npz": lambda: zipped(points=member(FLOATS % 2_000_000, ZEROS)),
    "many.npz": lambda: zipped(
        points=saved(np.save, X), **{f"a{n}": saved(np.save, np.zeros((40, 9999))) for n in "abcdef"}
    ),
    "header.nii.gz": lambda: gzip.compress(big_nifti(), 1),
    "scaled.nii.gz": lambda: gzip.compress(scaled_nifti(), 1),
    "header.nrrd": lambda: nrrd_of("400 400 400", gzip.compress(ZEROS, 1), "gzip"),
    "doubles.nrrd": lambda: nrrd_of("200 200 200", gzip.compress(ZEROS, 1), "gzip").replace(b"uint8", b"double"),
    "last.nrrd": lambda: nrrd_of("4 5 6\nbyte skip: -1", bz2.compress(ZEROS, 1), "bzip2"),
    "zeros.glb": lambda: glb(scene_of(1, 2_000_000_000)),
    "shown.glb": lambda: glb(scene_of(5_000, 5_000)),
    "equal.laz": lambda: all_equal_laz(500_000),
}


def traced(run):
    """Return the peak memory that Python and NumPy allocate during a call."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, name):
    data = BOMBS[name]()
    assert len(data) < MIB
    (tmp_path / name).write_bytes(data)

    def refused():
        with pytest.raises(ValueError, match=r"the limit of 0\.0156 GiB\. .* a larger `limit`"):
            io.read(tmp_path / name, limit=16 * MIB)

    assert traced(refused) < 48 * MIB


@pytest.mark.slow
def test_what_is_not_used_is_not_unpacked(tmp_path):
    large = member("{'descr': '<f8', 'fortran_order': False, 'shape': (8388608,)}", ZEROS)
    data = zipped(points=saved(np.save, X), other=large, text=saved(np.save, np.array(["a"])))
    (tmp_path / "a.npz").write_bytes(data)
    assert traced(lambda: io.read(tmp_path / "a.npz", limit=16 * MIB)) < 16 * MIB
    (tmp_path / "a.nrrd").write_bytes(nrrd_of("4 5 6", gzip.compress(BOX.tobytes("F") + ZEROS, 1), "gzip"))
    (tmp_path / "a.nii.gz").write_bytes(gzip.compress(IMAGE.to_bytes() + ZEROS, 1))

    def trailing():
        with pytest.raises(ValueError, match="more voxels than the header declares"):
            io.read(tmp_path / "a.nrrd", limit=16 * MIB)
        assert (io.read(tmp_path / "a.nii.gz", limit=16 * MIB).values == BOX).all()

    assert traced(trailing) < 16 * MIB


@pytest.mark.parametrize("number", ["1000000000000", "-1"])
@pytest.mark.parametrize("name", ["binary.ply", "ascii.ply", "array.npy", "mask.npz", "raw.nrrd", "gzip.nrrd"])
def test_counts_that_cannot_be_are_no_reason_to_wait(tmp_path, name, number):
    kinds = {
        "ply": [(b"vertex 42", f"vertex {number}"), (b"face 80", f"face {number}")],
        "npy": [(b"(40, 3)", f"({number}, 3)")],
        "nrrd": [(b"sizes: 4", f"sizes: {number}")],
    }
    if name == "mask.npz":
        bad = member(f"{{'descr': '|b1', 'fortran_order': False, 'shape': ({number}, 5, 6)}}", bytes(120))
        changed = [zipped(mask=bad)]
    else:
        changed = [WHOLE[name].replace(old, new.encode()) for old, new in kinds[name.split(".")[-1]]]
    for data in changed:
        assert data != WHOLE[name]
        with pytest.raises(ValueError, match=name):
            read(tmp_path, name, data)


def test_only_regular_files_are_read(tmp_path):
    for name, kind in {"a.npy": "a device", "b.npy": "a pipe", "c.npy": "a directory"}.items():
        path = tmp_path / name
        {"a": lambda p: p.symlink_to("/dev/zero"), "b": os.mkfifo, "c": os.mkdir}[name[0]](path)
        with pytest.raises(
            ValueError, match=rf"{name} cannot be used: it is {kind}, and only regular files are read\."
        ):
            io.read(path)
    with open(tmp_path / "hole.npy", "wb") as file:
        file.truncate(2**40)  # a sparse file of a terabyte
    with pytest.raises(ValueError, match="needs more memory than the limit of 4 GiB"):
        io.read(tmp_path / "hole.npy")


@pytest.mark.parametrize("seam", ["", "vt 0 0\nvt 1 1\nvn 0 0 1\n"])
def test_materials_and_objects_share_the_vertices(tmp_path, seam):
    vertices = "".join(f"v {x} {y} {z}\n" for x, y, z in SPHERE.vertices)
    lines = []
    for n, face in enumerate(SPHERE.faces + 1):
        lines += [f"usemtl m{n % 19}", f"o part{n % 7}", f"g group{n}"] if n % 3 == 0 else []
        lines.append("f " + " ".join(f"{v}/{1 + n % 2}/1" if seam else str(v) for v in face))
    cloud = read(tmp_path, "parts.obj", (vertices + seam + "\n".join(lines)).encode())
    assert np.allclose(cloud.points, SPHERE.vertices, atol=1e-6)
    assert (cloud.faces == SPHERE.faces).all()


def test_obj_corners_count_back_and_polygons_are_cut(tmp_path):
    text = b"v 0 0 0\nv 1 0 0\nv 0 1 0\nf -3 -2 -1\nv 0 0 1\nv 1 0 1\nv 1 1 1 # top\nv 0 1 1\nf -4 -3 \\\n -2 -1\n"
    cloud = read(tmp_path, "back.obj", text)
    assert cloud.faces.tolist() == [[0, 1, 2], [3, 4, 5], [3, 5, 6]]
    for wrong in (b"v 0 0 0\nf 1 0 1\n", b"v 0 0 0\nf 1 1 -2\n", b"v 0 0 0\nf 1 1\n"):
        with pytest.raises(ValueError, match="a face has"):
            read(tmp_path, "wrong.obj", wrong)
    with pytest.warns(io.PartlyReadWarning, match="mixed.obj: colors that only some vertices have are left out"):
        read(tmp_path, "mixed.obj", b"v 0 0 0\nv 1 0 0 0.5 0.5 0.5\n")


def ply_of(encoding, element, rows, kinds="uchar int"):
    """Return a PLY file of six points and lists of corners of any length."""
    points = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 2, 0], [1, 2, 0]], np.float32)
    header = f"ply\nformat {encoding} 1.0\ncomment by hand\nelement vertex 6\nproperty float x\nproperty float y\n"
    header += f"property float z\nelement {element} {len(rows)}\nproperty list {kinds} vertex_indices\nend_header\n"
    if encoding == "ascii":
        lines = [*(" ".join(map(str, point)) for point in points), *(" ".join(map(str, [len(r), *r])) for r in rows)]
        return (header + "\n".join(lines)).encode()
    order = {"binary_little_endian": "<", "binary_big_endian": ">"}[encoding]
    count, corner = {"uchar": "B", "int": "i"}[kinds.split()[0]], "i"
    packed = [struct.pack(f"{order}{count}{len(row)}{corner}", len(row), *row) for row in rows]
    return header.encode() + points.astype(f"{order}f4").tobytes() + b"".join(packed)


ENCODINGS = ["ascii", "binary_little_endian", "binary_big_endian"]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_strips_of_triangles_are_a_surface(tmp_path, encoding):
    rows = [[0, 1, 2, 3, -1, 2, 3, 4, 4, 5]], [[0, 1, 2, 3], [2, 3, 4, 4, 5]]  # as Stanford's, or a strip per row
    for strips in rows:
        cloud = read(tmp_path, "strips.ply", ply_of(encoding, "tristrips", strips, "int int"))
        assert cloud.faces.tolist() == [[0, 1, 2], [2, 1, 3], [2, 3, 4]]
        assert np.isclose(cloud.mass.sum(), 1.5)
        normals = np.cross(*(cloud.points[cloud.faces[:, k]] - cloud.points[cloud.faces[:, 0]] for k in (1, 2)))
        assert (normals[:, 2] > 0).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_polygons_of_a_ply_file_become_triangles(tmp_path, encoding):
    mixed = read(tmp_path, "mixed.ply", ply_of(encoding, "face", [[0, 1, 3, 2], [2, 3, 5], [0, 1, 5, 4, 2]]))
    assert mixed.faces.tolist() == [[0, 1, 3], [0, 3, 2], [2, 3, 5], [0, 1, 5], [0, 5, 4], [0, 4, 2]]
    quads = read(tmp_path, "quads.ply", ply_of(encoding, "face", [[0, 1, 3, 2], [2, 3, 5, 4]]))
    assert np.isclose(quads.mass.sum(), 2)
    with pytest.raises(ValueError, match="a face has 2 corners"):
        read(tmp_path, "edge.ply", ply_of(encoding, "face", [[0, 1]]))
    strange = ply_of(encoding, "face", [[0, 1, 2]]).replace(b"vertex_indices", b"somewhere_else")
    with pytest.raises(ValueError, match="its face rows should have a list `vertex_indices`; they have somewhere_else"):
        read(tmp_path, "strange.ply", strange)


def test_arrays_and_text_follow_one_rule(tmp_path):
    table = np.random.default_rng(2).random((40, 6))
    array = read(tmp_path, "a.npy", saved(np.save, table))
    text = read(tmp_path, "a.csv", "\n".join(",".join(map(repr, row.tolist())) for row in table).encode())
    for cloud in (array, text):
        assert (cloud.coordinates == table[:, :3]).all()
        assert list(cloud.attributes) == ["column_4", "column_5", "column_6"]
        assert (cloud.attributes["column_5"] == table[:, 4]).all()
    assert read(tmp_path, "plane.npy", saved(np.save, table[:, :2])).points.shape == (40, 2)
    assert read(tmp_path, "six.npz", saved(np.savez, points=table)).points.shape == (40, 6)


@pytest.mark.parametrize("rows", [2, 3])
def test_a_transposed_table_is_not_taken_for_points(tmp_path, rows):
    table = np.random.default_rng(2).random((rows, 40))
    text = "\n".join(" ".join(map(str, row)) for row in table).encode()
    for name, data in {"a.npy": saved(np.save, table), "a.xyz": text}.items():
        with pytest.raises(ValueError, match=f"{rows} rows and 40 columns without names, which looks transposed"):
            read(tmp_path, name, data)
    with pytest.raises(ValueError, match="101 columns without names, too many"):
        read(tmp_path, "picture.npy", saved(np.save, np.zeros((80, 101))))


@pytest.mark.parametrize(
    "text",
    [
        '"x","y","z","height"\n"0","1.5","2","7"\n"4","5","6","8"\n',
        "x|y|z|height\n0|1.5|2|7\n4|5|6|8\n",
        "x;y;z;height\n0;1,5;2;7\n4;5;6;8\n",
        "x\ty\tz\theight\n0\t1,5\t2\t7\n4\t5\t6\t8\n",
        "x y z height\n0 1,5 2,0 7\n4 5 6 8\n",
        'x,y,z,height\n0,"1,5",2,7\n4,5,6,8\n',
        "//X Y Z height\n0 1.5 2 7\n4 5 6 8 # last\n",
        "x, y, z, height,\n0, 1.5, 2, 7,\n4, 5, 6, 8,\n",
        "x,y,z,height\r\n0,1.5,2,7\r\n4,5,6,8\r\n",
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_text_as_spreadsheets_write_it(tmp_path, text, encoding):
    cloud = read(tmp_path, "a.csv", text.encode(encoding))
    assert cloud.coordinates.tolist() == [[0, 1.5, 2], [4, 5, 6]]
    assert {name: values.tolist() for name, values in cloud.attributes.items()} == {"height": [7, 8]}


def test_columns_of_words_are_left_out_with_a_word(tmp_path):
    text = b"tree,x,y,z,height,kind\noak 1,0,1,2,7,a\noak 2,4,5,6,,b\n"
    with pytest.warns(io.PartlyReadWarning, match=r"a\.csv: columns .* left out: tree \('oak 1'\), kind \('a'\)\."):
        cloud = read(tmp_path, "a.csv", text)
    assert cloud.coordinates.tolist() == [[0, 1, 2], [4, 5, 6]]
    assert np.array_equal(cloud.attributes["height"], [7, np.nan], equal_nan=True)
    with pytest.warns(io.PartlyReadWarning, match=r"column_1 \('C'\)"):  # a molecule
        assert read(tmp_path, "a.xyz", b"2\nmade by hand\nC 0 0 0\nH 1 0 0\n").points.shape == (2, 3)
    with pytest.raises(ValueError, match=r"columns should be numbers; these are not: y \('\?'\), z \('\?'\)"):
        read(tmp_path, "b.csv", b"x,y,z\n0,1,2\n1,?,?\n")


def test_attributes_of_some_parts_are_left_out_with_a_word(tmp_path):
    scene = trimesh.Scene([colored(), trimesh.PointCloud(X)])
    with pytest.warns(io.PartlyReadWarning, match="only some parts have are left out: red, green, blue"):
        read(tmp_path, "scene.glb", exported(scene, "glb"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WHOLE))
@settings(max_examples=30, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_refused_or_read(tmp_path, name, data):
    whole = bytearray(WHOLE[name])
    kind = data.draw(st.sampled_from(["cut", "bytes", "header", "random"]))
    if kind == "cut":
        whole = whole[: data.draw(st.integers(0, len(whole)))]
    elif kind == "random":
        whole = data.draw(st.binary(max_size=300))
    else:
        last = min(len(whole), 400) if kind == "header" else len(whole)
        for _ in range(data.draw(st.integers(1, 4))):
            whole[data.draw(st.integers(0, last - 1))] = data.draw(st.sampled_from([0, 57, 127, 128, 255]))
    with contextlib.suppress(ValueError, io.PartlyReadWarning):
        read(tmp_path, name, bytes(whole))


@pytest.mark.parametrize(
    "name",
    ["binary.ply", "splats.ply", "binary.pcd", "ascii.pcd", "packed.pcd", "scan.las", "scan.laz", "array.npy",
     "arrays.npz", "raw.nrrd"],
)  # fmt: skip
def test_a_file_that_is_cut_short_is_never_read(tmp_path, name):
    whole = WHOLE[name]
    for size in [*range(0, len(whole), max(1, len(whole) // 25)), len(whole) - 1]:
        with pytest.raises(ValueError, match=name):
            read(tmp_path, name, whole[:size])


def test_damage_at_which_lazrs_would_end_the_process(tmp_path):
    whole = WHOLE["scan.laz"]
    start = struct.unpack_from("<I", whole, 96)[0]
    table = struct.unpack_from("<q", whole, start)[0]
    with pytest.raises(ValueError, match="fewer chunks than the chunk table declares"):
        read(tmp_path, "scan.laz", whole[: table + 4] + b"\xff" * 4 + whole[table + 8 :])
    size = whole.find(b"laszip encoded") - 2 + 54 + 36  # of the first point item in the laszip record
    assert struct.unpack_from("<H", whole, size)[0] == 20
    with pytest.raises(ValueError, match="damaged, truncated or not a LAZ file"):
        read(tmp_path, "scan.laz", whole[:size] + b"\xff\x00" + whole[size + 2 :])


def test_libraries_that_log_stay_silent(tmp_path, capfd):
    for name in WHOLE:
        with contextlib.suppress(ValueError, io.PartlyReadWarning):
            read(tmp_path, name, WHOLE[name][: len(WHOLE[name]) // 2])
    assert capfd.readouterr() == ("", "")


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "laspy", None)
    with pytest.raises(ModuleNotFoundError, match=r"Reading \.las needs laspy\. Install it with"):
        read(tmp_path, "scan.las")


@pytest.mark.parametrize("ending", ["ply", "npz"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, ending):
    path = tmp_path / f"out.{ending}"
    io.write(path, io.Cloud(X))
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.raises(OSError, match="No space left") as error:
            io.write(path, io.Cloud(X + 1))
    assert error.value.filename == str(path)
    reserved = {"ply": "x", "npz": "points"}[ending]
    with pytest.raises(ValueError, match=f"`{reserved}`"):
        io.write(path, io.Cloud(X).with_attributes(**{reserved: HEIGHT}))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_where_and_what_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match=r"its name should end in \.ply or \.npz"):
        io.write(tmp_path / "out.obj", io.Cloud(X))
    with pytest.raises(ValueError, match="there is no directory"):
        io.write(tmp_path / "no" / "out.ply", io.Cloud(X))
    with pytest.raises(ValueError, match="2 coordinates"):
        io.write(tmp_path / "out.ply", io.Cloud(X[:, :2].copy()))
    assert not list(tmp_path.iterdir())


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link.ply").symlink_to(tmp_path / "target.ply")
    io.write(tmp_path / "link.ply", io.Cloud(X))
    assert (tmp_path / "link.ply").is_symlink()
    assert len(io.read(tmp_path / "target.ply")) == 40


def test_spacing_and_extent_of_a_lattice():
    lattice = np.stack(np.meshgrid(*3 * [np.arange(5.0)]), axis=-1).reshape(-1, 3) / 2
    cloud = io.Cloud(np.concatenate([lattice, lattice]))  # duplicated points
    assert np.isclose(cloud.spacing, 0.5)
    assert np.isclose(cloud.extent, 2 * np.sqrt(3))
    assert io.Cloud(np.ones((3, 3))).spacing == 0


@pytest.mark.parametrize("n", [40, slow(3000)])  # by all distances, and by a tree
def test_spacing_is_the_mean_distance_to_the_nearest_point(n):
    x = np.random.default_rng(0).random((n, 3))
    distances = np.linalg.norm(x[:, None] - x, axis=-1)
    np.fill_diagonal(distances, np.inf)
    assert np.isclose(io.Cloud(x).spacing, distances.min(1).mean(), rtol=1e-6)


def test_clouds_check_what_they_are_made_of():
    with pytest.raises(ValueError, match="float32 or float64"):
        io.Cloud(np.zeros((3, 3), int))
    with pytest.raises(ValueError, match="The attribute `a`"):
        io.Cloud(X).with_attributes(a=np.zeros(3))
    with pytest.raises(ValueError, match="`faces` should have shape"):
        io.Cloud(X, np.zeros((0, 3), int))


def test_masses_of_the_file_come_first():
    cloud = io.Cloud(X, np.array([[0, 1, 2]]))
    assert np.count_nonzero(cloud.mass) == 3
    assert (cloud.with_attributes(mass=np.ones(40)).mass == 1).all()


@pytest.mark.parametrize("name", ["ascii.pcd", "binary.pcd", "packed.pcd"])
def test_fields_of_a_pcd_file(tmp_path, name):
    cloud = read(tmp_path, name)
    np.testing.assert_array_equal(cloud.coordinates, X)
    np.testing.assert_allclose(cloud.attributes["height"], HEIGHT, rtol=1e-6)
    assert [int(cloud.attributes[color][7]) for color in ("red", "green", "blue")] == [10, 11, 12]
    assert set(cloud.attributes) == {"height", "red", "green", "blue"}


def test_a_pcd_file_in_text_whose_last_line_does_not_end(tmp_path):
    with pytest.raises(ValueError, match="its last number may be cut short, as no line break follows"):
        read(tmp_path, "ascii.pcd", WHOLE["ascii.pcd"].rstrip())


def test_copies_inside_a_packed_pcd_file(tmp_path):
    """Zeros, once as they are and then as a copy that overlaps itself, with a length in one byte and in two."""
    header = b"VERSION .7\nFIELDS x y z\nSIZE 4 4 4\nTYPE F F F\nCOUNT 1 1 1\nWIDTH 30\nHEIGHT 1\nPOINTS 30\nDATA "
    one = np.float32(1).tobytes()
    packed = b"\x00\x00" + b"\xe0\x64\x00"  # 0, and 109 copies of it
    packed += b"\x20\x00" + b"\x60\x00"  # 3 and 5 more
    packed += b"\x01\x00\x00" + b"\x03" + one  # two zeros, and a number
    packed += b"\xe0\xe3\x03"  # 236 bytes: that number again and again
    sizes = np.array([len(packed), 360], "<u4").tobytes()
    cloud = read(tmp_path, "a.pcd", header + b"binary_compressed\n" + sizes + packed)
    np.testing.assert_array_equal(cloud.coordinates, np.repeat([[0, 1, 1]], 30, axis=0))


def test_absent_points_of_a_pcd_file_are_left_out_with_a_word(tmp_path):
    header = "FIELDS x y z i\nSIZE 4 4 4 2\nTYPE F F F U\nCOUNT 1 1 1 2\nWIDTH 2\nHEIGHT 1\nPOINTS 2\nDATA ascii\n"
    with pytest.warns(io.PartlyReadWarning, match="1 points that are NaN are left out"):
        cloud = read(tmp_path, "a.pcd", (header + "nan nan nan 3 4\n1 2 3 5 6\n").encode())
    np.testing.assert_array_equal(cloud.coordinates, [[1, 2, 3]])
    np.testing.assert_array_equal(cloud.attributes["i"], [[5, 6]])
