/**
 * Middleware for Express 4 and 5, and for other frameworks with `(request, response, next)` handlers.
 */

import type { IncomingMessage, ServerResponse } from "node:http";
import type { Decision } from "./decision.js";
import { denialResponse, denialStatus, type PlainResponse, rejectionResponse } from "./denial.js";
import { type CommonOptions, type MaybePromise, RequestLimiter } from "./middleware.js";
import { setDecision, setHold } from "./request-decision.js";
import { addHeaders, afterResponse, type HeaderAccess } from "./server-response.js";

/** Continues with the next handler. */
export type Next = (error?: unknown) => void;

/** The settings of the middleware. */
export interface ExpressOptions<Req extends IncomingMessage, Res extends ServerResponse>
  extends CommonOptions<[request: Req, response: Res]> {
  /** Sends the response to a denied request. Its status and headers are already set. */
  onDenied?: (request: Req, response: Res, decision: Decision, next: Next) => MaybePromise<unknown>;
  /**
   * Returns whether a request is refunded after its response, for example to count only failed logins. Needs a token with the
   * scope `adjust`.
   */
  refundWhen?: (request: Req, response: Res) => boolean;
}

/**
 * Creates middleware that limits requests.
 *
 * ```js
 * app.use(rateLimit({ client, name: "api", key: header("x-api-key"), limit: { amount: 100, window: "1m" } }));
 * ```
 */
export function rateLimit<Req extends IncomingMessage = IncomingMessage, Res extends ServerResponse = ServerResponse>(
  options: ExpressOptions<Req, Res>,
): (request: Req, response: Res, next: Next) => void {
  const limiter = new RequestLimiter(options);
  const { onDenied, refundWhen } = options;

  /** Handles a request. Returns whether the next handler is called. */
  async function handle(request: Req, response: Res, next: Next): Promise<boolean> {
    const verdict = await limiter.decide(request, response);
    if (verdict.kind === "skipped") return true;
    if (verdict.kind === "rejected") {
      send(response, rejectionResponse(verdict.detail));
      return false;
    }
    const { decision } = verdict;
    setDecision(request, decision);
    if (verdict.kind === "allowed" && verdict.hold !== null) setHold(request, verdict.hold);
    if (verdict.kind === "allowed" && (verdict.hold !== null || refundWhen !== undefined)) {
      afterResponse(response, () => limiter.finish(verdict, () => refundWhen?.(request, response) ?? false));
    }
    // another handler, for example one for timeouts, may have responded during the check
    if (response.headersSent) return verdict.kind === "allowed";
    addHeaders(headersOf(response), limiter.headersOf(decision));
    if (verdict.kind === "allowed") return true;
    if (onDenied === undefined) {
      send(response, denialResponse(decision, options.name));
    } else {
      response.statusCode = denialStatus(decision);
      await onDenied(request, response, decision, next);
    }
    return false;
  }

  return (request, response, next) => {
    handle(request, response, next).then((isAllowed) => {
      if (isAllowed) next();
    }, fail(next));
  };
}

/** Passes an exception to the error handler of the application. Without a value, `next` would call the handler of the request. */
function fail(next: Next): (error: unknown) => void {
  return (error) => next(error || new Error("a function of the rate limit's settings threw no error"));
}

function headersOf(response: ServerResponse): HeaderAccess {
  return {
    get: (name) => response.getHeader(name),
    set: (name, value) => response.setHeader(name, value),
  };
}

function send(response: ServerResponse, { status, headers, body }: PlainResponse): void {
  if (response.headersSent) return;
  response.statusCode = status;
  for (const [name, value] of Object.entries(headers)) response.setHeader(name, value);
  response.end(body);
}
