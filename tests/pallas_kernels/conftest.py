"""What several tests of kernels ask of the machine."""

import pytest

from pallas_kernels.native import library


@pytest.fixture(scope="module")
def native_runs_here() -> None:
    """Skips where the machine has no native kernels; fails where their source is at fault."""
    reason = library.load()
    if reason is not None and "made no library" in reason:
        pytest.fail(reason)  # an error in the source isn't a lack of this machine's
    if reason is not None:
        pytest.skip(reason)
