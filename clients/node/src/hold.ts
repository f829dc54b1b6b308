/**
 * Holds: admitted requests whose cost is an estimate until they are settled.
 */

import type { CallOptions } from "./client.js";
import type { Decision } from "./decision.js";
import { isSluicegateError, type SluicegateError, UnavailableError } from "./errors.js";
import {
  copiedCost,
  type HoldAdjustment,
  type HoldAnswer,
  releaseOf,
  renewalOf,
  settlementOf,
} from "./hold-request.js";
import type { Cost, RequestBody } from "./request.js";
import type { Settlement } from "./settlement.js";

/** A hold is renewed after this fraction of its time to live. */
const RENEW_AFTER = 2 / 3;

/** A failed renewal is repeated after this fraction of the time to live, and after this pause at the earliest. */
const RENEW_AGAIN_AFTER = 1 / 15;
const SHORTEST_RENEWAL_PAUSE_MS = 50;

/**
 * The default time to live of the server. It renews a hold whose time to live is unknown, because its answer was lost, no store recorded
 * it, or it existed already. A renewal never shortens a hold.
 */
const DEFAULT_TTL_MS = 60_000;

/** The pause before such a hold is renewed for the first time. */
const FIRST_PAUSE_MS = 500;

/** The outcomes for a hold that has no counters. */
const WITHOUT_COUNTERS = { settle: "settled", release: "released", renew: "renewed" } as const;

/** Sends calls for holds. */
export interface HoldCaller {
  /** Sends a call. A settlement or release is repeated in the background if the server does not answer. */
  adjust(adjustment: HoldAdjustment, options?: CallOptions): Promise<Settlement>;
  /** Reports an error that no caller sees. */
  reportUnsettled(error: SluicegateError): void;
}

/**
 * A hold that was admitted or denied.
 *
 * ```js
 * await using hold = await client.hold({ labels: { tenant: "acme" }, cost: { tokens: 500 } });
 * if (hold.allowed) await hold.settle({ tokens: 120 });
 * ```
 *
 * When an `await using` block ends, the hold is settled with `actualCost`, or with the estimate if that is not set, unless it has ended
 * before.
 */
export class Hold {
  /** The decision for the request with its estimated cost. */
  readonly decision: Decision;
  /** The id of the hold. */
  readonly id: string;
  /** The token with which another process can settle the hold; null if the server did not admit it. */
  readonly token: string | null;
  /** When the hold expires on the store's clock, in microseconds; null if no store recorded it. */
  readonly expiresAtUs: number | null;
  /** Whether a hold with this id was live already. Then this is its first response, and nothing was charged again. */
  readonly isRepeated: boolean;
  readonly #answer: HoldAnswer;
  readonly #estimate: Cost;
  readonly #caller: HoldCaller;
  #actualCost: Cost | undefined;
  #timer: NodeJS.Timeout | undefined;
  /** The call that was sent to end the hold: if it is cancelled or fails, the end of the block repeats it. */
  #unfinishedCall: HoldAdjustment | null = null;
  #isKeptAlive = false;
  #hasEnded = false;

  /** @internal */
  constructor(answer: HoldAnswer, estimate: Cost, caller: HoldCaller) {
    this.decision = answer.decision;
    this.id = answer.id;
    this.token = answer.token;
    this.expiresAtUs = answer.expiresAtUs;
    this.isRepeated = answer.isRepeated;
    this.#answer = answer;
    this.#estimate = estimate;
    this.#caller = caller;
  }

  /** Whether the request is allowed. A denied hold has charged nothing and is not settled. */
  get allowed(): boolean {
    return this.decision.allowed;
  }

  /** The actual cost, which is charged when the block ends, also after an exception. It can be set repeatedly. */
  get actualCost(): Cost | undefined {
    return this.#actualCost;
  }

  set actualCost(cost: Cost) {
    this.#actualCost = copiedCost(cost);
  }

  /**
   * Replaces the estimate with the actual cost, once. A unit that is not named keeps its estimate. If the server is unavailable, the
   * call is repeated in the background, and the outcome is `queued`.
   *
   * @throws SluicegateError
   */
  async settle(cost: Cost, options?: CallOptions): Promise<Settlement> {
    return this.#finish("settle", (reference) => settlementOf(reference, cost), options);
  }

  /**
   * Refunds the estimate. If the server is unavailable, the call is repeated in the background.
   *
   * @throws SluicegateError
   */
  async release(options?: CallOptions): Promise<Settlement> {
    return this.#finish("release", releaseOf, options);
  }

  /**
   * Moves the expiry to `ttlMs` from now, if that is later. The default is the time to live of the hold, or 60 s if that is unknown.
   *
   * @throws SluicegateError
   */
  async renew(ttlMs?: number | null, options?: CallOptions): Promise<Settlement> {
    const { reference } = this.#answer;
    if (reference === null) return withoutCounters("renew");
    return this.#caller.adjust(renewalOf(reference, ttlMs ?? this.#ttlMs), options);
  }

  /**
   * Renews the hold in the background until it ends, or the application has no reference to it any more. `await using`, `withHold` and the
   * middleware do this.
   */
  keepAlive(): void {
    const { reference, ttlMs } = this.#answer;
    if (this.#isKeptAlive || this.#hasEnded || reference === null) return;
    this.#isKeptAlive = true;
    const pauseMs = ttlMs === null ? FIRST_PAUSE_MS : ttlMs * RENEW_AFTER;
    // the remaining time of a hold that existed already is unknown
    this.#renewAfter(this.isRepeated ? 0 : pauseMs, this.#ttlMs);
  }

  /** Settles `actualCost`, or the estimate if that is not set, unless the hold has ended. Errors are reported. */
  async end(): Promise<void> {
    if (this.#hasEnded) return;
    const unfinished = this.#unfinishedCall;
    const call =
      unfinished === null
        ? this.settle(this.#actualCost ?? this.#estimate)
        : this.#finish(unfinished.operation, () => unfinished);
    await this.#reportFailure(call);
  }

  /**
   * Ends the hold because of an exception: settles `actualCost`, or releases the hold if that is not set. Errors are reported.
   *
   * @internal
   */
  async fail(): Promise<void> {
    if (this.#hasEnded) return;
    const isReleased = this.#actualCost === undefined && this.#unfinishedCall === null;
    await (isReleased ? this.#reportFailure(this.release()) : this.end());
  }

  /** Ends the hold with its block. The property is read when the block starts, which also starts the renewal. */
  get [Symbol.asyncDispose](): () => Promise<void> {
    this.keepAlive();
    return () => this.end();
  }

  get #ttlMs(): number {
    return this.#answer.ttlMs ?? DEFAULT_TTL_MS;
  }

  async #finish(
    operation: HoldAdjustment["operation"],
    adjustment: (reference: RequestBody) => HoldAdjustment,
    options?: CallOptions,
  ): Promise<Settlement> {
    const { reference } = this.#answer;
    try {
      this.#unfinishedCall = reference === null ? null : adjustment(reference);
      const settlement =
        this.#unfinishedCall === null
          ? withoutCounters(operation)
          : await this.#caller.adjust(this.#unfinishedCall, options);
      this.#hasEnded = true;
      clearTimeout(this.#timer);
      return settlement;
    } catch (error) {
      // after an UnavailableError, the end of the block repeats the call
      if (isSluicegateError(error) && !(error instanceof UnavailableError)) {
        // the end of the block must not release the hold because of this error
        this.#unfinishedCall = null;
        this.#actualCost ??= this.#estimate;
      }
      throw error;
    }
  }

  async #reportFailure(call: Promise<Settlement>): Promise<void> {
    try {
      await call;
    } catch (error) {
      if (!isSluicegateError(error)) throw error;
      this.#caller.reportUnsettled(error);
    }
  }

  #renewAfter(pauseMs: number, ttlMs: number): void {
    // without a reference nothing can end the hold, for example if a generator was abandoned in its block
    const reference = new WeakRef(this);
    this.#timer = setTimeout(() => {
      const hold = reference.deref();
      if (hold !== undefined) void hold.#renewOnce(ttlMs);
    }, pauseMs);
    this.#timer.unref();
  }

  async #renewOnce(ttlMs: number): Promise<void> {
    let pauseMs = ttlMs * RENEW_AFTER;
    try {
      if (!isLive(await this.renew(ttlMs))) return;
    } catch (error) {
      if (!(error instanceof UnavailableError) || error.code === "closed") {
        this.#caller.reportUnsettled(error as SluicegateError);
        return;
      }
      pauseMs = Math.max(ttlMs * RENEW_AGAIN_AFTER, SHORTEST_RENEWAL_PAUSE_MS);
    }
    if (!this.#hasEnded) this.#renewAfter(pauseMs, ttlMs);
  }
}

/** Creates a hold without counters, for a decision that was made without the server. */
export function holdWithoutCounters(decision: Decision): Hold {
  const answer = { decision, id: "", token: null, expiresAtUs: null, isRepeated: false, reference: null, ttlMs: null };
  const caller: HoldCaller = {
    adjust: async ({ operation }) => withoutCounters(operation),
    reportUnsettled: () => {},
  };
  return new Hold(answer, 0, caller);
}

function withoutCounters(operation: HoldAdjustment["operation"]): Settlement {
  return { outcome: WITHOUT_COUNTERS[operation], tiers: [] };
}

/** Returns whether any counter still has a renewed hold. The overall outcome is that of the worst counter. */
function isLive({ outcome, tiers }: Settlement): boolean {
  return tiers.length === 0 ? outcome === "renewed" : tiers.some((tier) => tier.outcome === "renewed");
}

/**
 * Calls a function with a hold, and ends the hold when it returns or fails. After an abort, an exception of any kind does not release the
 * hold: some libraries throw the reason of the signal, or an error with another name.
 */
export async function useHold<T>(hold: Hold, use: (hold: Hold) => T | Promise<T>, signal?: AbortSignal): Promise<T> {
  hold.keepAlive();
  let result: T;
  try {
    result = await use(hold);
  } catch (error) {
    // otherwise a client could avoid the charge by disconnecting
    await (signal?.aborted || isAbort(error) ? hold.end() : hold.fail());
    throw error;
  }
  await hold.end();
  return result;
}

function isAbort(error: unknown): boolean {
  return error instanceof Error && error.name === "AbortError";
}
