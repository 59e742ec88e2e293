"""`python -m shoal.prefill_worker config.json`: one prefill worker as a plain process."""

import sys

from shoal.prefill_worker.worker import PrefillWorker
from shoal.rpc.standalone import main

if __name__ == "__main__":
    sys.exit(main(PrefillWorker, sys.argv[1:]))
