/**
 * The failure policy `localBucket`: a token bucket per key in the memory of this process.
 *
 * A bucket is stored as the time at which it is full again (GCRA).
 */

import { parseDuration } from "./duration.js";
import { ConfigurationError } from "./errors.js";
import type { Cost, Request } from "./request.js";

/** The default size of the table. */
const DEFAULT_MAX_KEYS = 10_000;

/** How many of the least recently used buckets are examined for a full one when the table has no room. */
const EVICTION_SCAN = 8;

/** The bucket that new keys share while the table has no room. It cannot equal the key of a request. */
const OVERFLOW_KEY = "";

/** The settings of a local bucket. */
export interface LocalBucketOptions {
  /** The units per window that this process admits for each key. With several processes, use a share of the limit. */
  amount: number;
  /** The length of the window, for example `1m`. */
  window: string;
  /** The capacity of a bucket; equal to `amount` by default. */
  burst?: number;
  /** The labels that select the bucket, for example `["ip"]`; all labels by default. */
  per?: readonly string[];
  /** The unit that is counted; `requests` by default. */
  unit?: string;
  /** The most buckets; 10,000 by default. If all are in use, new keys share one bucket. */
  maxKeys?: number;
}

/** The decision of a local bucket. */
export interface LocalOutcome {
  allowed: boolean;
  limit: number;
  remaining: number;
  retryAfterMs: number | null;
  resetAfterMs: number;
  never: boolean;
}

/** A table of token buckets. */
export class LocalBucket {
  readonly #msPerUnit: number;
  readonly #capacity: number;
  readonly #per: readonly string[] | null;
  readonly #unit: string;
  readonly #maxKeys: number;
  /** For each key the time at which its bucket is full again; the least recently used first. */
  readonly #fullAtMs = new Map<string, number>();

  constructor({
    amount,
    window,
    burst = amount,
    per,
    unit = "requests",
    maxKeys = DEFAULT_MAX_KEYS,
  }: LocalBucketOptions) {
    const windowMs = parseDuration(window);
    if (windowMs === null) {
      throw new ConfigurationError(
        `localBucket: window ${JSON.stringify(window)} is not a duration: use for example "1m"`,
      );
    }
    for (const [name, value] of Object.entries({ amount, burst, maxKeys })) {
      if (!Number.isSafeInteger(value) || value < 1) {
        throw new ConfigurationError(`localBucket: ${name} ${value} is out of range: use a whole number from 1`);
      }
    }
    this.#msPerUnit = windowMs / amount;
    this.#capacity = burst;
    this.#per = per ?? null;
    this.#unit = unit;
    this.#maxKeys = maxKeys;
  }

  /** The number of buckets in the table. */
  get size(): number {
    return this.#fullAtMs.size;
  }

  /** Decides a request, and charges it if it is an allowed check. */
  decide(call: "check" | "peek", request: Request, nowMs: number): LocalOutcome {
    const cost = this.#costOf(request.cost);
    const key = this.#slotOf(this.#keyOf(request), nowMs);
    const fullAtMs = Math.max(nowMs, this.#fullAtMs.get(key) ?? nowMs);
    const fullAfterMs = fullAtMs + cost * this.#msPerUnit;
    // the bucket has room if it would be full again within the time that an empty one needs
    const waitMs = fullAfterMs - nowMs - this.#capacity * this.#msPerUnit;
    const never = cost > this.#capacity;
    const allowed = !never && waitMs <= ROUNDING_MS;
    const endMs = allowed && call === "check" ? fullAfterMs : fullAtMs;
    if (allowed && call === "check" && cost > 0) this.#store(key, fullAfterMs);
    const usedUnits = (endMs - nowMs) / this.#msPerUnit;
    return {
      allowed,
      limit: this.#capacity,
      remaining: Math.max(0, Math.floor(this.#capacity - usedUnits + ROUNDING_UNITS)),
      retryAfterMs: allowed || never ? null : Math.max(1, Math.ceil(waitMs)),
      resetAfterMs: Math.ceil(endMs - nowMs),
      never,
    };
  }

  #keyOf({ key, labels }: Request): string {
    if (key !== undefined) return `key:${key}`;
    const names = this.#per ?? Object.keys(labels).sort();
    return JSON.stringify(names.map((name) => [name, labels[name] ?? null]));
  }

  #costOf(cost: Cost | undefined): number {
    const units = typeof cost === "object" ? (cost[this.#unit] ?? 0) : (cost ?? 1);
    return Number.isSafeInteger(units) && units >= 0 ? units : 1;
  }

  /** Returns the key under which a bucket is stored. Only a full bucket is evicted, because its removal grants nothing. */
  #slotOf(key: string, nowMs: number): string {
    if (this.#fullAtMs.has(key) || this.#fullAtMs.size < this.#maxKeys) return key;
    let scanned = 0;
    for (const [oldest, fullAtMs] of this.#fullAtMs) {
      if (fullAtMs <= nowMs) {
        this.#fullAtMs.delete(oldest);
        return key;
      }
      scanned += 1;
      if (scanned === EVICTION_SCAN) break;
    }
    return OVERFLOW_KEY;
  }

  #store(key: string, fullAtMs: number): void {
    // deleted first, so that the key becomes the most recently used
    this.#fullAtMs.delete(key);
    this.#fullAtMs.set(key, fullAtMs);
  }
}

/** Tolerances for the rounding of floating-point numbers. */
const ROUNDING_MS = 1e-6;
const ROUNDING_UNITS = 1e-6;

/** Creates the failure policy that limits each key in the memory of this process. */
export function localBucket(options: LocalBucketOptions): LocalBucket {
  return new LocalBucket(options);
}
