"""What a worker reports of its queue and its pace, for routers to predict a wait from. Knows the public message."""

from shoal.engine.holdings import HoldingQueue
from shoal.pb.v1 import shoal_pb2
from shoal.placement.rates import WorkRate


def report_queue(load: shoal_pb2.WorkerLoad, holdings: HoldingQueue, rate: WorkRate) -> None:
    """Fill in blocks, holders, who waits by class, and how fast things move."""
    load.num_used_blocks = holdings.blocks.num_used
    load.num_total_blocks = holdings.blocks.num_blocks
    load.num_reservations = holdings.num_holders
    load.num_waiting_reqs = holdings.num_waiting
    for priority, (num_requests, num_blocks) in holdings.waiters.waiting().items():
        if num_requests:
            load.waiting.add(priority=priority, num_requests=num_requests, num_blocks=num_blocks)
    load.max_reservations = holdings.max_holders
    load.mean_hold_s = holdings.mean_hold_s
    load.token_layers_per_s = rate.per_s
