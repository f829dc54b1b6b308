/**
 * Failure policies: how a check or peek is decided if the server does not answer.
 */

import { MAX_BACKOFF_MS } from "./circuit-breaker.js";
import { type Decision, localDecision } from "./decision.js";
import { ConfigurationError, type SluicegateError } from "./errors.js";
import type { LocalBucket } from "./local-bucket.js";
import type { Request } from "./request.js";

/** The wait that a denial by the policy `closed` reports: the longest time between probes of the server. */
const CLOSED_RETRY_AFTER_MS = MAX_BACKOFF_MS;

/** The call that a policy decides. A peek charges nothing. */
export type PolicyCall = "check" | "peek";

/** How a check or peek is decided if the server does not answer. */
export type FailurePolicy = "open" | "closed" | LocalBucket;

/** Decides a request without the server. */
export function decideByPolicy(
  policy: FailurePolicy,
  call: PolicyCall,
  request: Request,
  error: SluicegateError,
): Decision {
  switch (policy) {
    case "open":
      return localDecision({ allowed: true, source: "open", error });
    case "closed":
      return localDecision({ allowed: false, source: "closed", retryAfterMs: CLOSED_RETRY_AFTER_MS, error });
    default:
      return localDecision({ ...policy.decide(call, request, performance.now()), source: "fallback", error });
  }
}

/** Returns the policy if it is valid. */
export function validPolicy(policy: FailurePolicy): FailurePolicy {
  if (policy === "open" || policy === "closed" || typeof policy?.decide === "function") return policy;
  throw new ConfigurationError(
    'onFailure is invalid: use "open", "closed" or localBucket({ amount: 100, window: "1m" })',
  );
}
