"""What a worker reports of its queue, pace and work: routers predict a wait from it, the controller a need. Knows messages."""

from collections.abc import Iterable

from shoal.engine.holdings import HoldingQueue
from shoal.pb.internal.v1 import worker_pb2
from shoal.pb.v1 import shoal_pb2
from shoal.placement.rates import WorkRate
from shoal.placement.tally import Tally
from shoal.types import Priority, Turn


def report_queue(
    load: shoal_pb2.WorkerLoad, holdings: HoldingQueue, rate: WorkRate, outstanding: Iterable[tuple[Turn, int]]
) -> None:
    """Fill in blocks, holders, what each class has before it, and the pace. `outstanding`: each request's token-layers."""
    load.num_used_blocks = holdings.blocks.num_used
    load.num_cached_blocks = holdings.blocks.num_cached
    load.num_total_blocks = holdings.blocks.num_blocks
    load.num_reservations = holdings.num_holders
    load.num_waiting_reqs = holdings.num_waiting
    token_layers = dict.fromkeys(Priority, 0)
    for turn, num_token_layers in outstanding:
        token_layers[turn.priority] += num_token_layers
    load.outstanding_token_layers = sum(token_layers.values())
    for priority, (num_requests, num_blocks) in holdings.waiters.waiting().items():
        if num_requests or token_layers[priority]:
            load.classes.add(
                priority=priority,
                num_waiting_reqs=num_requests,
                num_waiting_blocks=num_blocks,
                outstanding_token_layers=token_layers[priority],
            )
    load.max_reservations = holdings.max_holders
    load.mean_hold_s = holdings.mean_hold_s
    load.token_layers_per_s = rate.per_s


def work_report(load: shoal_pb2.WorkerLoad, tally: Tally | None) -> worker_pb2.WorkReport:
    """The load, and what has been done since the start; no `tally` before the model is loaded."""
    if tally is None:
        return worker_pb2.WorkReport(load=load)
    return worker_pb2.WorkReport(
        load=load,
        num_arrived_reqs=tally.num_arrived,
        prompts_by_size=tally.prompts.by_size,
        prompt_tokens=tally.prompts.total,
        answers_by_size=tally.answers.by_size,
        answer_tokens=tally.answers.total,
        num_steps=tally.num_steps,
        step_s=tally.step_s,
        step_reqs=tally.step_reqs,
        step_tokens=tally.step_tokens,
    )
