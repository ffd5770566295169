"""What this machine offers: the dtype that is faster on it, and a clock that waits for the device."""
import time

import torch


def wait_for(device):
    """A GPU works on while Python goes on, so wait for it before reading a clock."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def matmul_rate(device, dtype, seconds=0.15):
    """Measured floating-point operations per second of a matrix product with shapes like this model's."""
    a, b = (torch.randn(shape, device=device, dtype=dtype) for shape in ((2048, 512), (512, 512)))
    done, start = 0, None
    while start is None or time.time() - start < seconds:
        a @ b
        wait_for(device)
        start, done = start or time.time(), done + 1                # the first product warms up
    return 2 * 2048 * 512 * 512 * (done - 1) / (time.time() - start)


def pick_dtype(s):
    """Resolve s.dtype "auto", and return the rate of a matrix product in the dtype that s has then.

    bfloat16 is chosen where its matrix product is faster than float32's: on GPUs and on CPUs with bf16 units. Elsewhere
    bfloat16 is emulated and up to a hundred times slower.
    """
    rates = {d: matmul_rate(s.device, d) for d in (torch.float32, torch.bfloat16)}
    if s.dtype == "auto":
        s.dtype = "bfloat16" if rates[torch.bfloat16] > 1.2 * rates[torch.float32] else "float32"
    return rates[getattr(torch, s.dtype)]


def autocast(s):
    """The context in which a forward runs: bfloat16 where s.dtype says so, else plain float32."""
    return torch.autocast(s.device.split(":")[0], dtype=torch.bfloat16, enabled=s.dtype == "bfloat16")
