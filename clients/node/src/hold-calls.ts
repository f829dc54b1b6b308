/**
 * The operations on holds. Each is idempotent: the client chooses the id, and a hold is settled or released at most once.
 */

import type { CallsInProgress } from "./calls-in-progress.js";
import type { CallOptions, CheckOptions } from "./client.js";
import type { Decision } from "./decision.js";
import { SluicegateError, UnavailableError } from "./errors.js";
import { Hold, type HoldCaller } from "./hold.js";
import {
  copiedCost,
  type HoldAdjustment,
  type HoldAnswer,
  holdReader,
  referenceTo,
  releaseOf,
  validId,
  validTtl,
} from "./hold-request.js";
import { type Request, type RequestBody, requestBody } from "./request.js";
import { readSettlement, type Settlement } from "./settlement.js";
import { SettlementQueue } from "./settlement-queue.js";

/** The deadline of each attempt in the background. */
const BACKGROUND_DEADLINE_MS = 1000;

const QUEUED: Settlement = { outcome: "queued", tiers: [] };

/** The settings of a hold. */
export interface HoldOptions extends CheckOptions {
  /**
   * The id of the hold, of at most 128 bytes; a random one by default. Repeating a live hold with its id returns the first response.
   */
  id?: string | undefined;
  /** The time until the hold expires; by default the shortest `ttl` of the rules, or 60 s. */
  ttlMs?: number | undefined;
}

/** One call of the API. */
export interface HoldOperation<T> {
  path: string;
  body: RequestBody;
  read(body: unknown): T | null;
}

/** The functions of the client that the operations use. */
export interface HoldPort {
  /** Sends a call unless the circuit breaker is open. Repeats it once if the connection is lost. */
  callWithBreaker<T>(operation: HoldOperation<T>, options: CallOptions): Promise<T>;
  /** Sends a call even if the circuit breaker is open. Repeats it once if the connection is lost. */
  callAlways<T>(operation: HoldOperation<T>, options: CallOptions): Promise<T>;
  /** Reports an error after which the failure policy decides. Throws other errors. */
  decideDespite(error: unknown, request: Request, options: CheckOptions): Decision;
  report(error: SluicegateError): void;
  /** The calls that the client waits for when it is closed. */
  readonly inProgress: CallsInProgress;
}

/** Makes holds, and settles, releases and renews them. */
export class HoldCalls implements HoldCaller {
  readonly #port: HoldPort;
  readonly #queue: SettlementQueue;

  constructor(port: HoldPort) {
    this.#port = port;
    this.#queue = new SettlementQueue({
      send: (adjustment) => port.callAlways(operationOf(adjustment), { deadlineMs: BACKGROUND_DEADLINE_MS }),
      dropped: (error) => this.reportUnsettled(error),
    });
  }

  /** Makes a hold. If the server does not answer in time, the failure policy decides. */
  async hold(request: Request, options: HoldOptions): Promise<Hold> {
    const id = validId(options.id);
    const body: RequestBody = { ...requestBody(request), id };
    if (options.ttlMs !== undefined) body.ttl_ms = validTtl(options.ttlMs);
    if (options.headers === true) body.headers = true;
    const operation = { path: "/v1/hold", body, read: holdReader(options.ttlMs) };
    const estimate = copiedCost(request.cost ?? 1);
    const answer = this.#port.inProgress.add(this.#answer(operation, request, id, options));
    return new Hold(await answer, estimate, this);
  }

  async #answer(
    operation: HoldOperation<HoldAnswer>,
    request: Request,
    id: string,
    options: HoldOptions,
  ): Promise<HoldAnswer> {
    try {
      return await this.#port.callWithBreaker(operation, options);
    } catch (error) {
      const isAborted = !(error instanceof SluicegateError);
      let reference = isAborted || isAmbiguous(error) ? referenceTo(request, id) : null;
      // the server may have admitted it. If the caller repeats its own id, a release would end the repeated hold
      const release = reference !== null && options.id === undefined ? releaseOf(reference) : null;
      if (isAborted && release !== null) this.#enqueue(release);
      const decision = this.#port.decideDespite(error, request, options);
      if (!decision.allowed) {
        if (release !== null) this.#enqueue(release);
        reference = null;
      }
      const ttlMs = options.ttlMs ?? null;
      return { decision, id, token: null, expiresAtUs: null, isRepeated: false, reference, ttlMs };
    }
  }

  /** Settles, releases or renews a hold. A settlement or release is repeated in the background if the server does not answer. */
  async adjust(adjustment: HoldAdjustment, options: CallOptions = {}): Promise<Settlement> {
    const operation = operationOf(adjustment);
    if (adjustment.operation === "renew") return this.#port.callAlways(operation, options);
    return this.#port.inProgress.add(this.#end(adjustment, operation, options));
  }

  async #end(
    adjustment: HoldAdjustment,
    operation: HoldOperation<Settlement>,
    options: CallOptions,
  ): Promise<Settlement> {
    try {
      return await this.#port.callWithBreaker(operation, options);
    } catch (error) {
      const isAborted = !(error instanceof SluicegateError);
      const isQueued = (isAborted || isUnavailable(error)) && this.#enqueue(adjustment);
      if (isQueued && !isAborted) return QUEUED;
      throw error;
    }
  }

  /** Repeats a call in the background. Returns whether there is space for it. */
  #enqueue(adjustment: HoldAdjustment): boolean {
    const isQueued = this.#queue.add(adjustment);
    if (isQueued) void this.#port.inProgress.add(this.#queue.emptied());
    return isQueued;
  }

  reportUnsettled(error: SluicegateError): void {
    const message = `${error.message}; the hold was not settled, and counts until it expires`;
    this.#port.report(new SluicegateError(error.code, message, error));
  }
}

function operationOf({ operation, body }: HoldAdjustment): HoldOperation<Settlement> {
  return { path: `/v1/${operation}`, body, read: readSettlement };
}

function isUnavailable(error: unknown): error is UnavailableError {
  return error instanceof UnavailableError && error.code !== "closed";
}

/** Returns whether the server may have run a call. */
function isAmbiguous(error: unknown): boolean {
  return isUnavailable(error) && error.mayHaveRun;
}
