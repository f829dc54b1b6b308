
-- Every call of the script defines its functions again, so define[code] creates the functions of an algorithm only when the batch
-- needs them:
--   load(raw, key)                returns the stored state, or that of an unused counter; nil if the script cannot have
--                                 stored it. The functions below rely on these checks
--   view(state, limit)            advances the state to the present: `state.used` is the number of units that count now. The
--                                 functions below rely on it
--   charge(state, limit, n)       adds n units
--   wait(state, limit, max_used)  returns the time until at most `max_used` units count
--   reset(state, limit)           returns the time until no units count, and its unused part
--   refund(state, limit, n, t)    refunds up to n units: the newest ones (t = -1), or those of the charge at time t, which was made under
--                                 `limit.made_under` (nil: unknown). Returns whether the state changed
--   own_limit(state, limit)       returns the window, phase and rate under which the state was last charged, for holds
--   save(key, state, limit)       writes the state
local define = {}

-- Returns a * b as high * 2^52 + low.
local function multiply(a, b)
  local HALF, LIMB = 2 ^ 26, 2 ^ 52
  local a1, b1 = floor(a / HALF), floor(b / HALF)
  local a0, b0 = a - a1 * HALF, b - b1 * HALF
  local cross1, cross2 = a1 * b0, a0 * b1
  local carry1, carry2 = floor(cross1 / HALF), floor(cross2 / HALF)
  local middle = (cross1 - carry1 * HALF) + (cross2 - carry2 * HALF)
  local carry3 = floor(middle / HALF)
  local low = a0 * b0 + (middle - carry3 * HALF) * HALF
  local carry4 = floor(low / LIMB)
  return a1 * b1 + carry1 + carry2 + carry3 + carry4, low - carry4 * LIMB
end

-- Returns floor(a * b / divisor) and the remainder. The quotient may exceed 2^53 by a few at most; then it is 2^53.
local function multiply_divide(a, b, divisor)
  local product = a * b
  local quotient = floor(product / divisor)
  if product < 2 ^ 52 then
    return quotient, product - quotient * divisor
  end
  -- a large estimate is off by a few: correct it with the exact products
  quotient = min(quotient, MAX_EXACT)
  local high, low = multiply(a, b)
  local h, l = multiply(quotient, divisor)
  while h > high or (h == high and l > low) do
    quotient = quotient - 1
    h, l = multiply(quotient, divisor)
  end
  local remainder = (high - h) * 2 ^ 52 + (low - l)
  while remainder >= divisor do
    quotient = quotient + 1
    remainder = remainder - divisor
  end
  return quotient, remainder
end

-- Returns the time at which a state dated `last` is read; nil if it is dated more than one window ahead.
local function effective_time(last, window)
  if last > now + window then
    return nil
  end
  return max(last, now)
end

-- Returns the wait until `moment`, or until `cutoff` if all units stop counting there because the window changed.
local function wait_until(moment, cutoff)
  return (cutoff and min(cutoff, moment) or moment) - now
end

-- Returns the TTL that the key of a changed state needs, in milliseconds: at least until no units count. Returns nil if the
-- current TTL is sufficient.
local function next_ttl(state, limit, expires)
  local window = limit.window
  if limit.ends then
    window = now < limit.ends and limit.ends - limit.start or limit.next_end - limit.ends
  end
  local ttl_until, millis = renewed_ttl(state.exists and state.ttl_until or 0, window, expires - now)
  state.ttl_until = ttl_until or state.ttl_until
  return millis
end

-- Writes a state of fixed length.
local function save_string(key, packed, ttl)
  if ttl then
    call('SET', key, packed, 'PX', ttl)
  else
    call('SETRANGE', key, '0', packed)
  end
end
