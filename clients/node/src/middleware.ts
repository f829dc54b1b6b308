/**
 * The part of the middleware that all frameworks share: from a request to a verdict.
 *
 * Errors of the server and of the configuration never fail a request. Only an exception of a function of the application does.
 */

import type { Client } from "./client.js";
import type { Decision } from "./decision.js";
import { type ErrorHandler, report } from "./error-reporter.js";
import { ConfigurationError, isSluicegateError, type SluicegateError } from "./errors.js";
import { type FailurePolicy, validPolicy } from "./failure-policy.js";
import { type Hold, holdWithoutCounters } from "./hold.js";
import { isServersLimitError, validateCost, validateLimit } from "./limit.js";
import { nameHeaders } from "./limit-name.js";
import { isRejectedRequest, RejectedRequest } from "./rejected-request.js";
import { type Cost, describe, type Labels, type Limit, MAX_VALUE_BYTES, type Request } from "./request.js";

/** A value, or a promise of it. */
export type MaybePromise<T> = T | Promise<T>;

/** The key of requests without a value for `key`; they share one counter. */
const ABSENT = "absent";

/** The longest name of a label in bytes. */
const MAX_NAME_BYTES = 128;

/** The value of a label; undefined and null are absent. */
type LabelValue = Labels[string];

/** The labels of a request: a function, or an object with constants and functions. */
export type LabelsOption<Args extends unknown[]> =
  | ((...args: Args) => MaybePromise<Labels>)
  | Readonly<Record<string, string | ((...args: Args) => MaybePromise<LabelValue>)>>;

/** The settings that all frameworks share. `Args` are the arguments of the framework's handler. */
export interface CommonOptions<Args extends unknown[]> {
  /** The client of the server. */
  client: Client;
  /** Labels for the rules of the server. Either `labels`, or `name`, `key` and `limit`. */
  labels?: LabelsOption<Args>;
  /** The name of a limit without a rule, in its keys and in the headers. Limits with different names are counted separately. */
  name?: string;
  /** The key of a request, for example its API key. Requests without one share a counter. */
  key?: (...args: Args) => MaybePromise<string | number | undefined | null>;
  /** The limit of each key, or a function that returns the limit of a request. */
  limit?: Limit | ((...args: Args) => MaybePromise<Limit>);
  /** The cost of a request; 1 by default. */
  cost?: Cost | ((...args: Args) => MaybePromise<Cost>);
  /**
   * Whether each request is held until its response has ended, which rules with the algorithm `concurrency` require; false by default.
   * The handler sets the actual cost: `holdOf(request).actualCost = { tokens: 120 }`.
   */
  hold?: boolean;
  /** Returns whether a request passes without a check. */
  skip?: (...args: Args) => MaybePromise<boolean>;
  /** Whether responses have rate limit headers; true by default. A denial has `Retry-After` in any case. */
  headers?: boolean;
  /** The failure policy; that of the client by default. */
  onFailure?: FailurePolicy;
  /** The time limit of the check; that of the client by default. */
  deadlineMs?: number;
  /** Receives errors that clients do not see; `onError` of the client by default. */
  onError?: ErrorHandler;
}

/** The outcome for one request. */
export type Verdict = { kind: "skipped" } | { kind: "rejected"; detail: string } | Decided;

/** A request that was allowed or denied. */
export interface Decided {
  kind: "allowed" | "denied";
  decision: Decision;
  request: Request;
  /** The hold; null without the option `hold`. */
  hold: Hold | null;
}

/** Checks the requests of one middleware. */
export class RequestLimiter<Args extends unknown[]> {
  readonly #options: CommonOptions<Args>;
  readonly #onError: ErrorHandler;
  readonly #read: (args: Args) => MaybePromise<Request>;

  constructor(options: CommonOptions<Args>) {
    if (typeof options?.client?.check !== "function") {
      throw new ConfigurationError("client is missing: pass { client: new Client({ url }) }");
    }
    if (options.onFailure !== undefined) validPolicy(options.onFailure);
    if (typeof options.cost !== "function") validateCost(options.cost, options.labels === undefined);
    this.#options = options;
    this.#onError = options.onError ?? options.client.onError;
    this.#read = requestReader(options);
  }

  /**
   * Decides a request. Errors of the configuration are reported, and the failure policy decides.
   *
   * @throws the exception of a function of the application. A client may have caused it, so that the policy `open` must not decide.
   */
  async decide(...args: Args): Promise<Verdict> {
    let request: Request = { labels: {} };
    try {
      if (await this.#options.skip?.(...args)) return { kind: "skipped" };
      request = await this.#withCost(await this.#read(args), args);
    } catch (error) {
      if (isRejectedRequest(error)) return { kind: "rejected", detail: error.message };
      // clientIp without the address of the peer
      if (isSluicegateError(error) && error.code === "configuration") return this.#decideLocally(request, error);
      throw error;
    }
    try {
      return await this.#check(request);
    } catch (error) {
      if (!isSluicegateError(error)) throw error;
      if (error.code === "needs_hold") {
        const fix = "set hold: true in the settings of the middleware";
        return this.#decideLocally(request, new ConfigurationError(`${error.message}: ${fix}`, error));
      }
      if (error.code !== "invalid_request") return this.#decideLocally(request, error);
      if (typeof this.#options.limit === "object" && isServersLimitError(error)) {
        return this.#decideLocally(request, new ConfigurationError(error.message, error));
      }
      // a client must not bypass its limit with a value that the server rejects
      report(this.#onError, error);
      return { kind: "rejected", detail: error.message };
    }
  }

  /** Ends an allowed request after its response, in the background: refunds it or settles its hold. Errors are reported. */
  finish(verdict: Decided, isRefunded: () => boolean): void {
    void this.#finish(verdict, isRefunded).catch((error) => report(this.#onError, asSluicegateError(error)));
  }

  async #finish({ request, decision, hold }: Decided, isRefunded: () => boolean): Promise<void> {
    const { atUs, degraded } = decision;
    try {
      if (!isRefunded()) return;
      if (hold !== null) await hold.release();
      else if (atUs !== null && !degraded) await this.#options.client.refund({ ...request, atUs });
    } finally {
      await hold?.end();
    }
  }

  /** Returns the rate limit headers of the response. */
  headersOf({ allowed, headers, retryAfterMs }: Decision): Record<string, string> {
    const shown = this.#options.headers === false ? {} : { ...headers };
    if (!allowed && retryAfterMs !== null) shown["retry-after"] = String(Math.max(1, Math.ceil(retryAfterMs / 1000)));
    return shown;
  }

  #decideLocally(request: Request, reason: SluicegateError): Verdict {
    report(this.#onError, reason);
    const { client, onFailure, hold: isHeld } = this.#options;
    const decision = client.decideLocally("check", request, reason, onFailure);
    return this.#verdict(decision, request, isHeld ? holdWithoutCounters(decision) : null);
  }

  async #check(request: Request): Promise<Verdict> {
    const { client, headers = true, onFailure, deadlineMs, hold: isHeld } = this.#options;
    const options = { headers, onFailure, deadlineMs, onError: this.#onError };
    if (!isHeld) return this.#verdict(await client.check(request, options), request, null);
    const hold = await client.hold(request, options);
    if (hold.allowed) hold.keepAlive();
    return this.#verdict(hold.decision, request, hold);
  }

  #verdict(decision: Decision, request: Request, hold: Hold | null): Verdict {
    const { name } = this.#options;
    const named = name === undefined ? decision : { ...decision, headers: nameHeaders(decision.headers, name) };
    return { kind: decision.allowed ? "allowed" : "denied", decision: named, request, hold };
  }

  async #withCost(request: Request, args: Args): Promise<Request> {
    const { cost } = this.#options;
    if (cost === undefined) return request;
    return { ...request, cost: typeof cost === "function" ? await cost(...args) : cost } as Request;
  }
}

/** Headers whose values are lists: several limiters can each add members. */
export function isListHeader(name: string, value: string): boolean {
  const lower = name.toLowerCase();
  return lower === "ratelimit-policy" || (lower === "ratelimit" && value.startsWith('"'));
}

/** Wraps an error of a function of the application. */
function asSluicegateError(error: unknown): SluicegateError {
  if (isSluicegateError(error)) return error;
  const message = error instanceof Error ? `${error.name}: ${error.message}` : String(error);
  return new ConfigurationError(`a function of the middleware's options failed (${message}): correct it`, error);
}

/** Returns the function that reads requests, for one of the two forms of options. */
function requestReader<Args extends unknown[]>(options: CommonOptions<Args>): (args: Args) => MaybePromise<Request> {
  const { labels, name, key, limit, hold } = options;
  if (labels !== undefined && name === undefined && key === undefined && limit === undefined) {
    if (typeof labels === "function") return async (args) => ({ labels: checkedLabels(await labels(...args)) });
    validateConstants(labels);
    return (args) => labelsOf(labels, args);
  }
  if (labels !== undefined || name === undefined || key === undefined || limit === undefined) {
    throw new ConfigurationError("pass either labels, for the rules of the server, or name, key and limit");
  }
  if (!/^[^:]{1,100}$/.test(name)) {
    throw new ConfigurationError(`name ${JSON.stringify(name)} is invalid: use 1 to 100 characters without a colon`);
  }
  if (typeof limit !== "function") validateLimit(limit);
  if (typeof limit !== "function" && limit.algorithm === "concurrency" && !hold) {
    throw new ConfigurationError("limit: concurrency counts requests in flight: set hold: true");
  }
  return async (args) => {
    return {
      key: checkedValue("the key", `${name}:${keyText(await key(...args))}`),
      limit: typeof limit === "function" ? await limit(...args) : limit,
    };
  };
}

/**
 * Returns the part of a key that identifies the client. The parser of a body or a query can return any type, and the conversion
 * of an object calls its `toString`, which a client can replace.
 */
function keyText(value: unknown): string {
  if (value === undefined || value === null) return ABSENT;
  if (typeof value === "string" || typeof value === "number" || typeof value === "bigint") return `=${value}`;
  throw new RejectedRequest(`the key is ${describe(value)}: send a string or a number`);
}

function validateConstants(labels: object): void {
  for (const [name, value] of Object.entries(labels)) {
    const isText = typeof value === "string";
    const isValid = isText ? Buffer.byteLength(value) <= MAX_VALUE_BYTES : value === null || typeof value !== "object";
    if (!isValid || name === "" || Buffer.byteLength(name) > MAX_NAME_BYTES) {
      const fix = `use a function, or text of at most ${MAX_VALUE_BYTES} bytes, and a name of 1 to ${MAX_NAME_BYTES} bytes`;
      throw new ConfigurationError(`labels: ${JSON.stringify(name)} is invalid: ${fix}`);
    }
  }
}

async function labelsOf<Args extends unknown[]>(
  labels: Exclude<LabelsOption<Args>, (...args: Args) => unknown>,
  args: Args,
): Promise<Request> {
  const values: Record<string, LabelValue> = {};
  for (const [label, value] of Object.entries(labels)) {
    values[label] = typeof value === "function" ? await value(...args) : value;
  }
  return { labels: checkedLabels(values) };
}

function checkedLabels(labels: Labels): Labels {
  // the client rejects values that are not an object
  for (const [name, value] of Object.entries(labels ?? {})) {
    if (typeof value === "string") checkedValue(`the value of ${name}`, value);
  }
  return labels;
}

/** Returns a value that the server accepts. */
function checkedValue(description: string, value: string): string {
  if (value.length * 3 > MAX_VALUE_BYTES && Buffer.byteLength(value) > MAX_VALUE_BYTES) {
    throw new RejectedRequest(`${description} has more than ${MAX_VALUE_BYTES} bytes: send a shorter one`);
  }
  return value;
}
