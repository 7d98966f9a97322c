"""A worker of a comparison whose locks are those of redis-py.

It reads its orders from standard input, a line of JSON each, and answers in the same way: worker/protocol.rs describes them.
"""

import json
import os
import sys
import threading
import time

import redis

# The clock of the moments, time.monotonic_ns, is one that all processes of the machine share.

# As long as a lease of the other workers lasts.
TTL = 10
# How long after the order all workers start, in nanoseconds. The moment itself is told on a clock that Python has on Linux only.
NOTICE = 30_000_000


def order():
    line = sys.stdin.readline()
    if not line:
        # Whoever gave the orders is gone.
        sys.exit(0)
    return json.loads(line)


def say(answer):
    print(json.dumps(answer), flush=True)


def nanos(duration):
    return duration["secs"] * 1_000_000_000 + duration["nanos"]


def pairs(lock, job):
    length = nanos(job["slice"])
    say("Ready")
    while order():
        acquire, release = [], []
        start = time.monotonic_ns() + length // 8
        while (sent := time.monotonic_ns()) < start + length:
            lock.acquire()
            acquired = time.monotonic_ns()
            lock.release()
            released = time.monotonic_ns()
            if sent >= start:
                acquire.append(acquired - sent)
                release.append(released - acquired)
        say({"Paired": {"acquire": acquire, "release": release}})
    say("Finished")


def take(lock, job):
    say("Ready")
    while order():
        lock.acquire()
        at = time.monotonic_ns()
        lock.release()
        say({"Took": {"at": at}})
    say("Finished")


def give(lock, job):
    say("Ready")
    while order():
        lock.acquire()
        say({"Took": {"at": time.monotonic_ns()}})
        order()
        at = time.monotonic_ns()
        lock.release()
        say({"Gave": {"at": at}})
    say("Finished")


def contend(client, job):
    file = os.open(job["file"], os.O_RDWR)
    counts, totals, failed = [], [], []
    say("Ready")
    order()
    start = time.monotonic_ns() + NOTICE
    since = start + nanos(job["warm_up"])
    until = since + nanos(job["length"])

    def one_task():
        # A lock of its own, as each task of the other workers has.
        lock, counted, total = client.lock(job["key"], timeout=TTL), 0, 0
        try:
            while time.monotonic_ns() < until:
                lock.acquire()
                # The count, and the fence that there is none of: two numbers of fixed width.
                count = int(os.pread(file, 20, 0)) + 1
                os.pwrite(file, b"%020d %020d\n" % (count, 0), 0)
                got = time.monotonic_ns()
                total += 1
                counted += since <= got < until
                lock.release()
        except Exception as error:
            failed.append(error)
        counts.append(counted)
        totals.append(total)

    while (left := start - time.monotonic_ns()) > 0:
        time.sleep(left / 1e9)
    tasks = [threading.Thread(target=one_task) for _ in range(job["tasks"])]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    if failed:
        raise failed[0]
    say({"Contended": {"counts": counts, "total": sum(totals), "out_of_turn": 0}})


assignment = order()
[(name, job)] = assignment["job"].items()
host, port = assignment["store"].rsplit(":", 1)
client = redis.Redis(host=host, port=int(port))
# So that the connection is up and the script is loaded.
with client.lock(f"warm-up/{os.getpid()}", timeout=TTL):
    pass
if name == "Contend":
    contend(client, job)
else:
    {"Pairs": pairs, "Take": take, "Give": give}[name](client.lock(job["key"], timeout=TTL), job)
