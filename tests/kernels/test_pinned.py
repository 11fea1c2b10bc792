"""Registration against a runtime that fails where it is told to."""

from types import SimpleNamespace

import pytest

from kvtide.kernels import pinned, runtime
from kvtide.kernels.device import DeviceError, DeviceLost


class Runtime:
    cudaHostRegisterPortable = 1
    cudaHostRegisterMapped = 2

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.codes: dict[str, int] = {}

    def _call(self, name: str, *values: object) -> tuple[object, ...]:
        self.calls.append(name)
        return (self.codes.get(name, 0), *values)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[object, ...]:
        assert flags == 3
        return self._call("register")

    def cudaHostGetDevicePointer(self, address: int, flags: int) -> tuple[object, ...]:
        return self._call("pointer", address + 4096)

    def cudaHostUnregister(self, address: int) -> tuple[object, ...]:
        return self._call("unregister")

    def cudaGetLastError(self) -> tuple[object, ...]:
        return (0,)

    def cudaError_t(self, code: int) -> SimpleNamespace:
        return SimpleNamespace(name=f"error {code}")


@pytest.fixture
def driver(monkeypatch):
    driver = Runtime()
    monkeypatch.setattr(pinned, "cudart", lambda: driver)
    monkeypatch.setattr(runtime, "cudart", lambda: driver)
    monkeypatch.setattr(pinned, "_users", {})
    return driver


def test_S0_3_the_devices_own_address_is_returned(driver) -> None:
    assert pinned.register(0, 8192, 4096) == 8192 + 4096
    pinned.unregister(0, 8192)
    assert driver.calls == ["register", "pointer", "unregister"]


def test_two_devices_share_one_registration(driver) -> None:
    pinned.register(0, 8192, 4096)
    pinned.register(1, 8192, 4096)
    pinned.unregister(0, 8192)
    assert "unregister" not in driver.calls
    pinned.unregister(1, 8192)
    assert driver.calls.count("register") == driver.calls.count("unregister") == 1
    with pytest.raises(KeyError):
        pinned.unregister(1, 8192)


def test_a_range_that_was_never_unregistered_is_not_taken_for_a_new_one(driver) -> None:
    pinned.register(0, 8192, 4096)
    driver.codes["register"] = 712
    for device, nbytes in ((0, 4096), (1, 8192)):
        with pytest.raises(DeviceError, match="712"):
            pinned.register(device, 8192, nbytes)
    pinned.unregister(0, 8192)
    assert driver.calls[-1] == "unregister"


def test_S0_2_a_failed_registration_is_rolled_back(driver) -> None:
    driver.codes["register"] = 2
    with pytest.raises(DeviceError, match="cudaHostRegister failed with code 2"):
        pinned.register(0, 8192, 4096)
    assert driver.calls == ["register"]
    driver.codes = {"pointer": 719}
    with pytest.raises(DeviceLost):
        pinned.register(0, 8192, 4096)
    assert driver.calls[-1] == "unregister"
    with pytest.raises(KeyError):
        pinned.unregister(0, 8192)


def test_S4_7_codes_are_mapped_once(driver) -> None:
    assert runtime.check("call", (0, 5)) == 5
    assert runtime.check("call", (0,)) is None
    for code, kind in ((1, DeviceError), (700, DeviceLost), (214, DeviceLost), (2, DeviceError)):
        with pytest.raises(DeviceError) as caught:
            runtime.check("call", (code, None))
        assert type(caught.value) is kind
        assert (caught.value.code, caught.value.call) == (code, "call")
