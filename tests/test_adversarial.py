"""Random configurations against a dense oracle; `python tests/adversarial.py` runs any number of them."""

import adversarial
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_one_thread")]

FAILED_BEFORE = [
    63,  # a site of a matrix that no mass reaches made all potentials NaN
    97,  # powers of a signal (N,) by a batch of operators: the first product was taken for channels
    109,  # a signal with a batch of its own, given at construction, left its batch in the potential
    231,  # the same, and rows of voxels far from all mass: index_copy of other dimensions
    310,  # sums of Gaussians kept bandwidths of a pass without gradient, and so none by sigma
    843,  # unrolled, an item that converges first had NaN gradients: the logarithm of a sum without terms
    100006,  # "symmetric" with a site that no mass reaches: NaN everywhere
    100235,  # mixtures were centered by points without mass, far away, and lost their digits
    100236,  # the same, in row sums
    100378,  # the same, in values
    403555,  # the exponential of a row that does not count was infinite, and its derivative NaN
    403881,  # mixtures: a row far away, without a cotangent, hid the biases of all others
    404546,  # as 403555, unrolled
    606572,  # voxels far from all mass: their places were rounded to float32
    608828,  # a sum of kernels, one of which hardly counts in a row: its share was 1 minus that of the other
    505705,  # a cotangent below the smallest normal float: its reciprocal was infinite
    408196,  # masses of 1e36 without normalization: an infinite cotangent was refused as a bias
    701376,  # voxels far from all mass, and a signal in float64: index_copy of two dtypes
    701800,  # the backend of a backward pass was selected twice, for inputs that it takes and for some that it does not
]


@pytest.mark.parametrize("seed", FAILED_BEFORE)
def test_what_failed_before(seed):
    adversarial.run(seed)


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_configurations(first):
    for seed in range(first, first + 10):
        adversarial.run(seed)
