/** A request of a client that cannot be checked, for example because a header is repeated. The response is 400. */
export class RejectedRequest extends Error {}
