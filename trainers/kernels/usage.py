"""What a compiled kernel takes of a compute unit, read from its binary: no GPU needed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.compiler import CompiledKernel

from planner.kernels.resources import architecture
from planner.specs.device import DeviceProfile


@dataclass(frozen=True)
class Usage:
    """Of one program."""

    registers: int
    """32-bit registers of each thread (AMD: architectural and accumulation registers together)."""
    spilled: int
    """Registers (AMD) or bytes (NVIDIA) of each thread that the compiler put into memory."""
    lds_bytes: int
    """Shared memory (LDS)."""


def usage_of(kernel: CompiledKernel) -> Usage:
    """Read it from the assembly (AMD) or with cuobjdump, which Triton brings (NVIDIA)."""
    lds_bytes = int(kernel.metadata.shared)
    if "amdgcn" in kernel.asm:
        found = {
            name: int(count)
            for name, count in re.findall(r"\.(\w+_count): +(\d+)", kernel.asm["amdgcn"])
        }
        spilled = found["vgpr_spill_count"] + found["sgpr_spill_count"]
        # CDNA's register file is one: agpr_count is a part of vgpr_count.
        return Usage(found["vgpr_count"], spilled, lds_bytes)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = subprocess.run(
            [_cuobjdump(), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack, local = (
        int(re.findall(rf"{name}:(\d+)", listing)[-1]) for name in ("REG", "STACK", "LOCAL")
    )
    return Usage(registers, stack + local, lds_bytes)


def _cuobjdump() -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def largest_lds_bytes(device: DeviceProfile) -> int:
    """Shared memory (LDS) that one program may have."""
    return int(device.compute.lds_bytes.value) - architecture(device).reserved_bytes


def refusal(usage: Usage, lds_limit_bytes: int) -> str:
    """Why a kernel that takes so much is not run; empty: it is."""
    if usage.spilled:
        return f"spills {usage.spilled} (registers {usage.registers})"
    if usage.lds_bytes > lds_limit_bytes:
        return f"needs {usage.lds_bytes:,} bytes of shared memory, has {lds_limit_bytes:,}"
    return ""
