/** Access to the decision of the middleware from a request handler. */

import type { Decision } from "./decision.js";

/** The property of requests. It is the same in the ES module and the CommonJS build. */
const DECISION = Symbol.for("sluicegate.decision");

/** Stores the decision of a request. */
export function setDecision(request: object, decision: Decision): void {
  Object.defineProperty(request, DECISION, { value: decision, configurable: true });
}

/** Returns the decision of the last middleware that checked this request; undefined if none did. */
export function decisionOf(request: object): Decision | undefined {
  return (request as { [DECISION]?: Decision })[DECISION];
}
