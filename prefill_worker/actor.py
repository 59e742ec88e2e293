"""The Ray actor of a prefill worker: a thin shell over PrefillWorker. Importing it loads neither Ray nor torch."""

from shoal.config.worker import Pool, WorkerConfig
from shoal.errors import Unavailable
from shoal.pb.internal.v1 import worker_pb2
from shoal.rpc.hosted import HostedWorker, Worker


class PrefillActor(HostedWorker):
    """Hosts one PrefillWorker in its own process. The controller makes a Ray actor class of it."""

    pool = Pool.PREFILL

    def node_host(self) -> str:
        import ray  # here, as everything of Ray's: the class is also imported where there is none

        return str(ray.util.get_node_ip_address())

    def make_worker(self, config: WorkerConfig) -> Worker:
        from shoal.prefill_worker.worker import PrefillWorker  # here: only the actor's own process needs torch

        self._prefill = PrefillWorker(config, progress=self.report_progress)
        return self._prefill

    async def prewarm(self, description: bytes) -> None:
        """Connect to a decode worker (a serialised WorkerDescription) ahead of its first transfer."""
        from shoal.kv_transfer import DecodeTarget

        if not self.is_ready:
            raise Unavailable("the prefill worker is not ready")
        decode = worker_pb2.WorkerDescription.FromString(description)
        await self._prefill.prewarm(DecodeTarget(decode.address, decode.worker_id, decode.epoch))
