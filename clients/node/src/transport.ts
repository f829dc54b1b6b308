/**
 * Sends one HTTP request within a deadline. A request that the server may have received is not sent again, unless it is idempotent.
 *
 * An own HTTP/1.1 codec instead of `node:http` needs about half of the CPU time per call, and it exposes whether a request
 * was written, which decides whether it may be sent on another connection.
 */

import type { Connection, ExchangeFailure, Target } from "./connection.js";
import { TlsError, UnavailableError } from "./errors.js";
import type { HttpResponse } from "./http1.js";
import { ConnectionPool, QueueFullError, type Waiter } from "./pool.js";

/**
 * The idle time after which a connection is used only after the event loop has polled its sockets. The server may have closed the
 * connection while the process was busy, and a request that is written to such a connection is lost.
 */
const STALE_AFTER_MS = 500;

/** How often a request is prepared for another connection because its connection was closed before the request was written. */
const MAX_ATTEMPTS = 3;

/** One call. */
export interface Call {
  path: string;
  /** Returns the body, for the time that remains. */
  body(remainingMs: number): string;
  maxResponseBytes: number;
  deadlineMs: number;
  /** The time at which the deadline starts. */
  startedMs: number;
  signal?: AbortSignal | undefined;
}

/** The error of a call after the client was closed. */
export function closedError(): UnavailableError {
  return new UnavailableError("the client is closed: create another one", { mayHaveRun: false }, "closed");
}

/** Sends requests to one server. */
export class Transport {
  readonly #pool: ConnectionPool;
  readonly #basePath: string;
  readonly #headers: string;
  readonly #origin: string;
  #isClosed = false;
  #lastResponseMs = Number.NEGATIVE_INFINITY;

  constructor(url: URL, tls: Target["tls"], token: string | undefined, maxConnections: number) {
    const host = url.hostname.replace(/^\[|\]$/g, "");
    const port = url.port === "" ? (tls === null ? 80 : 443) : Number(url.port);
    this.#pool = new ConnectionPool({ host, port, tls }, maxConnections);
    this.#basePath = url.pathname.replace(/\/+$/, "");
    this.#origin = url.origin;
    const authorization = token === undefined ? "" : `authorization: Bearer ${token}\r\n`;
    this.#headers = `host: ${url.host}\r\n${authorization}content-type: application/json\r\n`;
  }

  /** Closes all connections; later calls fail. */
  close(): void {
    this.#isClosed = true;
    this.#pool.close();
  }

  /** The time of the last response to any call. */
  get lastResponseMs(): number {
    return this.#lastResponseMs;
  }

  /** Records that the server responds. */
  responded(): void {
    this.#lastResponseMs = performance.now();
  }

  /** Closes the connections that no call uses. */
  closeIdle(): void {
    this.#pool.closeIdle();
  }

  /**
   * Sends a request and returns its response.
   *
   * @throws UnavailableError, or the reason of the signal
   */
  send(call: Call): Promise<HttpResponse> {
    if (this.#isClosed) return Promise.reject(closedError());
    return new Promise((resolve, reject) => new Exchange(this.#pool, this, call, resolve, reject).start());
  }

  /**
   * Sends an idempotent request, and once more if its connection is lost before the response.
   *
   * @throws UnavailableError, or the reason of the signal
   */
  async sendTwice(call: Call): Promise<HttpResponse> {
    try {
      return await this.send(call);
    } catch (lost) {
      const isLost = lost instanceof UnavailableError && lost.code === "unavailable" && lost.mayHaveRun;
      if (!isLost) throw lost;
      try {
        return await this.send(call);
      } catch (error) {
        // the first request may have arrived
        throw error instanceof UnavailableError && !error.mayHaveRun ? lost : error;
      }
    }
  }

  /** Returns the bytes of a request. */
  encode(path: string, body: string): string {
    const length = Buffer.byteLength(body);
    return `POST ${this.#basePath}${path} HTTP/1.1\r\n${this.#headers}content-length: ${length}\r\n\r\n${body}`;
  }

  /** Converts the reason of a failure to an error that names the fix. */
  errorOf({ error, mayHaveRun }: ExchangeFailure): UnavailableError {
    const details = { mayHaveRun, cause: error };
    if (error instanceof QueueFullError) {
      const message = `${error.message}: raise maxConnections, or send fewer calls`;
      return new UnavailableError(message, { ...details, isLocal: true }, "overload");
    }
    const reason = reasonOf(error);
    if (isTlsError(error)) {
      const fix = "check the settings ca, cert and key, and the names in the server's certificate";
      return new TlsError(`TLS with ${this.#origin} failed (${reason}): ${fix}`, details);
    }
    const fix = "check that the server runs, and the client's url";
    return new UnavailableError(`no response from ${this.#origin} (${reason}): ${fix}`, details);
  }

  /** The error of a call whose deadline has passed. */
  deadlineError(deadlineMs: number, details: { mayHaveRun: boolean; isLocal: boolean }): UnavailableError {
    const fix = details.isLocal
      ? "the call waited for a connection: raise maxConnections, or send fewer calls"
      : "check the server, or raise deadlineMs";
    return new UnavailableError(
      `no response from ${this.#origin} within ${deadlineMs} ms: ${fix}`,
      details,
      "deadline",
    );
  }
}

/** One call in progress: it waits for a connection, then for its response, until its deadline. */
class Exchange implements Waiter {
  readonly #pool: ConnectionPool;
  readonly #transport: Transport;
  readonly #call: Call;
  readonly #resolve: (response: HttpResponse) => void;
  readonly #reject: (error: unknown) => void;
  #timer: NodeJS.Timeout | undefined;
  #connection: Connection | null = null;
  #attempts = 0;
  #hasWaited = false;
  #mayHaveRun = false;
  #isSettled = false;

  constructor(
    pool: ConnectionPool,
    transport: Transport,
    call: Call,
    resolve: (response: HttpResponse) => void,
    reject: (error: unknown) => void,
  ) {
    this.#pool = pool;
    this.#transport = transport;
    this.#call = call;
    this.#resolve = resolve;
    this.#reject = reject;
  }

  start(): void {
    const { signal } = this.#call;
    if (signal?.aborted) {
      this.#fail(signal.reason);
      return;
    }
    signal?.addEventListener("abort", this.#onAbort, { once: true });
    // After a busy period, timers run before the sockets are read: a response that is already here still counts.
    this.#timer = setTimeout(() => setImmediate(this.#onDeadline), this.#remainingMs());
    this.#pool.acquire(this);
    this.#hasWaited = this.#connection === null;
  }

  ready(connection: Connection): boolean {
    // after a busy period, the deadline can have passed although its timer has not fired
    if (this.#remainingMs() <= 0) {
      this.#failLate(true);
      return false;
    }
    this.#connection = connection;
    if (connection.idleMs < STALE_AFTER_MS) this.#write(connection);
    // The first callback runs in the current iteration of the event loop, the second after all sockets were polled.
    else setImmediate(() => setImmediate(() => this.#write(connection)));
    return true;
  }

  failed(error: Error): void {
    this.#fail(this.#transport.errorOf({ error, mayHaveRun: false }));
  }

  #write(connection: Connection): void {
    if (this.#isSettled) return;
    if (connection.isClosed) {
      this.#tryAnother(new Error("the server closed the connection"));
      return;
    }
    const { path, body, maxResponseBytes } = this.#call;
    const request = this.#transport.encode(path, body(this.#remainingMs()));
    this.#mayHaveRun = true;
    connection.send(request, maxResponseBytes, (failure, response) => {
      this.#connection = null;
      if (response !== null) {
        this.#transport.responded();
        this.#pool.release(connection);
        this.#settle();
        this.#resolve(response);
      } else if (failure !== null && !failure.mayHaveRun) {
        this.#mayHaveRun = false;
        this.#tryAnother(failure.error);
      } else if (failure !== null) {
        this.#fail(this.#transport.errorOf(failure));
      }
    });
  }

  #remainingMs(): number {
    return this.#call.deadlineMs - (performance.now() - this.#call.startedMs);
  }

  /** Uses another connection for a request that the server did not receive. */
  #tryAnother(error: Error): void {
    this.#connection = null;
    this.#attempts += 1;
    if (this.#attempts >= MAX_ATTEMPTS) this.failed(error);
    else this.#pool.acquire(this);
  }

  /** A call that waited is late because of other calls if the server responded to one of them since its start. */
  readonly #onDeadline = (): void => {
    this.#failLate(this.#hasWaited && this.#transport.lastResponseMs >= this.#call.startedMs);
  };

  #failLate(isLocal: boolean): void {
    const { deadlineMs } = this.#call;
    this.#fail(this.#transport.deadlineError(deadlineMs, { mayHaveRun: this.#mayHaveRun, isLocal }));
  }

  readonly #onAbort = (): void => {
    this.#fail(this.#call.signal?.reason);
  };

  #fail(error: unknown): void {
    if (this.#isSettled) return;
    this.#settle();
    this.#pool.abandon(this);
    const connection = this.#connection;
    if (connection !== null && this.#mayHaveRun) connection.abandon();
    else if (connection !== null) this.#pool.release(connection);
    this.#reject(error);
  }

  #settle(): void {
    this.#isSettled = true;
    clearTimeout(this.#timer);
    this.#call.signal?.removeEventListener("abort", this.#onAbort);
  }
}

/** Codes of failed certificate verification that have no common prefix. */
const VERIFICATION_CODES =
  /^(CERT_|UNABLE_TO_|SELF_SIGNED_|DEPTH_ZERO_|INVALID_CA|HOSTNAME_MISMATCH|ERR_TLS_|ERR_SSL_|EPROTO)/;

function isTlsError(error: NodeJS.ErrnoException): boolean {
  return typeof error.code === "string" && VERIFICATION_CODES.test(error.code);
}

/** Returns the code and message of an error; of several connection attempts, the first. */
function reasonOf(error: NodeJS.ErrnoException): string {
  const first: NodeJS.ErrnoException = error instanceof AggregateError ? error.errors[0] : error;
  return first.message || first.code || "unknown error";
}
