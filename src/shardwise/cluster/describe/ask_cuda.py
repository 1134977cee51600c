"""Asks the CUDA driver which GPUs there are. The first line that it prints is the newest CUDA the driver runs, or what
it failed with; then one line per GPU: memory in bytes, capability, peers, name. machine.py runs it as a process.

Uses only ctypes and the driver's own library, so it needs neither torch nor nvidia-smi and sees exactly the devices
that torch would see.
"""

from __future__ import annotations

import ctypes
import sys

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE: none, or none that CUDA_VISIBLE_DEVICES allows
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # CUdevice_attribute values of the driver interface


def main() -> int:
    """Prints what the driver says, and returns 1 where there is no driver or no GPU."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return 1
    count, version = ctypes.c_int(), ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if failed == NO_DEVICE:
        return 1
    if failed:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(failed, ctypes.byref(text))
        print("error", failed, (text.value or b"").decode(), sep="\t")
        return 0
    driver.cuDriverGetVersion(ctypes.byref(version))  # 12040 is CUDA 12.4
    print("cuda", version.value // 1000, version.value % 1000 // 10, sep="\t")
    for index in range(count.value):
        device, memory = ctypes.c_int(), ctypes.c_size_t()
        major, minor = ctypes.c_int(), ctypes.c_int()
        name = ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        driver.cuDeviceGetName(name, len(name), device)
        driver.cuDeviceGetAttribute(ctypes.byref(major), CAPABILITY_MAJOR, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), CAPABILITY_MINOR, device)
        peers = sum(_reaches(driver, device, other) for other in range(count.value) if other != index)
        print(memory.value, major.value, minor.value, peers, name.value.decode(), sep="\t")
    return 0


def _reaches(driver: ctypes.CDLL, device: ctypes.c_int, other: int) -> bool:
    """Returns whether `device` can read the memory of GPU number `other` without a detour through the CPU's."""
    peer, answer = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(peer), other)
    return driver.cuDeviceCanAccessPeer(ctypes.byref(answer), device, peer) == 0 and answer.value == 1


if __name__ == "__main__":
    sys.exit(main())
