/**
 * A plugin for Fastify 5. It applies to the scope in which it is registered, and to the scopes below.
 */

import type { IncomingMessage, ServerResponse } from "node:http";
import type { FastifyReply, FastifyRequest } from "fastify";
import type { Decision } from "./decision.js";
import { denialResponse, denialStatus, rejectionResponse } from "./denial.js";
import { report } from "./error-reporter.js";
import { ConfigurationError } from "./errors.js";
import { type CommonOptions, type MaybePromise, RequestLimiter } from "./middleware.js";
import { setDecision, setHold } from "./request-decision.js";
import { addHeaders, afterResponse, type HeaderAccess } from "./server-response.js";

/** The part of Fastify's request that the plugin uses. */
export interface RequestLike {
  raw: IncomingMessage;
  routeOptions?: { config?: unknown; url?: string | undefined };
}

/** The part of Fastify's reply that the plugin uses. */
export interface ReplyLike {
  raw: ServerResponse;
  sent: boolean;
  code(status: number): unknown;
  header(name: string, value: string): unknown;
  getHeader(name: string): unknown;
  send(payload?: unknown): unknown;
}

/** The settings of a hook. */
export interface FastifyHookOptions<Req extends RequestLike, Res extends ReplyLike>
  extends CommonOptions<[request: Req, reply: Res]> {
  /**
   * Responds to a denied request: sends the reply, returns its payload, or throws an error for the error handler of the
   * application. Status and headers are already set.
   */
  onDenied?: (request: Req, reply: Res, decision: Decision) => MaybePromise<unknown>;
  /**
   * Returns whether a request is refunded after its response, for example to count only failed logins. Needs a token with the
   * scope `adjust`.
   */
  refundWhen?: (request: Req, reply: Res) => boolean;
}

/** The settings of one route, in its `config.rateLimit`; false disables the limit of the plugin. */
export type RouteOptions<Req extends RequestLike, Res extends ReplyLike> =
  | false
  | Partial<FastifyHookOptions<Req, Res>>;

/** The settings of the plugin. */
export interface FastifyOptions<Req extends RequestLike, Res extends ReplyLike> extends FastifyHookOptions<Req, Res> {
  /** Whether routes without `config.rateLimit` are limited; true by default. */
  global?: boolean;
  /** The hook in which requests are checked; `onRequest` by default. Use `preHandler` to check after authentication. */
  hook?: "onRequest" | "preParsing" | "preValidation" | "preHandler";
}

/** A hook of Fastify. The types of its parameters must not take part in the inference of those of the options. */
// biome-ignore lint/suspicious/noExplicitAny: a hook serves routes with any types of parameters, queries and bodies
export type Hook = (request: any, reply: any) => Promise<unknown>;

/** The part of Fastify's instance that the plugin uses. */
interface InstanceLike {
  addHook(name: string, hook: unknown): unknown;
}

/** Creates a hook for one route, or for a handler of unknown routes. */
export function rateLimitHook<Req extends RequestLike = FastifyRequest, Res extends ReplyLike = FastifyReply>(
  options: FastifyHookOptions<Req, Res>,
): Hook {
  const limiter = new RequestLimiter(options);
  const { onDenied, refundWhen } = options;

  return async (request: Req, reply: Res) => {
    const verdict = await limiter.decide(request, reply);
    if (verdict.kind === "skipped") return undefined;
    if (verdict.kind === "allowed" && verdict.hold !== null) setHold(request, verdict.hold);
    if (verdict.kind === "allowed" && (verdict.hold !== null || refundWhen !== undefined)) {
      afterResponse(reply.raw, () => limiter.finish(verdict, () => refundWhen?.(request, reply) ?? false));
    }
    // another hook, for example one for timeouts, may have responded during the check
    if (reply.sent) return undefined;
    if (verdict.kind === "rejected") {
      const { status, headers, body } = rejectionResponse(verdict.detail);
      return send(reply, status, headers, body);
    }
    const { decision } = verdict;
    setDecision(request, decision);
    addHeaders(headersOf(reply), limiter.headersOf(decision));
    if (verdict.kind === "allowed") return undefined;
    if (onDenied === undefined) {
      const { status, headers, body } = denialResponse(decision, options.name);
      return send(reply, status, headers, body);
    }
    reply.code(denialStatus(decision));
    const payload = await onDenied(request, reply, decision);
    if (!reply.sent && payload !== reply) reply.send(payload);
    return reply;
  };
}

function plugin(
  // biome-ignore lint/suspicious/noExplicitAny: the plugin serves instances for HTTP/1.1, HTTP/2 and any logger
  instance: any,
  options: FastifyOptions<FastifyRequest, FastifyReply>,
  done: (error?: Error) => void,
): void {
  const { global: isGlobal = true, hook = "onRequest", ...base } = options;
  const general = isGlobal ? rateLimitHook(base) : null;
  /** The hooks by `config.rateLimit` of their routes. */
  const hooks = new Map<unknown, Hook>();

  /** Returns the hook for the configuration of a route; null if the route is not limited. */
  function hookOf(config: unknown): Hook | null {
    const route = (config as { rateLimit?: RouteOptions<FastifyRequest, FastifyReply> } | undefined)?.rateLimit;
    if (route === undefined) return general;
    if (route === false) return null;
    const existing = hooks.get(route);
    if (existing !== undefined) return existing;
    if (typeof route !== "object" || route === null) {
      throw new ConfigurationError("config.rateLimit of a route is invalid: use an object, or false");
    }
    const created = rateLimitHook(mergeOptions(base, route));
    hooks.set(route, created);
    return created;
  }

  /** Returns the hook of a route. The plugin can find a route that was declared before it only now, too late to fail the start. */
  function hookOfRequest({ routeOptions }: FastifyRequest): Hook | null {
    const config = routeOptions?.config as { rateLimit?: unknown } | undefined;
    try {
      return hookOf(config);
    } catch (error) {
      const reported = new ConfigurationError(
        `config.rateLimit of the route ${routeOptions?.url} is invalid (${(error as Error).message}): correct it, and register the plugin before the route`,
        error,
      );
      const replacement = general ?? rateLimitHook({ ...withoutLimit(base), labels: () => Promise.reject(reported) });
      if (general !== null) report(base.onError ?? base.client.onError, reported);
      hooks.set(config?.rateLimit, replacement);
      return replacement;
    }
  }

  const scope: InstanceLike = instance;
  // creates the hooks of routes early, so that an error in their options fails the start of the application
  scope.addHook("onRoute", (route: { config?: unknown }) => void hookOf(route.config));
  scope.addHook(hook, async (request: FastifyRequest, reply: FastifyReply) => hookOfRequest(request)?.(request, reply));
  done();
}

/** Returns the settings without those that select the counter. */
function withoutLimit<Req extends RequestLike, Res extends ReplyLike>(
  options: FastifyHookOptions<Req, Res>,
): FastifyHookOptions<Req, Res> {
  const { labels, name, key, limit, cost, ...others } = options;
  return others;
}

/** Combines the settings of the plugin with those of a route. Labels that are objects are combined as well. */
function mergeOptions<Req extends RequestLike, Res extends ReplyLike>(
  base: FastifyHookOptions<Req, Res>,
  route: Partial<FastifyHookOptions<Req, Res>>,
): FastifyHookOptions<Req, Res> {
  const { labels, name, key, limit, ...others } = base;
  if (route.labels !== undefined) {
    const combines = typeof labels === "object" && typeof route.labels === "object";
    return { ...others, ...route, labels: combines ? { ...labels, ...route.labels } : route.labels };
  }
  const usesKey = route.name !== undefined || route.key !== undefined || route.limit !== undefined;
  return usesKey ? ({ ...base, labels: undefined, ...route } as FastifyHookOptions<Req, Res>) : { ...base, ...route };
}

function headersOf(reply: ReplyLike): HeaderAccess {
  return {
    get: (name) => reply.getHeader(name),
    set: (name, value) => reply.header(name, value),
  };
}

function send(reply: ReplyLike, status: number, headers: Record<string, string>, body: string): unknown {
  reply.code(status);
  for (const [name, value] of Object.entries(headers)) reply.header(name, value);
  return reply.send(body);
}

/**
 * The plugin. Its hooks belong to the scope that registers it, not to a new one.
 *
 * ```js
 * await app.register(rateLimit, { client, labels: { route: "api", ip: clientIp() } });
 * ```
 */
export const rateLimit = Object.assign(plugin, {
  [Symbol.for("skip-override")]: true,
  [Symbol.for("fastify.display-name")]: "sluicegate",
  [Symbol.for("plugin-meta")]: { name: "sluicegate", fastify: "5.x" },
});

export default rateLimit;
