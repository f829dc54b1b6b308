/**
 * Collects the checks that start in the same iteration of the event loop, so that one call decides all of them.
 *
 * No check waits for a timer or for the response to another: if no call is in flight, a check is sent at once, otherwise as soon
 * as the event loop has read its sockets. A busy application then needs one write, one read and one JSON document for several
 * checks.
 */

import type { Decision } from "./decision.js";
import type { InvalidRequestError } from "./errors.js";

/** The most checks of a batch. */
const MAX_BATCH = 100;

/** The largest check of a batch in bytes, so that a batch is smaller than the largest body of the server, 1 MiB. */
const MAX_BATCHED_BYTES = 8 * 1024;

/** The longest time between the starts of two checks of a batch, which share one deadline. */
const MAX_SPREAD_MS = 5;

/** A check that is not sent yet. */
export interface PendingCheck {
  /** The JSON of the check. */
  text: string;
  deadlineMs: number;
  startedMs: number;
  /** Receives the result; null if the check must be sent alone, because the server rejected the batch. */
  resolve(result: Decision | InvalidRequestError | null): void;
  reject(error: unknown): void;
}

/** Returns whether a check is small enough for a batch. A UTF-16 unit has at most 3 bytes. */
export function isBatchable(text: string): boolean {
  return text.length * 3 <= MAX_BATCHED_BYTES;
}

/** Checks that are sent in one call. */
export type Batch = [PendingCheck, ...PendingCheck[]];

/** Collects checks and sends them in batches. */
export class CheckBatcher {
  readonly #call: (batch: Batch) => Promise<void>;
  #pending: PendingCheck[] = [];
  #callsInFlight = 0;

  /** `call` sends a batch and settles its checks. Its promise is never rejected. */
  constructor(call: (batch: Batch) => Promise<void>) {
    this.#call = call;
  }

  /** Sends a check at once, or together with the others of this iteration of the event loop. */
  add(check: PendingCheck): void {
    if (this.#callsInFlight === 0) {
      this.#send([check]);
      return;
    }
    const count = this.#pending.push(check);
    if (count === MAX_BATCH) this.#sendPending();
    else if (count === 1) setImmediate(() => this.#sendPending());
  }

  #send(batch: Batch): void {
    this.#callsInFlight += 1;
    void this.#call(batch).then(() => {
      this.#callsInFlight -= 1;
    });
  }

  #sendPending(): void {
    const pending = this.#pending;
    this.#pending = [];
    for (let [first, ...rest] = pending; first !== undefined; [first, ...rest] = rest) {
      const start = first;
      const other = rest.findIndex((check) => !sharesDeadline(start, check));
      const count = other < 0 ? rest.length : other;
      this.#send([first, ...rest.slice(0, count)]);
      rest = rest.slice(count);
    }
  }
}

function sharesDeadline(first: PendingCheck, check: PendingCheck): boolean {
  return check.deadlineMs === first.deadlineMs && check.startedMs - first.startedMs <= MAX_SPREAD_MS;
}
