"""Calls sluicegate's Lua script on Redis, with the same counters and decisions as the server. Needs redis-py.

    cargo run -p sluicegate --example print_script > sluicegate.lua
    python3 sluicegate.py redis://127.0.0.1:6379 sluicegate.lua < requests

Reads one request per line, as JSON, and prints a decision for each. A tier is one counter with its limit and cost:

    {"tiers": [{"values": ["user:42"], "algorithm": "sliding-log", "amount": 3, "window_ms": 60000}]}

Optional fields of a tier: "rule" (default: a key without rules), "burst", "cost". Optional field of a request: "operation", which is
check, peek, charge or refund.
"""

import hashlib
import json
import math
import string
import struct
import sys
import zlib

import redis

OPERATIONS = {"check": 0, "peek": 1, "charge": 2, "refund": 3}
ALGORITHMS = {"fixed-window": 1, "sliding-counter": 2, "token-bucket": 3, "sliding-log": 4}
PLAIN = (string.ascii_letters + string.digits + "-._").encode()
LONGEST_IDENTITY = 128


def encoded(value):
    return "".join(chr(byte) if byte in PLAIN else f"%{byte:02x}" for byte in value.encode())


def identity_of(values):
    """Joins the values of a rule's `per` labels; None is an absent label."""
    text = ",".join("!" if value is None else encoded(value) for value in values) if values else "*"
    return text if len(text) <= LONGEST_IDENTITY else "#" + hashlib.sha256(text.encode()).hexdigest()


def key_of(tier, prefix="sg"):
    identity = identity_of(tier["values"])
    rule = encoded(tier["rule"]) if tier.get("rule") else "!key"
    return f"{prefix}1:{{{zlib.crc32(identity.encode()):08x}}}:{tier['algorithm']}:{rule}:{identity}"


class Limit:
    """The limit and the cost of a tier, as the script expects them."""

    def __init__(self, tier):
        self.code = ALGORITHMS[tier["algorithm"]]
        self.amount, self.window = tier["amount"], tier["window_ms"] * 1000
        self.capacity, self.cost = tier.get("burst", self.amount), tier.get("cost", 1)
        common = math.gcd(self.amount, self.window)
        self.units, self.micros = self.amount // common, self.window // common

    def packed(self):
        phase = 0  # not 0 for rules with `stagger`
        return struct.pack(
            "<Bdddddd", self.code, self.amount, self.window, self.capacity, phase, self.units, self.micros
        )


class Sluicegate:
    def __init__(self, client, script):
        self.script = client.register_script(script)  # EVALSHA, and EVAL if the server does not have the script

    def decide(self, tiers, operation="check"):
        """Decides over all tiers, all or none."""
        tiers = sorted(tiers, key=lambda tier: tier["algorithm"] == "sliding-log")  # logs come last
        limits = [Limit(tier) for tier in tiers]
        others = sum(tier["algorithm"] != "sliding-log" for tier in tiers)
        header = struct.pack("<ddH", -1, -1, others)  # the clock of Redis, no deadline
        plan = struct.pack("<BBBHd", OPERATIONS[operation], 0, len(tiers), 1, -1)
        plan += b"".join(struct.pack("<BHd", 0, at + 1, limit.cost) for at, limit in enumerate(limits))
        plan += struct.pack(f"<I{len(tiers)}H", 1, *range(1, len(tiers) + 1))
        arguments = [header, b"".join(limit.packed() for limit in limits), plan]
        reply = self.script(keys=[key_of(tier) for tier in tiers], args=arguments)
        return self.decision(reply, tiers, limits, operation)

    def decision(self, reply, tiers, limits, operation):
        _, now, passed = struct.unpack_from("<Bdd", reply)
        if passed < 0:  # each tier has a full record at the end
            records = list(struct.iter_unpack("<IIddddd", reply[17 + 8 * len(tiers) :]))
            if any(wait == -2 for _, _, _, wait, _, _, _ in records):
                raise ValueError("the stored state of a counter cannot be read, nothing was charged")
            decisions = [by_record(limit, record) for limit, record in zip(limits, records)]
        else:
            levels = struct.unpack_from(f"<{len(tiers)}d", reply, 17)
            charged = passed if operation == "check" else 0
            decisions = [by_level(limit, level, charged, now) for limit, level in zip(limits, levels)]
        for tier, decision in zip(tiers, decisions):
            decision["rule"] = tier.get("rule")
        return {"allowed": all(tier["allowed"] for tier in decisions), "at_us": int(now), "tiers": decisions}


def by_record(limit, record):
    passes, _, free, wait, reset, _, _ = record
    return {
        "allowed": passes > 0,
        "limit": limit.capacity,
        "remaining": max(int(free), 0),
        "retry_after_us": int(wait) if wait > 0 else None,  # -1: never
        "reset_after_us": int(reset),
    }


def by_level(limit, level, charged, now):
    """Computes a decision from the previous level. Counters other than buckets were charged now."""
    if limit.code != ALGORITHMS["token-bucket"]:
        into = now % limit.window
        reset = {1: limit.window - into, 2: 2 * limit.window - into, 4: limit.window}[limit.code]
        used = level + limit.cost
        return by_record(limit, (1, 1, limit.capacity - used, 0, reset, 0, 0))
    # a level counts fractions of a unit: a unit is `micros`, and `units` drain per microsecond
    too_much = level - (limit.capacity - limit.cost) * limit.micros
    wait = -1 if limit.cost > limit.capacity else math.ceil(too_much / limit.units)
    level += charged * limit.cost * limit.micros
    free = limit.capacity - math.ceil(level / limit.micros)
    return by_record(limit, (too_much <= 0, charged, free, wait, math.ceil(level / limit.units), 0, 0))


def main():
    url, script = sys.argv[1:]
    with open(script) as file:
        sluicegate = Sluicegate(redis.Redis.from_url(url), file.read())
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(sluicegate.decide(**request)), flush=True)


if __name__ == "__main__":
    main()
