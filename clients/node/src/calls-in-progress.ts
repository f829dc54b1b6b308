/**
 * The calls that a client waits for when it is closed: those that end a hold or refund a request, and the holds that are being made.
 */

/**
 * How many iterations of the event loop may pass from the event `close` of a server to the end of its last holds. A server is closed
 * before its sockets, the sockets before the responses, and the middleware ends a hold after all listeners of its response.
 */
const MAX_ITERATIONS = 10;

/** Calls in progress. */
export class CallsInProgress {
  readonly #calls = new Set<Promise<unknown>>();

  /** Adds a call until it ends, and returns it. */
  add<T>(call: Promise<T>): Promise<T> {
    if (this.#calls.has(call)) return call;
    this.#calls.add(call);
    const remove = () => void this.#calls.delete(call);
    call.then(remove, remove);
    return call;
  }

  /** Waits until no call is in progress, including those that follow the end of another call or of a response. */
  async ended(): Promise<void> {
    for (;;) {
      for (let n = 0; n < MAX_ITERATIONS; n += 1) await nextIteration();
      if (this.#calls.size === 0) return;
      await Promise.allSettled(this.#calls);
    }
  }
}

function nextIteration(): Promise<void> {
  return new Promise((resolve) => setImmediate(resolve));
}
