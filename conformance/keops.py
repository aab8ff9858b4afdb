"""Write the CUDA code with which KeOps computes lse of points in space, with biases, for keops.sh."""

import sys
from unittest import mock

import keopscore.config  # noqa: F401 (a module that its package hides behind an object of the same name)

# KeOps asks for a GPU when the module is imported, and to compile. Its code needs none.
Cuda = type(sys.modules["keopscore.config"].cuda_config)
with (
    mock.patch.object(Cuda, "get_cuda_version", return_value=13000),
    mock.patch.object(Cuda, "get_gpu_props", return_value=(1, "")),
):
    from keopscore.mapreduce.gpu.GpuReduc1D import GpuReduc1D
    from keopscore.mapreduce.MapReduce import MapReduce

FORMULA = "Max_SumShiftExp_Reduction(Var(2,1,1)-IntInv(2)*SqDist(Var(0,3,0),Var(1,3,1)),0)"

reduction = GpuReduc1D.__new__(GpuReduc1D)
# Three arguments, float32, sums by blocks, on the device, and with fast functions: the defaults of PyKeOps.
MapReduce.__init__(reduction, FORMULA, [], 3, "float", "float", "block_sum", 0, 1, 0, 0, True, 0)
reduction.dimy = reduction.varloader.dimy
reduction.get_code()
with open(sys.argv[1], "w") as file:
    file.write(reduction.code.replace("GpuConv1DOnDevice", "keops"))
