"""A driver for the process tests: holds a lease (and, when asked, a cluster) until it is told to end.

``python -m tests.integration.stack_driver <state_dir> [--cluster] [--work-pool NAME]`` prints a line of JSON then.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from contextlib import ExitStack

from resources.hardware import HardwareClass, PoolsConfig
from resources.pools.cluster import embedded_cluster
from resources.pools.local_stack import local_stack

CONFIG = PoolsConfig(
    classes={
        "compute": HardwareClass(role="engine"),
        "learner": HardwareClass(role="learner", num_workers=0),
        "cpu": HardwareClass(role="environment", num_workers=0),
        "control": HardwareClass(role="control", num_workers=0),
    }
)


def main(arguments: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    work_pools = {arguments[arguments.index("--work-pool") + 1]: 1} if "--work-pool" in arguments else {}
    with ExitStack() as opened:
        stack = opened.enter_context(local_stack(arguments[0], work_pools=work_pools))
        if "--cluster" in arguments:
            opened.enter_context(embedded_cluster(CONFIG))
        print(json.dumps({"api_url": stack.api_url, "supervisor": stack.supervisor_pid}), flush=True)
        time.sleep(120)


if __name__ == "__main__":
    main(sys.argv[1:])
