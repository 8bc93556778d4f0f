"""Copy arrays from the host to a device, and back."""

from __future__ import annotations

from typing import Any

import iree.runtime as ireert
import numpy as np
from iree.runtime import BufferUsage, HalElementType, HalFence, MemoryType
from iree.runtime.array_interop import map_dtype_to_hal_element_type

from irongrad.runtime.arrays import Array

_STAGING = int(MemoryType.HOST_LOCAL | MemoryType.DEVICE_VISIBLE)
_COPIED = int(BufferUsage.TRANSFER_TARGET | BufferUsage.MAPPING_SCOPED)


def to_device(device: ireert.HalDevice, host: Array) -> ireert.HalBufferView:
    """Copy `host` into the memory of `device`.

    Raises:
        TypeError: the array does not hold numbers.
    """
    element = map_dtype_to_hal_element_type(host.dtype)
    if element is None:
        raise TypeError(f"{host.dtype} is no type of numbers")
    return device.allocator.allocate_buffer_copy(
        memory_type=MemoryType.DEVICE_LOCAL,
        allowed_usage=BufferUsage.DEFAULT,
        device=device,
        buffer=np.ascontiguousarray(host) if host.ndim else host.copy(),
        element_type=element,
    )


def to_host(device: ireert.HalDevice, view: ireert.HalBufferView) -> Array:
    """Return the elements of `view`: mapped if the host can access the device's memory, else copied.

    A copy goes through memory that the device allocates. `DeviceArray.to_host` of IREE 3.13.0 imports numpy's memory
    instead. Vulkan refuses memory that does not begin on a page ("host allocation import pointer does not satisfy
    Vulkan minImportedHostPointerAlignment"). tests/targets/test_vulkan.py tells when it is fixed.
    """
    dtype = HalElementType.map_to_dtype(view.element_type)
    source = view.get_buffer()
    if is_mappable(source):
        return np.asarray(view.map().asarray(view.shape, dtype))
    if source.byte_length() == 0:
        return np.empty(view.shape, dtype)
    staging = device.allocator.allocate_buffer(
        memory_type=_STAGING, allowed_usage=_COPIED, allocation_size=source.byte_length()
    )
    semaphore = device.create_semaphore(0)
    done = HalFence.create_at(semaphore, 1)
    device.queue_copy(source, staging, wait_semaphores=HalFence.create_at(semaphore, 0), signal_semaphores=done)
    done.wait()
    return np.asarray(staging.map().asarray(view.shape, dtype))


def is_mappable(buffer: Any) -> bool:
    """Whether the host can access the memory of a buffer."""
    needed = ((buffer.memory_type(), MemoryType.HOST_VISIBLE), (buffer.allowed_usage(), BufferUsage.MAPPING_SCOPED))
    return all(has & int(flag) == int(flag) for has, flag in needed)
