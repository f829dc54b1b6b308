/**
 * Responses of the server: decisions, resets, explanations and errors.
 */

import { type Decision, readDecision } from "./decision.js";
import {
  AuthenticationError,
  ConfigurationError,
  HoldConflictError,
  InvalidRequestError,
  UnavailableError,
  UnknownRuleError,
} from "./errors.js";
import type { HttpResponse } from "./http1.js";

/** The response to a reset. */
export interface ResetResult {
  /** How many counters existed and were deleted. */
  readonly reset: number;
  /** These counters. */
  readonly counters: ReadonlyArray<{ readonly rule: string | null; readonly key: string }>;
  /** The names of the rules that match the request but were not reset. */
  readonly kept: readonly string[];
}

/** A rule that applies to a request, with its counter. */
export interface AppliedRule {
  /** The name of the rule; null for a key. */
  readonly rule: string | null;
  readonly key: string;
  readonly cost: number;
  readonly limit: {
    readonly algorithm: string;
    readonly amount: number;
    /** Not for `concurrency`. */
    readonly window?: string;
    readonly capacity: number;
    readonly shadow: boolean;
  };
  readonly state: { readonly used: number; readonly remaining: number; readonly resetAfterMs: number } | null;
  /** The calculation as text. */
  readonly arithmetic: string | null;
  /** The stored state; its fields depend on the algorithm. */
  readonly snapshot: Readonly<Record<string, unknown>> | null;
}

/** The response to an explain. */
export interface Explanation {
  /** The decision, as of a peek. */
  readonly decision: Decision;
  readonly applies: readonly AppliedRule[];
  /** The other rules; only for tokens with the scope `admin`. */
  readonly others: ReadonlyArray<{ readonly rule: string; readonly because: string }>;
  /** The number of other rules that are not listed. */
  readonly moreOthers: number;
}

/** An error response (`application/problem+json`). */
interface Problem {
  status: number;
  detail: string;
}

/**
 * Converts a response to the value of a call. `read` returns null for JSON that is not such a value.
 *
 * @throws InvalidRequestError, AuthenticationError, ConfigurationError, UnavailableError
 */
export function readResponse<T>(response: HttpResponse, path: string, read: (body: unknown) => T | null): T {
  const body = parseJson(response.body);
  const value = response.status === 200 ? read(body) : null;
  if (value !== null) return value;

  const detail = isProblem(body) ? body.detail : null;
  switch (response.status) {
    case 400:
    case 413:
      // anchored, because other details contain text of the request, for example the name of a unit
      if (detail !== null && /^[\w.[\]]+: unknown field `/.test(detail)) {
        throw new ConfigurationError(
          `the server does not support this client (${detail}): use the same version of both`,
        );
      }
      throw invalidRequest(detail ?? `the server rejects the request with status ${response.status}`);
    case 409:
      throw new HoldConflictError(detail ?? "the server rejects the id of the hold");
    case 401:
    case 403: {
      const reason = detail ?? `status ${response.status}`;
      throw new AuthenticationError(response.status, `${path} is not permitted (${reason}): check the setting token`);
    }
    default: {
      const reason = detail ?? "not a response of sluicegate: check the client's url";
      const message = `${path} failed with status ${response.status} (${reason})`;
      throw new UnavailableError(message, { mayHaveRun: response.status !== 404, hasResponse: true });
    }
  }
}

/** Reads the results of several checks. */
export function readResults(body: unknown, count: number): Array<Decision | InvalidRequestError> | null {
  const { results } = (body ?? {}) as { results?: unknown };
  if (!Array.isArray(results) || results.length !== count) return null;
  const read = results.map(
    (result) => readDecision(result) ?? (isProblem(result) ? invalidRequest(result.detail) : null),
  );
  return read.every((result) => result !== null) ? read : null;
}

/** Reads the response to a reset. */
export function readReset(body: unknown): ResetResult | null {
  const { reset, counters, kept } = (body ?? {}) as Partial<ResetResult>;
  if (reset === undefined || !Array.isArray(counters) || !Array.isArray(kept)) return null;
  return { reset, counters, kept };
}

/** Reads the response to an explain. */
export function readExplanation(body: unknown): Explanation | null {
  const decision = readDecision((body as { decision?: unknown } | null)?.decision);
  if (decision === null) return null;
  const { applies, others, moreOthers } = camelCase(body) as Explanation;
  return { decision, applies, others, moreOthers };
}

/** The rejection of a check that needs a hold. Anchored, because other details contain text of the request. */
const NEEDS_HOLD =
  /^(this limit|rule "[^"]*") counts requests in flight: use hold, and settle or release it at the end$/;

function invalidRequest(detail: string): InvalidRequestError {
  if (NEEDS_HOLD.test(detail)) return new InvalidRequestError(detail, "needs_hold");
  return detail.startsWith("there is no rule ") ? new UnknownRuleError(detail) : new InvalidRequestError(detail);
}

function isProblem(body: unknown): body is Problem {
  const { status, detail } = (body ?? {}) as Partial<Problem>;
  return typeof status === "number" && typeof detail === "string";
}

function parseJson(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** Converts the names of all members, for example `more_others` to `moreOthers`. */
function camelCase(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(camelCase);
  if (typeof value !== "object" || value === null) return value;
  const converted = Object.entries(value).map(([name, member]) => [
    name.replace(/_([a-z])/g, (_, letter: string) => letter.toUpperCase()),
    camelCase(member),
  ]);
  return Object.fromEntries(converted);
}
