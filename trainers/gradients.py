"""Dense gradients: exact sums over all pools, weighted by samples, overlapped with backward.

DDP sits on the world group and only buckets; a communication hook weights each bucket by the
rank's share of the global batch and sums it over the bridge on one background thread, so that
buckets travel in the order in which DDP launches them, on every rank the same.

The exchange is *exposed* from the end of the backward pass (the autograd engine calls back once all
gradients are computed) until the last bucket has come; the rest of its time is hidden behind it.
"""

from __future__ import annotations

import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from trainers.rank import Bridge

BUCKET_MIB = 4
"""Small enough that the first bucket leaves while most of backward is still to come."""


class DenseExchange:
    """DDP communication hook: sum over ranks of weight x gradient.

    Args:
        weight: b_p / B, times the inverse of the loss scale.
    """

    def __init__(self, bridge: Bridge, weight: float, device: torch.device) -> None:
        self.bytes = 0
        self.busy_s = 0.0
        """In which buckets travelled or waited for other ranks' (on a GPU: of the host thread)."""
        self.exposed_s = 0.0
        self._backward_end_s: float | None = None
        self._bridge = bridge
        self._weight = weight
        self._device = device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dense-exchange")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Queue one bucket; DDP waits for the futures at the end of backward."""
        gradient = bucket.buffer()
        if bucket.index() == 0:
            self._backward_end_s = None
            # Before DDP queues its own wait for the last bucket: callbacks run in order.
            Variable._execution_engine.queue_callback(self._backward_ended)
        on_gpu = self._stream is not None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[self._device] if on_gpu else []
        )
        ready = torch.cuda.current_stream(self._device).record_event() if on_gpu else None
        self.bytes += gradient.nbytes
        self._thread.submit(self._run, gradient, ready, future, bucket.is_last())
        return future

    def _backward_ended(self) -> None:
        self._backward_end_s = time.perf_counter()

    def _run(
        self,
        gradient: torch.Tensor,
        ready: torch.cuda.Event | None,
        future: torch.futures.Future[torch.Tensor],
        last: bool,
    ) -> None:
        begin = time.perf_counter()
        try:
            # A no-op context without a GPU.
            with torch.cuda.stream(self._stream):
                if self._stream is not None and ready is not None:
                    self._stream.wait_event(ready)
                self._bridge.all_reduce_sum(gradient.mul_(self._weight))
                self._count(begin, last)
                future.set_result(gradient)
        except Exception as error:  # handed to DDP, which raises it in backward
            future.set_exception(error)

    def _count(self, begin_s: float, last: bool) -> None:
        now_s = time.perf_counter()
        self.busy_s += now_s - begin_s
        if last and self._backward_end_s is not None:
            self.exposed_s += now_s - self._backward_end_s

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=True)


class WorldDataParallel(DataParallelWrapper):
    """Wraps what TorchRec does not shard in DDP over all ranks of all pools.

    With ``exchange`` None (one rank in all) there is nothing to sum and no wrapper.
    """

    def __init__(self, world_group: dist.ProcessGroup, exchange: DenseExchange | None) -> None:
        self._world_group = world_group
        self._exchange = exchange

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Called by TorchRec once the tables are sharded."""
        if self._exchange is None:
            return
        module = dmp._dmp_wrapped_module
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            module=module,
            params_and_buffers_to_ignore=set(
                DistributedModelParallel._sharded_parameter_names(module)
            ),
        )
        with warnings.catch_warnings():
            # Its successor would sync buffers once, and FBGEMM's differ between pools.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            wrapped = DistributedDataParallel(
                module,
                device_ids=None if device.type == "cpu" else [device],
                process_group=self._world_group,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
                static_graph=True,
                bucket_cap_mb=BUCKET_MIB,
            )
        exchange = self._exchange
        # DDP would compare annotations, which are text here.
        wrapped.register_comm_hook(None, lambda _state, bucket: exchange.start(bucket))
        dmp._dmp_wrapped_module = wrapped
