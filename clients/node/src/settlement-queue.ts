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

/** Settlements that were not delivered. They are sent in order. */
export class SettlementQueue {
  readonly #sender: SettlementSender;
  readonly #maxQueued: number;
  readonly #maxAgeMs: number;
  readonly #waiting = new Queue<Queued>();
  #isSending = false;

  constructor(sender: SettlementSender, { maxQueued, maxAgeMs }: QueueBounds = BOUNDS) {
    this.#sender = sender;
    this.#maxQueued = maxQueued;
    this.#maxAgeMs = maxAgeMs;
  }

  /** Repeats a call until it is answered. Returns whether there is space for it. */
  add(adjustment: HoldAdjustment): boolean {
    if (this.#waiting.size >= this.#maxQueued) return false;
    this.#waiting.add({ adjustment, untilMs: performance.now() + this.#maxAgeMs });
    if (!this.#isSending) void this.#sendAll();
    return true;
  }

  async #sendAll(): Promise<void> {
    this.#isSending = true;
    for (let next = this.#waiting.shift(); next !== undefined; next = this.#waiting.shift()) await this.#deliver(next);
    this.#isSending = false;
  }

  /** Repeats a settlement until it is answered or too old. */
  async #deliver({ adjustment, untilMs }: Queued): Promise<void> {
    for (let pauseMs = FIRST_PAUSE_MS; ; pauseMs = Math.min(LONGEST_PAUSE_MS, pauseMs * 2)) {
      try {
        await this.#sender.send(adjustment);
        return;
      } catch (error) {
        const isRepeated = error instanceof UnavailableError && error.code !== "closed" && performance.now() < untilMs;
        if (!isRepeated) {
          this.#sender.dropped(error as SluicegateError);
          return;
        }
      }
      await new Promise((resolve) => setTimeout(resolve, pauseMs * (0.5 + Math.random() / 2)).unref());
    }
  }
}
