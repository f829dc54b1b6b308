// Calls sluicegate's Lua script on Redis, with the same counters and decisions as the server. Needs ioredis.
//
//   cargo run -p sluicegate --example print_script > sluicegate.lua
//   node sluicegate.mjs redis://127.0.0.1:6379 sluicegate.lua < requests
//
// Reads one request per line, as JSON, and prints a decision for each. A tier is one counter with its limit and cost:
//
//   {"tiers": [{"values": ["user:42"], "algorithm": "sliding-log", "amount": 3, "window_ms": 60000}]}
//
// Optional fields of a tier: "rule" (default: a key without rules), "burst", "cost". Optional field of a request: "operation", which
// is check, peek, charge or refund.

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";
import Redis from "ioredis";

const OPERATIONS = { check: 0, peek: 1, charge: 2, refund: 3 };
const ALGORITHMS = { "fixed-window": 1, "sliding-counter": 2, "token-bucket": 3, "sliding-log": 4 };
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

export function keyOf({ rule, values, algorithm }, prefix = "sg") {
  const identity = identityOf(values);
  return `${prefix}1:{${crc32(identity)}}:${algorithm}:${rule ? encoded(rule) : "!key"}:${identity}`;
}

const gcd = (a, b) => (b === 0 ? a : gcd(b, a % b));

// The limit and the cost of a tier, as the script expects them.
function limitOf({ algorithm, amount, window_ms, burst = amount, cost = 1 }) {
  const window = window_ms * 1000;
  const common = gcd(amount, window);
  return { code: ALGORITHMS[algorithm], amount, window, capacity: burst, cost, units: amount / common, micros: window / common };
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

  // Decides over all tiers, all or none.
  async decide({ tiers, operation = "check" }) {
    const isLog = (tier) => tier.algorithm === "sliding-log";
    tiers = [...tiers].sort((one, other) => isLog(one) - isLog(other)); // logs come last
    const limits = tiers.map(limitOf);
    const others = tiers.filter((tier) => !isLog(tier)).length;
    const header = pack(["d", -1], ["d", -1], ["H", others]); // the clock of Redis, no deadline
    const phase = 0; // not 0 for rules with `stagger`
    const table = limits.map(({ code, amount, window, capacity, units, micros }) =>
      pack(["B", code], ...[amount, window, capacity, phase, units, micros].map((number) => ["d", number])),
    );
    const plan = [
      pack(["B", OPERATIONS[operation]], ["B", 0], ["B", tiers.length], ["H", 1], ["d", -1]),
      ...limits.map(({ cost }, at) => pack(["B", 0], ["H", at + 1], ["d", cost])),
      pack(["I", 1], ...tiers.map((_, at) => ["H", at + 1])),
    ];
    const keys = tiers.map((tier) => keyOf(tier));
    const reply = await this.client.sluicegateBuffer(keys.length, ...keys, header, Buffer.concat(table), Buffer.concat(plan));
    return this.decision(reply, tiers, limits, operation);
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
