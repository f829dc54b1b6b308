/**
 * A bounded pool of connections. Callers that find none wait in a bounded queue, first come first served.
 */

import { Connection, type Target } from "./connection.js";
import { Queue } from "./queue.js";

/** The most callers that wait for a connection. */
const MAX_WAITERS = 10_000;

/** A caller that needs a connection. */
export interface Waiter {
  /** Receives an open connection, which belongs to the caller until it is released or closed. Returns whether it is needed. */
  ready(connection: Connection): boolean;
  /** Receives the reason why there is none. */
  failed(error: Error): void;
}

/** The queue of callers is full. */
export class QueueFullError extends Error {}

/** The connections to one server. */
export class ConnectionPool {
  readonly #target: Target;
  readonly #maxConnections: number;
  readonly #all = new Set<Connection>();
  /** The unused connections; the last one was used most recently. */
  readonly #idle: Connection[] = [];
  readonly #waiters = new Queue<Waiter>();
  #connecting = 0;
  #isClosed = false;

  constructor(target: Target, maxConnections: number) {
    this.#target = target;
    this.#maxConnections = maxConnections;
  }

  /** Passes a connection to the waiter, now or later. */
  acquire(waiter: Waiter): void {
    if (this.#isClosed) {
      waiter.failed(new Error("the client was closed"));
      return;
    }
    const connection = this.#idle.pop();
    if (connection !== undefined) {
      if (!waiter.ready(connection)) this.#idle.push(connection);
      return;
    }
    if (this.#waiters.size >= MAX_WAITERS) {
      waiter.failed(new QueueFullError(`${MAX_WAITERS} calls already wait for a connection`));
      return;
    }
    this.#waiters.add(waiter);
    this.#connectForWaiters();
  }

  /** Removes a waiter that needs no connection any more. */
  abandon(waiter: Waiter): void {
    this.#waiters.delete(waiter);
  }

  /** Returns a connection after its request is complete. */
  release(connection: Connection): void {
    if (connection.isClosed) return;
    for (let waiter = this.#waiters.shift(); waiter !== undefined; waiter = this.#waiters.shift()) {
      if (waiter.ready(connection)) return;
    }
    this.#idle.push(connection);
  }

  /** Closes the connections that no caller uses. */
  closeIdle(): void {
    for (const connection of [...this.#idle]) connection.close();
  }

  /** Closes all connections; calls in progress fail. */
  close(): void {
    this.#isClosed = true;
    for (let waiter = this.#waiters.shift(); waiter !== undefined; waiter = this.#waiters.shift()) {
      waiter.failed(new Error("the client was closed"));
    }
    for (const connection of this.#all) connection.close();
  }

  /** Opens connections until each waiter has one that is being established. */
  #connectForWaiters(): void {
    while (this.#connecting < this.#waiters.size && this.#all.size < this.#maxConnections) {
      this.#connecting += 1;
      let isOpen = false;
      const connection = new Connection(this.#target, {
        onOpen: (opened) => {
          isOpen = true;
          this.#connecting -= 1;
          this.release(opened);
        },
        onClose: (closed, error) => {
          this.#all.delete(closed);
          const place = this.#idle.indexOf(closed);
          if (place >= 0) this.#idle.splice(place, 1);
          if (!isOpen) {
            this.#connecting -= 1;
            this.#waiters.shift()?.failed(error);
          }
          this.#connectForWaiters();
        },
      });
      this.#all.add(connection);
    }
  }
}
