/**
 * A client of sluicegate, a distributed rate limiter.
 *
 * Middleware: `sluicegate/express`, `sluicegate/fastify` and `sluicegate/fetch`.
 */

export { type CallOptions, type CheckOptions, Client, type ClientOptions } from "./client.js";
export type { Pem } from "./client-settings.js";
export type { Decision, DecisionSource, Tier } from "./decision.js";
export type { ErrorHandler } from "./error-reporter.js";
export {
  AuthenticationError,
  ConfigurationError,
  type ErrorCode,
  HoldConflictError,
  InvalidRequestError,
  SluicegateError,
  TlsError,
  UnavailableError,
  UnknownRuleError,
} from "./errors.js";
export { type ClientIpOptions, clientIp, type Extractor, header } from "./extractors.js";
export type { FailurePolicy } from "./failure-policy.js";
export { Hold } from "./hold.js";
export type { HoldOptions } from "./hold-calls.js";
export type { HoldReference } from "./hold-request.js";
export { type LocalBucket, type LocalBucketOptions, localBucket } from "./local-bucket.js";
export type {
  Algorithm,
  ChargeRequest,
  Cost,
  KeyRequest,
  Labels,
  LabelsRequest,
  Limit,
  RefundRequest,
  Request,
  ResetRequest,
} from "./request.js";
export { decisionOf, holdOf } from "./request-decision.js";
export type { AppliedRule, Explanation, ResetResult } from "./response.js";
export type { SettledTier, Settlement, SettleOutcome } from "./settlement.js";
