/**
 * The calls that a client waits for when it is closed: those that end a hold or refund a request, and the holds that are being made.
 */

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
      // the middleware ends its holds one iteration of the event loop after the event of the response
      await nextIteration();
      await nextIteration();
      if (this.#calls.size === 0) return;
      await Promise.allSettled(this.#calls);
    }
  }
}

function nextIteration(): Promise<void> {
  return new Promise((resolve) => setImmediate(resolve));
}
