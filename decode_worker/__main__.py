"""`python -m shoal.decode_worker config.json`: one decode worker as a plain process."""

import sys

from shoal.decode_worker.worker import DecodeWorker
from shoal.rpc.standalone import main

if __name__ == "__main__":
    sys.exit(main(DecodeWorker, sys.argv[1:]))
