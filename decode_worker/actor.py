"""The Ray actor of a decode worker: a thin shell over DecodeWorker. Importing it loads neither Ray nor torch."""

from shoal.config.worker import Pool, WorkerConfig
from shoal.rpc.hosted import HostedWorker, Worker


class DecodeActor(HostedWorker):
    """Hosts one DecodeWorker in its own process. The controller makes a Ray actor class of it."""

    pool = Pool.DECODE

    def node_host(self) -> str:
        import ray  # here, as everything of Ray's: the class is also imported where there is none

        return str(ray.util.get_node_ip_address())

    def make_worker(self, config: WorkerConfig) -> Worker:
        from shoal.decode_worker.worker import DecodeWorker  # here: only the actor's own process needs torch

        return DecodeWorker(config, progress=self.report_progress)
