/**
 * A first-in, first-out queue from which any item can be removed, each in constant time.
 *
 * The first item of a `Set` is not found in constant time: the iteration starts with the items that were deleted.
 */

interface Node<T> {
  readonly item: T;
  previous: Node<T> | null;
  next: Node<T> | null;
}

/** A queue of different items. */
export class Queue<T> {
  readonly #nodes = new Map<T, Node<T>>();
  #first: Node<T> | null = null;
  #last: Node<T> | null = null;

  /** The number of items. */
  get size(): number {
    return this.#nodes.size;
  }

  /** Adds an item at the end, unless the queue contains it. */
  add(item: T): void {
    if (this.#nodes.has(item)) return;
    const node = { item, previous: this.#last, next: null };
    if (this.#last === null) this.#first = node;
    else this.#last.next = node;
    this.#last = node;
    this.#nodes.set(item, node);
  }

  /** Removes the first item, and returns it; undefined if the queue is empty. */
  shift(): T | undefined {
    const item = this.#first?.item;
    if (item !== undefined) this.delete(item);
    return item;
  }

  /** Removes an item, if the queue contains it. */
  delete(item: T): void {
    const node = this.#nodes.get(item);
    if (node === undefined) return;
    this.#nodes.delete(item);
    if (node.previous === null) this.#first = node.next;
    else node.previous.next = node.next;
    if (node.next === null) this.#last = node.previous;
    else node.next.previous = node.previous;
  }
}
