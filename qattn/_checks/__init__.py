"""Wrong input, worded once: what was expected, what came, and the remedy."""

from qattn._checks.attention import *
from qattn._checks.clouds import *
from qattn._checks.grids import *
from qattn._checks.layers import *
from qattn._checks.matrices import *
from qattn._checks.mixtures import *
from qattn._checks.numbers import *
from qattn._checks.operators import *
from qattn._checks.ranks import *
from qattn._checks.spectra import *
