/**
 * Responses to denied requests, in the format of the server's forward-auth: problem+json (RFC 9457).
 */

import type { Decision } from "./decision.js";
import { UNNAMED } from "./limit-name.js";

const PROBLEM_TYPES = "https://iana.org/assignments/http-problem-types";

/** A response without a framework. */
export interface PlainResponse {
  status: number;
  headers: Record<string, string>;
  body: string;
}

/** Returns the status of a denial: 503 if it is due to a failure policy, otherwise 429. */
export function denialStatus(decision: Decision): number {
  return decision.source === "closed" ? 503 : 429;
}

/** Creates the response to a denied request, without the rate limit headers. `name` is that of a limit without a rule. */
export function denialResponse(decision: Decision, name = UNNAMED): PlainResponse {
  const status = denialStatus(decision);
  const denying = decision.tiers.filter((tier) => !tier.allowed && !tier.shadow).map((tier) => tier.rule ?? name);
  const violated = denying.length > 0 ? denying : [decision.rule ?? name];
  const { retryAfterMs } = decision;
  const quota = {
    type: `${PROBLEM_TYPES}#quota-exceeded`,
    title: "Quota Exceeded",
    status,
    detail: quotaDetail(violated.join(", "), retryAfterMs),
  };
  const reducedCapacity = {
    type: `${PROBLEM_TYPES}#temporary-reduced-capacity`,
    title: "Temporary Reduced Capacity",
    status,
    detail: "limits cannot be checked at the moment",
  };
  const problem = {
    ...(status === 503 ? reducedCapacity : quota),
    "violated-policies": violated,
    ...(retryAfterMs === null ? {} : { retry_after_ms: retryAfterMs }),
  };
  return problemResponse(status, problem);
}

/** Creates the response to a request that cannot be checked. */
export function rejectionResponse(detail: string): PlainResponse {
  return problemResponse(400, { type: "about:blank", title: "Bad Request", status: 400, detail });
}

function quotaDetail(names: string, retryAfterMs: number | null): string {
  if (retryAfterMs === null) return `denied: ${names}; a retry cannot succeed`;
  const seconds = Math.max(1, Math.ceil(retryAfterMs / 1000));
  return `limit exceeded: ${names}; retry in ${seconds} ${seconds === 1 ? "second" : "seconds"}`;
}

function problemResponse(status: number, problem: object): PlainResponse {
  const headers = { "content-type": "application/problem+json", "cache-control": "no-store" };
  return { status, headers, body: JSON.stringify(problem) };
}
