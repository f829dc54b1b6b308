/**
 * A circuit breaker: after repeated failures, calls do not wait for their deadline. One call at a time probes the server, after a
 * backoff with jitter.
 */

/** Consecutive failures after which the circuit breaker opens. */
const FAILURES_TO_OPEN = 5;

/** The first and the longest time between probes. Together with a deadline, the longest is below 2 s. */
const FIRST_BACKOFF_MS = 100;
export const MAX_BACKOFF_MS = 1000;

/** Whether a call is sent: as usual, as the probe of an open circuit breaker, or not at all. */
export type Admission = "normal" | "probe" | "rejected";

/** Counts failures and decides which calls are sent. */
export class CircuitBreaker {
  #failures = 0;
  #backoffMs = 0;
  #retryAtMs = 0;
  #isProbing = false;
  #lastError: Error | null = null;

  /** The error of the last failure, while the circuit breaker is open. */
  get lastError(): Error | null {
    return this.#lastError;
  }

  /** Whether calls are rejected without being sent, except probes. */
  get isOpen(): boolean {
    return this.#backoffMs > 0;
  }

  /** Decides whether a call is sent. Each admitted call is followed by `succeeded`, `failed` or `cancelled`. */
  admit(nowMs: number): Admission {
    if (!this.isOpen) return "normal";
    if (this.#isProbing || nowMs < this.#retryAtMs) return "rejected";
    this.#isProbing = true;
    return "probe";
  }

  /** The server answered. */
  succeeded(): void {
    this.#failures = 0;
    this.#backoffMs = 0;
    this.#isProbing = false;
    this.#lastError = null;
  }

  /** The server did not answer. Returns whether the circuit breaker opens now. */
  failed(admission: Admission, error: Error, nowMs: number): boolean {
    this.#failures += 1;
    if (admission === "probe") this.#isProbing = false;
    const opens = !this.isOpen && this.#failures >= FAILURES_TO_OPEN;
    if (!opens && admission !== "probe") return false;
    this.#lastError = error;
    this.#backoffMs = Math.min(MAX_BACKOFF_MS, Math.max(FIRST_BACKOFF_MS, this.#backoffMs * 2));
    const jitter = 0.5 + Math.random() / 2;
    this.#retryAtMs = nowMs + this.#backoffMs * jitter;
    return opens;
  }

  /** The call ended without a sign of the state of the server, for example because the caller cancelled it. */
  cancelled(admission: Admission): void {
    if (admission === "probe") this.#isProbing = false;
  }
}
