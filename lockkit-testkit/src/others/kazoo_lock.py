"""Takes and releases one lock with kazoo's Lock, as it is told on standard input.

Arguments: the servers, the session timeout in milliseconds, the path of the lock.
"""

import sys
import time

from kazoo.client import KazooClient
from kazoo.exceptions import LockTimeout
from kazoo.recipe.lock import Lock

client = KazooClient(hosts=sys.argv[1], timeout=int(sys.argv[2]) / 1000)
client.start()
lock = Lock(client, sys.argv[3], identifier="kazoo", extra_lock_patterns=["-lock-"])


def say(text):
    print(text, flush=True)


say("ready")
for order in sys.stdin:
    words = order.split()
    if words[0] == "acquire":
        try:
            say("acquired" if lock.acquire(timeout=int(words[1]) / 1000) else "refused")
        except LockTimeout:
            say("refused")
    elif words[0] == "release":
        lock.release()
        say("released")
    elif words[0] == "count":
        for _ in range(int(words[1])):
            with lock:
                with open(words[2]) as counter:
                    count = int(counter.read())
                time.sleep(0.001)
                with open(words[2], "w") as counter:
                    counter.write(str(count + 1))
        say("counted")
client.stop()
