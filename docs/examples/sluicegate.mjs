// Asks Redis by sluicegate's script: the same counters and the same answers as the server. Needs ioredis.
//
//   cargo run -p sluicegate --example print_script > sluicegate.lua
//   node sluicegate.mjs redis://127.0.0.1:6379 sluicegate.lua < questions
//
// One question a line, as JSON; an answer for each. A tier is one counter and what is asked of it:
//
//   {"tiers": [{"values": ["user:42"], "algorithm": "sliding-log", "amount": 3, "window_ms": 60000}]}
//
// Also: "rule" (none: a key without rules), "burst", "cost", and beside the tiers "operation": check, peek, charge or refund.

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

// The values of a rule's `per`; null where a label is absent.
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

// A tier's limit, in the numbers that the script takes.
function numbersOf({ algorithm, amount, window_ms, burst = amount, cost = 1 }) {
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
    client.defineCommand("sluicegate", { lua: script }); // EVALSHA, and EVAL where the script is not known
    this.client = client;
  }

  // Decides over all tiers, all or none.
  async ask({ tiers, operation = "check" }) {
    const isLog = (tier) => tier.algorithm === "sliding-log";
    tiers = [...tiers].sort((one, other) => isLog(one) - isLog(other)); // keys of logs come last
    const limits = tiers.map(numbersOf);
    const others = tiers.filter((tier) => !isLog(tier)).length;
    const header = pack(["d", -1], ["d", -1], ["H", others]); // by Redis's clock, without a deadline
    const phase = 0; // other than 0 for rules with `stagger`
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
    return this.answer(reply, tiers, limits, operation);
  }

  answer(reply, tiers, limits, operation) {
    const now = reply.readDoubleLE(1);
    const passed = reply.readDoubleLE(9);
    const records = 17 + 8 * tiers.length;
    const answers = limits.map((limit, tier) => {
      if (passed >= 0) {
        return byLevel(limit, reply.readDoubleLE(17 + 8 * tier), operation === "check" ? passed : 0, now);
      }
      const at = records + 40 * tier; // the tiers are told in full, at the end
      const [free, wait, reset] = [8, 16, 24].map((offset) => reply.readDoubleLE(at + offset));
      return inFull(limit, reply.readUInt32LE(at) > 0, free, wait, reset);
    });
    answers.forEach((answer, tier) => (answer.rule = tiers[tier].rule ?? null));
    return { allowed: answers.every(({ allowed }) => allowed), at_us: now, tiers: answers };
  }
}

function inFull(limit, allowed, free, wait, reset) {
  return {
    allowed,
    limit: limit.capacity,
    remaining: Math.max(free, 0),
    retry_after_us: wait > 0 ? wait : null, // -1: never
    reset_after_us: reset,
  };
}

// What a counter means that held so much before. For anything but a bucket, it was charged just now.
function byLevel(limit, level, charged, now) {
  const { code, window, capacity, cost, units, micros } = limit;
  if (code !== ALGORITHMS["token-bucket"]) {
    const into = now % window;
    const reset = { 1: window - into, 2: 2 * window - into, 4: window }[code];
    return inFull(limit, true, capacity - level - cost, 0, reset);
  }
  // a level counts parts of a unit: `micros` to the unit, `units` of which drain in a microsecond
  const tooMuch = level - (capacity - cost) * micros;
  const wait = cost > capacity ? -1 : Math.ceil(tooMuch / units);
  level += charged * cost * micros;
  return inFull(limit, tooMuch <= 0, capacity - Math.ceil(level / micros), wait, Math.ceil(level / units));
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  const [url, script] = process.argv.slice(2);
  const client = new Redis(url);
  const sluicegate = new Sluicegate(client, readFileSync(script, "utf8"));
  for await (const line of createInterface({ input: process.stdin })) {
    console.log(JSON.stringify(await sluicegate.ask(JSON.parse(line))));
  }
  client.disconnect();
}
