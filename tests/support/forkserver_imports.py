"""Modules that the fork server of a test process imports for all ranks, beyond what a run needs.

This saves 0.25 s of CPU time for each rank. Nothing here may import triton: each rank sets TRITON_INTERPRET itself, and
triton reads it when it is imported.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]  # like pytest

import pytest  # noqa: E402
import simulated_gpu.runs  # noqa: E402

assert simulated_gpu.runs and pytest
assert "triton" not in sys.modules
