/**
 * The errors of this package. Each has a `code`, which is the same in the ES module and the CommonJS build.
 */

/** The kind of an error. */
export type ErrorCode =
  | "configuration"
  | "invalid_request"
  | "unknown_rule"
  | "needs_hold"
  | "hold_conflict"
  | "authentication"
  | "unavailable"
  | "deadline"
  | "circuit_open"
  | "overload"
  | "closed"
  | "tls";

/** Identifies the errors of this package. It is the same in the ES module and the CommonJS build. */
const BRAND = Symbol.for("sluicegate.error");

/** The base class of all errors of this package. */
export class SluicegateError extends Error {
  /** The kind of the error. */
  readonly code: ErrorCode;
  /** @internal */
  readonly [BRAND] = true;

  constructor(code: ErrorCode, message: string, cause?: unknown) {
    super(message, cause === undefined ? undefined : { cause });
    this.name = new.target.name;
    this.code = code;
  }
}

/** Returns whether an error is one of this package, of either build. */
export function isSluicegateError(error: unknown): error is SluicegateError {
  return error instanceof Error && BRAND in error;
}

/** A setting of the client or of a middleware is invalid. */
export class ConfigurationError extends SluicegateError {
  constructor(message: string, cause?: unknown) {
    super("configuration", message, cause);
  }
}

/** The request is invalid: the server rejects it, and nothing was charged. */
export class InvalidRequestError extends SluicegateError {
  constructor(
    message: string,
    code: "invalid_request" | "unknown_rule" | "needs_hold" | "hold_conflict" = "invalid_request",
  ) {
    super(code, message);
  }
}

/** A selected rule does not exist; nothing was charged. */
export class UnknownRuleError extends InvalidRequestError {
  constructor(message: string) {
    super(message, "unknown_rule");
  }
}

/** The id belongs to a hold with another cost, or to a hold that has ended; nothing was charged. */
export class HoldConflictError extends InvalidRequestError {
  constructor(message: string) {
    super(message, "hold_conflict");
  }
}

/** The server rejects the token (401, 403). */
export class AuthenticationError extends SluicegateError {
  /** 401 without a token; 403 with an unknown token or one without the required scope. */
  readonly status: number;

  constructor(status: number, message: string) {
    super("authentication", message);
    this.status = status;
  }
}

/** How far a failed call got. */
export interface FailureDetails {
  /** Whether the server may have received the request, and so may have charged it. */
  mayHaveRun: boolean;
  /** Whether the call failed because of other calls of this process, not because of the server; false by default. */
  isLocal?: boolean;
  /** Whether the server responded, with an error; false by default. */
  hasResponse?: boolean;
  cause?: unknown;
}

/** The server did not answer: it is down, late, or its answer is not usable. */
export class UnavailableError extends SluicegateError {
  /** Whether the server may have received the request, and so may have charged it. */
  readonly mayHaveRun: boolean;
  /** Whether the call failed because of other calls of this process, for example because it waited for a connection. */
  readonly isLocal: boolean;
  /** Whether the server responded, with an error. */
  readonly hasResponse: boolean;

  constructor(
    message: string,
    { mayHaveRun, isLocal = false, hasResponse = false, cause }: FailureDetails,
    code: "unavailable" | "deadline" | "circuit_open" | "overload" | "closed" | "tls" = "unavailable",
  ) {
    super(code, message, cause);
    this.mayHaveRun = mayHaveRun;
    this.isLocal = isLocal;
    this.hasResponse = hasResponse;
  }
}

/** The TLS handshake failed, for example because the certificate of the server could not be verified. */
export class TlsError extends UnavailableError {
  constructor(message: string, details: FailureDetails) {
    super(message, details, "tls");
  }
}
