"""Takes and releases one lock with kazoo's Lock, and leads by it with its Election, as it is told on standard input.

Arguments: the servers, the session timeout in milliseconds, the path of the lock.
"""

import sys
import threading
import time

from kazoo.client import KazooClient
from kazoo.exceptions import LockTimeout
from kazoo.recipe.election import Election
from kazoo.recipe.lock import Lock

client = KazooClient(hosts=sys.argv[1], timeout=int(sys.argv[2]) / 1000)
client.start()
lock = Lock(client, sys.argv[3], identifier="kazoo", extra_lock_patterns=["-lock-"])


def say(text):
    print(text, flush=True)


class Leader:
    """Leads from the moment in which it is elected until it is told to resign."""

    def __init__(self):
        self.elected, self.told = threading.Event(), threading.Event()
        self.election = Election(client, sys.argv[3], "another")
        # Its own lock heeds the nodes of kazoo alone.
        self.election.lock = Lock(client, sys.argv[3], identifier="another", extra_lock_patterns=["-lock-"])
        self.thread = threading.Thread(target=self.election.run, args=(self.lead,))
        self.thread.start()

    def lead(self):
        self.elected.set()
        self.told.wait()


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
    elif words[0] == "lead":
        leader = Leader()
        if leader.elected.wait(int(words[1]) / 1000):
            say("leads")
        else:
            leader.election.cancel()
            leader.thread.join()
            say("refused")
    elif words[0] == "resign":
        leader.told.set()
        leader.thread.join()
        say("resigned")
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
