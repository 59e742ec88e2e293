"""The Ray actor of a prefill worker: a thin shell over PrefillWorker. Importing it loads neither Ray nor torch."""

from shoal.config.worker import Pool, WorkerConfig
from shoal.rpc.hosted import HostedWorker, Worker


class PrefillActor(HostedWorker):
    """Hosts one PrefillWorker in its own process. The controller makes a Ray actor class of it."""

    pool = Pool.PREFILL

    def make_worker(self, config: WorkerConfig) -> Worker:
        from shoal.prefill_worker.worker import PrefillWorker  # here: only the actor's own process needs torch

        return PrefillWorker(config, progress=self.report_progress)
