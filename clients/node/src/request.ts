/**
 * Requests: their types, their validation and their JSON.
 *
 * The server validates everything. This module rejects only what JSON or the size limits of the server would hide.
 */

import { InvalidRequestError } from "./errors.js";

/** The most checks of one `checkMany`. */
export const MAX_CHECKS = 1000;

/** The largest body of a single request, and of several checks, in bytes. The limits of the server. */
const MAX_BODY_BYTES = 64 * 1024;
const MAX_BATCH_BODY_BYTES = 1024 * 1024;

/** The longest value of a label, and the longest key, in bytes. */
export const MAX_VALUE_BYTES = 1024;

/** The algorithm of a limit. */
export type Algorithm = "token-bucket" | "sliding-log" | "sliding-counter" | "fixed-window" | "concurrency" | "gcra";

/** A limit that the application sets, without a rule on the server. */
export interface Limit {
  /** The units per window. */
  amount: number;
  /**
   * The length of the window: `250ms`, `30s`, `5m`, `1h30m`, `7d`. For `fixed-window` also a period of the calendar: `1 day`,
   * `1 week`, `1 month`, `1 quarter`, `1 year`. Not for `concurrency`, which limits requests in flight.
   */
  window?: string;
  /** The algorithm; `token-bucket` by default. */
  algorithm?: Algorithm;
  /** The capacity of a token bucket; equal to `amount` by default. */
  burst?: number;
  /** The time zone of a calendar window, for example `Europe/Berlin`; UTC by default. */
  zone?: string;
  /** The first day of a calendar window: a day of the month, or a weekday for `1 week`. */
  anchor?: number | string;
  /** How much of the limit the server may charge in advance for a hot key: `1%`, or a number of units. */
  lease?: string | number;
  /** Whether the estimate of a hold that expires stays charged (the default) or is refunded. */
  on_expiry?: "charge" | "release";
  /** How much the actual cost of a hold may exceed its estimate; the capacity by default. */
  max_excess?: number;
}

/** The attributes of a request. A label that is undefined or null is absent. */
export type Labels = Readonly<Record<string, string | number | boolean | undefined | null>>;

/** A number of requests, or one number per unit: `{ requests: 1, tokens: 850 }`. */
export type Cost = number | Readonly<Record<string, number>>;

/** A request that the rules of the server decide. */
export interface LabelsRequest {
  labels: Labels;
  /** One request by default. */
  cost?: Cost;
  key?: never;
  limit?: never;
}

/** A request for one counter, with its limit. */
export interface KeyRequest {
  key: string;
  limit: Limit;
  /** 1 by default. */
  cost?: number;
  labels?: never;
}

/** A request: labels for the rules of the server, or a key and a limit. */
export type Request = LabelsRequest | KeyRequest;

/** Selects rules for a charge, refund or reset with labels. */
export interface RuleSelection {
  /** Only these rules. */
  rules?: readonly string[];
}

/** A charge of usage that is known only afterwards. */
export type ChargeRequest = (LabelsRequest & RuleSelection) | KeyRequest;

/** A refund. */
export type RefundRequest = ChargeRequest & {
  /** The time of the charge to refund: `atUs` of its decision. Without it, the newest charges are refunded. */
  atUs?: number;
};

/** A reset: deletes the counters of the labels, or of the key. */
export type ResetRequest =
  | (Omit<LabelsRequest, "cost"> & RuleSelection & { /** Resets all rules that match. */ all?: boolean })
  | Omit<KeyRequest, "cost">;

/** The JSON of a request, before it is serialized. */
export type RequestBody = Record<string, unknown>;

/** A request with the fields of all calls. */
type AnyRequest = Partial<{
  labels: Labels;
  key: string;
  limit: Limit;
  cost: Cost;
  rules: readonly string[];
  all: boolean;
  atUs: number;
}>;

/** Converts a request to its JSON. */
export function requestBody(request: Request | ChargeRequest | RefundRequest | ResetRequest): RequestBody {
  if (typeof request !== "object" || request === null) {
    throw new InvalidRequestError("the request is not an object: pass { labels } or { key, limit }");
  }
  const { labels, key, limit, cost, rules, all, atUs }: AnyRequest = request;
  if ((labels === undefined) === (key === undefined)) {
    throw new InvalidRequestError("the request needs either labels, or key and limit");
  }
  const body: RequestBody = {};
  if (labels !== undefined) body.labels = presentLabels(labels);
  if (key !== undefined) {
    if (typeof key !== "string") throw new InvalidRequestError(`key is ${describe(key)}: pass a string`);
    if (limit === undefined) {
      throw new InvalidRequestError('key has no limit: pass one, for example { amount: 100, window: "1m" }');
    }
    body.key = key;
    body.limit = limitBody(limit);
  }
  if (cost !== undefined) body.cost = costBody(cost);
  if (rules !== undefined) body.rules = rules;
  if (all !== undefined) body.all = all;
  if (atUs !== undefined) body.at_us = wholeNumber("atUs", atUs);
  return body;
}

/** Serializes a body, and rejects one that is too large for the server. */
export function serialize(body: RequestBody): string {
  const text = JSON.stringify(body);
  const most = body.checks === undefined ? MAX_BODY_BYTES : MAX_BATCH_BODY_BYTES;
  // a character has at most 3 bytes per UTF-16 unit, so most requests need not be measured
  if (text.length * 3 > most && Buffer.byteLength(text) > most) {
    throw new InvalidRequestError(`the request has ${Buffer.byteLength(text)} bytes: send at most ${most}`);
  }
  return text;
}

function presentLabels(labels: Labels): Record<string, string> {
  if (typeof labels !== "object" || labels === null || Array.isArray(labels)) {
    throw new InvalidRequestError(`labels is ${describe(labels)}: pass an object, for example { route: "login" }`);
  }
  // without a prototype, a label can have any name
  const present: Record<string, string> = Object.create(null);
  for (const [name, value] of Object.entries(labels)) {
    if (value === undefined || value === null) continue;
    if (typeof value === "object" || typeof value === "function" || typeof value === "symbol") {
      throw new InvalidRequestError(`label ${name} is ${describe(value)}: pass a string, a number or a boolean`);
    }
    present[name] = String(value);
  }
  return present;
}

function limitBody(limit: Limit): RequestBody {
  if (typeof limit !== "object" || limit === null) {
    throw new InvalidRequestError(
      `limit is ${describe(limit)}: pass an object, for example { amount: 100, window: "1m" }`,
    );
  }
  const { amount, window, algorithm, burst, zone, anchor, lease, on_expiry, max_excess } = limit;
  const body: RequestBody = { amount: wholeNumber("limit.amount", amount) };
  if (window !== undefined) body.window = window;
  if (algorithm !== undefined) body.algorithm = algorithm;
  if (burst !== undefined) body.burst = wholeNumber("limit.burst", burst);
  if (zone !== undefined) body.zone = zone;
  if (anchor !== undefined) body.anchor = anchor;
  if (lease !== undefined) body.lease = lease;
  if (on_expiry !== undefined) body.on_expiry = on_expiry;
  if (max_excess !== undefined) body.max_excess = wholeNumber("limit.max_excess", max_excess);
  return body;
}

/** Converts a cost to its JSON. */
export function costBody(cost: Cost): Cost {
  if (typeof cost === "object" && cost !== null && !Array.isArray(cost)) {
    for (const [unit, number] of Object.entries(cost)) wholeNumber(`cost.${unit}`, number);
    return cost;
  }
  return wholeNumber("cost", cost as number);
}

/** Returns a number that JSON can represent exactly. `NaN`, for example, would be serialized as `null`. */
function wholeNumber(name: string, value: number): number {
  if (!Number.isSafeInteger(value) || value < 0) {
    throw new InvalidRequestError(
      `${name} is ${describe(value)}: pass a whole number from 0 to ${Number.MAX_SAFE_INTEGER}`,
    );
  }
  return value;
}

/** Describes a value for an error message, without its content if it is an object. */
export function describe(value: unknown): string {
  if (value === null) return "null";
  if (Array.isArray(value)) return "an array";
  if (typeof value === "string") return JSON.stringify(value.slice(0, 40));
  return typeof value === "number" || typeof value === "boolean" ? String(value) : `of type ${typeof value}`;
}
