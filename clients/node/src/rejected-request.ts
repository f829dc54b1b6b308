/** Requests of clients that cannot be checked. */

/** Identifies the error. It is the same in the ES module and the CommonJS build. */
const BRAND = Symbol.for("sluicegate.rejected-request");

/** A request of a client cannot be checked, for example because a header is repeated. The response is 400. */
export class RejectedRequest extends Error {
  readonly [BRAND] = true;
}

/** Returns whether an error is a `RejectedRequest`, of either build. */
export function isRejectedRequest(error: unknown): error is RejectedRequest {
  return error instanceof Error && BRAND in error;
}
