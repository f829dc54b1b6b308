/**
 * The requests of holds: to make one, and to settle, release or renew it.
 */

import { randomUUID } from "node:crypto";
import { type Decision, readDecision } from "./decision.js";
import { InvalidRequestError } from "./errors.js";
import {
  type Cost,
  costBody,
  describe,
  type KeyRequest,
  type LabelsRequest,
  type Request,
  type RequestBody,
  requestBody,
} from "./request.js";

/** The longest id in bytes, and the range of a time to live. The limits of the server. */
const MAX_ID_BYTES = 128;
const MAX_TTL_MS = 24 * 60 * 60 * 1000;

/** Identifies a hold: its token, or the labels or the key of its request, with its id. */
export type HoldReference =
  | { token: string; labels?: never; key?: never; limit?: never; id?: never }
  | (Omit<LabelsRequest, "cost"> & { id: string; token?: never })
  | (Omit<KeyRequest, "cost"> & { id: string; token?: never });

/** A reference with all fields. */
type AnyReference = Partial<{ token: unknown; id: unknown; cost: unknown; ttlMs: unknown }>;

/** The answer to a hold. */
export interface HoldAnswer {
  decision: Decision;
  id: string;
  token: string | null;
  expiresAtUs: number | null;
  isRepeated: boolean;
  /** Identifies the hold on the server; null if there is none. */
  reference: RequestBody | null;
  /** The time from the hold to its expiry; null if it is unknown. */
  ttlMs: number | null;
}

/** A call that settles, releases or renews a hold. */
export interface HoldAdjustment {
  operation: "settle" | "release" | "renew";
  body: RequestBody;
}

/** Returns the id of a hold; a random one if there is none. */
export function validId(id: unknown): string {
  if (id === undefined) return randomUUID();
  if (typeof id !== "string") throw new InvalidRequestError(`id is ${describe(id)}: pass a string`);
  const bytes = Buffer.byteLength(id);
  if (bytes < 1 || bytes > MAX_ID_BYTES) {
    throw new InvalidRequestError(`id has ${bytes} bytes: use 1 to ${MAX_ID_BYTES}`);
  }
  return id;
}

/** Returns a time to live in whole milliseconds. */
export function validTtl(ttlMs: unknown): number {
  if (typeof ttlMs !== "number" || !(ttlMs >= 1 && ttlMs <= MAX_TTL_MS)) {
    throw new InvalidRequestError(`ttlMs ${describe(ttlMs)} is out of range: use 1 to ${MAX_TTL_MS}`);
  }
  return Math.ceil(ttlMs);
}

/** Returns the reference to a hold whose answer was lost. */
export function referenceTo({ labels, key, limit }: Request, id: string): RequestBody {
  return { ...requestBody({ labels, key, limit } as Request), id };
}

/** Converts a reference to its JSON. */
export function referenceBody(reference: HoldReference): RequestBody {
  if (typeof reference !== "object" || reference === null) {
    throw new InvalidRequestError("the hold is not an object: pass { token }, or { labels, id } or { key, limit, id }");
  }
  const { token, id, cost: _cost, ttlMs: _ttlMs, ...request }: AnyReference = reference;
  const hasSubject = Object.values(request).some((value) => value !== undefined);
  if (typeof token === "string" && id === undefined && !hasSubject) return { token };
  if (token !== undefined || id === undefined) {
    throw new InvalidRequestError(
      "a hold is identified by its token, or by its id with labels or with key and limit: pass exactly one",
    );
  }
  return { ...requestBody(request as Request), id: validId(id) };
}

/** Returns a cost that does not change with the object of the application. */
export function copiedCost(cost: Cost): Cost {
  const valid = costBody(cost);
  return typeof valid === "object" ? { ...valid } : valid;
}

export function settlementOf(reference: RequestBody, cost: Cost): HoldAdjustment {
  return { operation: "settle", body: { ...reference, cost: copiedCost(cost) } };
}

export function releaseOf(reference: RequestBody): HoldAdjustment {
  return { operation: "release", body: reference };
}

export function renewalOf(reference: RequestBody, ttlMs: number): HoldAdjustment {
  return { operation: "renew", body: { ...reference, ttl_ms: validTtl(ttlMs) } };
}

/** The members of the answer to a hold that a decision does not have. */
interface HoldBody {
  id: string;
  token?: string | null;
  expires_at_us?: number | null;
  repeated: boolean;
}

/** Returns a function that converts the answer to a hold, or returns null if the JSON value is not one. */
export function holdReader(ttlMs: number | undefined): (body: unknown) => HoldAnswer | null {
  return (body) => {
    const decision = readDecision(body);
    const { id, token = null, expires_at_us: expiresAtUs = null, repeated } = (body ?? {}) as Partial<HoldBody>;
    if (decision === null || typeof id !== "string" || typeof repeated !== "boolean") return null;
    const { atUs, source } = decision;
    // a repeated answer has the time of the first one, but the expiry after all renewals
    const isKnown = !repeated && expiresAtUs !== null && atUs !== null;
    const foundMs = isKnown ? (expiresAtUs - atUs) / 1000 : null;
    // a hold that no rule matches has no counters
    const reference = token === null || source === "unmatched" ? null : { token };
    return { decision, id, token, expiresAtUs, isRepeated: repeated, reference, ttlMs: ttlMs ?? foundMs };
  };
}
