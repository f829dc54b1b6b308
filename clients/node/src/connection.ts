/**
 * One connection to the server: a TCP or TLS socket with at most one request in flight.
 *
 * Sockets never keep the process alive. While a call is in progress, its deadline timer does.
 */

import * as net from "node:net";
import * as tls from "node:tls";
import { type HttpResponse, ResponseParser } from "./http1.js";

/** The longest time to establish a connection. It can exceed a call's deadline: a later call then uses the connection. */
const CONNECT_TIMEOUT_MS = 1000;

/** The longest time that a connection is kept without a request. The server closes idle connections after 30 s. */
const IDLE_TIMEOUT_MS = 10_000;

/** The address of the server, and how to verify it. */
export interface Target {
  host: string;
  port: number;
  tls: tls.ConnectionOptions | null;
}

/** Why a request has no response. */
export interface ExchangeFailure {
  error: Error;
  /** Whether the server may have received the whole request. */
  mayHaveRun: boolean;
}

/** Receives the outcome of a request. */
export type ExchangeCallback = (failure: ExchangeFailure | null, response: HttpResponse | null) => void;

/** Receives the changes of a connection's state. */
export interface ConnectionEvents {
  onOpen(connection: Connection): void;
  onClose(connection: Connection, error: Error): void;
}

/** A connection to the server. */
export class Connection {
  readonly #socket: net.Socket;
  readonly #events: ConnectionEvents;
  readonly #isSecure: boolean;
  #isClosed = false;
  #idleSinceMs = 0;
  #parser: ResponseParser | null = null;
  #callback: ExchangeCallback | null = null;

  constructor(target: Target, events: ConnectionEvents) {
    this.#events = events;
    this.#isSecure = target.tls !== null;
    const { host, port } = target;
    this.#socket =
      target.tls === null
        ? net.connect({ host, port, noDelay: true })
        : tls.connect({ ...target.tls, host, port, ALPNProtocols: ["http/1.1"] });
    this.#socket.setNoDelay(true);
    this.#socket.unref();
    const opened = target.tls === null ? "connect" : "secureConnect";
    this.#socket.once(opened, () => {
      this.#markIdle();
      this.#events.onOpen(this);
    });
    this.#socket.setTimeout(CONNECT_TIMEOUT_MS);
    this.#socket.on("timeout", () => this.#onTimeout());
    this.#socket.on("data", (bytes: Buffer) => this.#onData(bytes));
    this.#socket.on("end", () => this.#close(new Error("the server closed the connection")));
    this.#socket.on("error", (error: Error) => this.#close(error));
    this.#socket.on("close", () => this.#close(new Error("the connection was closed")));
  }

  /** Whether the connection can no longer be used. */
  get isClosed(): boolean {
    return this.#isClosed;
  }

  /** How long the connection has been without a request. */
  get idleMs(): number {
    return performance.now() - this.#idleSinceMs;
  }

  /** Sends a request. The connection must be open and have no other request. */
  send(request: string, maxBodyBytes: number, callback: ExchangeCallback): void {
    this.#parser = new ResponseParser(maxBodyBytes);
    this.#callback = callback;
    this.#socket.setTimeout(0);
    this.#socket.write(request);
  }

  /** Closes the connection; a request in flight fails. */
  close(): void {
    this.#close(new Error("the client was closed"));
  }

  /** Closes the connection of a request that was abandoned. Its callback is not called. */
  abandon(): void {
    this.#callback = null;
    this.#close(new Error("the request was abandoned"));
  }

  #markIdle(): void {
    this.#idleSinceMs = performance.now();
    this.#socket.setTimeout(IDLE_TIMEOUT_MS);
  }

  #onTimeout(): void {
    const phase = this.#idleSinceMs === 0 ? `no connection after ${CONNECT_TIMEOUT_MS} ms` : "idle";
    this.#close(new Error(phase));
  }

  #onData(bytes: Buffer): void {
    if (this.#parser === null || this.#callback === null) {
      this.#close(new Error("unexpected bytes from the server"));
      return;
    }
    let response: HttpResponse | null;
    try {
      response = this.#parser.push(bytes);
    } catch (error) {
      this.#close(error as Error);
      return;
    }
    if (response === null) return;
    const callback = this.#callback;
    this.#parser = null;
    this.#callback = null;
    if (response.keepAlive) this.#markIdle();
    else this.#close(new Error("the server announced the end of the connection"));
    callback(null, response);
  }

  #close(error: Error): void {
    if (this.#isClosed) return;
    this.#isClosed = true;
    this.#socket.destroy();
    const callback = this.#callback;
    this.#callback = null;
    this.#events.onClose(this, error);
    callback?.({ error, mayHaveRun: !this.#provesIncompleteRequest(error) }, null);
  }

  /**
   * Returns whether an error proves that the server did not receive the whole request.
   *
   * A request is one write. If the write fails, its last bytes were not handed to the kernel, and the server runs no incomplete
   * request. Any other error, also ECONNRESET from a read, can occur after the server ran the request. With TLS a failed write
   * can belong to another record.
   */
  #provesIncompleteRequest(error: NodeJS.ErrnoException): boolean {
    return !this.#isSecure && error.syscall === "write";
  }
}
