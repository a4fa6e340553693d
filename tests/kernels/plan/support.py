"""What tests of plans share."""

import pytest
from trirun_kernels.native import library_path

needs_library = pytest.mark.skipif(
    not library_path("cuda").exists(), reason="libtrirun_cuda.so, which knows its kernels' shared memory, is not built"
)
