"""The kernels that handle a whole payload, or a whole optimizer step, in a few launches: the module
that `Triton.fused` returns."""

from compressors.kernels.triton.codec import (
    Coded,
    as_rows,
    coded,
    coded_rows,
    encode_floats,
    encode_levels,
    encode_natural,
    write_values,
)
from compressors.kernels.triton.moments import enlarge
from compressors.kernels.triton.sparse import (
    add_sparse,
    add_sparse_rows,
    read_indices,
    sum_energies,
    write_sparse,
)

__all__ = [
    "Coded",
    "add_sparse",
    "add_sparse_rows",
    "as_rows",
    "coded",
    "coded_rows",
    "encode_floats",
    "encode_levels",
    "encode_natural",
    "enlarge",
    "read_indices",
    "sum_energies",
    "write_sparse",
    "write_values",
]
