"""Device profile: what one device type can do, every number with its provenance."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, get_args

from pydantic import model_validator

from planner.specs.base import Name, NonNegativeFloat, PositiveFloat, Spec, problem
from planner.specs.units import Dtype


class Provenance(StrEnum):
    """Where a number comes from, best first."""

    MEASURED = "measured"
    MEASURED_FIT = "measured-fit"
    DATASHEET = "datasheet"
    PUBLISHED = "published"
    SCALED = "scaled"
    ASSUMED = "assumed"


class Constant(Spec):
    """A non-negative number in base units (bytes, seconds, FLOP, or a ratio)."""

    value: NonNegativeFloat
    provenance: Provenance
    source: str
    """Datasheet URL; or where and when it was measured; or what it was scaled from."""
    error: PositiveFloat | None = None
    """Relative error (1 sigma), where one is known."""


class Topology(StrEnum):
    """Scale-up fabric inside a node."""

    SWITCH = "switch"
    """Any pair, and any subgroup, gets a device's whole bandwidth."""
    MESH = "mesh"
    """One link per pair: a subgroup of n of N devices gets (n-1)/(N-1) of a device's bandwidth."""
    HOST = "host"
    """Processes of one host, through its memory (CPU workers)."""


class ComputeProfile(Spec):
    units: Constant
    """Compute units (AMD), streaming multiprocessors (NVIDIA) or cores (CPU)."""
    clock_hz: Constant
    lds_bytes: Constant
    """LDS or shared memory per unit; for a CPU, L1 data cache."""
    peak_flops_per_s: dict[Dtype, Constant]
    """Dense matrix peak by dtype; a dtype that is missing is not supported."""
    emulated: tuple[Dtype, ...] = ()
    """Dtypes that have no hardware of their own and cost several passes of another."""
    vector_flops_per_s: Constant
    """fp32 peak outside the matrix units."""


class MemoryProfile(Spec):
    hbm_bytes: Constant
    """Device memory; for a CPU worker, its share comes from the cluster file instead."""
    hbm_bytes_per_s: Constant
    l2_bytes: Constant
    l2_bytes_per_s: Constant
    last_level_cache_bytes: Constant
    """AMD Infinity Cache (MALL), or the L2 where that is the last level."""
    access_bytes: Constant
    """Smallest transfer from device memory (sector)."""
    context_bytes: Constant
    """Taken by the driver context and the collectives library before the first tensor."""
    allocator_reserve: Constant
    """Share of device memory kept free for fragmentation."""


class GemmProfile(Spec):
    """Constants of the vendor library's products (``planner.cost.gemm``)."""

    compute_efficiency: Constant
    """Share of the matrix peak that a full tile reaches."""
    hbm_efficiency: Constant
    l2_over_hbm: Constant
    """L2 bandwidth as a multiple of HBM bandwidth."""
    store_over_hbm: Constant
    """Bandwidth of storing C, as a multiple of HBM bandwidth."""
    reduce_over_hbm: Constant
    """Bandwidth of split-K's partial sums, as a multiple of HBM bandwidth."""
    launch_s: Constant
    fill_s: Constant
    """Of each wave, from its start to the first product, and its end."""
    step_s: Constant
    """Shortest step of 128 bytes of k, however small the tile."""
    reduce_s: Constant
    """Added once by split-K's reduction."""
    tf32_fill_s: Constant
    tf32_step_s: Constant
    narrow_load_s: Constant
    """Of one load by one unit, where rows are no multiple of 16 bytes."""
    narrow_compute: Constant
    """Time of matrix instructions where rows are no multiple of 16 bytes, as a multiple."""
    transposed_load_s: Constant
    """Of one tf32 element by one unit, where the operand is not contiguous along k."""
    vector_operands: Constant
    """fp32 on vector units: reads of the operands over multiplications, in a tile of side one; 0
    where fp32 has matrix units."""
    wave_overlap: Constant
    """Share of the last wave's idle time that other work fills, 0 to 1."""


LoopName = Literal["nt_16", "nn_16", "tn_16", "nt_32", "nn_32", "tn_32"]
"""Main loops of the Triton kernels: layout, and bits of an element (fp8 runs as 16)."""


class LoopProfile(Spec):
    """Constants of the main loop of one layout and element size."""

    shared_efficiency: Constant
    """Share of 128 bytes per clock and unit that operands reach through shared memory."""
    step_s: Constant
    """Added to the products of one block of k where a program is alone on its unit."""
    latency_s: Constant
    """From the load of a block to its use."""
    latency_s_per_byte: Constant
    """Added to it for each byte of the block."""


class TritonProfile(Spec):
    """Constants of the Triton kernels' model (``planner.cost.triton_gemm``)."""

    matrix_efficiency: Constant
    """Share of the peak that matrix instructions reach with operands in shared memory."""
    register_efficiency: Constant
    """Share of the peak with operands in registers (mma.sync, AMD)."""
    vector_efficiency: Constant
    """Share of the fp32 peak, without matrix instructions."""
    unit_l2_bytes_per_clock: Constant
    """What one unit can load from the L2."""
    l2_over_hbm: Constant
    """Bandwidth of reading each operand once from the L2, as a multiple of HBM bandwidth."""
    hbm_efficiency: Constant
    store_over_hbm: Constant
    """Bandwidth of storing C as a multiple of HBM bandwidth."""
    unit_store_bytes_per_clock: Constant
    """What one unit alone can store."""
    unit_reduce_bytes_per_clock: Constant
    """Partial sums that one unit adds up."""
    launch_s: Constant
    fill_s: Constant
    """From a program's start to its first product, and its end."""
    finish_s: Constant
    """Storing one of the sums that each thread of a program holds."""
    hbm_latency_s: Constant
    """Added to a load's latency where it comes from device memory."""
    reduce_s: Constant
    """Added by split-K's second kernel."""
    issue_s: Constant
    """One warp's vector load."""
    copy_s: Constant
    """One warp's copy of 4-byte elements that are not aligned."""
    transpose_s: Constant
    """One warp's copy of 4-byte elements that are transposed on their way."""
    scalar_s: Constant
    """One warp's load of smaller elements that are not aligned."""
    register_load_s: Constant
    """Added to a step whose operands pass through registers instead of being copied ahead."""
    margin: Constant
    """A tile runs only where it is predicted to be faster than the vendor's kernel by more."""
    loops: dict[LoopName, LoopProfile]

    @model_validator(mode="after")
    def _check(self) -> TritonProfile:
        missing = sorted(set(get_args(LoopName)) - set(self.loops))
        if missing:
            raise problem(f"no constants of {', '.join(missing)}", "add them under triton.loops")
        return self


class ElementwiseProfile(Spec):
    hbm_efficiency: Constant
    launch_s: Constant


class EmbeddingProfile(Spec):
    """Constants of the table-batched-embedding (TBE) model (``planner.cost.embedding``)."""

    call_s: Constant
    """Fixed cost of one TBE call (forward)."""
    table_s: Constant
    """Fixed cost of one table inside a call."""
    read_efficiency: Constant
    """Share of HBM bandwidth that random row reads reach."""
    backward_call_s: Constant
    sort_s_per_id: Constant
    """Sorting the ids before the fused update."""
    update_efficiency: Constant
    """Share of HBM bandwidth that the backward's row reads and writes reach."""
    uvm_efficiency: Constant
    """Share of the host link that zero-copy (fused_uvm) row reads reach."""
    cache_lookup_s_per_id: Constant
    """Software-cache look-up of fused_uvm_caching."""


class CollectiveConstants(Spec):
    """t(bytes, n) = latency + per_rank_latency * (n - 1) + bytes_on_wire / (efficiency * link)."""

    latency_s: Constant
    per_rank_latency_s: Constant
    efficiency: Constant


class CollectivesProfile(Spec):
    all_reduce: CollectiveConstants
    all_to_all: CollectiveConstants
    reduce_scatter: CollectiveConstants
    all_gather: CollectiveConstants
    pool_sum: CollectiveConstants | None = None
    """Reduce to one rank and broadcast from it, together, as an all-reduce's wire bytes; like an
    all-reduce where it is left out."""


class ScaleUpProfile(Spec):
    topology: Topology
    devices: Constant
    """Devices in one scale-up domain."""
    bytes_per_s: Constant
    """One device to all others together, each way."""
    collectives: CollectivesProfile


class NetworkProfile(Spec):
    """Scale-out: one NIC (share) per device."""

    bytes_per_s: Constant
    latency_s: Constant
    efficiency: Constant
    """Share of the NIC's rate that a large collective reaches."""
    half_bytes: Constant
    """Message size at which half of that is reached."""


class HostProfile(Spec):
    link_bytes_per_s: Constant
    """Host memory to device, each way (PCIe, C2C)."""
    link_efficiency: Constant
    memory_bytes_per_device: Constant
    """Host memory that one device may use for tables (the cluster file may override)."""


class FrameworkProfile(Spec):
    """What the training framework costs on the host, per step and rank (PyTorch + TorchRec)."""

    step_s: Constant
    """Fixed: data loader hand-over, pipeline, optimizer loop, metrics."""
    op_s: Constant
    """Each operator that the host launches."""
    sharded_s: Constant | None = None
    """CPU workers, in a pool of several: setting up the distribution of ids and pooled rows."""
    id_s: Constant | None = None
    """CPU workers: making or reading one id of the next batch, on the core that also computes."""


class DeviceProfile(Spec):
    """One GPU product, or a CPU core."""

    name: Name
    description: str
    vendor: Literal["amd", "nvidia", "cpu"]
    arch: Name
    """Compiler target: gfx950, gfx942, sm_90, sm_100, …"""
    ray_accelerator_type: str | None = None
    """Ray's name for it (node label ``ray.io/accelerator-type``)."""
    compute: ComputeProfile
    memory: MemoryProfile
    gemm: GemmProfile
    triton: TritonProfile | None = None
    """None: every product runs in the vendor library."""
    elementwise: ElementwiseProfile
    embedding: EmbeddingProfile
    scale_up: ScaleUpProfile
    network: NetworkProfile
    host: HostProfile
    framework: FrameworkProfile
    watts: Constant

    def __hash__(self) -> int:
        """Profiles hold dicts, which have no hash; equal profiles have equal names."""
        return hash(self.name)

    @property
    def is_cpu(self) -> bool:
        """Whether this is a CPU worker rather than an accelerator."""
        return self.vendor == "cpu"

    @model_validator(mode="after")
    def _check(self) -> DeviceProfile:
        for dtype in self.compute.emulated:
            if dtype not in self.compute.peak_flops_per_s:
                raise problem(
                    f"emulated dtype {dtype} has no peak", f"add compute.peak_flops_per_s.{dtype}"
                )
        return self
