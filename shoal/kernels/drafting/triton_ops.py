"""Speculation on a GPU, in Triton: the functions of reference.py."""

from shoal.kernels.drafting.look_up import look_up
from shoal.kernels.drafting.verify import accept, begin_verification, write_histories
