/**
 * The client: operations, deadlines, the circuit breaker and the failure policy.
 */

import { CallsInProgress } from "./calls-in-progress.js";
import { type Batch, CheckBatcher, isBatchable } from "./check-batcher.js";
import { type Admission, CircuitBreaker, MAX_BACKOFF_MS } from "./circuit-breaker.js";
import { DEFAULT_URL, parseUrl, type TlsOptions, tlsSettings, validToken } from "./client-settings.js";
import { type Decision, readDecision } from "./decision.js";
import { consoleReporter, type ErrorHandler, report } from "./error-reporter.js";
import { ConfigurationError, InvalidRequestError, SluicegateError, UnavailableError } from "./errors.js";
import { decideByPolicy, type FailurePolicy, type PolicyCall, validPolicy } from "./failure-policy.js";
import { type Hold, useHold } from "./hold.js";
import { HoldCalls, type HoldOperation, type HoldOptions } from "./hold-calls.js";
import { type HoldReference, referenceBody, releaseOf, renewalOf, settlementOf } from "./hold-request.js";
import type { HttpResponse } from "./http1.js";
import {
  type ChargeRequest,
  type Cost,
  MAX_CHECKS,
  type RefundRequest,
  type Request,
  type RequestBody,
  type ResetRequest,
  requestBody,
  serialize,
} from "./request.js";
import {
  type Explanation,
  type ResetResult,
  readExplanation,
  readReset,
  readResponse,
  readResults,
} from "./response.js";
import type { Settlement } from "./settlement.js";
import { type Call, closedError, Transport } from "./transport.js";

const DEFAULT_DEADLINE_MS = 100;
const MAX_DEADLINE_MS = 60_000;
const DEFAULT_MAX_CONNECTIONS = 64;

/** The share of a deadline, and the most of it, that is reserved for the network. The server gets the rest. */
const NETWORK_SHARE = 0.1;
const MAX_NETWORK_MS = 10;

/** The largest response in bytes: to a single decision, and to several checks or an explanation. */
const MAX_RESPONSE_BYTES = { decision: 256 * 1024, large: 16 * 1024 * 1024 };

/** The settings of a client. */
export interface ClientOptions extends TlsOptions {
  /** The address of the server; `http://127.0.0.1:8080` by default. */
  url?: string | URL;
  /** The token that is sent as `Authorization: Bearer …`. */
  token?: string;
  /** The time limit of a call in milliseconds, from the call to its result; 100 by default. */
  deadlineMs?: number;
  /** How checks and peeks are decided if the server does not answer in time; `"open"` by default. */
  onFailure?: FailurePolicy;
  /** Receives errors that are not returned to a caller. By default each message is written to standard error at most once a minute. */
  onError?: ErrorHandler;
  /** The most connections to the server; 64 by default. */
  maxConnections?: number;
}

/** The settings of one call. */
export interface CallOptions {
  /** The time limit of this call in milliseconds. */
  deadlineMs?: number | undefined;
  /** Cancels the call. The request may already have been charged. */
  signal?: AbortSignal | undefined;
}

/** The settings of one check or peek. */
export interface CheckOptions extends CallOptions {
  /** The failure policy of this call. */
  onFailure?: FailurePolicy | undefined;
  /** Whether the decision has the rate limit headers for the response to the client. */
  headers?: boolean | undefined;
  /** Receives the error if the failure policy decides; `onError` of the client by default. */
  onError?: ErrorHandler | undefined;
}

/** A client of one sluicegate server. */
export class Client {
  /** Receives errors that are not returned to a caller. */
  readonly onError: ErrorHandler;
  readonly #transport: Transport;
  readonly #inProgress = new CallsInProgress();
  readonly #breaker = new CircuitBreaker();
  readonly #batcher = new CheckBatcher((batch) => this.#sendBatch(batch));
  readonly #holds = new HoldCalls({
    callWithBreaker: (operation, options) =>
      this.#callOfHold(operation, options, this.#breaker.admit(performance.now())),
    callAlways: (operation, options) => this.#callOfHold(operation, options, "normal"),
    decideDespite: (error, request, options) =>
      this.decideLocally("check", request, this.#hidden(error, options), options.onFailure),
    report: (error) => report(this.onError, error),
    inProgress: this.#inProgress,
  });
  readonly #deadlineMs: number;
  readonly #onFailure: FailurePolicy;
  #closing: Promise<void> | undefined;

  constructor(options: ClientOptions | string | URL = {}) {
    const settings: ClientOptions = typeof options === "string" || options instanceof URL ? { url: options } : options;
    const url = parseUrl(settings.url ?? DEFAULT_URL);
    const maxConnections = settings.maxConnections ?? DEFAULT_MAX_CONNECTIONS;
    if (!Number.isSafeInteger(maxConnections) || maxConnections < 1) {
      throw new ConfigurationError(`maxConnections ${maxConnections} is out of range: use a whole number from 1`);
    }
    this.#deadlineMs = validDeadline(settings.deadlineMs ?? DEFAULT_DEADLINE_MS);
    this.#onFailure = validPolicy(settings.onFailure ?? "open");
    this.onError = settings.onError ?? consoleReporter();
    this.#transport = new Transport(url, tlsSettings(url, settings), validToken(settings.token), maxConnections);
  }

  /**
   * Decides a request, and charges it if it is allowed. If the server does not answer in time, the failure policy decides.
   *
   * @throws InvalidRequestError, AuthenticationError
   */
  check(request: Request, options: CheckOptions = {}): Promise<Decision> {
    return this.#decide("check", request, options);
  }

  /**
   * Decides a request without charging it. If the server does not answer in time, the failure policy decides.
   *
   * @throws InvalidRequestError, AuthenticationError
   */
  peek(request: Request, options: CheckOptions = {}): Promise<Decision> {
    return this.#decide("peek", request, options);
  }

  /**
   * Decides up to 1000 independent requests in one call. The results are in the order of the requests; a request that is invalid
   * only for a rule has an error as its result.
   *
   * @throws InvalidRequestError, AuthenticationError
   */
  async checkMany(
    requests: readonly Request[],
    options: CheckOptions = {},
  ): Promise<Array<Decision | InvalidRequestError>> {
    if (!Array.isArray(requests) || requests.length > MAX_CHECKS) {
      throw new InvalidRequestError(`checkMany needs an array of at most ${MAX_CHECKS} requests`);
    }
    this.#assertOpen();
    if (requests.length === 0) return [];
    const checks = requests.map((request) => withHeaders(requestBody(request), options.headers));
    const read = (body: unknown) => readResults(body, requests.length);
    try {
      return await this.#callWithBreaker({ path: "/v1/check", body: { checks }, read, size: "large" }, options);
    } catch (error) {
      const reported = this.#hidden(error, options);
      return requests.map((request) => this.decideLocally("check", request, reported, options.onFailure));
    }
  }

  /**
   * Checks a request with an estimated cost, and holds it until the actual cost is known. Rules with the algorithm `concurrency`
   * require a hold. If the server does not answer in time, the failure policy decides.
   *
   * ```js
   * await using hold = await client.hold({ labels: { tenant: "acme" }, cost: { tokens: 500 } });
   * ```
   *
   * @throws InvalidRequestError, AuthenticationError
   */
  async hold(request: Request, options: HoldOptions = {}): Promise<Hold> {
    this.#assertOpen();
    return this.#holds.hold(request, options);
  }

  /**
   * Holds a request while a function runs. The function is also called if the request is denied: see `hold.allowed`. The hold is renewed
   * while the function runs. Then it is settled with `actualCost`. If that is not set, an exception releases the hold; without an exception
   * the estimate stays charged. It also stays charged after an `AbortError`, or after any exception if `options.signal` is aborted, because
   * a client could otherwise avoid every charge by disconnecting.
   */
  withHold<T>(request: Request, use: (hold: Hold) => T | Promise<T>): Promise<T>;
  withHold<T>(request: Request, options: HoldOptions, use: (hold: Hold) => T | Promise<T>): Promise<T>;
  async withHold<T>(
    request: Request,
    ...rest: [use: (hold: Hold) => T | Promise<T>] | [options: HoldOptions, use: (hold: Hold) => T | Promise<T>]
  ): Promise<T> {
    const [options, use] = rest.length === 1 ? [{}, rest[0]] : rest;
    return useHold(await this.hold(request, options), use, options.signal);
  }

  /**
   * Replaces the estimate of a hold with the actual cost, once. A unit that is not named keeps its estimate. If the server is
   * unavailable, the call is repeated in the background, and the outcome is `queued`.
   *
   * @throws SluicegateError
   */
  async settle(hold: HoldReference & { cost: Cost }, options: CallOptions = {}): Promise<Settlement> {
    return this.#holds.adjust(settlementOf(referenceBody(hold), hold.cost), options);
  }

  /**
   * Refunds the estimate of a hold. If the server is unavailable, the call is repeated in the background.
   *
   * @throws SluicegateError
   */
  async release(hold: HoldReference, options: CallOptions = {}): Promise<Settlement> {
    return this.#holds.adjust(releaseOf(referenceBody(hold)), options);
  }

  /**
   * Moves the expiry of a hold to `ttlMs` from now, if that is later.
   *
   * @throws SluicegateError
   */
  async renew(hold: HoldReference & { ttlMs: number }, options: CallOptions = {}): Promise<Settlement> {
    return this.#holds.adjust(renewalOf(referenceBody(hold), hold.ttlMs), options);
  }

  /**
   * Charges usage that is known only afterwards, into debt if necessary.
   *
   * @throws SluicegateError
   */
  async charge(request: ChargeRequest, options: CallOptions = {}): Promise<Decision> {
    const body = requestBody(request);
    return this.#callAlways({ path: "/v1/charge", body, read: readDecision, size: "decision" }, options);
  }

  /**
   * Refunds at most what counts now: the newest charges, or with `atUs` exactly that charge.
   *
   * @throws SluicegateError
   */
  async refund(request: RefundRequest, options: CallOptions = {}): Promise<Decision> {
    const body = requestBody(request);
    const operation: Operation<Decision> = { path: "/v1/refund", body, read: readDecision, size: "decision" };
    return this.#inProgress.add(this.#callAlways(operation, options));
  }

  /**
   * Deletes the counters of labels or of a key.
   *
   * @throws SluicegateError
   */
  async reset(request: ResetRequest, options: CallOptions = {}): Promise<ResetResult> {
    const body = requestBody(request);
    return this.#callAlways({ path: "/v1/reset", body, read: readReset, size: "decision" }, options);
  }

  /**
   * Shows which rules apply to a request, with their counters. Nothing is charged.
   *
   * @throws SluicegateError
   */
  async explain(request: Request, options: CallOptions = {}): Promise<Explanation> {
    const body = requestBody(request);
    return this.#callAlways({ path: "/v1/explain", body, read: readExplanation, size: "large" }, options);
  }

  /** Decides a request by the failure policy, without a call. */
  decideLocally(call: PolicyCall, request: Request, reason: SluicegateError, onFailure?: FailurePolicy): Decision {
    return decideByPolicy(onFailure === undefined ? this.#onFailure : validPolicy(onFailure), call, request, reason);
  }

  /**
   * Closes all connections, after waiting up to the deadline of the client for holds that are being made, settlements, releases and
   * refunds, also for those that are repeated in the background. Later checks, peeks and holds fail at once, and all other calls once the
   * connections are closed. Never rejects.
   */
  close(): Promise<void> {
    this.#closing ??= this.#close();
    return this.#closing;
  }

  async #close(): Promise<void> {
    let timer: NodeJS.Timeout | undefined;
    const deadline = new Promise<void>((resolve) => {
      timer = setTimeout(resolve, this.#deadlineMs);
    });
    await Promise.race([this.#inProgress.ended(), deadline]);
    clearTimeout(timer);
    this.#transport.close();
  }

  #assertOpen(): void {
    if (this.#closing !== undefined) throw closedError();
  }

  async #decide(call: PolicyCall, request: Request, options: CheckOptions): Promise<Decision> {
    const body = withHeaders(requestBody(request), options.headers);
    this.#assertOpen();
    const operation: Operation<Decision> = { path: `/v1/${call}`, body, read: readDecision, size: "decision" };
    try {
      return await (call === "check" ? this.#check(operation, options) : this.#callWithBreaker(operation, options));
    } catch (error) {
      return this.decideLocally(call, request, this.#hidden(error, options), options.onFailure);
    }
  }

  /** Sends a check, in a batch with others if that is possible. A probe, and a check that can be cancelled, is sent alone. */
  async #check(operation: Operation<Decision>, options: CallOptions): Promise<Decision> {
    const text = serialize(operation.body);
    if (options.signal !== undefined || this.#breaker.isOpen || !isBatchable(text)) {
      return this.#callWithBreaker(operation, options);
    }
    const deadlineMs = options.deadlineMs === undefined ? this.#deadlineMs : validDeadline(options.deadlineMs);
    const startedMs = performance.now();
    const result = await new Promise<Decision | InvalidRequestError | null>((resolve, reject) => {
      this.#batcher.add({ text, deadlineMs, startedMs, resolve, reject });
    });
    if (result === null) return this.#callWithBreaker(operation, options, startedMs);
    if (result instanceof InvalidRequestError) throw result;
    return result;
  }

  /** Sends checks in one call. Each check counts as a success or failure, as if it was sent alone. */
  async #sendBatch(batch: Batch): Promise<void> {
    const [{ text, deadlineMs, startedMs }] = batch;
    const path = "/v1/check";
    const isSingle = batch.length === 1;
    const json = isSingle ? text : `{"checks":[${batch.map((check) => check.text).join(",")}]}`;
    const maxResponseBytes = isSingle ? MAX_RESPONSE_BYTES.decision : MAX_RESPONSE_BYTES.large;
    const read = (body: unknown) => (isSingle ? asList(readDecision(body)) : readResults(body, batch.length));
    try {
      const call = { path, body: withDeadline(json), maxResponseBytes, deadlineMs, startedMs };
      const results = readResponse(await this.#transport.send(call), path, read);
      this.#breaker.succeeded();
      batch.forEach((check, index) => {
        check.resolve(results[index] ?? null);
      });
    } catch (error) {
      if (error instanceof UnavailableError) for (const _ of batch) this.#failed("normal", error);
      else this.#breaker.succeeded();
      // the server rejects a batch as a whole if one check is invalid; then nothing was charged
      const isRepeated = !isSingle && error instanceof InvalidRequestError;
      for (const check of batch) {
        if (isRepeated) check.resolve(null);
        else check.reject(error);
      }
    }
  }

  /** Reports an error that the failure policy hides. Throws it if it is of another kind. */
  #hidden(error: unknown, { onError = this.onError }: CheckOptions): UnavailableError {
    if (!(error instanceof UnavailableError) || error.code === "closed") throw error;
    report(onError, error);
    return error;
  }

  /** Sends a call unless the circuit breaker is open. A 5xx response counts as a failure of the server. */
  async #callWithBreaker<T>(operation: Operation<T>, options: CallOptions, startedMs?: number): Promise<T> {
    const call = this.#prepare(operation, options, startedMs);
    const admission = this.#breaker.admit(performance.now());
    if (admission === "rejected") throw circuitOpen(this.#breaker.lastError);
    try {
      const response = await this.#transport.send(call);
      const value = readResponse(response, operation.path, operation.read);
      this.#breaker.succeeded();
      return value;
    } catch (error) {
      if (error instanceof UnavailableError) this.#failed(admission, error);
      else if (error instanceof SluicegateError) this.#breaker.succeeded();
      else this.#breaker.cancelled(admission);
      throw error;
    }
  }

  /**
   * Sends an idempotent call for a hold. For the circuit breaker, any response is a success: a 503 can mean that one counter has too many
   * holds.
   */
  async #callOfHold<T>(operation: HoldOperation<T>, options: CallOptions, admission: Admission): Promise<T> {
    if (admission === "rejected") throw circuitOpen(this.#breaker.lastError);
    let response: HttpResponse;
    try {
      response = await this.#transport.sendTwice(this.#prepare({ ...operation, size: "decision" }, options));
    } catch (error) {
      if (error instanceof UnavailableError) this.#failed(admission, error);
      else this.#breaker.cancelled(admission);
      throw error;
    }
    this.#breaker.succeeded();
    return readResponse(response, operation.path, operation.read);
  }

  /** Sends a call that no failure policy can replace, also while the circuit breaker is open. */
  async #callAlways<T>(operation: Operation<T>, options: CallOptions): Promise<T> {
    const call = this.#prepare(operation, options);
    let response: HttpResponse;
    try {
      response = await this.#transport.send(call);
    } catch (error) {
      if (error instanceof UnavailableError) this.#failed("normal", error);
      throw error;
    }
    this.#breaker.succeeded();
    return readResponse(response, operation.path, operation.read);
  }

  /** Counts a failure of the server. Probes use new connections, because the others may lead to a server that is gone. */
  #failed(admission: Admission, error: UnavailableError): void {
    if (error.isLocal) this.#breaker.cancelled(admission);
    else if (this.#breaker.failed(admission, error, performance.now())) this.#transport.closeIdle();
  }

  #prepare(
    { path, body, size }: Operation<unknown>,
    { deadlineMs, signal }: CallOptions,
    startedMs = performance.now(),
  ): Call {
    return {
      path,
      body: withDeadline(serialize(body)),
      startedMs,
      maxResponseBytes: MAX_RESPONSE_BYTES[size],
      deadlineMs: deadlineMs === undefined ? this.#deadlineMs : validDeadline(deadlineMs),
      signal,
    };
  }
}

/** One call of the API. */
interface Operation<T> {
  path: string;
  /** The request, with at least one member. */
  body: RequestBody;
  /** Converts the JSON of the response; returns null if it is not valid. */
  read(body: unknown): T | null;
  size: keyof typeof MAX_RESPONSE_BYTES;
}

function withHeaders(body: RequestBody, headers: boolean | undefined): RequestBody {
  if (headers === true) body.headers = true;
  return body;
}

/** Returns a function that adds the deadline of the server to a JSON object with at least one member. */
function withDeadline(text: string): Call["body"] {
  return (remainingMs) => `${text.slice(0, -1)},"deadline_ms":${serverDeadline(remainingMs)}}`;
}

function asList<T>(value: T | null): T[] | null {
  return value === null ? null : [value];
}

function circuitOpen(last: Error | null): UnavailableError {
  const message = `circuit breaker open, the next probe follows within ${MAX_BACKOFF_MS} ms; last error: ${last?.message}`;
  return new UnavailableError(message, { mayHaveRun: false, cause: last ?? undefined }, "circuit_open");
}

/** Returns the deadline of the server's decision, so that its response arrives within the remaining time. */
function serverDeadline(remainingMs: number): number {
  return Math.max(1, Math.floor(remainingMs - Math.min(MAX_NETWORK_MS, remainingMs * NETWORK_SHARE)));
}

function validDeadline(deadlineMs: number): number {
  if (!(deadlineMs >= 1 && deadlineMs <= MAX_DEADLINE_MS)) {
    throw new ConfigurationError(`deadlineMs ${deadlineMs} is out of range: use 1 to ${MAX_DEADLINE_MS}`);
  }
  return deadlineMs;
}
