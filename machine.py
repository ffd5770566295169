"""What this machine offers: a device, the dtype that is faster on it, a clock that waits for it."""
import time

import torch

from checkpoint import UserError


def check_device(name):
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"--device {name}: {str(e).splitlines()[0][:100]}; leave the flag out to take what there is")


def wait_for(device):
    """A GPU works on while Python goes on: before reading a clock, wait for it."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def matmul_rate(device, dtype, seconds=0.15):
    """Measured floating-point operations a second of a matrix product of this model's kind of shape."""
    a, b = (torch.randn(shape, device=device, dtype=dtype) for shape in ((2048, 512), (512, 512)))
    done, start = 0, None
    while start is None or time.time() - start < seconds:
        a @ b
        wait_for(device)
        start, done = start or time.time(), done + 1                # the first product warms up
    return 2 * 2048 * 512 * 512 * (done - 1) / (time.time() - start)


def pick_dtype(s):
    """bf16 where a bf16 matrix product is faster than an fp32 one: on GPUs and on CPUs with bf16 units. Elsewhere it
    is emulated, up to a hundred times slower."""
    rates = {d: matmul_rate(s.device, d) for d in (torch.float32, torch.bfloat16)}
    if s.dtype == "auto":
        s.dtype = "bfloat16" if rates[torch.bfloat16] > 1.2 * rates[torch.float32] else "float32"
    return rates[getattr(torch, s.dtype)]


def autocast(s):
    return torch.autocast(s.device.split(":")[0], dtype=torch.bfloat16, enabled=s.dtype == "bfloat16")
