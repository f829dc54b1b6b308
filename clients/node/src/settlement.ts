/**
 * The answer of the server to settling, releasing or renewing a hold.
 */

/**
 * The outcomes, from the best to the worst. `already`: the hold was settled or released before, and nothing changed. `late`: the hold had
 * expired; settling charged the actual cost once. `queued`: the server or its store did not answer, and the call is repeated in the
 * background. `unknown`: there is no such hold, and nothing changed.
 */
export type SettleOutcome =
  | "settled"
  | "released"
  | "renewed"
  | "already"
  | "late"
  | "queued"
  | "unknown"
  | (string & {});

/** The outcome for the counter of one rule. */
export interface SettledTier {
  /** The name of the rule; null for a key. */
  readonly rule: string | null;
  /** The unit that is counted. */
  readonly unit: string;
  readonly outcome: SettleOutcome;
  /** The units that the hold has charged in total; null if the hold is unknown. */
  readonly charged: number | null;
  /** The units available now; null if nothing changed. */
  readonly remaining: number | null;
  /** When the hold expires on the store's clock, in microseconds; null if the hold is unknown. */
  readonly expiresAtUs: number | null;
}

/** The outcome of settling, releasing or renewing a hold. */
export interface Settlement {
  /** The worst of the outcomes of all counters. */
  readonly outcome: SettleOutcome;
  /** The outcome of each counter. */
  readonly tiers: readonly SettledTier[];
}

/** The members of a tier in JSON. */
interface TierBody {
  rule: string | null;
  unit: string;
  outcome: string;
  charged?: number | null;
  remaining?: number | null;
  expires_at_us?: number | null;
}

/** Converts a settlement of the server; returns null if the JSON value is not one. */
export function readSettlement(body: unknown): Settlement | null {
  const { outcome, tiers } = (body ?? {}) as { outcome?: unknown; tiers?: unknown };
  if (typeof outcome !== "string" || !Array.isArray(tiers)) return null;
  return {
    outcome,
    tiers: tiers.map((tier: TierBody) => ({
      rule: tier.rule,
      unit: tier.unit,
      outcome: tier.outcome,
      charged: tier.charged ?? null,
      remaining: tier.remaining ?? null,
      expiresAtUs: tier.expires_at_us ?? null,
    })),
  };
}
