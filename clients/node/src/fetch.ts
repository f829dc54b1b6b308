/**
 * A wrapper for handlers of the form `(request: Request) => Response`: Next.js route handlers, Hono, Deno-style servers.
 */

import type { Decision } from "./decision.js";
import { denialResponse, denialStatus, type PlainResponse, rejectionResponse } from "./denial.js";
import { type CommonOptions, isListHeader, type MaybePromise, RequestLimiter } from "./middleware.js";
import { setDecision, setHold } from "./request-decision.js";

/** The longest time for which the hold of a request whose client has disconnected waits until its body is cancelled. */
const CANCELLATION_MS = 1000;

/** A handler of requests. Frameworks pass further arguments, for example route parameters. */
export type FetchHandler<Context extends unknown[]> = (request: Request, ...context: Context) => MaybePromise<Response>;

/** The settings of the wrapper. */
export interface FetchOptions<Context extends unknown[]>
  extends CommonOptions<[request: Request, ...context: Context]> {
  /** Creates the response to a denied request, to which the headers are added. Use the status of `status`, or another one. */
  onDenied?: (request: Request, decision: Decision, status: number) => MaybePromise<Response>;
  /**
   * Returns whether a request is refunded after its response, for example to count only failed logins. Needs a token with the
   * scope `adjust`.
   */
  refundWhen?: (request: Request, response: Response) => boolean;
}

/**
 * Wraps a handler so that its requests are limited.
 *
 * ```js
 * export const POST = rateLimit({ client, labels: { route: "login", api_key: header("x-api-key") } }, async (request) => …);
 * ```
 */
export function rateLimit<Context extends unknown[]>(
  options: FetchOptions<Context>,
  handler: FetchHandler<Context>,
): (request: Request, ...context: Context) => Promise<Response> {
  const limiter = new RequestLimiter(options);
  const { onDenied, refundWhen } = options;

  return async (request, ...context) => {
    const verdict = await limiter.decide(request, ...context);
    if (verdict.kind === "skipped") return handler(request, ...context);
    if (verdict.kind === "rejected") return responseOf(rejectionResponse(verdict.detail));
    const { decision } = verdict;
    setDecision(request, decision);
    const headers = limiter.headersOf(decision);
    if (verdict.kind === "denied") {
      const denied =
        onDenied?.(request, decision, denialStatus(decision)) ?? responseOf(denialResponse(decision, options.name));
      return withHeaders(await denied, headers);
    }
    const { hold } = verdict;
    if (hold === null) {
      const response = await handler(request, ...context);
      if (refundWhen !== undefined) limiter.finish(verdict, () => refundWhen(request, response));
      return withHeaders(response, headers);
    }
    setHold(request, hold);
    try {
      const response = await handler(request, ...context);
      const finish = () => limiter.finish(verdict, () => refundWhen?.(request, response) ?? false);
      return withHeaders(afterBody(request, response, finish), headers);
    } catch (error) {
      await hold.end();
      throw error;
    }
  };
}

function responseOf({ status, headers, body }: PlainResponse): Response {
  return new Response(body, { status, headers });
}

/** Calls a function when a response was discarded without reading its body. */
const discarded = new FinalizationRegistry<() => void>((callback) => callback());

/**
 * Calls a function once when the body of a response has been read, has failed or was cancelled, and when its client has disconnected.
 * Returns the response to send.
 */
function afterBody({ method, signal }: Request, response: Response, callback: () => void): Response {
  // the body of a response to HEAD is not read
  if (response.body === null || response.status < 200 || method === "HEAD") {
    callback();
    return response;
  }
  const reader = response.body.getReader();
  let timer: NodeJS.Timeout | undefined;
  let hasEnded = false;
  const end = () => {
    if (hasEnded) return;
    hasEnded = true;
    clearTimeout(timer);
    signal.removeEventListener("abort", endSoon);
    callback();
  };
  const endSoon = () => {
    timer ??= setTimeout(end, CANCELLATION_MS).unref();
  };
  // the server, not this stream, decides when the application's stream is read
  const strategy = { highWaterMark: 0 };
  const body = new ReadableStream<Uint8Array>(
    {
      async pull(controller) {
        try {
          const { done, value } = await reader.read();
          if (!done) {
            controller.enqueue(value);
            return;
          }
          controller.close();
        } catch (error) {
          controller.error(error);
        }
        end();
      },
      cancel(reason) {
        // the source may still set the actual cost of the hold
        endSoon();
        const cancelled = reader.cancel(reason);
        cancelled.then(end, end);
        return cancelled;
      },
    },
    strategy,
  );
  // a server may discard the body without cancelling it, for example after a disconnection or for a 304
  if (signal.aborted) endSoon();
  else signal.addEventListener("abort", endSoon);
  discarded.register(body, end);
  return new Response(body, response);
}

/** Adds headers to a response; those of a response from `fetch` are immutable, so it is copied. */
function withHeaders(response: Response, headers: Record<string, string>): Response {
  // an upgrade or a network error, which cannot be copied
  if (response.status < 200) return response;
  try {
    addHeaders(response.headers, headers);
    return response;
  } catch {
    const copy = new Response(response.body, response);
    addHeaders(copy.headers, headers);
    return copy;
  }
}

function addHeaders(target: Headers, headers: Record<string, string>): void {
  for (const [name, value] of Object.entries(headers)) {
    if (isListHeader(name, value)) target.append(name, value);
    else target.set(name, value);
  }
}
