/**
 * Repeats settlements and releases in the background while the server is unavailable.
 *
 * The pauses do not keep the process running.
 */

import { type SluicegateError, UnavailableError } from "./errors.js";
import type { HoldAdjustment } from "./hold-request.js";
import { Queue } from "./queue.js";
import type { Settlement } from "./settlement.js";

/** The bounds of a client's queue. */
const BOUNDS: QueueBounds = { maxQueued: 10_000, maxAgeMs: 600_000 };

/** The first and the longest pause after a failure. */
const FIRST_PAUSE_MS = 50;
const LONGEST_PAUSE_MS = 1000;

interface Queued {
  adjustment: HoldAdjustment;
  untilMs: number;
}

/** The functions of the client that the queue uses. */
export interface SettlementSender {
  send(adjustment: HoldAdjustment): Promise<Settlement>;
  /** Reports a settlement that is dropped. */
  dropped(error: SluicegateError): void;
}

/** The maximum number of queued settlements, and how long each is repeated. */
export interface QueueBounds {
  maxQueued: number;
  maxAgeMs: number;
}

/**
 * Settlements that were not delivered. They are sent one by one. One to which the server responds with an error is repeated after the
 * others, so that it does not block them.
 */
export class SettlementQueue {
  readonly #sender: SettlementSender;
  readonly #maxQueued: number;
  readonly #maxAgeMs: number;
  readonly #waiting = new Queue<Queued>();
  #sending: Promise<void> | null = null;

  constructor(sender: SettlementSender, { maxQueued, maxAgeMs }: QueueBounds = BOUNDS) {
    this.#sender = sender;
    this.#maxQueued = maxQueued;
    this.#maxAgeMs = maxAgeMs;
  }

  /** Repeats a call until it is answered. Returns whether there is space for it. */
  add(adjustment: HoldAdjustment): boolean {
    if (this.#waiting.size >= this.#maxQueued) return false;
    this.#waiting.add({ adjustment, untilMs: performance.now() + this.#maxAgeMs });
    this.#sending ??= this.#sendAll();
    return true;
  }

  /** Waits until the queue is empty. */
  emptied(): Promise<void> {
    return this.#sending ?? Promise.resolve();
  }

  async #sendAll(): Promise<void> {
    let pauseMs = FIRST_PAUSE_MS;
    for (let next = this.#waiting.shift(); next !== undefined; ) {
      const failure = await this.#send(next);
      if (failure === null) {
        pauseMs = FIRST_PAUSE_MS;
        next = this.#waiting.shift();
        continue;
      }
      if (failure.hasResponse) {
        this.#waiting.add(next);
        next = this.#waiting.shift();
      }
      await pause(pauseMs * (0.5 + Math.random() / 2));
      pauseMs = Math.min(LONGEST_PAUSE_MS, pauseMs * 2);
    }
    this.#sending = null;
  }

  /** Sends a settlement. Returns the error if it is sent again later. */
  async #send({ adjustment, untilMs }: Queued): Promise<UnavailableError | null> {
    try {
      await this.#sender.send(adjustment);
    } catch (error) {
      if (error instanceof UnavailableError && error.code !== "closed" && performance.now() < untilMs) return error;
      this.#sender.dropped(error as SluicegateError);
    }
    return null;
  }
}

function pause(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms).unref());
}
