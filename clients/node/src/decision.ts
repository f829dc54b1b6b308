/**
 * Decisions, as the server sends them and as this package returns them.
 */

import type { SluicegateError } from "./errors.js";

/** Where a decision was made. */
export type DecisionSource =
  | "store"
  | "memory"
  | "cache"
  | "lease"
  | "rule"
  | "unmatched"
  | "fallback"
  | "open"
  | "closed"
  | (string & {});

/** The decision of one rule. */
export interface Tier {
  /** Whether this rule alone would allow the request. */
  readonly allowed: boolean;
  /** The name of the rule; null for a key. */
  readonly rule: string | null;
  /** The capacity of the limit. */
  readonly limit: number;
  /** The units available now. */
  readonly remaining: number;
  /** The wait after which the same request would be allowed; null if it is allowed, or if no wait suffices. */
  readonly retryAfterMs: number | null;
  /** The time until the counter is empty. */
  readonly resetAfterMs: number;
  /** Whether the rule denies the request and waiting does not help. */
  readonly never: boolean;
  /** The unit that is counted. */
  readonly unit: string;
  /** Whether the rule is a shadow rule, which never denies. */
  readonly shadow: boolean;
}

/** The answer to a check, a peek, a charge or a refund. */
export interface Decision {
  /** Whether the request is allowed. */
  readonly allowed: boolean;
  /** The deciding rule; null if no rule matched, or for a key. */
  readonly rule: string | null;
  /** The capacity of that rule's limit. */
  readonly limit: number | null;
  /** The units available now. */
  readonly remaining: number | null;
  /** The wait after which the same request would be allowed; null if it is allowed, or if no wait suffices. */
  readonly retryAfterMs: number | null;
  /** The time until the counter is empty. */
  readonly resetAfterMs: number | null;
  /** Whether the request is denied and waiting does not help. */
  readonly never: boolean;
  /** Whether a failure policy decided: the server's, because its store did not answer, or that of this client. */
  readonly degraded: boolean;
  /** Where the decision was made. */
  readonly source: DecisionSource;
  /** The time of the decision on the store's clock, in microseconds. A refund with this time reverts exactly this charge. */
  readonly atUs: number | null;
  /** The decision of each matching rule. */
  readonly tiers: readonly Tier[];
  /** The rate limit headers of the response to the client, if they were requested. */
  readonly headers: Readonly<Record<string, string>>;
  /** Why the failure policy of this client decided; null if the server decided. */
  readonly error: SluicegateError | null;
}

/** The members of a decision in JSON. */
interface TierBody {
  allowed: boolean;
  rule: string | null;
  limit: number;
  remaining: number;
  retry_after_ms: number | null;
  reset_after_ms: number;
  never: boolean;
  unit: string;
  shadow: boolean;
}

interface DecisionBody {
  allowed: boolean;
  rule: string | null;
  limit: number | null;
  remaining: number | null;
  retry_after_ms: number | null;
  reset_after_ms: number | null;
  never: boolean;
  degraded: boolean;
  source: string;
  at_us: number | null;
  tiers: TierBody[];
  headers?: unknown;
}

const NO_HEADERS: Readonly<Record<string, string>> = Object.freeze({});

/** Returns the headers that a response can have: another character would fail the response. */
function validHeaders(headers: unknown): Readonly<Record<string, string>> {
  if (typeof headers !== "object" || headers === null) return NO_HEADERS;
  const isValid = ([name, value]: [string, unknown]) =>
    /^[A-Za-z0-9-]+$/.test(name) && typeof value === "string" && /^[\x20-\x7e]*$/.test(value);
  return Object.fromEntries(Object.entries(headers).filter(isValid));
}

/** Returns whether a JSON value is a decision of the server. */
function isDecisionBody(body: unknown): body is DecisionBody {
  const { allowed, source, tiers } = (body ?? {}) as Partial<DecisionBody>;
  return typeof allowed === "boolean" && typeof source === "string" && Array.isArray(tiers);
}

/** Converts a decision of the server; returns null if the JSON value is not one. */
export function readDecision(body: unknown): Decision | null {
  if (!isDecisionBody(body)) return null;
  return {
    allowed: body.allowed,
    rule: body.rule,
    limit: body.limit,
    remaining: body.remaining,
    retryAfterMs: body.retry_after_ms,
    resetAfterMs: body.reset_after_ms,
    never: body.never,
    degraded: body.degraded,
    source: body.source,
    atUs: body.at_us,
    tiers: body.tiers.map((tier) => ({
      allowed: tier.allowed,
      rule: tier.rule,
      limit: tier.limit,
      remaining: tier.remaining,
      retryAfterMs: tier.retry_after_ms,
      resetAfterMs: tier.reset_after_ms,
      never: tier.never,
      unit: tier.unit,
      shadow: tier.shadow,
    })),
    headers: validHeaders(body.headers),
    error: null,
  };
}

/** Creates a decision that was made without the server. */
export function localDecision(decided: Pick<Decision, "allowed" | "source" | "error"> & Partial<Decision>): Decision {
  const retryAfterMs = decided.retryAfterMs ?? null;
  return {
    rule: null,
    limit: null,
    remaining: null,
    resetAfterMs: null,
    never: false,
    atUs: null,
    tiers: [],
    degraded: true,
    ...decided,
    retryAfterMs,
    headers:
      retryAfterMs === null ? NO_HEADERS : { "retry-after": String(Math.max(1, Math.ceil(retryAfterMs / 1000))) },
  };
}
