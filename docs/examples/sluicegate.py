"""Calls sluicegate's Lua script on Redis, with the same counters and decisions as the server. Needs redis-py.

    cargo run -p sluicegate --example print_script > sluicegate.lua
    python3 sluicegate.py redis://127.0.0.1:6379 sluicegate.lua < requests

Reads one request per line, as JSON, and prints a decision for each. A tier is one counter with its limit and cost:

    {"tiers": [{"values": ["user:42"], "algorithm": "sliding-log", "amount": 3, "window_ms": 60000}]}

Optional fields of a tier: "rule" (default: a key without rules), "burst", "cost", and for holds "max_excess" and "on_expiry". Optional
field of a request: "operation", which is check, peek, charge or refund; or hold, settle, release or renew, with the "id" of the hold and
"ttl_ms". A tier without "cost" keeps its estimate when its hold is settled. Tiers with the algorithm "concurrency" need a hold.
"""

import hashlib
import json
import math
import string
import struct
import sys
import zlib

import redis

OPERATIONS = {"check": 0, "peek": 1, "charge": 2, "refund": 3, "hold": 0, "settle": 4, "release": 4, "renew": 5}
ALGORITHMS = {"fixed-window": 1, "sliding-counter": 2, "token-bucket": 3, "sliding-log": 4, "concurrency": 6}
OUTCOMES = ["", "held", "repeated", "renewed", "settled", "already", "late", "unknown", "conflict", "full"]
# The outcomes of an operation on a hold, from the best to the worst.
WORST_LAST = ["settled", "released", "renewed", "already", "late", "unknown"]
KEEP_ESTIMATE, RELEASE_EXPIRED = 4, 8
DEFAULT_TTL_MS = 60_000
PLAIN = (string.ascii_letters + string.digits + "-._").encode()
LONGEST_IDENTITY = 128


def encoded(value):
    return "".join(chr(byte) if byte in PLAIN else f"%{byte:02x}" for byte in value.encode())


def identity_of(values):
    """Joins the values of a rule's `per` labels; None is an absent label."""
    text = ",".join("!" if value is None else encoded(value) for value in values) if values else "*"
    return text if len(text) <= LONGEST_IDENTITY else "#" + hashlib.sha256(text.encode()).hexdigest()


def key_of(tier, prefix="sg", kind=""):
    """Returns the key of a counter; with a kind, the key of the record of that kind."""
    identity = identity_of(tier["values"])
    rule = encoded(tier["rule"]) if tier.get("rule") else "!key"
    return f"{prefix}1:{{{zlib.crc32(identity.encode()):08x}}}:{kind}{tier['algorithm']}:{rule}:{identity}"


class Keys:
    """The keys of a call: strings, then sliding logs, then sorted sets. With holds, also their records and indexes."""

    def __init__(self, tiers, is_held, id):
        self.counters = [key_of(tier) for tier in tiers]
        self.records = [f"{key_of(tier, kind='hold:')}:{encoded(id)}" for tier in tiers] if id else []
        self.indexes = [key_of(tier, kind="holds:") if has_window(tier) else None for tier in tiers] if is_held else []
        kinds = {"sliding-log": 1, "concurrency": 2}
        parts = [[], [], []]
        for tier, counter in zip(tiers, self.counters):
            parts[kinds.get(tier["algorithm"], 0)].append(counter)
        parts[0] += self.records
        parts[2] += filter(None, self.indexes)
        self.names = [name for part in parts for name in part]
        self.before_logs = len(parts[0])
        self.before_sets = len(parts[0]) + len(parts[1])

    def place(self, name):
        """Returns the index of a key in KEYS, from 1; 0 if there is none."""
        return self.names.index(name) + 1 if name else 0


def has_window(tier):
    return tier["algorithm"] != "concurrency"


def releases(tier):
    """Returns whether a hold that expires is refunded."""
    return tier.get("on_expiry") == "release" or not has_window(tier)


class Limit:
    """The limit and the cost of a tier, as the script expects them."""

    def __init__(self, tier):
        self.code = ALGORITHMS[tier["algorithm"]]
        self.amount, self.window = tier["amount"], tier.get("window_ms", 0) * 1000
        self.capacity, self.cost = tier.get("burst", self.amount), tier.get("cost", 1)
        common = math.gcd(self.amount, self.window)
        self.units, self.micros = (self.amount // common, self.window // common) if self.window else (1, 1)

    def packed(self):
        phase = 0  # not 0 for rules with `stagger`
        return struct.pack(
            "<Bdddddd", self.code, self.amount, self.window, self.capacity, phase, self.units, self.micros
        )


class Sluicegate:
    def __init__(self, client, script):
        self.script = client.register_script(script)  # EVALSHA, and EVAL if the server does not have the script

    def decide(self, tiers, operation="check", id=None, ttl_ms=DEFAULT_TTL_MS):
        """Decides over all tiers, all or none; or settles, releases or renews the hold with this id."""
        if id is None and not all(map(has_window, tiers)):
            raise ValueError("concurrency counts requests in flight: use hold")
        # a check must refund expired holds of its counters first
        is_held = id is not None or (operation in ("check", "peek") and any(map(releases, tiers)))
        keys = Keys(tiers, is_held, id)
        limits = [Limit(tier) for tier in tiers]
        header = struct.pack("<ddHH", -1, -1, keys.before_logs, keys.before_sets)  # the clock of Redis, no deadline
        if is_held:
            plan = held_plan(tiers, limits, keys, operation, encoded(id or ""), ttl_ms)
        else:
            plan = struct.pack("<BBBHd", OPERATIONS[operation], 0, len(tiers), 1, -1)
            plan += b"".join(struct.pack("<BHd", 0, at + 1, limit.cost) for at, limit in enumerate(limits))
            plan += struct.pack(f"<I{len(tiers)}H", 1, *map(keys.place, keys.counters))
        arguments = [header, b"".join(limit.packed() for limit in limits), plan]
        reply = self.script(keys=keys.names, args=arguments)
        if not is_held:
            return self.decision(reply, tiers, limits, operation)
        # after the record of each tier is that of its hold: the reply without them is that of a check
        start = 17 + 8 * len(tiers)
        ends = [reply[at : at + 77] for at in range(start, len(reply), 77)]
        holds = [struct.unpack_from("<BIddd", end, 48) for end in ends]
        decision = self.decision(reply[:start] + b"".join(end[:48] for end in ends), tiers, limits, operation)
        if operation in ("check", "peek"):
            return decision
        return held(decision, holds, id) if operation == "hold" else settlement(decision, holds, operation)

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


def held_plan(tiers, limits, keys, operation, id, ttl_ms):
    """Returns the group of a check with holds."""
    plan = b""
    for at, (tier, limit) in enumerate(zip(tiers, limits)):
        keeps = operation == "settle" and "cost" not in tier
        flags = (KEEP_ESTIMATE if keeps else 0) + (RELEASE_EXPIRED if releases(tier) else 0)
        # a settlement uses the bound that was recorded with the hold
        excess = tier.get("max_excess", limit.capacity) if operation == "hold" else -1
        plan += struct.pack("<BHd", flags, at + 1, excess)
    ttl = ttl_ms * 1000 if operation in ("hold", "renew") else 0
    plan += struct.pack("<IdH", 1, ttl, len(id)) + id.encode()
    for limit, counter, index, record in zip(limits, keys.counters, keys.indexes, keys.records or [None] * len(tiers)):
        cost = 0 if operation in ("release", "renew") else limit.cost
        plan += struct.pack("<dHHH", cost, keys.place(counter), keys.place(index), keys.place(record))
    return struct.pack("<BBBHdI", OPERATIONS[operation], 3, len(tiers), 1, -1, len(plan)) + plan


def held(decision, holds, id):
    """Adds the hold to its decision."""
    outcomes = [OUTCOMES[code] for code, *_ in holds]
    if "conflict" in outcomes:
        raise ValueError(f"id {id} belongs to a hold with another cost, or to one that has ended")
    if "full" in outcomes:
        raise ValueError("a counter has too many live holds")
    made = [(int(at), int(expires)) for (_, _, at, expires, _), outcome in zip(holds, outcomes) if outcome]
    decision["id"], decision["repeated"] = id, "repeated" in outcomes
    if decision["repeated"]:  # the first response
        decision["at_us"] = max(at for at, _ in made)
    decision["expires_at_us"] = min(expires for _, expires in made) if decision["allowed"] else None
    return decision


def settlement(decision, holds, operation):
    """Returns the outcome of settling, releasing or renewing a hold."""
    tiers = []
    for tier, (code, _, _, expires, charged) in zip(decision["tiers"], holds):
        outcome = "released" if operation == "release" and OUTCOMES[code] == "settled" else OUTCOMES[code]
        is_known = outcome != "unknown"
        tiers.append({"rule": tier["rule"], "outcome": outcome, "charged": int(charged) if is_known else None})
        tiers[-1]["expires_at_us"] = int(expires) if is_known else None
    return {"outcome": max((tier["outcome"] for tier in tiers), key=WORST_LAST.index), "tiers": tiers}


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
