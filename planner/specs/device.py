"""Device profile: what one device type can do, every number with its provenance."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from planner.specs.base import Name, NonNegativeFloat, Spec, problem
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
    """A non-negative number in base units (bytes, seconds, FLOP, or a ratio).

    Every field of a profile says which kind it is. The bounds of the kinds below are far from
    every device there is: they catch a wrong unit or a slipped exponent.
    """

    value: NonNegativeFloat
    provenance: Provenance
    source: str
    """Datasheet URL; or where and when it was measured; or what it was scaled from."""
    error: Annotated[float, Field(gt=0, le=10)] | None = None
    """Relative error (1 sigma), where one is known."""


class Seconds(Constant):
    """A time: fixed, per operation, per id or per byte."""

    value: Annotated[float, Field(ge=0, le=1)]


class BytesPerSecond(Constant):
    value: Annotated[float, Field(ge=1e6, le=1e15)]


class FlopsPerSecond(Constant):
    value: Annotated[float, Field(ge=1e6, le=1e18)]


class Hertz(Constant):
    value: Annotated[float, Field(ge=1e6, le=1e11)]


class BytesPerClock(Constant):
    """Of one unit."""

    value: Annotated[float, Field(ge=0.1, le=1e5)]


class Bytes(Constant):
    """The size of a memory, or of a message."""

    value: Annotated[float, Field(ge=1, le=1e15)]


class TakenBytes(Constant):
    """Memory that something takes; none is possible."""

    value: Annotated[float, Field(ge=0, le=1e15)]


class LineBytes(Constant):
    """What one access moves at least."""

    value: Annotated[float, Field(ge=1, le=65_536)]


class Count(Constant):
    value: Annotated[float, Field(ge=1, le=1e6)]


class Efficiency(Constant):
    """A share of a stated rate; cached data may come faster than the rate."""

    value: Annotated[float, Field(ge=1e-3, le=2)]


class Multiple(Constant):
    """One rate over another."""

    value: Annotated[float, Field(ge=1e-2, le=1e3)]


class Factor(Constant):
    """How much more or longer; 0: it has no part."""

    value: Annotated[float, Field(ge=0, le=1e3)]


class Share(Constant):
    """A part of a whole that leaves some of it."""

    value: Annotated[float, Field(ge=0, lt=1)]


class Watts(Constant):
    value: Annotated[float, Field(ge=0.1, le=1e6)]


class Topology(StrEnum):
    """Scale-up fabric inside a node."""

    SWITCH = "switch"
    """Any pair, and any subgroup, gets a device's whole bandwidth."""
    MESH = "mesh"
    """One link per pair: a subgroup of n of N devices gets (n-1)/(N-1) of a device's bandwidth."""
    HOST = "host"
    """Processes of one host, through its memory (CPU workers)."""


class ComputeProfile(Spec):
    units: Count
    """Compute units (AMD), streaming multiprocessors (NVIDIA) or cores (CPU)."""
    clock_hz: Hertz
    lds_bytes: Bytes
    """LDS or shared memory per unit; for a CPU, L1 data cache."""
    peak_flops_per_s: Annotated[dict[Dtype, FlopsPerSecond], Field(min_length=1)]
    """Dense matrix peak by dtype; a dtype that is missing is not supported."""
    emulated: tuple[Dtype, ...] = ()
    """Dtypes that have no hardware of their own and cost several passes of another."""
    vector_flops_per_s: FlopsPerSecond
    """fp32 peak outside the matrix units."""


class MemoryProfile(Spec):
    hbm_bytes: Bytes
    """Device memory; for a CPU worker, its share comes from the cluster file instead."""
    hbm_bytes_per_s: BytesPerSecond
    l2_bytes: Bytes
    l2_bytes_per_s: BytesPerSecond
    last_level_cache_bytes: Bytes
    """AMD Infinity Cache (MALL), or the L2 where that is the last level."""
    access_bytes: LineBytes
    """Smallest transfer from device memory (sector)."""
    context_bytes: TakenBytes
    """Taken by the driver context and the collectives library before the first tensor."""
    allocator_reserve: Share
    """Share of device memory kept free for fragmentation."""


class GemmProfile(Spec):
    """Constants of the vendor library's products (``planner.cost.gemm``)."""

    compute_efficiency: Efficiency
    """Share of the matrix peak that a full tile reaches."""
    hbm_efficiency: Efficiency
    l2_over_hbm: Multiple
    """L2 bandwidth as a multiple of HBM bandwidth."""
    store_over_hbm: Multiple
    """Bandwidth of storing C, as a multiple of HBM bandwidth."""
    reduce_over_hbm: Multiple
    """Bandwidth of split-K's partial sums, as a multiple of HBM bandwidth."""
    launch_s: Seconds
    fill_s: Seconds
    """Of each wave, from its start to the first product, and its end."""
    step_s: Seconds
    """Shortest step of 128 bytes of k, however small the tile."""
    reduce_s: Seconds
    """Added once by split-K's reduction."""
    tf32_fill_s: Seconds
    tf32_step_s: Seconds
    narrow_load_s: Seconds
    """Of one load by one unit, where rows are no multiple of 16 bytes."""
    narrow_compute: Factor
    """Time of matrix instructions where rows are no multiple of 16 bytes, as a multiple."""
    transposed_load_s: Seconds
    """Of one tf32 element by one unit, where the operand is not contiguous along k."""
    vector_operands: Factor
    """fp32 on vector units: reads of the operands over multiplications, in a tile of side one; 0
    where fp32 has matrix units."""
    wave_overlap: Share
    """Share of the last wave's idle time that other work fills, 0 to 1."""


LoopName = Literal["nt_16", "nn_16", "tn_16", "nt_32", "nn_32", "tn_32"]
"""Main loops of the Triton kernels: layout, and bits of an element (fp8 runs as 16)."""


class LoopProfile(Spec):
    """Constants of the main loop of one layout and element size."""

    shared_efficiency: Efficiency
    """Share of 128 bytes per clock and unit that operands reach through shared memory."""
    step_s: Seconds
    """Added to the products of one block of k where a program is alone on its unit."""
    latency_s: Seconds
    """From the load of a block to its use."""
    latency_s_per_byte: Seconds
    """Added to it for each byte of the block."""


class TritonProfile(Spec):
    """Constants of the Triton kernels' model (``planner.cost.triton_gemm``)."""

    matrix_efficiency: Efficiency
    """Share of the peak that matrix instructions reach with operands in shared memory."""
    register_efficiency: Efficiency
    """Share of the peak with operands in registers (mma.sync, AMD)."""
    vector_efficiency: Efficiency
    """Share of the fp32 peak, without matrix instructions."""
    unit_l2_bytes_per_clock: BytesPerClock
    """What one unit can load from the L2."""
    l2_over_hbm: Multiple
    """Bandwidth of reading each operand once from the L2, as a multiple of HBM bandwidth."""
    hbm_efficiency: Efficiency
    store_over_hbm: Multiple
    """Bandwidth of storing C as a multiple of HBM bandwidth."""
    unit_store_bytes_per_clock: BytesPerClock
    """What one unit alone can store."""
    unit_reduce_bytes_per_clock: BytesPerClock
    """Partial sums that one unit adds up."""
    launch_s: Seconds
    fill_s: Seconds
    """From a program's start to its first product, and its end."""
    finish_s: Seconds
    """Storing one of the sums that each thread of a program holds."""
    hbm_latency_s: Seconds
    """Added to a load's latency where it comes from device memory."""
    reduce_s: Seconds
    """Added by split-K's second kernel."""
    issue_s: Seconds
    """One warp's vector load."""
    copy_s: Seconds
    """One warp's copy of 4-byte elements that are not aligned."""
    transpose_s: Seconds
    """One warp's copy of 4-byte elements that are transposed on their way."""
    scalar_s: Seconds
    """One warp's load of smaller elements that are not aligned."""
    register_load_s: Seconds
    """Added to a step whose operands pass through registers instead of being copied ahead."""
    margin: Factor
    """A tile runs only where it is predicted to be faster than the vendor's kernel by more."""
    loops: dict[LoopName, LoopProfile]

    @model_validator(mode="after")
    def _check(self) -> TritonProfile:
        missing = sorted(set(get_args(LoopName)) - set(self.loops))
        if missing:
            raise problem(f"no constants of {', '.join(missing)}", "add them under triton.loops")
        return self


class ElementwiseProfile(Spec):
    hbm_efficiency: Efficiency
    launch_s: Seconds


class EmbeddingProfile(Spec):
    """Constants of the table-batched-embedding (TBE) model (``planner.cost.embedding``)."""

    call_s: Seconds
    """Fixed cost of one TBE call (forward)."""
    table_s: Seconds
    """Fixed cost of one table inside a call."""
    read_efficiency: Efficiency
    """Share of HBM bandwidth that random row reads reach."""
    backward_call_s: Seconds
    sort_s_per_id: Seconds
    """Sorting the ids before the fused update."""
    update_efficiency: Efficiency
    """Share of HBM bandwidth that the backward's row reads and writes reach."""
    uvm_efficiency: Efficiency
    """Share of the host link that zero-copy (fused_uvm) row reads reach."""
    cache_lookup_s_per_id: Seconds
    """Software-cache look-up of fused_uvm_caching."""


class CollectiveConstants(Spec):
    """t(bytes, n) = latency + per_rank_latency * (n - 1) + bytes_on_wire / (efficiency * link)."""

    latency_s: Seconds
    per_rank_latency_s: Seconds
    efficiency: Efficiency


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
    devices: Count
    """Devices in one scale-up domain."""
    bytes_per_s: BytesPerSecond
    """One device to all others together, each way."""
    collectives: CollectivesProfile


class NetworkProfile(Spec):
    """Scale-out: one NIC (share) per device."""

    bytes_per_s: BytesPerSecond
    latency_s: Seconds
    efficiency: Efficiency
    """Share of the NIC's rate that a large collective reaches."""
    half_bytes: Bytes
    """Message size at which half of that is reached."""


class HostProfile(Spec):
    link_bytes_per_s: BytesPerSecond
    """Host memory to device, each way (PCIe, C2C)."""
    link_efficiency: Efficiency
    memory_bytes_per_device: Bytes
    """Host memory that one device may use for tables (the cluster file may override)."""


class FrameworkProfile(Spec):
    """What the training framework costs on the host, per step and rank (PyTorch + TorchRec)."""

    step_s: Seconds
    """Fixed: data loader hand-over, pipeline, optimizer loop, metrics."""
    op_s: Seconds
    """Each operator that the host launches."""
    sharded_s: Seconds | None = None
    """CPU workers, in a pool of several: setting up the distribution of ids and pooled rows."""
    id_s: Seconds | None = None
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
    watts: Watts

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
