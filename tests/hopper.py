"""Compile Triton kernels for Hopper where there is no GPU, from the launches of a real call."""

import re
import subprocess
import tempfile
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
"""Shared memory that one program may have on Hopper."""

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
OPTIONS = {"num_warps", "num_stages", "maxnreg"}


class Resources(NamedTuple):
    """What a program of a compiled kernel needs."""

    shared_bytes: int
    stack_bytes: int
    """Of a thread: what its registers do not hold."""


class Recorder:
    """Stands for a kernel: keeps the arguments of its launches and computes nothing."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, []

    def __getitem__(self, grid):
        return lambda *arguments, **named: self.launches.append((arguments, named))


def compiled(kernel, arguments, named):
    """Return the resources of a kernel, compiled for the arguments of a launch."""
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | named
    options = {name: values.pop(name) for name in OPTIONS & values.keys()}
    # The default, said so that no version of Triton warns of another one to come.
    options["enable_fp_fusion"] = True
    signature, constants, hints = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = values[name]
        is_tensor = isinstance(value, torch.Tensor)
        parameter = kernel.params[place]
        is_fixed = not is_tensor and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or is_fixed:
            signature[name], constants[(place,)] = "constexpr", value
            continue
        signature[name] = TYPES[value.dtype] if is_tensor else "i32"
        if is_tensor or value % 16 == 0:
            hints[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, hints)
    built = triton.compile(source, target=TARGET, options=options)
    return Resources(built.metadata.shared, _stack_bytes(built.asm["cubin"]))


def _stack_bytes(binary):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        call = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", told)[1])
