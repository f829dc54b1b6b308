/** Access to the decision and the hold of the middleware from a request handler. */

import type { Decision } from "./decision.js";
import type { Hold } from "./hold.js";

/** The properties of requests. They are the same in the ES module and the CommonJS build. */
const DECISION = Symbol.for("sluicegate.decision");
const HOLD = Symbol.for("sluicegate.hold");

/** Stores the decision of a request. */
export function setDecision(request: object, decision: Decision): void {
  Object.defineProperty(request, DECISION, { value: decision, configurable: true });
}

/** Returns the decision of the last middleware that checked this request; undefined if none did. */
export function decisionOf(request: object): Decision | undefined {
  return (request as { [DECISION]?: Decision })[DECISION];
}

/** Stores the hold of a request. */
export function setHold(request: object, hold: Hold): void {
  Object.defineProperty(request, HOLD, { value: hold, configurable: true });
}

/** Returns the hold of the last middleware with `hold: true` that admitted this request; undefined if none did. */
export function holdOf(request: object): Hold | undefined {
  return (request as { [HOLD]?: Hold })[HOLD];
}
