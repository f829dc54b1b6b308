// Calls sluicegate's Lua script on Redis, with the same counters and decisions as the server. Needs ioredis.
//
//   cargo run -p sluicegate --example print_script > sluicegate.lua
//   node sluicegate.mjs redis://127.0.0.1:6379 sluicegate.lua < requests
//
// Reads one request per line, as JSON, and prints a decision for each. A tier is one counter with its limit and cost:
//
//   {"tiers": [{"values": ["user:42"], "algorithm": "sliding-log", "amount": 3, "window_ms": 60000}]}
//
// Optional fields of a tier: "rule" (default: a key without rules), "burst", "cost", and for holds "max_excess" and "on_expiry".
// Optional field of a request: "operation", which is check, peek, charge or refund; or hold, settle, release or renew, with the "id"
// of the hold and "ttl_ms". A tier without "cost" keeps its estimate when its hold is settled. Tiers with the algorithm "concurrency"
// need a hold.

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";
import Redis from "ioredis";

const OPERATIONS = { check: 0, peek: 1, charge: 2, refund: 3, hold: 0, settle: 4, release: 4, renew: 5 };
const ALGORITHMS = { "fixed-window": 1, "sliding-counter": 2, "token-bucket": 3, "sliding-log": 4, concurrency: 6 };
const OUTCOMES = ["", "held", "repeated", "renewed", "settled", "already", "late", "unknown", "conflict", "full"];
// The outcomes of an operation on a hold, from the best to the worst.
const WORST_LAST = ["settled", "released", "renewed", "already", "late", "unknown"];
const [KEEP_ESTIMATE, RELEASE_EXPIRED] = [4, 8];
const DEFAULT_TTL_MS = 60_000;
const LONGEST_IDENTITY = 128;

const encoded = (value) =>
  Array.from(Buffer.from(value), (byte) => {
    const char = String.fromCharCode(byte);
    return /[A-Za-z0-9._-]/.test(char) ? char : `%${byte.toString(16).padStart(2, "0")}`;
  }).join("");

// Joins the values of a rule's `per` labels; null is an absent label.
function identityOf(values) {
  const text = values.length ? values.map((value) => (value === null ? "!" : encoded(value))).join(",") : "*";
  return text.length <= LONGEST_IDENTITY ? text : `#${createHash("sha256").update(text).digest("hex")}`;
}

function crc32(text) {
  let crc = ~0;
  for (const byte of Buffer.from(text)) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return (~crc >>> 0).toString(16).padStart(8, "0");
}

// Returns the key of a counter; with a kind, the key of the record of that kind.
export function keyOf({ rule, values, algorithm }, prefix = "sg", kind = "") {
  const identity = identityOf(values);
  return `${prefix}1:{${crc32(identity)}}:${kind}${algorithm}:${rule ? encoded(rule) : "!key"}:${identity}`;
}

const hasWindow = ({ algorithm }) => algorithm !== "concurrency";

// Returns whether a hold that expires is refunded.
const releases = (tier) => tier.on_expiry === "release" || !hasWindow(tier);

// The keys of a call: strings, then sliding logs, then sorted sets. With holds, also their records and indexes.
class Keys {
  constructor(tiers, isHeld, id) {
    this.counters = tiers.map((tier) => keyOf(tier));
    this.records = tiers.map((tier) => (id ? `${keyOf(tier, "sg", "hold:")}:${encoded(id)}` : null));
    this.indexes = tiers.map((tier) => (isHeld && hasWindow(tier) ? keyOf(tier, "sg", "holds:") : null));
    const countersOf = (isOfKind) => this.counters.filter((_, at) => isOfKind(tiers[at].algorithm));
    const isString = (algorithm) => algorithm !== "sliding-log" && algorithm !== "concurrency";
    const strings = [...countersOf(isString), ...this.records.filter(Boolean)];
    const logs = countersOf((algorithm) => algorithm === "sliding-log");
    const sets = [...countersOf((algorithm) => algorithm === "concurrency"), ...this.indexes.filter(Boolean)];
    this.names = [...strings, ...logs, ...sets];
    this.beforeLogs = strings.length;
    this.beforeSets = strings.length + logs.length;
  }

  // Returns the index of a key in KEYS, from 1; 0 if there is none.
  place(name) {
    return this.names.indexOf(name) + 1;
  }
}

const gcd = (a, b) => (b === 0 ? a : gcd(b, a % b));

// The limit and the cost of a tier, as the script expects them.
function limitOf({ algorithm, amount, window_ms = 0, burst = amount, cost = 1 }) {
  const window = window_ms * 1000;
  const common = gcd(amount, window);
  const [units, micros] = window === 0 ? [1, 1] : [amount / common, window / common];
  return { code: ALGORITHMS[algorithm], amount, window, capacity: burst, cost, units, micros };
}

// Packs numbers as `struct` does, without padding: B, H and I are unsigned, d is a double.
function pack(...fields) {
  const size = { B: 1, H: 2, I: 4, d: 8 };
  const bytes = Buffer.alloc(fields.reduce((sum, [kind]) => sum + size[kind], 0));
  let at = 0;
  for (const [kind, number] of fields) {
    if (kind === "d") bytes.writeDoubleLE(number, at);
    else bytes.writeUIntLE(number, at, size[kind]);
    at += size[kind];
  }
  return bytes;
}

export class Sluicegate {
  constructor(client, script) {
    client.defineCommand("sluicegate", { lua: script }); // EVALSHA, and EVAL if the server does not have the script
    this.client = client;
  }

  // Decides over all tiers, all or none; or settles, releases or renews the hold with this id.
  async decide({ tiers, operation = "check", id, ttl_ms = DEFAULT_TTL_MS }) {
    if (id === undefined && !tiers.every(hasWindow)) throw new Error("concurrency counts requests in flight: use hold");
    // a check must refund expired holds of its counters first
    const isDecision = operation === "check" || operation === "peek";
    const isHeld = id !== undefined || (isDecision && tiers.some(releases));
    const keys = new Keys(tiers, isHeld, id);
    const limits = tiers.map(limitOf);
    // the clock of Redis, no deadline
    const header = pack(["d", -1], ["d", -1], ["H", keys.beforeLogs], ["H", keys.beforeSets]);
    const phase = 0; // not 0 for rules with `stagger`
    const table = limits.map(({ code, amount, window, capacity, units, micros }) =>
      pack(["B", code], ...[amount, window, capacity, phase, units, micros].map((number) => ["d", number])),
    );
    const path = isHeld ? 3 : 0;
    const group = pack(["B", OPERATIONS[operation]], ["B", path], ["B", tiers.length], ["H", 1], ["d", -1]);
    const checks = isHeld
      ? heldChecks(tiers, limits, keys, operation, encoded(id ?? ""), ttl_ms)
      : Buffer.concat([
          ...limits.map(({ cost }, at) => pack(["B", 0], ["H", at + 1], ["d", cost])),
          pack(["I", 1], ...keys.counters.map((counter) => ["H", keys.place(counter)])),
        ]);
    const plan = Buffer.concat([group, checks]);
    const { names } = keys;
    const reply = await this.client.sluicegateBuffer(names.length, ...names, header, Buffer.concat(table), plan);
    if (!isHeld) return this.decision(reply, tiers, limits, operation);
    // the record of each tier is followed by the record of its hold; without those, the reply is that of a check
    const start = 17 + 8 * tiers.length;
    const ends = tiers.map((_, at) => reply.subarray(start + 77 * at, start + 77 * (at + 1)));
    const records = ends.map((end) => end.subarray(0, 48));
    const decision = this.decision(Buffer.concat([reply.subarray(0, start), ...records]), tiers, limits, operation);
    if (isDecision) return decision;
    const holds = ends.map((end) => ({
      outcome: OUTCOMES[end[48]],
      at_us: end.readDoubleLE(53),
      expires_at_us: end.readDoubleLE(61),
      charged: end.readDoubleLE(69),
    }));
    return operation === "hold" ? held(decision, holds, id) : settlement(decision, holds, operation);
  }

  decision(reply, tiers, limits, operation) {
    const now = reply.readDoubleLE(1);
    const passed = reply.readDoubleLE(9);
    const records = 17 + 8 * tiers.length;
    const decisions = limits.map((limit, tier) => {
      if (passed >= 0) {
        return byLevel(limit, reply.readDoubleLE(17 + 8 * tier), operation === "check" ? passed : 0, now);
      }
      const at = records + 48 * tier; // each tier has a full record at the end
      const [free, wait, reset] = [8, 16, 24].map((offset) => reply.readDoubleLE(at + offset));
      if (wait === -2) throw new Error("the stored state of a counter cannot be read, nothing was charged");
      return byRecord(limit, reply.readUInt32LE(at) > 0, free, wait, reset);
    });
    decisions.forEach((decision, tier) => (decision.rule = tiers[tier].rule ?? null));
    return { allowed: decisions.every(({ allowed }) => allowed), at_us: now, tiers: decisions };
  }
}

// Returns the tiers and the check of a group with holds.
function heldChecks(tiers, limits, keys, operation, id, ttlMs) {
  const terms = tiers.map((tier, at) => {
    const keeps = operation === "settle" && tier.cost === undefined;
    const flags = (keeps ? KEEP_ESTIMATE : 0) + (releases(tier) ? RELEASE_EXPIRED : 0);
    // a settlement uses the bound that was recorded with the hold
    const excess = operation === "hold" ? (tier.max_excess ?? limits[at].capacity) : -1;
    return pack(["B", flags], ["H", at + 1], ["d", excess]);
  });
  const ttl = operation === "hold" || operation === "renew" ? ttlMs * 1000 : 0;
  const { counters, indexes, records } = keys;
  const places = counters.flatMap((counter, at) => {
    const cost = operation === "release" || operation === "renew" ? 0 : limits[at].cost;
    return [["d", cost], ...[counter, indexes[at], records[at]].map((name) => ["H", keys.place(name)])];
  });
  const body = Buffer.concat([...terms, pack(["I", 1], ["d", ttl], ["H", id.length]), Buffer.from(id), pack(...places)]);
  return Buffer.concat([pack(["I", body.length]), body]);
}

// Adds the hold to its decision.
function held(decision, holds, id) {
  const has = (name) => holds.some(({ outcome }) => outcome === name);
  if (has("conflict")) throw new Error(`id ${id} belongs to a hold with another cost, or to one that has ended`);
  if (has("full")) throw new Error("a counter has too many live holds");
  const made = holds.filter(({ outcome }) => outcome !== "");
  const repeated = has("repeated");
  const at_us = repeated ? Math.max(...made.map((hold) => hold.at_us)) : decision.at_us; // repeated: the first response
  const expires_at_us = decision.allowed ? Math.min(...made.map((hold) => hold.expires_at_us)) : null;
  return { ...decision, at_us, id, repeated, expires_at_us };
}

// Returns the outcome of settling, releasing or renewing a hold.
function settlement(decision, holds, operation) {
  const tiers = holds.map(({ outcome, charged, expires_at_us }, at) => {
    const { rule } = decision.tiers[at];
    if (outcome === "unknown") return { rule, outcome, charged: null, expires_at_us: null };
    const isReleased = operation === "release" && outcome === "settled";
    return { rule, outcome: isReleased ? "released" : outcome, charged, expires_at_us };
  });
  const worst = Math.max(...tiers.map(({ outcome }) => WORST_LAST.indexOf(outcome)));
  return { outcome: WORST_LAST[worst], tiers };
}

function byRecord(limit, allowed, free, wait, reset) {
  return {
    allowed,
    limit: limit.capacity,
    remaining: Math.max(free, 0),
    retry_after_us: wait > 0 ? wait : null, // -1: never
    reset_after_us: reset,
  };
}

// Computes a decision from the previous level. Counters other than buckets were charged now.
function byLevel(limit, level, charged, now) {
  const { code, window, capacity, cost, units, micros } = limit;
  if (code !== ALGORITHMS["token-bucket"]) {
    const into = now % window;
    const reset = { 1: window - into, 2: 2 * window - into, 4: window }[code];
    return byRecord(limit, true, capacity - level - cost, 0, reset);
  }
  // a level counts fractions of a unit: a unit is `micros`, and `units` drain per microsecond
  const tooMuch = level - (capacity - cost) * micros;
  const wait = cost > capacity ? -1 : Math.ceil(tooMuch / units);
  level += charged * cost * micros;
  return byRecord(limit, tooMuch <= 0, capacity - Math.ceil(level / micros), wait, Math.ceil(level / units));
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  const [url, script] = process.argv.slice(2);
  const client = new Redis(url);
  const sluicegate = new Sluicegate(client, readFileSync(script, "utf8"));
  for await (const line of createInterface({ input: process.stdin })) {
    console.log(JSON.stringify(await sluicegate.decide(JSON.parse(line))));
  }
  client.disconnect();
}
