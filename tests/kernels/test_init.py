"""What importing kernels loads, and the process's devices."""

import subprocess
import sys

import pytest

from kvtide.kernels import device_for
from kvtide.kernels.device import DeviceError
from kvtide.kernels.runtime import device_count


def test_importing_loads_no_torch_no_triton_no_cuda() -> None:
    code = (
        "import sys, kvtide.kernels, kvtide.kernels.bridge, kvtide.kernels.worker, kvtide.kernels.cpu;"
        "import kvtide.kernels.cuda, kvtide.kernels.fake;"
        "bad = {'torch', 'triton', 'cuda', 'numpy'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_device_for_is_one_a_process() -> None:
    assert device_for("cpu") is device_for("cpu")
    with pytest.raises(ValueError, match="no device of kind"):
        device_for("tpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [-1, 2**40, 1000])
def test_S4_8_a_device_that_is_not_there_is_refused(index: int) -> None:
    with pytest.raises(DeviceError, match="there is no cuda"):
        device_for("cuda", index)
    assert device_count() >= 0
