"""Takes and releases one lock with redis-py's Lock, as it is told on standard input.

Arguments: the server, the time to live in milliseconds, the key of the lock.
"""

import sys
import time

import redis

host, port = sys.argv[1].rsplit(":", 1)
client = redis.Redis(host=host, port=int(port))
# It is not woken, but asks again after each sleep.
lock = client.lock(sys.argv[3], timeout=int(sys.argv[2]) / 1000, sleep=0.01)


def say(text):
    print(text, flush=True)


client.ping()
say("ready")
for order in sys.stdin:
    words = order.split()
    if words[0] == "acquire":
        say("acquired" if lock.acquire(blocking_timeout=int(words[1]) / 1000) else "refused")
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
